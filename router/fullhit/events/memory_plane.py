"""An event plane inside the process, over ``fullhit_publisher``'s memory broker. For tests: no sockets, and all the
code above the transport."""

from __future__ import annotations

import asyncio
import secrets

from fullhit_publisher.transports.memory import MemoryBroker

from .dispatcher import Dispatcher
from .ingest import Ingest
from .plane import OutgoingRequest, PlaneStatus

__all__ = ["MemoryPlane"]


class MemoryPlane:
    """Reads from a ``MemoryBroker`` whose publishers may live in other threads."""

    def __init__(self, broker: MemoryBroker, ingest: Ingest) -> None:
        self._broker = broker
        self._ingest = ingest
        self._inbox = f"_INBOX.{secrets.token_hex(8)}"
        self._dispatcher = Dispatcher(ingest, self._send)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._broker.add_reader(self._from_broker)
        self._ingest.plane_up()
        self._task = asyncio.create_task(self._dispatcher.run())

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            self._ingest.plane_lost()

    def status(self) -> PlaneStatus:
        return PlaneStatus("memory", "memory", self._task is not None, None, 1, "")

    def _from_broker(self, subject: str, data: bytes) -> None:
        if self._task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._arrive, subject, data)

    def _arrive(self, subject: str, data: bytes) -> None:
        if self._task is None:
            return
        if subject == self._inbox:
            self._ingest.feed_snapshot(data)
        elif not subject.startswith("_INBOX."):
            self._ingest.feed(subject, data)
        self._dispatcher.notice()

    def _send(self, request: OutgoingRequest) -> None:
        self._broker.request(request.subject, request.data, self._inbox)
