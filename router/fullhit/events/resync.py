"""One wish for a snapshot, from its cause to its outcome. A stream has at most one."""

from __future__ import annotations

import random

from .settings import StreamSettings

__all__ = ["Resync", "backoff"]


def backoff(attempt: int, settings: StreamSettings, rng: random.Random) -> float:
    """Seconds to wait before try ``attempt`` + 1; the exponent is capped so that it cannot overflow."""
    longest = min(settings.backoff_max, settings.backoff_base * 2.0 ** min(attempt, 16))
    return longest * rng.uniform(0.5, 1.0)


class Resync:
    """``due`` until a request is out, then ``deadline``; parts are checked in here.

    A snapshot is one picture: every part has the same epoch, ``seq`` and number of parts, and comes once.
    """

    __slots__ = (
        "attempts",
        "cause",
        "deadline",
        "due",
        "epoch",
        "floor",
        "heard_since",
        "keys",
        "parts",
        "received",
        "request_id",
        "sent_at",
        "seq",
    )

    def __init__(self, cause: str, due: float) -> None:
        self.cause = cause
        self.due = due
        self.attempts = 0
        self.request_id: int | None = None
        self._reset()

    def _reset(self) -> None:
        self.sent_at = 0.0
        self.deadline = 0.0
        self.floor: tuple[int | None, int] = (None, 0)
        self.heard_since = False
        self.received: set[int] = set()
        self.parts = 0
        self.epoch = 0
        self.seq = 0
        self.keys = 0

    @property
    def outstanding(self) -> bool:
        return self.request_id is not None

    def sent(self, request_id: int, now: float, settings: StreamSettings, floor: tuple[int | None, int]) -> None:
        """A request goes out. ``floor``: epoch and delta that the answer must at least contain."""
        self._reset()
        self.request_id = request_id
        self.attempts += 1
        self.sent_at = now
        self.deadline = now + settings.request_timeout
        self.floor = floor

    def retry(self, now: float, settings: StreamSettings, rng: random.Random) -> None:
        """This try failed; the next one waits longer."""
        self.request_id = None
        self.due = now + backoff(self.attempts, settings, rng)
        self._reset()

    def postpone(self, due: float) -> None:
        """Forget the try that is out without blaming anybody: its answer cannot arrive any more."""
        self.request_id = None
        self.attempts = 0
        self.due = due
        self._reset()

    def accept(
        self, epoch: int, seq: int, part: int, parts: int, keys: int, now: float, settings: StreamSettings
    ) -> str:
        """Check one part in: ``ok``, ``last``, or why not: ``duplicate``, ``inconsistent``, ``too_many_keys``."""
        if parts > settings.max_parts or not 0 <= part < parts:
            return "inconsistent"
        if not self.received:
            floor_epoch, floor_seq = self.floor
            if floor_epoch == epoch and seq < floor_seq:
                return "inconsistent"
            self.epoch, self.seq, self.parts = epoch, seq, parts
        elif (self.epoch, self.seq, self.parts) != (epoch, seq, parts):
            return "inconsistent"
        if part in self.received:
            return "duplicate"
        self.keys += keys
        if self.keys > settings.max_keys:
            return "too_many_keys"
        self.received.add(part)
        self.deadline = min(now + settings.request_timeout, self.sent_at + settings.fill_timeout)
        return "last" if len(self.received) == parts else "ok"
