"""What an encoder's reply to ``/encode`` says of the cache: the header ``x-fullhit-cache: hit|partial|miss``.

A router holds it against what it had promised itself of the encoder. The header is put there by the application's
outermost layer; what it says comes from the step that ran the request, which is some calls further inside and, since
requests are fused, in another task. The two meet in a note that hangs on the context of the reply's task.

With data parallelism the step runs in another process, and replies say nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

from .encoder import ItemCache

__all__ = ["ATTRIBUTE", "CacheHeader", "encode_pipeline"]

_log = logging.getLogger("fullhit_publisher")

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


async def encode_pipeline(original: Any, encoder: Any, scheduler: Any, request: Any, **how: Any) -> Any:
    """Around SGLang's ``execute_encode_pipeline``: writes the note."""
    request_id = request.get("req_id")
    content = await original(encoder, scheduler, request, **how)
    items: ItemCache | None = getattr(encoder, ATTRIBUTE, None)
    outcome = items.outcome(request_id) if items is not None else None
    note = _note.get()
    if outcome is not None and note is not None:
        note.append(outcome)
    return content
