"""One connection to an upstream server, and the request that is on it.

The request is handed to the kernel in windows: write buffers of the transport are set to zero, so that
`pause_writing` means exactly "the kernel did not take it all" and `resume_writing` "now it has". That makes the
question "had my request left this process when the connection died?" answerable, and keeps the body from being
copied into buffers.

The answer is parsed for framing only. Until somebody consumes it, at most `read_ahead` bytes are held. A
consumer (see reply.py) is called straight from the socket's callback, so that a relayed chunk costs one read and
one write and no task switch. The connection goes back to its pool when the answer ends, if both sides agreed
to keep it, the request had been sent in full and nothing came after the answer; in every other case it is closed.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from .chunks import ChunkError, ChunkScanner
from .errors import BadReply, LostAfterSend, NotAccepted, UpstreamError, UpstreamTimeout
from .heads import ResponseHead, parse_response_head
from .limits import Origin, Timeouts
from .reply import UpstreamResponse

if TYPE_CHECKING:
    from .upstream import OriginState, UpstreamClient

__all__ = ["UpstreamConnection"]

WINDOW = 512 * 1024
"""Bytes of a request body handed to the kernel in one turn of the loop."""
JOIN_LIMIT = 32 * 1024
"""Up to this size head and body are joined: cheaper than a vectored write."""
PROBE_AFTER = 0.25
"""A connection idle for longer is asked (one poll) whether the server has closed it in the meantime."""
NEVER = float("inf")

CONNECTING, FREE, WAITING, STREAMING, CLOSED = range(5)
STATE_NAMES = ("connecting", "free", "waiting", "streaming", "closed")


class UpstreamConnection(asyncio.BufferedProtocol):
    """Created by UpstreamClient."""

    __slots__ = (
        "_body",
        "_client",
        "_deadline",
        "_exact",
        "_head_only",
        "_interim",
        "_loop",
        "_on_sent",
        "_paused",
        "_pending",
        "_received",
        "_remaining",
        "_scanner",
        "_scratch_view",
        "_sent",
        "_stage",
        "_timeouts",
        "_total",
        "_transport",
        "_unwritten",
        "_waiter",
        "_window_at",
        "idle_since",
        "origin",
        "response",
        "reused",
        "server",
        "state",
    )

    def __init__(self, client: UpstreamClient, origin: Origin, server: OriginState) -> None:
        self._client = client
        self._loop = client.loop
        self._scratch_view = client.scratch_view
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._exact = True
        self._pending = bytearray()
        self._waiter: asyncio.Future[UpstreamResponse] | None = None
        self._body: memoryview | None = None
        self._window_at = 0
        self._on_sent: Callable[[], None] | None = None
        self._paused = False
        self._sent = False
        self._received = 0
        self._interim = 0
        self._remaining = 0
        self._scanner: ChunkScanner | None = None
        self._head_only = False
        self._timeouts = _NO_TIMEOUTS
        self._deadline = NEVER
        self._total = NEVER
        self._stage = "send"
        self._unwritten = 0
        self.origin = origin
        self.server = server
        self.state = CONNECTING
        self.reused = False
        self.idle_since = 0.0
        self.response: UpstreamResponse | None = None

    def __repr__(self) -> str:
        return f"<UpstreamConnection {self.origin} {STATE_NAMES[self.state]} stage={self._stage}>"

    # --- life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # TLS keeps ciphertext in a second buffer that the watermark does not cover: nothing can be proven there.
        self._exact = self.origin.ssl is None
        if self._exact:
            self._transport.set_write_buffer_limits(high=0, low=0)
        if self.state == CONNECTING:
            self.state = FREE

    def connection_lost(self, exc: Exception | None) -> None:
        self._over(exc, "closed")
        self._client.connection_closed(self)

    def eof_received(self) -> bool:
        self._over(None, "closed")
        self._client.connection_closed(self)
        if self._transport is not None and self._transport.get_write_buffer_size():
            self._transport.abort()
        return False

    def usable(self) -> bool:
        """As far as is known without asking the kernel."""
        return self.state == FREE and not self._transport.is_closing()

    def alive(self, now: float) -> bool:
        """Worth sending a request on."""
        if self.state != FREE or self._transport.is_closing():
            return False
        if now - self.idle_since < PROBE_AFTER:
            return True
        sock = self._transport.get_extra_info("socket")
        if sock is None:
            return True
        try:
            probe = select.poll()
            probe.register(sock.fileno(), select.POLLIN)
            return not probe.poll(0)  # readable while idle: end of stream, or garbage
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        """Give the connection up. Never goes back to the pool."""
        self.state = CLOSED
        self._deadline = self._total = NEVER
        self._body = None
        if self._transport is not None:
            self._transport.abort()
        self._client.connection_closed(self)

    # --- sending

    def begin(
        self,
        head: bytes,
        body: bytes | bytearray | memoryview,
        head_only: bool,
        timeouts: Timeouts,
        total_deadline: float,
        on_sent: Callable[[], None] | None,
    ) -> asyncio.Future[UpstreamResponse]:
        """Put a request on the wire; the future gets the answer's head."""
        self.state = WAITING
        self._head_only = head_only
        self._timeouts = timeouts
        self._on_sent = on_sent
        self._sent = False
        self._received = 0
        self._interim = 0
        self._total = total_deadline
        waiter = self._waiter = self._loop.create_future()
        size = len(body)
        if size <= JOIN_LIMIT:
            self._transport.write(b"".join((head, body)))
        elif size <= WINDOW:
            self._transport.writelines((head, body))
        else:
            view = memoryview(body).cast("B") if not isinstance(body, bytes) else memoryview(body)
            self._body = view
            self._window_at = WINDOW
            self._transport.writelines((head, view[:WINDOW]))
            if not self._paused:
                self._loop.call_soon(self._pump)
            self._sending()
            return waiter
        if self._paused:
            self._sending()
        else:
            self._all_sent()
        return waiter

    def _pump(self) -> None:
        """Hand over the next window, unless the kernel has had enough; then `resume_writing` comes."""
        body = self._body
        if body is None or self._paused or self._transport.is_closing():
            return
        at = self._window_at
        if at < len(body):
            self._window_at = at + WINDOW
            self._transport.write(body[at : at + WINDOW])
        if self._window_at < len(body):
            self._sending()
            if not self._paused:
                self._loop.call_soon(self._pump)
        elif not self._paused:
            self._body = None
            self._all_sent()

    def _sending(self) -> None:
        if self.state == WAITING:
            self._stage = "send"
            limit = self._timeouts.send
            self._deadline = NEVER if limit is None else self._loop.time() + limit
            self._unwritten = self._transport.get_write_buffer_size()

    def _all_sent(self) -> None:
        if self._sent or self._transport.is_closing():
            return
        self._sent = True
        self._stage = "first_byte"
        if self.state == WAITING:
            limit = self._timeouts.first_byte
            self._deadline = NEVER if limit is None else self._loop.time() + limit
        on_sent, self._on_sent = self._on_sent, None
        if on_sent is not None:
            on_sent()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self.state != WAITING and self.state != STREAMING:
            return
        if self._body is not None:
            self._loop.call_soon(self._pump)
        elif not self._sent:
            self._all_sent()

    # --- receiving

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch_view

    def buffer_updated(self, nbytes: int) -> None:
        view = self._scratch_view
        state = self.state
        if state == STREAMING:
            self._body_bytes(view, 0, nbytes)
        elif state == WAITING:
            self._received += nbytes
            if not self._pending and self._whole(view, nbytes):
                return
            if self._pending:
                self._pending += view[:nbytes]
                pending = self._pending
                with memoryview(pending) as joined:
                    keep = self._head_bytes(pending, joined, len(pending))
                if keep < 0:
                    self._pending = bytearray()
                else:
                    del pending[:keep]
            else:
                keep = self._head_bytes(self._client.scratch, view, nbytes)
                if keep >= 0 and self.state == WAITING:
                    self._pending += view[keep:nbytes]
        elif state == FREE:
            self._client.count("unsolicited")
            self.close()

    def _whole(self, view: memoryview, end: int) -> bool:
        """The usual answer to a request: short, with a length, all of it in one piece. False: look closer."""
        client = self._client
        cut = client.scratch.find(b"\r\n\r\n", 0, end) + 4
        limits = client.limits
        if cut < 4 or cut > limits.max_head_bytes or not self._sent or self._head_only:
            return False
        try:
            head = client.memo.read(bytes(view[:cut]))
        except BadReply:
            return False
        if head.chunked or head.content_length != end - cut or not head.keep_alive or head.status < 200:
            return False
        if self._waiter is None or self._waiter.done():
            self.close()  # Its sender was cancelled and is about to close it: nobody else may get it.
            return True
        response = UpstreamResponse(self, head, 0)
        response.arrived(bytes(view[cut:end]))
        if head.keep_alive_timeout is not None:
            client.learn(self.origin, head.keep_alive_timeout)
        self._deadline = self._total = NEVER
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(response)
        if self._transport.is_closing():
            self.close()
        else:
            self.state = FREE
            self.reused = True
            client.connection_free(self)
        return True

    def _head_bytes(self, data: bytearray, view: memoryview, end: int) -> int:
        """Look for the final answer's head in `data[:end]`. Returns where what must be kept begins; -1 when nothing
        needs to be. Interim answers are skipped, all of them together no longer than one head may be."""
        limits = self._client.limits
        at = 0
        while True:
            cut = data.find(b"\r\n\r\n", at, end)
            if cut < 0:
                if end - at > limits.max_head_bytes:
                    self.fail(BadReply("reply head too large", origin=str(self.origin)))
                    return -1
                if end - at >= 5 and data[at : at + 5] != b"HTTP/":
                    self.fail(BadReply("not an HTTP reply", origin=str(self.origin)))
                    return -1
                return at
            cut += 4
            try:
                if cut - at > limits.max_head_bytes:
                    raise BadReply("reply head too large")
                head = parse_response_head(bytes(view[at:cut]), limits.max_headers, self._head_only)
                if head.status == 101:
                    raise BadReply("the server switched protocols unasked")
            except BadReply as error:
                self.fail(BadReply(error.message, origin=str(self.origin), reused=self.reused))
                return -1
            if head.status >= 200:
                break
            self._interim += cut - at
            if self._interim > limits.max_head_bytes:
                self.fail(BadReply("too many interim replies", origin=str(self.origin)))
                return -1
            at = cut
        if self._waiter is None or self._waiter.done():
            self.close()
            return -1
        self._answer(head)
        self._body_bytes(view, cut, end)
        return -1

    def _answer(self, head: ResponseHead) -> None:
        response = UpstreamResponse(self, head, self._client.limits.read_ahead)
        self.response = response
        self.state = STREAMING
        if head.keep_alive_timeout is not None:
            self._client.learn(self.origin, head.keep_alive_timeout)
        self._scanner = ChunkScanner() if head.chunked else None
        self._remaining = -1 if head.chunked else head.content_length
        if self._head_only or head.status == 304:
            self._remaining = 0
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(response)

    def _body_bytes(self, view: memoryview, at: int, end: int) -> None:
        response = self.response
        assert response is not None
        scanner = self._scanner
        if scanner is not None:
            try:
                stop = scanner.feed(view, at, end)
            except ChunkError as error:
                self.fail(BadReply(f"malformed chunked reply: {error}", origin=str(self.origin)))
                return
            over = scanner.done
        elif self._remaining >= 0:
            stop = min(end, at + self._remaining)
            self._remaining -= stop - at
            over = self._remaining == 0
        else:
            stop = end
            over = False
        if stop > at:
            response.feed(view, at, stop)
        if over:
            self._complete(stop < end)
        elif self.state == STREAMING:
            self._touch()

    def _touch(self) -> None:
        if self._sent or self._timeouts.idle is None:
            self._stage = "idle"
            limit = self._timeouts.idle
            self._deadline = NEVER if limit is None else self._loop.time() + limit

    def _complete(self, surplus: bool) -> None:
        """The answer has ended as its framing says."""
        response = self.response
        assert response is not None
        self.response = None
        self._scanner = None
        self._deadline = self._total = NEVER
        if response.head.keep_alive and self._sent and not surplus and not self._transport.is_closing():
            self.state = FREE
            self.reused = True
            self._client.connection_free(self)
        else:
            self.close()
        response.ended()

    # --- holding back

    def pause_reading(self) -> None:
        self._deadline = NEVER
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.state == STREAMING:
            self._touch()
            self._transport.resume_reading()

    # --- failing

    @property
    def sent(self) -> bool:
        """The kernel has taken the whole request."""
        return self._sent

    def check_deadlines(self, now: float) -> None:
        if now >= self._total:
            self._expire("total")
        elif now >= self._deadline:
            if self._stage == "send":
                unwritten = self._transport.get_write_buffer_size()
                if unwritten < self._unwritten:
                    self._sending()
                    return
            self._expire(self._stage)

    def _expire(self, stage: str) -> None:
        sent = self._sent or not self._exact
        self.fail(UpstreamTimeout(stage, origin=str(self.origin), reused=self.reused, sent=sent))

    def fail(self, error: UpstreamError) -> None:
        """End the exchange with `error` and close the connection."""
        waiter, self._waiter = self._waiter, None
        response, self.response = self.response, None
        self.close()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        elif response is not None:
            response.failed(error)

    def _over(self, exc: Exception | None, how: str) -> None:
        """The connection has ended by itself."""
        state, self.state = self.state, CLOSED
        if state == FREE:
            self._client.closed_by_peer(self)
        if state not in (WAITING, STREAMING):
            return
        origin = str(self.origin)
        why = f"connection lost: {exc}" if exc is not None else "connection closed by the server"
        if state == STREAMING and exc is None and self._scanner is None and self._remaining < 0:
            self.state = STREAMING
            response = self.response
            self._complete_at_eof()
            assert response is not None
            return
        error: UpstreamError
        if state == STREAMING:
            error = LostAfterSend(
                f"reply cut short ({why})", origin=origin, reused=self.reused, received=self._received
            )
        elif not self._sent and self._exact and not self._received:
            error = NotAccepted(f"{why} while sending the request", origin=origin, reused=self.reused)
        elif self._pending or self._received:
            error = BadReply(f"reply head cut short ({why})", origin=origin, reused=self.reused)
        else:
            error = LostAfterSend(f"{why} before an answer", origin=origin, reused=self.reused)
        self.fail(error)

    def _complete_at_eof(self) -> None:
        response, self.response = self.response, None
        self.close()
        if response is not None:
            response.ended()


_NO_TIMEOUTS = Timeouts()
