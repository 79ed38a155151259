"""What an encoder's reply to ``/encode`` says of the cache: the header ``x-fullhit-cache: hit|partial|miss``.

A router holds it against what it had promised itself of the encoder. The header is put there by the application's
outermost layer; what it says comes from the step that ran the request, which is some calls further inside and, since
requests are fused, in another task. The two meet in a note that hangs on the context of the reply's task.

With data parallelism the step runs in another process, and replies say nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

from .encoder import ItemCache

__all__ = ["ATTRIBUTE", "CacheHeader", "encode_pipeline"]

ATTRIBUTE: Final = "_fullhit_items"
"""Under this name an encoder has its `ItemCache`."""
HEADER: Final = b"x-fullhit-cache"

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Any, Send], Awaitable[None]]

_note: ContextVar[list[str] | None] = ContextVar("fullhit_note", default=None)


class CacheHeader:
    """ASGI middleware: adds the header to replies of ``/encode`` whose outcome is known."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] != "http" or scope.get("path") != "/encode":
            await self._app(scope, receive, send)
            return
        note: list[str] = []

        async def marked(message: Message) -> None:
            if note and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, note[0].encode())]
            await send(message)

        token = _note.set(note)
        try:
            await self._app(scope, receive, marked)
        finally:
            _note.reset(token)


async def encode_pipeline(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's ``execute_encode_pipeline(enc, sched, request, ...)``: writes the note."""
    content = await original(*args, **kwargs)
    note = _note.get()
    if note is not None:
        try:
            encoder = kwargs["enc"] if "enc" in kwargs else args[0]
            request = kwargs["request"] if "request" in kwargs else args[2]
            items: ItemCache | None = getattr(encoder, ATTRIBUTE, None)
            outcome = items.outcome(request["req_id"]) if items is not None else None
        except (LookupError, TypeError, AttributeError):
            outcome = None  # another release's: replies say nothing
        if outcome is not None:
            note.append(outcome)
    return content
