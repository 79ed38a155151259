"""The circuit breaker of one worker: pure, driven by outcomes and a clock handed in.

What it guards against. Least-loaded selection has a known trap: a worker that fails in a millisecond never has
anything in flight, looks idle, and draws all traffic. So each failure first costs the worker a *penalty*, a moment
out of the selection, and a row of failures opens the breaker.

What counts. Only evidence about the worker: transport errors, time-outs, answers 5xx. Never a client's mistake (4xx),
never a client that went away, and not a 503: a full worker is healthy. It gets a short pause (or the one it asks for),
so that the request goes elsewhere, and its record stays clean.

How it comes back. The open window is short and grows (1, 2, 4 ... 30 s, jittered so that routers do not return in
step): an encoder that hiccups is back before a client's retries are spent. After the window the breaker is half open:
one request at a time passes, and the first success closes it. A worker that fails again soon after it closed resumes
the row of windows where it stopped; ``calm`` seconds without opening start it anew.

::

            failures in a row >= threshold, or half of the last outcomes
    closed ---------------------------------------------------------------> open
       ^                                                                   |   ^
       | success                                            window is over |   | failure
       +--------------------------------- half_open <----------------------+   |
                                              +--------------------------------+
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Breaker", "BreakerSettings", "BreakerState"]


class BreakerState(StrEnum):
    """Whether requests pass: all, none, or one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Times in seconds. A share of ``rate`` failures among the last ``samples`` opens it too: a worker may fail by
    halves and never ``threshold`` times in a row."""

    threshold: int = 3
    rate: float = 0.5
    samples: int = 20
    first_window: float = 1.0
    max_window: float = 30.0
    jitter: float = 0.2
    penalty: float = 0.25
    busy_pause: float = 0.25
    max_busy_pause: float = 5.0
    calm: float = 60.0


class Breaker:
    """State of one worker. ``now`` is monotonic seconds and never goes back.

    Usage::

        breaker = Breaker(BreakerSettings(), random.Random())
        breaker.failure(now)            # after a reset connection
        breaker.held_until(now)         # nothing new for this worker before then
        breaker.poll(now)               # open -> half open once the window is over
    """

    __slots__ = ("_closed_at", "_held", "_outcomes", "_rng", "_row", "_settings", "_window", "opened", "state")

    def __init__(self, settings: BreakerSettings, rng: random.Random | None = None) -> None:
        self._settings = settings
        self._rng = rng or random.Random()
        self.state = BreakerState.CLOSED
        self.opened = 0
        """How many times it opened."""
        self._row = 0
        self._outcomes: deque[bool] = deque(maxlen=settings.samples)
        self._held = 0.0
        self._window = 0.0
        self._closed_at = float("-inf")

    def __repr__(self) -> str:
        return f"<Breaker {self.state} row={self._row} window={self._window:g} held={self._held:g}>"

    @property
    def failures_in_row(self) -> int:
        """Failures since the last success."""
        return self._row

    def held_until(self, now: float) -> float:
        """When the next request may pass; ``now`` or earlier means at once."""
        return self._held

    def holds(self, now: float) -> bool:
        """Whether nothing new should be sent at ``now``."""
        return now < self._held

    def success(self, now: float) -> bool:
        """A request was answered. True when this closed the breaker."""
        if self.state is BreakerState.OPEN:
            return False  # an answer to a request sent before it opened
        self._row = 0
        self._outcomes.append(True)
        if self.state is not BreakerState.HALF_OPEN:
            return False
        self.state = BreakerState.CLOSED
        self._outcomes.clear()
        self._held = 0.0
        self._closed_at = now
        return True

    def failure(self, now: float) -> bool:
        """A transport error, time-out or 5xx. True when this opened the breaker."""
        if self.state is BreakerState.OPEN:
            return False  # requests that were under way when it opened say nothing new
        self._row += 1
        self._outcomes.append(False)
        if self.state is BreakerState.HALF_OPEN or self._row >= self._settings.threshold or self._fails_by_halves():
            self.trip(now)
            return True
        self._hold(now + self._settings.penalty * 2 ** (self._row - 1))
        return False

    def busy(self, now: float, retry_after: float | None = None) -> None:
        """The worker said 503 or that it is full: a pause, not a stain."""
        pause = self._settings.busy_pause if retry_after is None else retry_after
        self._hold(now + min(max(pause, 0.0), self._settings.max_busy_pause))

    def trip(self, now: float) -> None:
        """Open it, whatever led there."""
        settings = self._settings
        if self._window and now - self._closed_at > settings.calm and self.state is BreakerState.CLOSED:
            self._window = 0.0
        self._window = min(self._window * 2 or settings.first_window, settings.max_window)
        self.state = BreakerState.OPEN
        self.opened += 1
        self._held = now + self._window * (1 + self._rng.uniform(-settings.jitter, settings.jitter))

    def half_open(self, now: float) -> None:
        """Cut the window short: something else (a good probe) says that the worker can be reached again."""
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN
            self._held = now

    def poll(self, now: float) -> bool:
        """Move on with time. True when the state changed."""
        if self.state is not BreakerState.OPEN or now < self._held:
            return False
        self.state = BreakerState.HALF_OPEN
        return True

    def reset(self) -> None:
        """Forget everything: another process answers at this address."""
        self.state = BreakerState.CLOSED
        self._row, self._held, self._window = 0, 0.0, 0.0
        self._outcomes.clear()

    def _hold(self, until: float) -> None:
        self._held = max(self._held, until)

    def _fails_by_halves(self) -> bool:
        outcomes = self._outcomes
        return len(outcomes) == outcomes.maxlen and outcomes.count(False) >= self._settings.rate * len(outcomes)
