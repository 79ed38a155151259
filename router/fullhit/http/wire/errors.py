"""What can go wrong on the wire, and who is at fault.

    WireError
    ├── ClientFault            the peer that sent us a request broke a rule (carries the HTTP answer it deserves)
    ├── PeerGone               the peer that waits for our answer has left, or stopped reading
    ├── LocalFault             our own caller broke a rule (a bug: answered 500, never blamed on a peer)
    └── UpstreamError          the server we forwarded to
        ├── ConnectFailed      no connection: nothing was sent, so sending elsewhere is safe
        ├── NotAccepted        the connection died before the kernel had taken the whole request: ditto
        ├── LostAfterSend      the connection died after the whole request had left us, before an answer
        ├── UpstreamTimeout    a limit of `Timeouts` passed; `stage` says which
        └── BadReply           the answer is not HTTP, is cut short, or frames itself in two ways

What is provable about "was my request processed?":

* `ConnectFailed`: no byte of it was ever written.
* `NotAccepted`: some of it never left this process, so with `Content-Length` framing the server knows that
  the request is incomplete. A server which acts on half a body is outside HTTP's promises.
* `UpstreamTimeout("send")`, `("pool")` and `("connect")`: the same, `not_processed` is true for them.
* `LostAfterSend(reused=True)`: the request was flushed on a kept-alive connection which then closed without a
  byte. Nearly always the server's idle timer closed the connection as we wrote, but a server that read the
  request and crashed looks exactly alike. Not provable: only the caller knows whether repeating is harmless.
"""

from __future__ import annotations

__all__ = [
    "BadReply",
    "ClientFault",
    "ConnectFailed",
    "LocalFault",
    "LostAfterSend",
    "NotAccepted",
    "PeerGone",
    "UpstreamError",
    "UpstreamTimeout",
    "WireError",
]


class WireError(Exception):
    """Root of everything this package raises. Not raised itself."""


class ClientFault(WireError):
    """A request that cannot be accepted.

    `status` is the HTTP status to answer with, `code` a short stable token for counters and the error body,
    `retry_after` (seconds) asks the client to come back.
    """

    def __init__(self, status: int, code: str, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after


class PeerGone(WireError):
    """The client of a streamed answer is not there any more (left, or read nothing for `write_timeout`)."""


class LocalFault(WireError):
    """A bug on our side of the API: answered twice, a header with a line break, a wrong content length."""


class UpstreamError(WireError):
    """Any failure of a forwarded request. `origin` is `host:port`; `reused` says whether the connection was
    a kept-alive one; `not_processed` is true only where that can be proven (see the module text)."""

    kind = "upstream"
    not_processed = False

    def __init__(self, message: str, *, origin: str = "", reused: bool = False) -> None:
        super().__init__(f"{origin}: {message}" if origin else message)
        self.message = message
        self.origin = origin
        self.reused = reused


class ConnectFailed(UpstreamError):
    """Refused, unreachable, name not found, TLS handshake failed."""

    kind = "connect"
    not_processed = True


class NotAccepted(UpstreamError):
    """The connection died while a part of the request was still in our own buffers."""

    kind = "not_accepted"
    not_processed = True


class LostAfterSend(UpstreamError):
    """The connection died after the whole request had been handed to the kernel, without a complete answer.

    `received` counts the bytes of the answer that had come in.
    """

    kind = "reset"

    def __init__(self, message: str, *, origin: str = "", reused: bool = False, received: int = 0) -> None:
        super().__init__(message, origin=origin, reused=reused)
        self.received = received


class UpstreamTimeout(UpstreamError):
    """A limit of `Timeouts` passed. `stage`: pool, connect, send, first_byte, idle or total."""

    kind = "timeout"

    def __init__(self, stage: str, *, origin: str = "", reused: bool = False, sent: bool = True) -> None:
        super().__init__(f"timed out ({stage})", origin=origin, reused=reused)
        self.stage = stage
        self.not_processed = not sent


class BadReply(UpstreamError):
    """The server answered something that is not a well-formed HTTP/1 response, or more than the caller's
    limit allows."""

    kind = "garbage"
