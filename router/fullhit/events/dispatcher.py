"""The task that gives ``Ingest`` its turns: slices of work, clock, outgoing snapshot requests.

Between two slices the event loop runs once, so routing never waits for more than a slice. With nothing to do the task
sleeps until the intake's next deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from .ingest import Ingest
from .plane import OutgoingRequest

__all__ = ["Dispatcher"]

_LONGEST_SLEEP = 1.0
"""Seconds; also how soon the index is swept after a worker was removed."""


class Dispatcher:
    """``send`` hands a request to the transport; it must not block, and may drop it."""

    def __init__(
        self, ingest: Ingest, send: Callable[[OutgoingRequest], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ingest = ingest
        self._send = send
        self._clock = clock
        self._wake = asyncio.Event()
        self._awake_until = 0.0
        ingest.on_work = self.notice

    def notice(self) -> None:
        """Call after feeding the intake: wakes the task if there is something for it to do."""
        if self._ingest.has_work or self._ingest.deadline < self._awake_until:
            self._wake.set()

    def wake(self) -> None:
        """Look again now."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        ingest = self._ingest
        while True:
            self._wake.clear()
            more = ingest.run_slices()
            now = self._clock()
            if now >= ingest.deadline:
                for request in ingest.tick(now):
                    self._send(request)
            if more or ingest.has_work:
                await asyncio.sleep(0)
                continue
            pause = min(max(ingest.deadline - now, 0.001), _LONGEST_SLEEP)
            self._awake_until = now + pause
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                pass
