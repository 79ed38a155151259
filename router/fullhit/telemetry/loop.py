"""How late the event loop runs: a timer that notes by how much it was overtaken.

Anything that blocks the loop (a long JSON parse, a snapshot applied in one go) delays every request at once, and the
liveness probe too. The sampler asks to be called every ``interval`` and reports the worst delay among the last one or
two ``window`` periods, so that a stall between two scrapes is seen and an old one fades.
"""

from __future__ import annotations

import asyncio

__all__ = ["LoopLag"]


class LoopLag:
    """Usage: ``lag = LoopLag(); lag.start(); ...; lag.worst; lag.stop()``. Times in seconds."""

    def __init__(self, interval: float = 0.25, window: float = 15.0) -> None:
        self._interval = interval
        self._window = window
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = 0.0
        self._current = 0.0
        self._previous = 0.0
        self._turn = 0.0
        self.last = 0.0
        """The latest delay seen."""

    @property
    def worst(self) -> float:
        """The largest delay of the current and the previous window."""
        return max(self._current, self._previous)

    def start(self) -> None:
        """Begin sampling in the running loop."""
        self.stop()
        self._loop = asyncio.get_running_loop()
        self._turn = self._loop.time() + self._window
        self._arm(self._loop)

    def stop(self) -> None:
        """Stop sampling; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = loop.time() + self._interval
        self._timer = loop.call_at(self._due, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        self.last = max(0.0, now - self._due)
        if now >= self._turn:
            self._previous, self._current = self._current, 0.0
            self._turn = now + self._window
        self._current = max(self._current, self.last)
        self._arm(loop)
