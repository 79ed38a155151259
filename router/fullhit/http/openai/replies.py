"""The shape in which the front answers on its own behalf: OpenAI's ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from typing import Final

import msgspec

from fullhit.http.wire import Headers, Responder

__all__ = ["Refusal", "error_body", "openai_error", "reply_refusal"]

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """An answer that the front gives itself. ``code``: short and stable, for clients and counters; ``param``: the field
    of the request that is at fault. ``headers`` (such as ``Allow``) go into the head."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.headers = headers


def error_body(status: int, code: str, message: str, param: str | None = None) -> bytes:
    """The JSON of an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def openai_error(status: int, code: str, message: str, request_id: str) -> tuple[str, bytes]:
    """For `HttpListener(error_format=...)`: errors of the listener itself in the same shape."""
    return "application/json", error_body(status, code, message)


def reply_refusal(responder: Responder, refusal: Refusal, request_id: bytes) -> None:
    """Answer with a refusal. ``request_id`` as `request_id_of` gave it."""
    headers = [(b"Content-Type", b"application/json"), (b"x-request-id", request_id), *refusal.headers]
    if refusal.retry_after is not None:
        headers.append((b"Retry-After", b"%d" % refusal.retry_after))
    responder.reply(refusal.status, headers, error_body(refusal.status, refusal.code, refusal.message, refusal.param))
