"""One client connection: a stream of requests, answered one at a time.

Reading goes through `BufferedProtocol`. Heads, small bodies and chunked bodies land in one scratch buffer that
all connections of a listener share (the loop fills it and calls back in the same step, so nobody else can
touch it in between) and are copied out; a large body with a Content-Length is received straight into its own
buffer. That buffer is made without being touched (see buffers.py) and, above 1 MiB, in two steps: 256 KiB first, the
announced size only when these have really arrived. So memory follows what was sent, not what was announced.

While a handler runs, the socket is still read, because that is the only way to notice that the client has
left; what a pipelining client sends meanwhile is kept, and reading stops only when that fills up.

End of input counts as a departure, also during a request: a client that half-closes and waits is rarer than
one that closed, and only the latter must stop the work behind us (nginx decides alike).

States:  IDLE -> HEAD -> BODY | CHUNKED -> HANDLING -> IDLE ...     any -> LINGER | GONE
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from .budget import BudgetHolder
from .chunks import ChunkError, ChunkScanner, ChunkTooLarge
from .errors import ClientFault
from .heads import RequestHead
from .request import Request, Responder

if TYPE_CHECKING:
    from .listener import HttpListener

__all__ = ["ServerConnection"]

IDLE, HEAD, BODY, CHUNKED, HANDLING, LINGER, GONE = range(7)
STATE_NAMES = ("idle", "head", "body", "chunked", "handling", "linger", "gone")

AT_ONCE = 1024 * 1024
"""Bodies up to this size get their buffer at once."""
FIRST_STEP = 256 * 1024
"""Bytes of a larger one that must have arrived before its whole announced size is allocated."""
WINDOW = 512 * 1024
"""Most bytes taken from a socket in one turn of the loop, so that nobody else waits long for a large body."""
PIPELINE_LIMIT = 64 * 1024
"""Bytes of later requests kept while one is being answered; then reading stops."""
SMALL_BODY = 64 * 1024
"""Bodies up to this size never wait for memory: control requests must pass while pictures queue."""

NEVER = float("inf")


class Feeder:
    """Something that writes to a connection and can hold back while the client is slow."""

    __slots__ = ()

    def client_slow(self) -> None: ...

    def client_ready(self) -> None: ...

    def client_gone(self) -> None: ...


class ServerConnection(asyncio.BufferedProtocol):
    """Created by HttpListener, one for each accepted socket."""

    __slots__ = (
        "_body",
        "_decoder",
        "_drainers",
        "_filled",
        "_head",
        "_length",
        "_limits",
        "_listener",
        "_loop",
        "_pending",
        "_reading_paused",
        "_scan",
        "_scratch",
        "_scratch_view",
        "_task",
        "_transport",
        "_unwritten",
        "_view",
        "body_memory",
        "closing_soon",
        "deadline",
        "feeder",
        "gone",
        "paused",
        "peer",
        "responder",
        "state",
        "write",
        "write_deadline",
    )

    def __init__(self, listener: HttpListener) -> None:
        self._listener = listener
        self._limits = listener.limits
        self._loop = listener.loop
        self._scratch = listener.scratch
        self._scratch_view = listener.scratch_view
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._pending = bytearray()
        self._scan = 0
        self._head: Request | None = None
        self._length = 0
        self._body: bytearray | None = None
        self._view: memoryview | None = None
        self._filled = 0
        self._decoder: ChunkScanner | None = None
        self._reading_paused = False
        self._task: asyncio.Task[None] | None = None
        self._drainers: list[asyncio.Future[None]] | None = None
        self._unwritten = 0
        self.body_memory = BodyMemory(self)
        self.responder: Responder | None = None
        self.feeder: Feeder | None = None
        self.state = IDLE
        self.gone = False
        self.paused = False
        self.closing_soon = False
        self.write: Callable[[bytes | bytearray | memoryview], None]
        self.peer = ""
        self.deadline = NEVER
        self.write_deadline = NEVER

    def __repr__(self) -> str:
        return f"<ServerConnection {self.peer} {STATE_NAMES[self.state]} pending={len(self._pending)}>"

    # --- asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.write = self._transport.write
        name: Any = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            host, port = name[0], name[1]
            self.peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.deadline = self._loop.time() + self._limits.head_timeout
        self._listener.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._depart()
        self._listener.closed(self)

    def eof_received(self) -> bool:
        handling = self.state == HANDLING
        self._depart()
        if handling:
            self._transport.abort()
        elif self._transport.get_write_buffer_size():
            self.deadline = self._loop.time() + self._limits.linger_timeout
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.state == BODY:
            view = self._view
            if view is not None:
                filled = self._filled
                return view[filled : filled + WINDOW]
        return self._scratch_view

    def buffer_updated(self, nbytes: int) -> None:
        state = self.state
        if state <= HEAD:
            if self._pending or self.paused:
                self._pending += self._scratch_view[:nbytes]
                if self.paused:
                    self._hold_back()
                else:
                    self._resume_parsing()
            else:
                taken = self._take(self._scratch, self._scratch_view, nbytes)
                if taken < nbytes:
                    self._pending += self._scratch_view[taken:nbytes]
        elif state == BODY:
            self._body_arrived(nbytes)
        elif state == HANDLING:
            self._pending += self._scratch_view[:nbytes]
            self._hold_back()
        elif state == CHUNKED:
            taken = self._chunks_arrived(self._scratch_view, 0, nbytes)
            if taken < nbytes:
                self._pending += self._scratch_view[taken:nbytes]

    def pause_writing(self) -> None:
        self.paused = True
        self._unwritten = self._transport.get_write_buffer_size()
        self.write_deadline = self._loop.time() + self._limits.write_timeout
        if self.feeder is not None:
            self.feeder.client_slow()

    def resume_writing(self) -> None:
        self.paused = False
        self.write_deadline = NEVER
        if self.feeder is not None:
            self.feeder.client_ready()
        self._release_drainers()
        if self._pending and self.state == IDLE:
            self._next_request()

    # --- for Responder and relays

    async def drain(self) -> None:
        """Wait until the client has taken most of what is queued, or has gone (`write_timeout` at most)."""
        if not self.paused or self.gone:
            return
        waiter = self._loop.create_future()
        if self._drainers is None:
            self._drainers = []
        self._drainers.append(waiter)
        await waiter

    def abort(self) -> None:
        """Drop the connection without sending what is queued."""
        if self._transport is not None:
            self._transport.abort()
        self._depart()

    # --- for HttpListener

    def check_deadlines(self, now: float) -> None:
        if now >= self.deadline:
            self._deadline_passed()
        if now >= self.write_deadline:
            unwritten = self._transport.get_write_buffer_size()
            if unwritten < self._unwritten:
                self._unwritten = unwritten
                self.write_deadline = now + self._limits.write_timeout
            else:
                self._listener.count("write_timeout")
                self.abort()

    def shut_when_idle(self) -> None:
        """Draining: close now if nothing is going on, else after the current answer."""
        self.closing_soon = True
        if self.state == IDLE or self.state == LINGER:
            self._close()

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The handler's task while one runs."""
        return self._task

    @property
    def busy(self) -> bool:
        return self._task is not None or self.state in (HEAD, BODY, CHUNKED)

    def refuse(self, fault: ClientFault) -> None:
        """Answer with an error that the handler never hears of, and close."""
        if self.gone:
            return
        self._listener.refused(fault)
        self._drop_body()
        headers, body = self._listener.error_body(fault.status, fault.code, fault.message)
        if fault.retry_after is not None:
            headers = [*headers, (b"Retry-After", b"%d" % fault.retry_after)]
        head = self._head
        responder = Responder(self, head if head is not None else _ANY_HEAD, keep_alive=False)
        responder.reply(fault.status, headers, body)
        self._linger()

    # --- requests

    def _resume_parsing(self) -> None:
        """Go on with what is in `_pending`."""
        pending = self._pending
        if not pending or (self.state != IDLE and self.state != HEAD):
            return
        self._pending = bytearray()
        view = memoryview(pending)
        taken = self._take(pending, view, len(pending))
        view.release()
        if taken < len(pending) and not self.gone:
            if taken:
                del pending[:taken]
            pending += self._pending
            self._pending = pending

    def _take(self, data: bytearray, view: memoryview, end: int) -> int:
        """Begin the request that starts at `data[0]`; returns how many bytes were used (0: head unfinished)."""
        start = 0
        if data[0] == 13 or data[0] == 10:
            start = 2 if end > 1 and data[0] == 13 and data[1] == 10 else 0
            if not start and not (end == 1 and data[0] == 13):
                self.refuse(ClientFault(400, "bad_request", "malformed request line"))
                return end
        cut = data.find(b"\r\n\r\n", max(start, self._scan - 3), end)
        limits = self._limits
        if cut < 0:
            if end - start > limits.max_head_bytes:
                self.refuse(_head_too_large(limits.max_head_bytes))
                return end
            scan = self._scan
            if data.count(b"\n", scan, end) != data.count(b"\r\n", max(0, scan - 1), end):
                self.refuse(ClientFault(400, "bad_request", "malformed request: bare line feed"))
                return end
            self._scan = end
            if self.state == IDLE:
                self.state = HEAD
                self.deadline = self._loop.time() + limits.head_timeout
            return 0
        cut += 4
        self._scan = 0
        try:
            if cut - start > limits.max_head_bytes:
                raise _head_too_large(limits.max_head_bytes)
            head = self._listener.memo.read(bytes(view[start:cut]), Request())
            length = head.content_length
            if length > limits.max_body_bytes:
                self._head = head
                raise _body_too_large(limits.max_body_bytes)
        except ClientFault as fault:
            self.refuse(fault)
            return end
        if head.chunked:
            self._head = head
            self.state = CHUNKED
            self._body = bytearray()
            self._decoder = ChunkScanner(self._body, limits.max_body_bytes)
            self.deadline = self._loop.time() + limits.body_idle_timeout
            if end > cut:
                return self._chunks_arrived(view, cut, end)
            if head.expects:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return cut
        if length <= 0:
            self._dispatch(head, b"")
            return cut
        stop = cut + length
        if stop <= end:
            self._dispatch(head, bytes(view[cut:stop]))
            return stop
        self._head = head
        self._length = length
        self.state = BODY
        here = end - cut
        buffers = self._listener.buffers
        at_once = length <= AT_ONCE or here >= FIRST_STEP or buffers.warm(length)
        body = buffers.take(length if at_once else FIRST_STEP)
        body_view = memoryview(body)
        body_view[:here] = view[cut:end]
        self._body = body
        self._view = body_view
        self._filled = 0
        if here == 0 and head.expects:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._body_arrived(here)
        return end

    def _body_arrived(self, size: int) -> None:
        filled = self._filled = self._filled + size
        length = self._length
        if filled == length:
            body, head = self._body, self._head
            assert body is not None and head is not None
            self._body = self._view = None
            self._charge(size, True)
            self._dispatch(head, body)
            return
        view = self._view
        assert view is not None
        if filled == len(view):
            grown = self._listener.buffers.take(length)
            self._view = memoryview(grown)
            self._view[:filled] = view
            self._body = grown
        self.deadline = self._loop.time() + self._limits.body_idle_timeout
        self._charge(size, length <= SMALL_BODY)
        if size == WINDOW and not self._reading_paused:  # more is there: uvloop would read on in this very turn
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self._reading_paused and not self.gone:
            self._transport.resume_reading()

    def _chunks_arrived(self, view: memoryview, start: int, end: int) -> int:
        decoder, body, head = self._decoder, self._body, self._head
        assert decoder is not None and body is not None and head is not None
        before = len(body)
        try:
            taken = decoder.feed(view, start, end)
        except ChunkTooLarge:
            self.refuse(_body_too_large(self._limits.max_body_bytes))
            return end
        except ChunkError as error:
            self.refuse(ClientFault(400, "bad_chunk", f"malformed chunked body: {error}"))
            return end
        if decoder.done:
            self._decoder = self._body = None
            self._charge(len(body) - before, True)
            self._dispatch(head, body)
        else:
            self.deadline = self._loop.time() + self._limits.body_idle_timeout
            self._charge(len(body) - before, len(body) <= SMALL_BODY)
        return taken

    def _charge(self, size: int, exempt: bool) -> None:
        budget = self._listener.budget
        if not budget.charge(self.body_memory, size):
            if exempt:
                budget.forgive_wait(self.body_memory)
            else:
                self._listener.count("memory_wait")
                self._pause_reading()
                self.deadline = self._loop.time() + self._limits.buffer_wait_timeout

    def memory_available(self) -> None:
        self.deadline = self._loop.time() + self._limits.body_idle_timeout
        self._resume_reading()

    def _dispatch(self, request: Request, body: bytes | bytearray) -> None:
        self.state = HANDLING
        self.deadline = NEVER
        self._head = None
        if type(body) is bytes and body:  # it came with the head and is small: booked, never made to wait
            size = len(body)
            self.body_memory.charged += size
            self._listener.budget.used += size
        loop = self._loop
        request.body = body
        request.peer = self.peer
        request.received_at = loop.time()
        responder = self.responder = Responder(self, request, request.keep_alive and not self.closing_soon)
        self._task = loop.create_task(self._listener.serve(request, responder))

    def request_over(self, responder: Responder) -> None:
        """The handler has returned and the responder is finished."""
        self._task = None
        self.responder = None
        self.feeder = None
        if self.body_memory.charged:
            self._listener.release_memory(self.body_memory)
        if self.gone:
            return
        if not responder.keep_alive or self.closing_soon:
            self._linger()
            return
        self.state = IDLE
        self.deadline = self._loop.time() + self._limits.keepalive_timeout
        if self._pending and not self.paused:  # a client that reads no answers gets no further ones
            self._next_request()

    def _next_request(self) -> None:
        self._resume_parsing()
        if self._reading_paused and len(self._pending) <= PIPELINE_LIMIT:
            self._resume_reading()

    # --- ends

    def _deadline_passed(self) -> None:
        self.deadline = NEVER
        state = self.state
        if state in (IDLE, LINGER):
            if state == IDLE and self.paused:
                self.deadline = self._loop.time() + self._limits.keepalive_timeout
            elif state == IDLE:
                self._close()
            else:
                self._transport.abort()
        elif state == GONE:
            self._transport.abort()
        elif state == HEAD:
            self._listener.count("head_timeout")
            self.refuse(ClientFault(408, "head_timeout", "the request head did not arrive in time"))
        elif self._reading_paused:
            self._listener.count("memory_timeout")
            message = "no memory for this body now (max_buffered_bytes)"
            self.refuse(ClientFault(503, "busy", message, retry_after=1))
        else:
            self._listener.count("body_timeout")
            self.refuse(ClientFault(408, "body_timeout", "the request body did not arrive in time"))

    def _close(self) -> None:
        """Close once what is queued has been taken; that has its time limit, too."""
        self.state = LINGER
        self.deadline = self._loop.time() + self._limits.linger_timeout
        self._transport.close()

    def _linger(self) -> None:
        """Close in a way that lets the client read our answer: stop sending, read the rest away."""
        self.state = LINGER
        self._pending = bytearray()
        transport = self._transport
        if transport.is_closing():
            return
        if not transport.can_write_eof():
            self._close()
            return
        transport.write_eof()
        self.deadline = self._loop.time() + self._limits.linger_timeout
        self._resume_reading()

    def _depart(self) -> None:
        """The client cannot be heard any more."""
        if self.gone:
            return
        self.gone = True
        state, self.state = self.state, GONE
        self.deadline = self.write_deadline = NEVER
        if state in (BODY, CHUNKED):
            self._listener.count("half_body")
        elif state == HEAD:
            self._listener.count("half_head")
        self._pending = bytearray()
        self._release_drainers()
        task, responder = self._task, self.responder
        if task is None:
            self._drop_body()
        elif responder is not None:
            task.add_done_callback(self._task_over)
            if not responder.finished:
                self._listener.count("client_gone")
            if self.feeder is not None:
                self.feeder.client_gone()
            if not responder.detached and not responder.finished:
                task.cancel()

    def _task_over(self, task: asyncio.Task[None]) -> None:
        """For a handler that was cancelled before its first step: nobody else lets go of its body."""
        self._task = self.responder = self.feeder = None
        self._drop_body()

    def _drop_body(self) -> None:
        self._body = self._view = self._decoder = None
        if self.body_memory.charged:
            self._listener.release_memory(self.body_memory)

    def _release_drainers(self) -> None:
        drainers, self._drainers = self._drainers, None
        for waiter in drainers or ():
            if not waiter.done():
                waiter.set_result(None)

    def _hold_back(self) -> None:
        if len(self._pending) > PIPELINE_LIMIT:
            self._pause_reading()

    def _pause_reading(self) -> None:
        if not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()


class BodyMemory(BudgetHolder):
    """The share of one connection in the memory of all bodies."""

    __slots__ = ("connection",)

    def __init__(self, connection: ServerConnection) -> None:
        super().__init__()
        self.connection = connection


def _head_too_large(limit: int) -> ClientFault:
    return ClientFault(431, "head_too_large", f"request head above {limit} bytes (max_head_bytes)")


def _body_too_large(limit: int) -> ClientFault:
    return ClientFault(413, "body_too_large", f"request body above the limit of {limit} bytes (max_body_bytes)")


_ANY_HEAD = RequestHead()
_ANY_HEAD.method = b"GET"
