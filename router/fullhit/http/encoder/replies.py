"""The shapes in which the gateway answers on its own behalf: SGLang's ``{status, message, req_id}``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from fullhit.http.wire import Responder

__all__ = [
    "JSON",
    "HeaderList",
    "Refusal",
    "message_in",
    "reply_error",
    "reply_json",
    "reply_text",
    "sglang_error",
]

HeaderList = Sequence[tuple[bytes, bytes]]

JSON: Final = (b"Content-Type", b"application/json")


class Refusal(Exception):
    """An answer that the gateway gives itself: HTTP ``status``, ``message``, and the short ``cause`` for counters.

    ``req_id`` goes into the body, ``headers`` (such as ``Allow``) into the head.
    """

    def __init__(
        self,
        status: int,
        message: str,
        cause: str,
        *,
        req_id: str = "",
        retry_after: int | None = None,
        headers: HeaderList = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.cause = cause
        self.req_id = req_id
        self.retry_after = retry_after
        self.headers = headers
        self.request_id = b""


def sglang_error(status: int, code: str, message: str, request_id: str) -> tuple[str, bytes]:
    """For `HttpListener(error_format=...)`: errors of the listener itself in the same shape."""
    body = {"status": "error", "message": message, "req_id": "", "code": code}
    if request_id:
        body["request_id"] = request_id
    return "application/json", msgspec.json.encode(body)


def reply_error(responder: Responder, refusal: Refusal, request_id: bytes) -> None:
    """``{"status": "error", "message", "req_id"}``."""
    body = {"status": "error", "message": refusal.message, "req_id": refusal.req_id}
    extra = [JSON, (b"x-request-id", request_id), *refusal.headers]
    if refusal.retry_after is not None:
        extra.append((b"Retry-After", b"%d" % refusal.retry_after))
    responder.reply(refusal.status, extra, msgspec.json.encode(body))


def reply_json(responder: Responder, status: int, body: object, headers: HeaderList = ()) -> None:
    responder.reply(status, [JSON, *headers], msgspec.json.encode(body))


def reply_text(responder: Responder, status: int, text: str, headers: HeaderList = ()) -> None:
    responder.reply(status, [(b"Content-Type", b"text/plain; charset=utf-8"), *headers], text.encode())


def message_in(body: bytes) -> str:
    """The ``message`` of an encoder's error body."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    message = fields.get("message") if isinstance(fields, dict) else None
    return message if isinstance(message, str) else ""
