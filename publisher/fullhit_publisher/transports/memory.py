"""A broker inside the process, with switches for every kind of trouble. For tests.

Delivery is synchronous and in order, like core NATS it keeps nothing for those who come later.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from .base import RequestHandler, TransportError

__all__ = ["MemoryBroker", "MemoryTransport"]

Reader = Callable[[str, bytes], None]


class MemoryBroker:
    """Where memory transports meet. All methods are thread-safe.

    ``stop`` breaks every connection, ``start`` lets clients in again, ``freeze`` is a network that swallows
    everything without an error, and ``max_payload`` what connections report.
    """

    def __init__(self, max_payload: int = 1024 * 1024) -> None:
        self.max_payload = max_payload
        self.swallowed = 0
        """Messages accepted from a client and delivered to nobody."""
        self._lock = threading.Lock()
        self._readers: list[Reader] = []
        self._connections: list[_MemoryConnection] = []
        self._running = True
        self._frozen = False

    def add_reader(self, reader: Reader) -> None:
        """Call ``reader(subject, data)`` for each message published from now on, in the publisher's thread."""
        with self._lock:
            self._readers.append(reader)

    def request(self, subject: str, data: bytes, reply: str) -> int:
        """Send a request to those who listen on ``subject``; returns how many that are."""
        with self._lock:
            targets = [one for one in self._connections if one.request_subject == subject]
        for target in targets:
            _post(target, target.on_request, data, reply)
        return len(targets)

    def stop(self) -> None:
        with self._lock:
            self._running = False
            gone, self._connections = self._connections, []
        for connection in gone:
            _post(connection, connection.lost.set)

    def start(self) -> None:
        with self._lock:
            self._running = True
            self._frozen = False

    def freeze(self) -> None:
        with self._lock:
            self._frozen = True

    def _admit(self, connection: _MemoryConnection) -> None:
        with self._lock:
            if not self._running:
                raise TransportError("the memory broker is stopped")
            self._connections.append(connection)

    def _leave(self, connection: _MemoryConnection) -> None:
        with self._lock:
            if connection in self._connections:
                self._connections.remove(connection)

    def _deliver(self, connection: _MemoryConnection, subject: str, data: bytes) -> None:
        with self._lock:
            if self._frozen:
                self.swallowed += 1
                return
            if connection not in self._connections:
                raise TransportError("not connected")
            readers = list(self._readers)
        # Outside the lock: a reader may send a request.
        for reader in readers:
            reader(subject, data)

    def _answers(self, connection: _MemoryConnection) -> bool:
        with self._lock:
            if not self._frozen and connection not in self._connections:
                raise TransportError("not connected")
            return not self._frozen


class MemoryTransport:
    """Transport to a ``MemoryBroker``."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    @property
    def name(self) -> str:
        return "memory"

    async def connect(self, request_subject: str, on_request: RequestHandler, timeout: float) -> _MemoryConnection:
        connection = _MemoryConnection(self._broker, request_subject, on_request)
        self._broker._admit(connection)
        return connection


class _MemoryConnection:
    def __init__(self, broker: MemoryBroker, request_subject: str, on_request: RequestHandler) -> None:
        self.loop = asyncio.get_running_loop()
        self.request_subject = request_subject
        self.on_request = on_request
        self._lost = asyncio.Event()
        self._broker = broker

    @property
    def max_payload(self) -> int:
        return self._broker.max_payload

    @property
    def lost(self) -> asyncio.Event:
        return self._lost

    async def publish(self, subject: str, data: bytes) -> None:
        if len(data) > self._broker.max_payload:
            raise TransportError(f"message of {len(data)} bytes, the broker takes {self._broker.max_payload}")
        self._broker._deliver(self, subject, data)

    async def confirm(self, timeout: float) -> None:
        if not self._broker._answers(self):
            await asyncio.sleep(timeout)
            raise TransportError(f"no answer from the broker for {timeout:g} s")

    async def close(self, timeout: float) -> None:
        self._broker._leave(self)
        self._lost.set()


def _post(connection: _MemoryConnection, callback: Callable[..., None], *args: object) -> None:
    try:
        connection.loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # its loop has ended
        pass
