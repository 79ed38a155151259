"""The answer of an upstream: read whole, or relayed to a client.

A relay passes bytes on as they came. Chunked stays chunked with the server's own chunk boundaries (a token
stream must not be collected and cut anew), a length stays a length. Only where the two HTTP versions differ
is there anything to convert: a close-delimited answer becomes chunked for an HTTP/1.1 client, a chunked one
loses its chunks for an HTTP/1.0 client.

Backpressure: when the client is slow the upstream is not read, when it catches up reading goes on; the client's
own `write_timeout` decides how long that may last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from .chunks import ChunkError, ChunkScanner
from .connection import Feeder, ServerConnection
from .errors import BadReply, LocalFault, UpstreamError
from .heads import Headers, ResponseHead, forwarded_block, header_block, status_line
from .request import Responder

if TYPE_CHECKING:
    from .exchange import UpstreamConnection

__all__ = ["UpstreamResponse"]


class UpstreamResponse(Feeder):
    """Head of an answer whose body may still be coming. Consume it with `read` or `relay`, or `close` it."""

    # Most answers arrive in one piece; instances hold only what differs from these.
    _bytes = 0
    _claimed = False
    _over = False
    _error: UpstreamError | None = None
    _waiter: asyncio.Future[None] | None = None
    _responder: Responder | None = None
    _client_conn: ServerConnection | None = None
    _convert: ChunkScanner | None = None
    _payload: bytearray | None = None
    _limit = -1
    _reading_paused = False
    _thrown_away = False
    _piecewise = False
    _on_body: Callable[[bytes], bool] | None = None

    def __init__(self, conn: UpstreamConnection, head: ResponseHead, read_ahead: int) -> None:
        self.head = head
        self.origin = conn.origin
        self._conn: UpstreamConnection | None = conn
        self._read_ahead = read_ahead
        self._held: list[bytes] = []

    def __repr__(self) -> str:
        return f"<UpstreamResponse {self.head.status} from {self.origin} over={self._over}>"

    @property
    def status(self) -> int:
        return self.head.status

    @property
    def reason(self) -> bytes:
        return self.head.reason

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """As received, framing and hop-by-hop headers included."""
        return self.head.headers

    def get(self, name: bytes) -> bytes | None:
        """Value of the first header called `name` (lower case)."""
        try:
            return self.head.headers[self.head.names.index(name)][1].strip(b" \t")
        except ValueError:
            return None

    def forwarded(self) -> bytes:
        """The end-to-end headers as they came: composed lines, ready for `Responder.reply_lines`."""
        return forwarded_block(self.head)

    @property
    def complete(self) -> bool:
        """The whole answer has arrived."""
        return self._over and self._error is None

    # --- whole

    async def read(self, limit: int = 16 * 1024 * 1024) -> bytes:
        """The body, chunks undone. Raises BadReply when it is larger than `limit` bytes, and what ended the
        connection when it ended early."""
        self._claim()
        if self.head.content_length > limit:
            self.close()
            raise BadReply(f"reply larger than {limit} bytes", origin=str(self.origin))
        if self._over and self._error is None and not self.head.chunked:
            body = b"".join(self._held)
            self._held.clear()
        else:
            self._payload = bytearray()
            self._limit = limit
            if self.head.chunked:
                self._convert = ChunkScanner(self._payload)
            self._replay()
            await self._until_over()
            body = bytes(self._payload)
        if len(body) > limit:
            raise BadReply(f"reply larger than {limit} bytes", origin=str(self.origin))
        return body

    async def discard(self) -> None:
        """Read the body to its end and keep nothing of it. Raises what ended the connection early."""
        self._claim()
        self._thrown_away = True
        self._held.clear()
        self._resume()
        await self._until_over()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes, chunks undone; the server is held up by whoever takes the pieces. Raises what ended the
        connection early."""
        self._claim()
        payload = self._payload = bytearray()
        self._piecewise = True
        if self.head.chunked:
            self._convert = ChunkScanner(payload)
        self._replay()
        while True:
            if payload:
                piece = bytes(payload)
                payload.clear()
                self._resume()
                yield piece
            elif self._over:
                break
            else:
                await self._until_over(arrival=True)
        if self._error is not None:
            raise self._error

    # --- relayed

    async def peek(self, patience: float | None = None, enough: Callable[[bytes], bool] | None = None) -> bytes:
        """Wait for the beginning of the body and return what has arrived of it, chunk framing included; empty when
        there is none, or none within `patience` seconds. It stays where it is, for `read` or `relay`.

        `enough` is shown what has arrived; until it is True, more is waited for, as much as is read ahead. Raises what
        ended the connection before that.
        """
        late = False

        def give_up() -> None:
            nonlocal late
            late = True
            self._wake()

        timer = None if patience is None else asyncio.get_running_loop().call_later(patience, give_up)
        try:
            while True:
                held = b"".join(self._held)
                if (held and (enough is None or enough(held))) or late or self._reading_paused:
                    return held
                if self._over:
                    break
                await self._until_over(arrival=True)
        finally:
            if timer is not None:
                timer.cancel()
        if self._error is not None:
            raise self._error
        return held

    async def relay(
        self, responder: Responder, extra_headers: Headers = (), on_body: Callable[[bytes], bool] | None = None
    ) -> None:
        """Answer the client with this: status, end-to-end headers plus `extra_headers`, body.

        `on_body` is shown each piece of the body as it came, chunk framing included, until it returns True.
        Raises what ended the upstream connection early (the client's connection has then been aborted, if a
        byte of the answer had left; `responder.started` tells). When cancelled, the upstream is closed.
        """
        self._claim()
        head = self.head
        if self._error is not None:  # known before a byte of the answer has left: the caller can still choose
            self._held.clear()
            raise self._error
        block = forwarded_block(head)
        if extra_headers:
            block += header_block(extra_headers)
        length = head.content_length
        passing = length >= 0 or (head.chunked and responder.modern)
        if not passing:
            responder.start_raw(head.status, head.reason, block, -1)
            if head.chunked:
                self._payload = bytearray()
                self._convert = ChunkScanner(self._payload)
        else:
            if head.status == 204:
                framing = b""
            elif length >= 0:
                framing = b"Content-Length: %d\r\n" % length
            else:
                framing = b"Transfer-Encoding: chunked\r\n"
            line = status_line(head.status, head.reason)
            start = b"%b%b%b%b\r\n" % (line, block, responder.connection_line(), framing)
            if self._over and self._error is None:
                if on_body is not None:
                    on_body(b"".join(self._held))
                self._held.insert(0, start)
                responder.pass_whole(b"".join(self._held), head.status)
                self._held.clear()
                return
            responder.start_passing(start, head.status)
        self._on_body = on_body
        self._responder = responder
        self._client_conn = responder.connection
        if self._client_conn is not None:
            self._client_conn.feeder = self
        try:
            self._replay()
            if not self._over and self._client_conn is not None and self._client_conn.paused:
                self.client_slow()
            await self._until_over()
        except UpstreamError:
            responder.abort()
            raise
        finally:
            if self._client_conn is not None:
                self._client_conn.feeder = None
                self._client_conn = None
            self._responder = None
        responder.finish()

    def client_slow(self) -> None:
        self._pause()

    def client_ready(self) -> None:
        self._resume()

    def client_gone(self) -> None:
        self._resume()  # whoever is detached reads on into the void; the others are being cancelled

    # --- giving up

    def release(self) -> None:
        """Done with it: a connection whose answer is complete is already back in its pool, any other is closed."""
        self.close()

    def close(self) -> None:
        """Throw the rest away. An answer that is not complete costs its connection."""
        conn, self._conn = self._conn, None
        self._claimed = True
        self._held.clear()
        if conn is not None and not self._over:
            self._over = True
            conn.response = None
            conn.close()

    # --- called by the connection

    def feed(self, view: memoryview, start: int, end: int) -> None:
        """Bytes of the body, chunk framing included."""
        if self._thrown_away:
            return
        responder = self._responder
        if responder is not None and self._convert is None:
            piece = bytes(view[start:end])
            if self.head.content_length >= 0 or self.head.chunked:
                responder.raw(piece)
            else:
                responder.write_some(piece)
            if self._on_body is not None:
                self._show(piece)
        elif self._responder is None and self._payload is None:
            self._held.append(bytes(view[start:end]))
            self._bytes += end - start
            if self._waiter is not None:
                self._wake()  # of `peek`
            if self._bytes > self._read_ahead:
                self._pause()
        else:
            self._converted(view, start, end)

    def arrived(self, body: bytes) -> None:
        """The whole body at once."""
        self._held.append(body)
        self._over = True
        self._conn = None

    def ended(self) -> None:
        """The body is complete."""
        self._over = True
        self._conn = None
        if self._waiter is not None:
            self._wake()

    def failed(self, error: UpstreamError) -> None:
        self._error = error
        self._over = True
        self._conn = None
        self._wake()

    # --- internals

    def _claim(self) -> None:
        if self._claimed:
            raise LocalFault("the answer has been consumed already")
        self._claimed = True

    def _converted(self, view: memoryview, start: int, end: int) -> None:
        payload = self._payload
        assert payload is not None
        if self._convert is not None:
            try:
                self._convert.feed(view, start, end)
            except ChunkError as error:  # the connection has checked the same bytes
                raise LocalFault("chunk scanners disagree") from error
        else:
            payload += view[start:end]
        if self._responder is not None:
            self._responder.write_some(bytes(payload))
            payload.clear()
            if self._on_body is not None:
                self._show(bytes(view[start:end]))
        elif self._piecewise:
            if self._waiter is not None:
                self._wake()
            if len(payload) > self._read_ahead:
                self._pause()
        elif len(payload) > self._limit:
            error_ = BadReply(f"reply larger than {self._limit} bytes", origin=str(self.origin))
            conn = self._conn
            if conn is not None and not self._over:
                conn.response = None
                conn.close()
            self.failed(error_)

    def _replay(self) -> None:
        held, self._held = self._held, []
        self._bytes = 0
        for piece in held:
            self.feed(memoryview(piece), 0, len(piece))
        self._resume()

    def _show(self, piece: bytes) -> None:
        if self._on_body is not None and self._on_body(piece):
            self._on_body = None

    async def _until_over(self, *, arrival: bool = False) -> None:
        """Wait for the end; or, by `arrival`, for whatever comes first."""
        if not self._over:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.close()
                raise
        if self._error is not None and not arrival:
            raise self._error

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _pause(self) -> None:
        if not self._reading_paused and self._conn is not None and not self._over:
            self._reading_paused = True
            self._conn.pause_reading()

    def _resume(self) -> None:
        if self._reading_paused and self._conn is not None and not self._over:
            self._reading_paused = False
            self._conn.resume_reading()
