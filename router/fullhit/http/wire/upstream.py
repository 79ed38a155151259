"""The client half: pooled connections to origins, one request at a time on each.

`send` either returns the head of an answer or raises one `UpstreamError`. It never repeats a request by itself:
whether that is harmless is the caller's knowledge. The one thing it does quietly is to skip pooled connections
that are known to be closed before a byte was written.

Cancelling `send` (or the `read` or `relay` that follows) closes the connection: a connection with half an
exchange on it must never serve somebody else.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from .errors import ConnectFailed, UpstreamTimeout
from .exchange import UpstreamConnection
from .heads import HeaderBlock, Headers, request_head
from .limits import Origin, Timeouts, UpstreamLimits
from .memo import ResponseMemo
from .pool import IdleStack
from .reply import UpstreamResponse

__all__ = ["UpstreamClient"]

SCRATCH_BYTES = 256 * 1024
SWEEP_SECONDS = 0.25
NEVER = float("inf")


class OriginState:
    __slots__ = ("host", "idle", "open", "waiting")

    def __init__(self, origin: Origin, limits: UpstreamLimits) -> None:
        self.host = str(origin).encode("idna" if not str(origin).isascii() else "ascii")
        self.idle: IdleStack[UpstreamConnection] = IdleStack(limits)
        self.open = 0
        self.waiting: deque[asyncio.Future[None]] = deque()


class UpstreamClient:
    """Sends requests to origins. Create it inside a running loop; close it when done.

    >>> client = UpstreamClient(UpstreamLimits())
    >>> response = await client.send(Origin("127.0.0.1", 30000), b"POST", b"/encode", headers, body,
    ...                              timeouts=Timeouts())
    >>> await response.relay(responder)
    """

    def __init__(self, limits: UpstreamLimits | None = None, on_event: Callable[[str], None] | None = None) -> None:
        self.limits = limits if limits is not None else UpstreamLimits()
        self.loop = asyncio.get_running_loop()
        self.scratch = bytearray(SCRATCH_BYTES)
        self.scratch_view = memoryview(self.scratch)
        self.memo = ResponseMemo(self.limits.max_headers)
        self.stats: Counter[str] = Counter()
        self._on_event = on_event
        self._origins: dict[Origin, OriginState] = {}
        self._connections: set[UpstreamConnection] = set()
        self._sweep = SWEEP_SECONDS
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    def __repr__(self) -> str:
        idle = sum(len(state.idle) for state in self._origins.values())
        return f"<UpstreamClient open={len(self._connections)} idle={idle}>"

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    def idle_connections(self, origin: Origin) -> int:
        state = self._origins.get(origin)
        return len(state.idle) if state is not None else 0

    def idle_timeout(self, origin: Origin) -> float:
        """Seconds that an unused connection to the origin is kept (what has been learnt included)."""
        return self._state(origin).idle.idle_timeout(self.loop.time())

    async def send(
        self,
        origin: Origin,
        method: bytes,
        target: bytes,
        headers: Headers | HeaderBlock,
        body: bytes | bytearray | memoryview = b"",
        *,
        timeouts: Timeouts,
        on_sent: Callable[[], None] | None = None,
    ) -> UpstreamResponse:
        """Send a request and wait for the head of the final answer (interim 1xx ones are skipped).

        `headers` may be what `Request.forwarded` gives. Hop-by-hop and framing headers in it are replaced by our own,
        a missing Host is added. `body` is not copied and must not change until `on_sent` (called once, when the kernel
        has all of it) or the end.
        Raises UpstreamError; LocalFault for headers that would break the framing.
        """
        state = self._origins.get(origin) or self._state(origin)
        head = request_head(method, target, headers, state.host, len(body))
        now = self.loop.time()
        total = NEVER if timeouts.total is None else now + timeouts.total
        connection = state.idle.take_fresh(now)
        if connection is None or not connection.usable():
            connection, useless = state.idle.pop(now)
            for stale in useless:
                stale.close()
            if connection is None:
                connection = await self._connect(origin, state, timeouts, total)
        waiter = connection.begin(head, body, method == b"HEAD", timeouts, total, on_sent)
        if self._sweeper is None:
            self._arm(timeouts)
        elif timeouts is not self._last_timeouts:
            self._tighten(timeouts)
        try:
            return await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().close()  # The answer was first: by now the connection may be another's.
            else:
                connection.close()
            raise

    async def close(self) -> None:
        """Close all connections. Requests that are under way fail."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in list(self._connections):
            connection.close()
        await asyncio.sleep(0)

    # --- connecting

    async def _connect(
        self, origin: Origin, state: OriginState, timeouts: Timeouts, total: float
    ) -> UpstreamConnection:
        if self._closed:
            raise ConnectFailed("the client is closed", origin=str(origin))
        while state.open >= self.limits.max_connections:
            await self._wait_for_slot(origin, state, timeouts, total)
            now = self.loop.time()
            connection, useless = state.idle.pop(now)
            for stale in useless:
                stale.close()
            if connection is not None:
                return connection
        state.open += 1
        connection = UpstreamConnection(self, origin, state)
        self._connections.add(connection)
        self.stats["connects"] += 1
        try:
            async with asyncio.timeout(_shorter(timeouts.connect, total - self.loop.time())):
                await self.loop.create_connection(
                    lambda: connection,
                    origin.host,
                    origin.port,
                    ssl=origin.ssl,
                    server_hostname=origin.host if origin.ssl is not None else None,
                )
        except TimeoutError:
            connection.close()
            raise UpstreamTimeout("connect", origin=str(origin), sent=False) from None
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; ValueError: a bad host name
            connection.close()
            raise ConnectFailed(f"cannot connect: {error}", origin=str(origin)) from error
        except BaseException:
            connection.close()
            raise
        return connection

    async def _wait_for_slot(self, origin: Origin, state: OriginState, timeouts: Timeouts, total: float) -> None:
        waiter: asyncio.Future[None] = self.loop.create_future()
        state.waiting.append(waiter)
        self.count("pool_wait")
        try:
            async with asyncio.timeout(_shorter(timeouts.pool, total - self.loop.time())):
                await waiter
        except TimeoutError:
            raise UpstreamTimeout("pool", origin=str(origin), sent=False) from None
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake(state)  # the slot was ours already: pass it on
            raise
        finally:
            if waiter in state.waiting:
                state.waiting.remove(waiter)

    # --- for UpstreamConnection

    def connection_free(self, connection: UpstreamConnection) -> None:
        state = connection.server
        if self._closed or not state.idle.push(connection, self.loop.time()):
            connection.close()
            return
        if state.waiting:
            self._wake(state)

    def connection_closed(self, connection: UpstreamConnection) -> None:
        """Called at least once for every connection, whatever ended it."""
        if connection in self._connections:
            self._connections.discard(connection)
            state = connection.server
            state.open -= 1
            state.idle.discard(connection)
            self._wake(state)

    def closed_by_peer(self, connection: UpstreamConnection) -> None:
        """The server closed a connection that lay idle: it keeps them no longer than that."""
        now = self.loop.time()
        if not self._closed and connection.idle_since:
            self.count("idle_closed_by_peer")
            self.learn(connection.origin, now - connection.idle_since)

    def learn(self, origin: Origin, seconds: float) -> None:
        self._state(origin).idle.learn(seconds, self.loop.time())

    def count(self, kind: str) -> None:
        self.stats[kind] += 1
        if self._on_event is not None:
            self._on_event(kind)

    # --- internals

    def _state(self, origin: Origin) -> OriginState:
        state = self._origins.get(origin)
        if state is None:
            state = self._origins[origin] = OriginState(origin, self.limits)
        return state

    def _wake(self, state: OriginState) -> None:
        while state.waiting:
            waiter = state.waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    _last_timeouts: Timeouts | None = None

    def _tighten(self, timeouts: Timeouts) -> None:
        """Sweep often enough for the shortest limit that anybody has asked for."""
        self._last_timeouts = timeouts
        limits = (timeouts.send, timeouts.first_byte, timeouts.idle, timeouts.total)
        shortest = min((value for value in limits if value is not None), default=NEVER)
        self._sweep = min(self._sweep, max(0.01, shortest / 8))

    def _arm(self, timeouts: Timeouts | None = None) -> None:
        if timeouts is not None:
            self._tighten(timeouts)
        self._sweeper = self.loop.call_later(self._sweep, self._check)

    def _check(self) -> None:
        self._sweeper = None
        now = self.loop.time()
        for connection in list(self._connections):
            connection.check_deadlines(now)
        for origin, state in list(self._origins.items()):
            for expired in state.idle.expire(now):
                expired.close()
            if not state.open and not state.waiting and state.idle.forgettable(now):
                del self._origins[origin]
        if self._connections and not self._closed:
            self._arm()


def _shorter(limit: float | None, left: float) -> float | None:
    if left == NEVER:
        return limit
    left = max(0.0, left)
    return left if limit is None else min(limit, left)
