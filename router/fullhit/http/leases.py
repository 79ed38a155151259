"""In-flight slots lent to callers outside: each has a number and an end.

Whoever asks for a choice and forwards the request itself must say when it is done; if it dies instead, its slot comes
back after ``seconds``. All leases last equally long, so the one that ends first is the one lent first, and a single
timer for the front of the queue is enough.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from fullhit.core.decision import Decision

__all__ = ["Lease", "Leases", "TooManyLeases"]


class TooManyLeases(Exception):
    """The bound on open leases is reached; the caller should release what it has finished."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A decision whose slot is held until ``ends_at`` (monotonic seconds)."""

    id: str
    pool: str
    decision: Decision
    ends_at: float


class Leases:
    """Open leases. Pure but for the clock; call `expire` now and then (`ends_next` says when it is worth while)."""

    def __init__(self, seconds: float = 60.0, limit: int = 10_000, *, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self._limit = limit
        self._clock = clock
        self._open: OrderedDict[str, Lease] = OrderedDict()
        self.expired = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def full(self) -> bool:
        """No further lease can be opened."""
        return len(self._open) >= self._limit

    @property
    def ends_next(self) -> float | None:
        """When the oldest lease ends."""
        return next(iter(self._open.values())).ends_at if self._open else None

    def open(self, pool: str, decision: Decision) -> Lease:
        """Lend the slot of ``decision``. Raises `TooManyLeases`, and gives the slot back, when the bound is reached."""
        if self.full:
            if decision.ticket is not None:
                decision.ticket.release()
            raise TooManyLeases(f"{self._limit} leases are open; release finished ones")
        lease = Lease(secrets.token_hex(8), pool, decision, self._clock() + self.seconds)
        self._open[lease.id] = lease
        return lease

    def release(self, id: str) -> Lease | None:
        """Give the slot back; None when there is no such lease (released before, or expired)."""
        lease = self._open.pop(id, None)
        if lease is not None and lease.decision.ticket is not None:
            lease.decision.ticket.release()
        return lease

    def expire(self) -> list[Lease]:
        """Take back the slots of leases whose time is over."""
        now, over = self._clock(), []
        while self._open and next(iter(self._open.values())).ends_at <= now:
            lease = self.release(next(iter(self._open)))
            if lease is not None:
                over.append(lease)
        self.expired += len(over)
        return over

    def release_all(self) -> None:
        """Shutdown: give every slot back."""
        for id in list(self._open):
            self.release(id)
