"""No event plane at all: every worker's holdings are predicted. Only the intake's own housekeeping runs."""

from __future__ import annotations

import asyncio

from .dispatcher import Dispatcher
from .ingest import Ingest
from .plane import OutgoingRequest, PlaneStatus

__all__ = ["NoPlane"]


class NoPlane:
    """What ``events.plane = "none"`` starts: nothing arrives, nothing is asked for."""

    def __init__(self, ingest: Ingest) -> None:
        self._dispatcher = Dispatcher(ingest, _nowhere)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin the housekeeping."""
        self._task = asyncio.create_task(self._dispatcher.run(), name="fullhit-events")

    async def close(self) -> None:
        """End it."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def status(self) -> PlaneStatus:
        """Not connected, and nothing is wrong with that."""
        return PlaneStatus("none", "", False, None, 0, "")


def _nowhere(_: OutgoingRequest) -> None:
    """A request without a plane is dropped; the stream asks again, seldom."""
