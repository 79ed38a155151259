"""What was decided and why: cheap to keep, readable on demand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .explain import render
from .look import Look
from .types import Reason
from .worker import Ticket, Worker

__all__ = ["Decision", "DecisionLog"]


class Decision(Look):
    """The chosen worker, its ticket, and everything needed to explain the choice. Read-only; only a pool makes them.

    `id` counts up per pool (or over all pools that were given one counter); `at` is the pool's clock, in seconds.
    `ticket` is None for a dry run.
    """

    __slots__ = ("at", "id", "reason", "ticket", "worker")

    # No __init__: one decision is made per request, and a Python constructor would double its price.
    id: int
    worker: Worker
    reason: Reason
    ticket: Ticket | None
    at: float

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def pool(self) -> str:
        return self.scene.pool

    @property
    def keys_held(self) -> int:
        """How many of the request's keys the chosen worker was believed to hold."""
        slot = self.scene.by_slot.index(self.worker)
        return sum(1 for mask in self.masks if mask >> slot & 1)

    def record(self) -> dict[str, Any]:
        """JSON-ready account: worker, reason, inputs, at most 16 candidates as they were then, group budget, why.

        The shape is described at `explain.render`.
        """
        return {
            "id": self.id,
            "pool": self.pool,
            "request_id": self.request_id,
            "at": self.at,
            "worker": self.worker.id,
            "reason": str(self.reason),
            **render(self, self.worker, self.reason),
        }

    def __repr__(self) -> str:
        return f"<Decision {self.id} {self.pool}: {self.worker.id} {self.reason}>"


Filter = Callable[[Decision], bool]


class DecisionLog:
    """The last `capacity` decisions, the oldest dropped first; fewer where they have more than `max_keys` together.

    >>> log.latest(20, {"reason": "miss", "worker": "http://127.0.0.1:30001"})    # doctest: +SKIP

    One log may serve several pools if they share a counter of ids (`Pool(ids=...)`).
    """

    def __init__(self, capacity: int = 1000, max_keys: int = 1_000_000) -> None:
        if capacity < 1:
            raise ValueError(f"decision log capacity: {capacity} is below 1")
        self.capacity = capacity
        self.max_keys = max_keys
        self._keys = 0
        self._ring: OrderedDict[int, Decision] = OrderedDict()

    def add(self, decision: Decision) -> None:
        ring = self._ring
        ring[decision.id] = decision
        self._keys += len(decision.request.keys)
        while len(ring) > self.capacity or (self._keys > self.max_keys and len(ring) > 1):
            self._keys -= len(ring.popitem(last=False)[1].request.keys)

    def get(self, id: int) -> Decision | None:
        return self._ring.get(id)

    def latest(self, n: int = 50, filters: Mapping[str, str] | Filter | None = None) -> list[Decision]:
        """Up to `n`, newest first. `filters`: wanted `worker`, `reason`, `request_id`, `pool`; or a function."""
        wanted = _matching(filters) if isinstance(filters, Mapping) else filters
        out: list[Decision] = []
        for decision in reversed(self._ring.values()):
            if len(out) >= n:
                break
            if wanted is None or wanted(decision):
                out.append(decision)
        return out

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[Decision]:
        """Oldest first."""
        return iter(list(self._ring.values()))


_FIELDS: Mapping[str, Callable[[Decision], str]] = {
    "worker": lambda d: d.worker.id,
    "reason": lambda d: str(d.reason),
    "request_id": lambda d: d.request_id,
    "pool": lambda d: d.pool,
}


def _matching(filters: Mapping[str, str]) -> Filter:
    unknown = sorted(set(filters) - set(_FIELDS))
    if unknown:
        raise ValueError(f"decisions cannot be filtered by {', '.join(unknown)}; use {', '.join(_FIELDS)}")
    pairs = [(_FIELDS[name], value) for name, value in filters.items()]
    return lambda decision: all(field(decision) == value for field, value in pairs)
