"""Who speaks for a worker: the present incarnation of its cache, past ones, and impostors.

A worker's cache has an *epoch*, larger after each restart (it is made from the clock), and speaks through a
*publisher*, which counts what it publishes in ``sequence``. Networks delay messages, so a past incarnation can be
heard after the present one; operators start two workers with one URL, so two can be alive at once; clocks are set
back, so a newer incarnation can have the smaller number. Told apart like this:

* An epoch that was current once is past for good. Its messages are late, unless it sent them clearly after the
  present one began: then both live, which is a conflict. (Two workers with one URL share a host as a rule, so
  their clocks compare.)
* A larger epoch never seen is a new incarnation. A smaller one is only a suspect while the present one is heard;
  once that has missed some heartbeats, the suspect was right. If both go on, that too is a conflict.
* Within an epoch a publisher may be replaced, once. When the former one comes back with messages of its own, two
  publishers claim one cache: a conflict.

Dynamo's publishers have no epoch. Their random publisher id stands in for it, and such numbers have no order. There a
new publisher is taken for a restart, and the one before it is past; but one process may have several. So a past one
that goes on speaking, some time after the new one began, is let in again, beside the others: they live *apart*, each
with its own count, and none of them is a conflict.
"""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum
from typing import NamedTuple

from .settings import StreamSettings

__all__ = ["Incarnation", "Origin", "Verdict"]

# Publishers of one epoch that are remembered; more than a handful is a conflict long before.
_MAX_PUBLISHERS = 16
# Live messages of a past epoch that make a conflict: one could be a message that was stamped late.
_LIVE_SIGNS = 3


class Origin(NamedTuple):
    """Who sent a message and which of its messages it is."""

    publisher_id: int
    sequence: int
    """Count of this publisher's publications, heartbeats included."""
    published_at: int
    """Unix milliseconds by the sender's clock."""
    epoch: int
    ordered: bool = True
    """Whether a larger epoch is a later one."""


class Verdict(StrEnum):
    """How a message stands to the present incarnation."""

    SAME = "same"
    NEW = "new"
    SWITCHED = "switched"
    STALE = "stale"
    SUSPECT = "suspect"
    CONFLICT = "conflict"
    APART = "apart"
    """Another living publisher of a worker whose publishers have no epochs."""


