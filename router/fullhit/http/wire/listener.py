"""A listening socket, its connections and their limits.

One sweep timer looks after all time limits of all connections, so that the hot path sets a number instead of
arming and cancelling a timer for every request; limits are therefore kept to within one sweep (at most half
a second late). Errors that the handler never hears of are formatted by `error_format`, replaceable because
protocols differ in the shape of their errors.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import secrets
import ssl as ssl_module
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .budget import BudgetHolder, MemoryBudget
from .buffers import BufferPool
from .connection import BodyMemory, ServerConnection
from .errors import ClientFault, PeerGone, UpstreamError, UpstreamTimeout
from .limits import ListenerLimits
from .memo import RequestMemo
from .request import Handler, Request, Responder

__all__ = ["DrainReport", "ErrorFormat", "HttpListener", "openai_error"]

log = logging.getLogger("fullhit.http.wire")

SCRATCH_BYTES = 64 * 1024
"""What a read without a buffer of its own may bring: heads, small bodies, and the beginning of large ones, which is
copied and therefore kept short."""
SPARE_BYTES = 32 * 1024 * 1024
"""Body buffers kept for reuse."""
SWEEP_SECONDS = 0.5

ErrorFormat = Callable[[int, str, str, str], tuple[str, bytes]]
"""(status, code, message, request id or "") -> (content type, body)."""


def openai_error(status: int, code: str, message: str, request_id: str) -> tuple[str, bytes]:
    """The default error body: `{"error": {"message", "type", "code"}}`."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "code": code}
    if request_id:
        error["request_id"] = request_id
    return "application/json", json.dumps({"error": error}).encode()


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What became of the requests that were running when a drain began: `finished` of `running` ended by
    themselves, `cut` did not within the time given."""

    running: int
    finished: int
    cut: int


class HttpListener:
    """Accepts connections and calls `handler(request, responder)` in a task of its own for each request.

    >>> listener = HttpListener(handler, ListenerLimits())
    >>> host, port = await listener.start("127.0.0.1", 0)
    >>> report = await listener.drain(30)
    >>> await listener.close()

    `on_event(kind)` is called for everything that `stats` counts. `error_format` shapes the bodies of answers
    that this class gives itself. An exception from the handler is answered 500 with a request id, logged and
    counted; ClientFault is answered as it says, UpstreamError with 502 or 504.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ListenerLimits | None = None,
        on_event: Callable[[str], None] | None = None,
        *,
        error_format: ErrorFormat = openai_error,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.limits = limits if limits is not None else ListenerLimits()
        self.budget = budget if budget is not None else MemoryBudget(self.limits.max_buffered_bytes)
        self.buffers = BufferPool(SPARE_BYTES)
        self.memo = RequestMemo(self.limits.max_headers)
        self.requests = 0
        self._events: Counter[str] = Counter()
        self.connections: set[ServerConnection] = set()
        self.scratch = bytearray(SCRATCH_BYTES)
        self.scratch_view = memoryview(self.scratch)
        self._handler = handler
        self._on_event = on_event
        self._error_format = error_format
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._sweep = SWEEP_SECONDS
        self._draining = False
        self._calm: asyncio.Event | None = None
        self._ids = (f"{prefix}-{n:x}" for prefix in (secrets.token_hex(4),) for n in itertools.count(1))
        self.loop: asyncio.AbstractEventLoop

    def __repr__(self) -> str:
        return f"<HttpListener connections={len(self.connections)} {self.budget!r} draining={self._draining}>"

    @property
    def stats(self) -> Counter[str]:
        """Everything counted so far: `requests`, and one entry for each kind of event."""
        return self._events + Counter(requests=self.requests)

    # --- life cycle

    async def start(
        self,
        host: str,
        port: int,
        ssl: ssl_module.SSLContext | None = None,
        *,
        reuse_port: bool = False,
    ) -> tuple[str, int]:
        """Listen; port 0 takes a free one. Returns the bound (host, port). Raises OSError."""
        self.loop = asyncio.get_running_loop()
        limits = self.limits
        shortest = min(
            limits.head_timeout,
            limits.body_idle_timeout,
            limits.keepalive_timeout,
            limits.write_timeout,
            limits.linger_timeout,
            limits.buffer_wait_timeout,
        )
        self._sweep = min(SWEEP_SECONDS, max(0.01, shortest / 4))
        self._calm = asyncio.Event()
        self._draining = False
        self._server = await self.loop.create_server(
            lambda: ServerConnection(self),
            host,
            port,
            ssl=ssl,
            backlog=limits.backlog,
            reuse_port=reuse_port or None,
        )
        self._arm()
        bound = self._server.sockets[0].getsockname()
        return bound[0], bound[1]

    async def drain(self, timeout: float) -> DrainReport:
        """Stop accepting, close idle connections, let running requests end for up to `timeout` seconds.

        Answers given meanwhile carry `Connection: close`. What still runs afterwards is left to `close`.
        """
        self._draining = True
        if self._server is not None:
            self._server.close()
        running = sum(connection.busy for connection in self.connections)
        for connection in list(self.connections):
            connection.shut_when_idle()
        deadline = self.loop.time() + timeout
        assert self._calm is not None
        while any(connection.busy for connection in self.connections):
            left = deadline - self.loop.time()
            if left <= 0:
                break
            self._calm.clear()
            try:
                async with asyncio.timeout(left):
                    await self._calm.wait()
            except TimeoutError:
                break
        cut = sum(connection.busy for connection in self.connections)
        return DrainReport(running, max(0, running - cut), cut)

    async def close(self) -> None:
        """Close everything at once; running handlers are cancelled and waited for."""
        self._draining = True
        if self._server is not None:
            self._server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        tasks = [c.task for c in self.connections if c.task is not None]
        for connection in list(self.connections):
            connection.abort()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        while self.connections and self._calm is not None:
            self._calm.clear()
            await self._calm.wait()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    # --- for ServerConnection

    def opened(self, connection: ServerConnection) -> None:
        self.connections.add(connection)
        self.count("connections")
        if self._draining:
            connection.shut_when_idle()
        elif len(self.connections) > self.limits.max_connections:
            message = "too many connections (max_connections)"
            connection.refuse(ClientFault(503, "busy", message, retry_after=1))

    def closed(self, connection: ServerConnection) -> None:
        self.connections.discard(connection)
        self._wake_drain()

    def count(self, kind: str) -> None:
        self._events[kind] += 1
        if self._on_event is not None:
            self._on_event(kind)

    def refused(self, fault: ClientFault) -> None:
        self.count(f"refused_{fault.code}")

    def error_body(
        self, status: int, code: str, message: str, request_id: str = ""
    ) -> tuple[list[tuple[bytes, bytes]], bytes]:
        content_type, body = self._error_format(status, code, message, request_id)
        headers = [(b"Content-Type", content_type.encode())]
        if request_id:
            headers.append((b"X-Request-Id", request_id.encode()))
        return headers, body

    def release_memory(self, holder: BudgetHolder) -> None:
        for woken in self.budget.release(holder):
            assert isinstance(woken, BodyMemory)
            woken.connection.memory_available()

    async def serve(self, request: Request, responder: Responder) -> None:
        """Run the handler for one request and see to it that the client gets an answer."""
        self.requests += 1
        try:
            await self._handler(request, responder)
            if not responder.finished:
                self._unanswered(request, responder, None)
        except asyncio.CancelledError:
            if not responder.finished:
                responder.abort()
        except ClientFault as fault:
            if responder.started:
                responder.abort()
            else:
                self.refused(fault)
                headers, body = self.error_body(fault.status, fault.code, fault.message)
                if fault.retry_after is not None:
                    headers.append((b"Retry-After", b"%d" % fault.retry_after))
                responder.reply(fault.status, headers, body)
        except PeerGone:
            responder.abort()
        except UpstreamError as error:
            self._upstream_failed(responder, error)
        except Exception as error:
            self._unanswered(request, responder, error)
        finally:
            if isinstance(request.body, bytearray):
                holder = [request.body]
                request.body = b""
                self.buffers.give(holder)
            connection = responder.settle()
            if connection is not None:
                connection.request_over(responder)
                if self._draining:
                    self._wake_drain()

    def _upstream_failed(self, responder: Responder, error: UpstreamError) -> None:
        """For handlers that have no better idea: a bad gateway, or a cut where an answer had begun."""
        self.count(f"upstream_{error.kind}")
        if responder.started:
            responder.abort()
        else:
            status = 504 if isinstance(error, UpstreamTimeout) else 502
            headers, body = self.error_body(status, f"upstream_{error.kind}", str(error))
            responder.reply(status, headers, body)

    def _unanswered(self, request: Request, responder: Responder, error: Exception | None) -> None:
        request_id = next(self._ids)
        self.count("handler_errors")
        what = "failed" if error is not None else "returned without an answer"
        log.error("handler %s for %r (request id %s)", what, request, request_id, exc_info=error)
        if responder.started:
            if not responder.finished:
                responder.abort()
            return
        headers, body = self.error_body(500, "internal_error", "internal error", request_id)
        responder.reply(500, headers, body)

    # --- internals

    def _wake_drain(self) -> None:
        if self._draining and self._calm is not None:
            self._calm.set()

    def _arm(self) -> None:
        self._sweeper = self.loop.call_later(self._sweep, self._check)

    def _check(self) -> None:
        self._arm()
        self.buffers.age()
        now = self.loop.time()
        late = [c for c in self.connections if c.deadline <= now or c.write_deadline <= now]
        for connection in late:
            connection.check_deadlines(now)
