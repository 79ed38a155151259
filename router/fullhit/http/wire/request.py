"""What a handler gets: the request, and the responder it answers through.

Headers stay a list of byte pairs in the order they came; nobody pays for a dictionary that is not asked for.
The responder knows the framing rules of the client's HTTP version, so that a handler cannot get them wrong:
one complete answer with `reply`, or `start` / `write` / `finish` for a stream. It never raises because the
client has gone while a complete answer is given: the handler has nothing useful left to do about that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from .errors import LocalFault, PeerGone
from .heads import Headers, RequestHead, header_block, status_line

if TYPE_CHECKING:
    from .connection import ServerConnection

__all__ = ["Handler", "Request", "Responder"]

JOIN_LIMIT = 64 * 1024
"""Up to this size head and body are joined into one write; above it a second write is cheaper than a copy."""


class Request(RequestHead):
    """One complete request.

    `headers` are as received (order and spelling kept, hop-by-hop ones included); `body` is `bytes` or, above
    about 64 KB, a `bytearray` filled straight from the socket: treat it as read-only. `received_at` is the
    loop's clock (seconds) when the request was complete.
    """

    body: bytes | bytearray | memoryview = b""
    peer = ""
    received_at = 0.0

    def get(self, name: bytes) -> bytes | None:
        """Value of the first header called `name` (give it in lower case), blanks at its ends removed."""
        try:
            return self.headers[self.names.index(name)][1].strip(b" \t")
        except ValueError:
            return None

    @property
    def path(self) -> bytes:
        """The target without its query."""
        return self.target.partition(b"?")[0]

    def __repr__(self) -> str:
        return f"<Request {self.method.decode()} {self.target!r} body={len(self.body)} from {self.peer}>"


_FRESH, _STARTED, _DONE = range(3)


class Responder:
    """Answers one request, exactly once."""

    # Most answers never leave these defaults; instances hold only what differs.
    _state = _FRESH
    _chunked = False
    _left = -1
    detached = False
    status = 0

    def __init__(self, conn: ServerConnection, head: RequestHead, keep_alive: bool) -> None:
        self._conn: ServerConnection | None = conn
        self._modern = head.modern
        self._head_only = head.method == b"HEAD"
        self._keep_alive = keep_alive

    # --- what a handler may ask

    @property
    def peer_gone(self) -> bool:
        """The client has closed its connection (or was cut off); nothing written will arrive."""
        conn = self._conn
        return conn is None or conn.gone

    @property
    def started(self) -> bool:
        """A byte of the answer may have reached the client."""
        return self._state != _FRESH

    @property
    def finished(self) -> bool:
        return self._state == _DONE

    def detach(self) -> None:
        """Let the handler run on when the client leaves. Everything written after that is thrown away."""
        self.detached = True

    # --- one complete answer

    def reply(self, status: int, headers: Headers, body: bytes | bytearray | memoryview = b"") -> None:
        """Answer completely. Framing headers are added here; `headers` must not carry them.

        Raises LocalFault when the request has been answered before.
        """
        self.reply_lines(status, header_block(headers), body)

    def reply_lines(self, status: int, lines: bytes, body: bytes | bytearray | memoryview = b"") -> None:
        """As `reply`, with headers that are composed and checked already: whole lines, each with its CRLF."""
        if self._state != _FRESH:
            raise LocalFault("the request has been answered already")
        size = len(body)
        if status == 204 or status < 200:
            head = b"%b%b%b\r\n" % (status_line(status), lines, self.connection_line())
            size = 0
        else:
            head = b"%b%b%bContent-Length: %d\r\n\r\n" % (status_line(status), lines, self.connection_line(), size)
            if self._head_only or status == 304:
                size = 0
        self.status = status
        self._state = _DONE
        conn = self._conn
        if conn is None or conn.gone:
            return
        if size == 0:
            conn.write(head)
        elif size <= JOIN_LIMIT:
            conn.write(b"".join((head, body)))
        else:
            conn.write(head)
            conn.write(body)

    # --- a streamed answer

    def start(self, status: int, headers: Headers, content_length: int | None) -> None:
        """Begin a streamed answer. Without a length it is chunked on HTTP/1.1 and ends with the connection on
        HTTP/1.0. Answers to HEAD, 204 and 304 take no body: what is written to them is dropped."""
        self.start_raw(status, None, header_block(headers), -1 if content_length is None else content_length)

    def start_raw(self, status: int, reason: bytes | None, block: bytes, length: int) -> None:
        """As `start`, with a ready block of header lines and -1 for an unknown length."""
        if self._state != _FRESH:
            raise LocalFault("the request has been answered already")
        if status < 200:
            raise LocalFault("an interim status cannot start an answer")
        self.status = status
        self._state = _STARTED
        self._left = length
        if status == 204:
            framing = b""
            self._left = 0
        elif length >= 0:
            framing = b"Content-Length: %d\r\n" % length
        elif self._head_only or status == 304:
            framing = b""
        elif self._modern:
            framing = b"Transfer-Encoding: chunked\r\n"
            self._chunked = True
        else:
            framing = b""
            self._keep_alive = False
        if self._head_only or status in (204, 304):
            self._head_only = True
        conn = self._conn
        if conn is not None and not conn.gone:
            line = status_line(status, reason)
            conn.write(b"%b%b%b%b\r\n" % (line, block, self._connection_line(), framing))

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Send a piece of the body and wait while the client is slow.

        Raises PeerGone when there is nobody to write to (not for detached handlers), LocalFault when more is
        written than `content_length` said.
        """
        conn = self._conn
        if conn is None or conn.gone:
            if self.detached:
                return
            raise PeerGone("the client has gone")
        self.write_some(chunk)
        if conn.paused:
            await conn.drain()
            if conn.gone and not self.detached:
                raise PeerGone("the client has gone")

    def write_some(self, chunk: bytes | bytearray | memoryview) -> None:
        """As `write`, without waiting: for callers with flow control of their own."""
        if self._state != _STARTED:
            raise LocalFault("write outside of start and finish")
        size = len(chunk)
        if not size or self._head_only:
            return
        if self._left >= 0:
            if size > self._left:
                raise LocalFault("more body than content_length said")
            self._left -= size
        conn = self._conn
        if conn is None or conn.gone:
            return
        if not self._chunked:
            conn.write(chunk)
        elif size <= JOIN_LIMIT:
            conn.write(b"".join((b"%x\r\n" % size, chunk, b"\r\n")))
        else:
            conn.write(b"%x\r\n" % size)
            conn.write(chunk)
            conn.write(b"\r\n")

    def finish(self) -> None:
        """End a streamed answer. One that is shorter than its `content_length` aborts the connection."""
        if self._state == _DONE:
            return
        if self._state != _STARTED:
            raise LocalFault("finish before start")
        self._state = _DONE
        conn = self._conn
        if conn is None or conn.gone:
            return
        if self._left > 0 and not self._head_only:
            conn.abort()
            raise LocalFault("less body than content_length said")
        if self._chunked:
            conn.write(b"0\r\n\r\n")

    def abort(self) -> None:
        """Cut the connection, so that the client sees that the answer is not complete."""
        self._state = _DONE
        if self._conn is not None:
            self._conn.abort()

    # --- for this package

    def settle(self) -> ServerConnection | None:
        """The handler is over: let go of the connection."""
        conn, self._conn = self._conn, None
        return conn

    @property
    def keep_alive(self) -> bool:
        return self._keep_alive

    @property
    def modern(self) -> bool:
        """The client speaks HTTP/1.1."""
        return self._modern

    @property
    def connection(self) -> ServerConnection | None:
        return self._conn

    def raw(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes that are framed already."""
        conn = self._conn
        if conn is not None and not conn.gone:
            conn.write(data)

    def start_passing(self, head: bytes, status: int) -> None:
        """A relay has composed the head itself and will write framed bytes."""
        if self._state != _FRESH:
            raise LocalFault("the request has been answered already")
        self.status = status
        self._state = _STARTED
        self._chunked = False
        self._left = -1
        self.raw(head)

    def pass_whole(self, message: bytes, status: int) -> None:
        """As `start_passing` with the whole answer, and `finish`."""
        if self._state != _FRESH:
            raise LocalFault("the request has been answered already")
        self.status = status
        self._state = _DONE
        conn = self._conn
        if conn is not None and not conn.gone:
            conn.write(message)

    def connection_line(self) -> bytes:
        """The Connection header of the answer, or nothing."""
        if self._modern and self._keep_alive and self._conn is not None and not self._conn.closing_soon:
            return b""
        return self._connection_line()

    def close_after(self) -> None:
        self._keep_alive = False

    def _connection_line(self) -> bytes:
        conn = self._conn
        if conn is not None and conn.closing_soon:
            self._keep_alive = False
        if self._modern:
            return b"" if self._keep_alive else b"Connection: close\r\n"
        return b"Connection: keep-alive\r\n" if self._keep_alive else b""


Handler = Callable[[Request, Responder], Awaitable[None]]