class Incarnation:
    """Judges the origin of each message of one worker id. Pure bookkeeping: the caller acts on the verdict."""

    __slots__ = (
        "_adopted_at",
        "_apart",
        "_began",
        "_heard_seq",
        "_live_signs",
        "_ordered",
        "_publishers",
        "_retired",
        "_returns",
        "_sequence",
        "_settings",
        "_suspect_last",
        "_suspect_since",
        "epoch",
        "publisher_id",
    )

    epoch: int | None
    publisher_id: int | None
    _publishers: dict[int, int]  # former ones of this epoch -> highest sequence heard
    _returns: deque[float]
    _sequence: int
    _heard_seq: int

    def __init__(self, settings: StreamSettings) -> None:
        self._settings = settings
        self._retired: dict[int, int] = {}  # epoch -> highest sequence heard from it
        self._live_signs = 0
        self._suspect_since = self._suspect_last = -math.inf
        self.epoch = None
        self._ordered = True
        self._reset_publishers(None)
        self._began = 0
        self._adopted_at = -math.inf
        self._apart: dict[int, tuple[int, int]] = {}  # publisher -> its sequence and heard_seq

    def judge(self, origin: Origin, now: float, overdue: bool) -> Verdict:
        """``overdue``: the present incarnation has missed heartbeats."""
        if origin.epoch == self.epoch:
            if origin.publisher_id == self.publisher_id:
                return Verdict.SAME
            return self._another_publisher(origin, now)
        if self.epoch is None:
            return Verdict.NEW
        if origin.epoch in self._apart:
            return Verdict.APART
        if origin.epoch in self._retired:
            return self._past(origin, now)
        if origin.ordered and self._ordered and origin.epoch < self.epoch and not overdue:
            return self._suspect(now)
        return Verdict.NEW

    def adopt(self, origin: Origin, now: float) -> None:
        """The origin is the present incarnation from now on."""
        self._retired.update((epoch, sequence) for epoch, (sequence, _) in self._apart.items())
        self._apart.clear()
        self._adopted_at = now
        if self.epoch is not None and self.epoch != origin.epoch:
            self._retired[self.epoch] = self._sequence
            while len(self._retired) > self._settings.retired_epochs:
                del self._retired[next(iter(self._retired))]
        self._retired.pop(origin.epoch, None)
        self.epoch = origin.epoch
        self._ordered = origin.ordered
        self._live_signs = 0
        self._suspect_since = self._suspect_last = -math.inf
        self._began = origin.published_at
        self._reset_publishers(origin.publisher_id)

    def turn(self, origin: Origin) -> None:
        """Another publisher of those that live apart has the word."""
        if self.epoch is not None:
            self._apart[self.epoch] = (self._sequence, self._heard_seq)
        past = self._retired.pop(origin.epoch, -1)
        self._sequence, self._heard_seq = self._apart.pop(origin.epoch, (past, 0))
        self.epoch, self.publisher_id = origin.epoch, origin.publisher_id

    def regressed(self, origin: Origin, least: int) -> bool:
        """Note where the stream of events stands; True when it counts again what it had counted before.

        ``least`` is the last delta that was surely published before this message. A late or repeated message
        has a sequence heard before; one that was sent after all we heard and yet knows fewer deltas was
        numbered anew. Snapshots must not be noted here: they overtake events.
        """
        if origin.sequence <= self._sequence:
            return False
        self._sequence = origin.sequence
        return least < self._heard_seq

    def heard(self, seq: int) -> None:
        """``seq`` is the delta in, or named by, the message just noted."""
        self._heard_seq = max(self._heard_seq, seq)

    def forget(self) -> None:
        """Whoever speaks next is new."""
        self.epoch = None
        self._retired.clear()
        self._apart.clear()
        self._reset_publishers(None)

    def _reset_publishers(self, publisher_id: int | None) -> None:
        self.publisher_id = publisher_id
        self._publishers = {}
        self._returns = deque()
        self._sequence = -1
        self._heard_seq = 0

    def _another_publisher(self, origin: Origin, now: float) -> Verdict:
        if self.publisher_id is not None:
            self._publishers[self.publisher_id] = self._sequence
        before = self._publishers.get(origin.publisher_id)
        if before is not None:
            if origin.sequence <= before:
                return Verdict.STALE
            self._returns.append(now)
            while now - self._returns[0] > self._settings.conflict_window:
                self._returns.popleft()
        if len(self._returns) >= self._settings.conflict_returns or len(self._publishers) > _MAX_PUBLISHERS:
            return Verdict.CONFLICT
        self.publisher_id = origin.publisher_id
        self._sequence = -1 if before is None else before
        return Verdict.SWITCHED

    def _suspect(self, now: float) -> Verdict:
        if now - self._suspect_last > self._settings.suspect_limit:
            self._suspect_since = now
        self._suspect_last = now
        return Verdict.CONFLICT if now - self._suspect_since > self._settings.suspect_limit else Verdict.SUSPECT

    def _past(self, origin: Origin, now: float) -> Verdict:
        if not origin.ordered:
            # By our own clock: whatever a publisher stamps, a network does not keep messages for that long.
            late = origin.sequence <= self._retired[origin.epoch]
            early = now - self._adopted_at <= self._settings.conflict_margin
            return Verdict.STALE if late or early or len(self._apart) >= _MAX_PUBLISHERS else Verdict.APART
        if origin.sequence > self._retired[origin.epoch]:
            self._retired[origin.epoch] = origin.sequence
            if origin.published_at > self._began + 1000 * self._settings.conflict_margin:
                self._live_signs += 1
                if self._live_signs >= _LIVE_SIGNS:
                    return Verdict.CONFLICT
        return Verdict.STALE
