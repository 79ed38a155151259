"""The OpenAI front: routes, and what all of them have in common.

An allow-list decides what passes: generation routes are steered to a worker, a few reading ones are passed on as they
are, everything else is 404 here and never reaches a frontend (its metrics and administration are not for clients).
Answers are passed on byte for byte, streams chunk by chunk. A client that leaves takes its request with it: the
connection to the frontend is closed at once, which cancels the generation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from fullhit.http.common import Origins, request_id_line, request_id_of
from fullhit.http.wire import Request, Responder, UpstreamClient
from fullhit_publisher.dynamo_keys import KeyRules

from .bodies import NO_MEDIA, Body, Shape
from .calls import Call, Seats
from .frontends import Frontends
from .headers import forwarded_headers
from .replies import Refusal, reply_refusal
from .settings import FrontSettings, FrontTelemetry
from .steering import Steering

__all__ = ["OpenAIFront"]

_STEERED: Final[dict[bytes, Shape]] = {
    b"/v1/chat/completions": "chat",
    b"/v1/messages": "chat",
    b"/v1/responses": "responses",
    b"/v1/completions": "text",
    b"/v1/embeddings": "text",
}
_PASSED: Final = frozenset((b"/v1/models", b"/health", b"/live"))
_MODELS: Final = b"/v1/models/"
_READING: Final = (b"GET", b"HEAD")


class OpenAIFront:
    """`handle` is a handler for `HttpListener`. Create it inside the running loop; `close` it after the listener.

    >>> front = OpenAIFront(Seats(pool, fleet.view("vision")), None, rules, client, settings, telemetry)
    >>> listener = HttpListener(front.handle, error_format=openai_error)
    """

    def __init__(
        self,
        decode: Seats,
        prefill: Seats | None,
        rules: KeyRules,
        client: UpstreamClient,
        settings: FrontSettings,
        telemetry: FrontTelemetry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = decode.pool
        self.settings = settings
        self._telemetry = telemetry
        self._clock = clock
        origins = Origins()
        self.frontends = Frontends([(url, origins.of(url)) for url in settings.frontends], clock)
        self._steering = Steering(decode, prefill, rules, client, self.frontends, settings, telemetry, clock)
        self._open = 0
        self._calm = asyncio.Event()
        self._calm.set()

    def __repr__(self) -> str:
        return f"<OpenAIFront {self.pool.name} open={self._open} {self._steering.choice.room!r}>"

    async def handle(self, request: Request, responder: Responder) -> None:
        """Serve one request."""
        if not self._open:
            self._calm.clear()
        self._open += 1
        request_id, given = request_id_of(request)
        try:
            shape = _route(request)
            headers = forwarded_headers(request)
            if not given:
                headers = headers.with_line(request_id_line(request_id))
            if shape is None:
                body = Body("", NO_MEDIA, request.body)
            else:
                body = await self._steering.read(request, shape)
                if not self.settings.models or body.model in self.settings.models:
                    await self._steering.serve(request, responder, headers, request_id, body)
                    return
            await self._steering.pass_on(Call(request, responder, headers, request_id.decode(), body, 0.0), request_id)
        except Refusal as refusal:
            if refusal.status < 500:
                self._telemetry.count("rejected", cause=refusal.code)
            self._telemetry.limited(
                f"front {refusal.code}", "refused", every=10.0, cause=refusal.code, status=refusal.status,
                message=refusal.message, path=request.target[:200].decode("latin-1"),
            )  # fmt: skip
            if responder.started:
                responder.abort()
            else:
                reply_refusal(responder, refusal, request_id)
        finally:
            self._open -= 1
            if not self._open:
                self._calm.set()

    def close(self) -> None:
        """Let go of the pools. Close the listener first: it ends the requests."""
        self._steering.close()

    def oldest_inflight(self) -> dict[str, float]:
        """Seconds since the oldest request under way at each worker was sent."""
        return self._steering.choice.in_flight.oldest()

    def status(self) -> dict[str, Any]:
        """Figures for gauges and status pages, JSON-ready."""
        room = self._steering.choice.room
        return {
            "open_calls": self._open,
            "queued": len(room),
            "queued_bytes": room.bytes,
            "pool": self.pool.name,
            "pool_usable": sum(worker.fit for worker in self.pool.workers()),
            "frontends_up": self.frontends.up,
            "frontends": self.frontends.status(),
        }


def _route(request: Request) -> Shape | None:
    """How a request is steered; None: passed on as it is. Raises Refusal (404, 405)."""
    path = request.path
    shape = _STEERED.get(path)
    if shape is not None:
        if request.method != b"POST":
            raise _not_allowed(path, (b"POST",))
        return shape
    if path in _PASSED or (path.startswith(_MODELS) and _is_plain(path)):
        if request.method not in _READING:
            raise _not_allowed(path, _READING)
        return None
    shown = path[:200].decode("latin-1")
    raise Refusal(404, "not_found", f"there is no {shown!r} here; this is a Fullhit front for Dynamo")


def _is_plain(path: bytes) -> bool:
    """Whether a path stays where it seems to be, however a server further on may read it."""
    return not {b".", b"..", b""} & set(unquote_to_bytes(path).replace(b"\\", b"/")[1:].split(b"/"))


def _not_allowed(path: bytes, methods: tuple[bytes, ...]) -> Refusal:
    allowed = b", ".join(methods)
    return Refusal(
        405, "method_not_allowed", f"{path.decode('latin-1')} takes {allowed.decode()}", headers=[(b"Allow", allowed)]
    )
