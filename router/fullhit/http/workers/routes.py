"""Where a path leads. Everything that is not listed is 404 and reaches no worker: their administration is not for
clients."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from fullhit.http.openai.replies import Refusal
from fullhit.http.wire import Request

from .generation import Shape

__all__ = ["Route", "Use", "route_of"]


class Use(Enum):
    """What is to be done with a request."""

    GENERATE = auto()
    PLAIN = auto()
    """Passed on to any worker of the model's service."""
    MODELS = auto()
    HEALTH = auto()
    HEALTH_GENERATE = auto()
    SERVER_INFO = auto()
    MODEL_INFO = auto()
    FLUSH = auto()


class Route(NamedTuple):
    use: Use
    methods: tuple[bytes, ...]
    shape: Shape = "text"


_POST: Final = (b"POST",)
_READING: Final = (b"GET", b"HEAD")
_ROUTES: Final = {
    b"/v1/chat/completions": Route(Use.GENERATE, _POST, "chat"),
    b"/v1/messages": Route(Use.GENERATE, _POST, "chat"),
    b"/v1/responses": Route(Use.GENERATE, _POST, "responses"),
    b"/v1/completions": Route(Use.GENERATE, _POST),
    b"/v1/embeddings": Route(Use.GENERATE, _POST),
    b"/v1/rerank": Route(Use.GENERATE, _POST),
    b"/generate": Route(Use.GENERATE, _POST, "generate"),
    b"/v1/models": Route(Use.MODELS, _READING),
    b"/health": Route(Use.HEALTH, _READING),
    b"/health_generate": Route(Use.HEALTH_GENERATE, _READING),
    b"/server_info": Route(Use.SERVER_INFO, _READING),
    b"/get_server_info": Route(Use.SERVER_INFO, _READING),
    b"/model_info": Route(Use.MODEL_INFO, _READING),
    b"/get_model_info": Route(Use.MODEL_INFO, _READING),
    b"/flush_cache": Route(Use.FLUSH, (b"POST", b"GET")),
}
_ANY: Final = (b"GET", b"HEAD", b"POST")
_MODEL: Final = b"/v1/models/"
_PAIRED: Final = frozenset(
    (b"/v1/chat/completions", b"/v1/completions", b"/v1/messages", b"/v1/responses", b"/generate")
)
"""What a prefill and a decode do together; the rest is one worker's."""


def route_of(request: Request, pass_through: Sequence[bytes]) -> Route:
    """How a request is served. Raises Refusal (404, 405)."""
    path = request.path
    route = _ROUTES.get(path)
    if route is None:
        if path.startswith(_MODEL) and len(path) > len(_MODEL):
            route = Route(Use.MODELS, _READING)
        elif _is_plain(path) and any(path == one or path.startswith(one + b"/") for one in pass_through):
            route = Route(Use.PLAIN, _ANY)
        else:
            raise Refusal(404, "not_found", f"there is no {path[:200].decode('latin-1')!r} here")
    if request.method not in route.methods:
        allowed = b", ".join(route.methods)
        message = f"{path[:200].decode('latin-1')} takes {allowed.decode()}"
        raise Refusal(405, "method_not_allowed", message, headers=[(b"Allow", allowed)])
    return route


def is_paired(path: bytes) -> bool:
    """Whether a prefill and a decode serve this together."""
    return path in _PAIRED


def _is_plain(path: bytes) -> bool:
    """Whether a path stays where it seems to be, however a server further on may read it."""
    return not {b".", b"..", b""} & set(unquote_to_bytes(path).replace(b"\\", b"/")[1:].split(b"/"))
