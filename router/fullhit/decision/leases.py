"""In-flight slots lent to callers outside: each has a number and an end.

Whoever asks for a choice and forwards the request itself must say when it is done; if it dies instead, its slot comes
back when its lease ends. Leases may last differently, so their ends wait in a heap; a lease that was released stays
there as a number nobody knows any more, and the heap is built anew when such numbers are the most of it.

A lease remembers the request id and the content it was opened for. That makes asking twice harmless: a caller that
never saw the answer asks again and gets the same lease, not a second slot.

A lease may belong to a holder, a connection for instance, and then ends with it. Who asked for it last holds it: when
a caller has come back over a new connection, the end of the old one must not take its slot.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from fullhit.core.decision import Decision

__all__ = ["Lease", "Leases", "TooManyLeases"]

_SPARE_ENDS = 1_024
_ID_CHARS = 16
_IDS_AT_ONCE = 64


class TooManyLeases(Exception):
    """The bound on open leases is reached; the caller should release what it has finished."""


@dataclass(slots=True)  # not frozen: one is made for each choice, and that would double its price
class Lease:
    """A decision whose slot is held until ``ends_at`` (monotonic seconds). Read-only."""

    id: str
    pool: str
    decision: Decision
    ends_at: float
    content: Hashable = None
    """What was asked for; equal content under one request id is the same question."""


class Leases:
    """Open leases. Pure but for the clock; call `expire` now and then (`ends_next` says when it is worth while).

    ``seconds``: how long a lease lasts unless it is opened with a time of its own. ``max_keys`` of all open leases
    together: a lease keeps what was asked for.
    """

    def __init__(
        self, seconds: float = 60.0, limit: int = 10_000, *, max_keys: int = 1_000_000, clock: Callable[[], float]
    ) -> None:
        self.seconds = seconds
        self._limit = limit
        self._max_keys = max_keys
        self._keys = 0
        self._clock = clock
        self._open: dict[str, Lease] = {}
        self._ends: list[tuple[float, str]] = []
        self._of_request: dict[tuple[str, str], str] = {}
        self._holders: dict[str, set[str]] = {}
        self._entropy = ""
        self.expired = 0

    def __len__(self) -> int:
        return len(self._open)

    def has_room(self, keys: int) -> bool:
        """Whether a further lease, on so many keys, can be opened."""
        return len(self._open) < self._limit and (not self._open or self._keys + keys <= self._max_keys)

    @property
    def ends_next(self) -> float | None:
        """When the next lease ends."""
        while self._ends and self._ends[0][1] not in self._open:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def open(self, pool: str, decision: Decision, seconds: float | None = None, *, content: Hashable = None) -> Lease:
        """Lend the slot of ``decision``. Raises `TooManyLeases`, and gives the slot back, when the bound is reached."""
        if not self.has_room(len(decision.request.keys)):
            if decision.ticket is not None:
                decision.ticket.release()
            raise TooManyLeases(f"{len(self._open)} leases are open on {self._keys} keys; release finished ones")
        ends_at = self._clock() + (self.seconds if seconds is None else seconds)
        lease = Lease(self._new_id(), pool, decision, ends_at, content)
        self._open[lease.id] = lease
        self._keys += len(decision.request.keys)
        if len(self._ends) > 2 * len(self._open) + _SPARE_ENDS:
            self._ends = [(one.ends_at, one.id) for one in self._open.values()]
            heapq.heapify(self._ends)
        else:
            heapq.heappush(self._ends, (ends_at, lease.id))
        if decision.request_id:
            self._of_request[pool, decision.request_id] = lease.id
        return lease

    def _new_id(self) -> str:
        """Not to be guessed: whoever knows it can give the slot back. Asking the kernel costs more than a choice, so
        it is asked for many at once."""
        if not self._entropy:
            self._entropy = secrets.token_hex(_ID_CHARS // 2 * _IDS_AT_ONCE)
        id, self._entropy = self._entropy[:_ID_CHARS], self._entropy[_ID_CHARS:]
        return id

    def bind(self, lease: Lease, holder: set[str] | None) -> None:
        """The lease belongs to this holder from now on, a set of ids that is kept up to date; None: to nobody."""
        former = self._holders.pop(lease.id, None)
        if former is not None:
            former.discard(lease.id)
        if holder is not None:
            holder.add(lease.id)
            self._holders[lease.id] = holder

    def release_held(self, holder: set[str]) -> int:
        """The holder is gone: give its slots back. Returns how many."""
        ids = list(holder)
        for id in ids:
            self.release(id)
        return len(ids)

    def left(self, lease: Lease) -> float:
        """Seconds until it ends."""
        return max(0.0, lease.ends_at - self._clock())

    def find(self, pool: str, request_id: str) -> Lease | None:
        """The open lease that a request id got last."""
        id = self._of_request.get((pool, request_id))
        return None if id is None else self._open.get(id)

    def release(self, id: str) -> Lease | None:
        """Give the slot back; None when there is no such lease (released before, or expired)."""
        lease = self._open.pop(id, None)
        if lease is None:
            return None
        self._keys -= len(lease.decision.request.keys)
        self.bind(lease, None)
        name = (lease.pool, lease.decision.request_id)
        if self._of_request.get(name) == id:
            del self._of_request[name]
        if lease.decision.ticket is not None:
            lease.decision.ticket.release()
        return lease

    def expire(self) -> list[Lease]:
        """Take back the slots of leases whose time is over."""
        if not self._ends:
            return []
        now, over = self._clock(), []
        while self._ends and self._ends[0][0] <= now:
            lease = self.release(heapq.heappop(self._ends)[1])
            if lease is not None:
                over.append(lease)
        self.expired += len(over)
        return over

    def release_all(self) -> None:
        """Shutdown: give every slot back."""
        for id in list(self._open):
            self.release(id)
