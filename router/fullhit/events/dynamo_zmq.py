"""Dynamo's event plane over ZMQ: one SUB socket that feeds one pool, in one of two ways.

Direct: each publisher has a PUB socket of its own, found through discovery (``open`` and ``close``). A message then
says nothing about its scope; its publisher must be one that discovery named. Broker: the socket connects to the XPUB
side of every broker, hears each message as often as there are brokers, and the copies are dropped.

ZMQ connects again by itself, which is what is wanted here, for there is nothing to ask for afterwards. A broker's loss
is seen by a monitor, so that entries lose our trust as they do with NATS. A publisher's is not: its discovery record
goes with it.

Needs the extra ``dynamo`` (pyzmq).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from .dynamo_feed import DynamoFeed
from .ingest import Ingest
from .observer import EventLog
from .plane import PlaneStatus

if TYPE_CHECKING:
    import zmq.asyncio

__all__ = ["DynamoZmq"]

_TURN: Final = 0.0005
_FRAME_SPACE: Final = 64
MAX_ENDPOINTS: Final = 10_000
"""Publishers connected to at once."""
HIGH_WATER: Final = 10_000
"""Messages that wait in the socket per publisher; what comes then is dropped there, and shows as a gap."""


class DynamoZmq:
    """``brokers``: XPUB URLs; none = direct. Raises ImportError, with what to install, when pyzmq is missing."""

    def __init__(
        self,
        brokers: Sequence[str],
        feed: DynamoFeed,
        ingest: Ingest,
        *,
        log: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _import()
        self._brokers = tuple(brokers)
        self._feed = feed
        self._ingest = ingest
        self._log = log
        self._clock = clock
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._publishers: dict[int, str] = {}
        self._endpoints: dict[str, int] = {}  # address -> publishers that gave it
        self._error = "not started"
        self._connects = 0
        self._linked: set[str] = set()  # brokers in reach
        self._last_at: float | None = None

    async def start(self) -> None:
        """Open the socket; returns at once."""
        if self._socket is not None:
            return
        zmq, asynchronous = _import()
        self._context = asynchronous.Context()
        self._socket = socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, self._ingest.settings.limits.max_message_bytes + _FRAME_SPACE)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
        socket.setsockopt(zmq.IPV6, 1)
        for prefix in self._feed.scope.prefixes():
            socket.setsockopt(zmq.SUBSCRIBE, prefix)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._error = ""
        self._tasks = [
            asyncio.create_task(self._receive(socket), name="fullhit-dynamo-zmq"),
            asyncio.create_task(self._watch(monitor), name="fullhit-dynamo-zmq-monitor"),
        ]
        for broker in self._brokers:
            self._connect(broker)
        if not self._brokers:
            self._ingest.dynamo_up(self._feed.pool)
        for address in self._endpoints:
            self._connect(address)

    async def close(self) -> None:
        """Close the socket. Never waits for a peer."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.disable_monitor()
            socket.close(0)
            self._ingest.dynamo_lost(self._feed.pool)
        context, self._context = self._context, None
        if context is not None:
            context.destroy(0)
        self._error = "closed"

    def open(self, publisher_id: int, address: str) -> None:
        """Discovery knows this publisher; listen to it."""
        known = self._publishers.get(publisher_id)
        if known == address:
            return
        if known is not None:
            self.shut(publisher_id)
        elif len(self._publishers) >= MAX_ENDPOINTS:
            self._feed.refuse("endpoint", f"more than {MAX_ENDPOINTS} publishers")
            return
        if not address.startswith("tcp://"):
            self._feed.refuse("endpoint", f"publisher {publisher_id} has no tcp address: {address[:100]!r}")
            return
        self._publishers[publisher_id] = address
        self._endpoints[address] = self._endpoints.get(address, 0) + 1
        if self._endpoints[address] == 1:
            self._connect(address)

    def shut(self, publisher_id: int) -> None:
        """Discovery knows it no more."""
        address = self._publishers.pop(publisher_id, None)
        if address is None:
            return
        self._endpoints[address] -= 1
        if self._endpoints[address]:
            return
        del self._endpoints[address]
        if self._socket is not None:
            zmq, _ = _import()
            try:
                self._socket.disconnect(address)
            except zmq.ZMQError:
                pass  # it never connected

    def status(self) -> PlaneStatus:
        age = None if self._last_at is None else self._clock() - self._last_at
        url = ",".join(self._brokers) if self._brokers else f"zmq direct, {len(self._publishers)} publishers"
        connected = self._socket is not None and (not self._brokers or bool(self._linked))
        error = self._error or ("" if connected else "no broker connected")
        return PlaneStatus("zmq", url, connected, age, self._connects, error)

    def _connect(self, address: str) -> None:
        if self._socket is None:
            return
        zmq, _ = _import()
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._feed.refuse("endpoint", f"{address[:100]}: {error}")

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        zmq, _ = _import()
        publishers = None if self._brokers else self._publishers
        turn_began = self._clock()
        while True:
            try:
                frames = await socket.recv_multipart()
            except zmq.ZMQError as error:
                self._error = str(error)
                await asyncio.sleep(0.1)
                continue
            self._error = ""
            self._last_at = self._clock()
            self._feed.zmq(frames, publishers)
            if self._ingest.backlog_bytes > self._ingest.settings.max_backlog_bytes // 2:
                await asyncio.sleep(0.001)
                turn_began = self._clock()
            elif self._clock() - turn_began > _TURN:
                await asyncio.sleep(0)
                turn_began = self._clock()

    async def _watch(self, monitor: Any) -> None:
        zmq, _ = _import()
        from zmq.utils.monitor import parse_monitor_message

        pool = self._feed.pool
        while True:
            message = parse_monitor_message(await monitor.recv_multipart())
            where = message["endpoint"].decode("utf-8", "replace")
            before = bool(self._linked)
            if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connects += 1
                if self._brokers:
                    self._linked.add(where)
            else:
                self._linked.discard(where)
            if bool(self._linked) is before:
                continue
            if before:
                self._tell("warning", "dynamo_plane_down")
                self._ingest.dynamo_lost(pool)
            else:
                self._tell("info", "dynamo_plane_up")
                self._ingest.dynamo_up(pool)
            self._ingest.on_work()

    def _tell(self, level: str, event: str) -> None:
        if self._log is not None:
            self._log(level, event, pool=self._feed.pool, url=",".join(self._brokers))


def _import() -> tuple[Any, Any]:
    try:
        import zmq
        import zmq.asyncio as asynchronous
    except ImportError:
        raise ImportError("Dynamo's ZMQ event plane needs pyzmq: pip install 'fullhit[dynamo]'", name="zmq") from None
    return zmq, asynchronous
