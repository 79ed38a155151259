"""What was decided and why, cheap to keep and readable on demand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from .types import Reason, SelectRequest
from .worker import Ticket, Worker

__all__ = ["Decision", "DecisionLog"]


class Decision:
    """The chosen worker, its ticket, and everything needed to explain the choice."""

    __slots__ = ("_facts", "at", "id", "reason", "request", "ticket", "worker")

    def __init__(
        self,
        id: int,
        request: SelectRequest,
        worker: Worker,
        reason: Reason,
        ticket: Ticket | None,
        at: float,
        facts: Any,
    ) -> None:
        self.id = id
        self.request = request
        self.worker = worker
        self.reason = reason
        self.ticket = ticket
        self.at = at
        self._facts = facts

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def record(self) -> dict[str, Any]:
        """JSON-ready account of the decision."""
        return {"id": self.id, "request_id": self.request_id, "worker": self.worker.id, "reason": str(self.reason)}


class DecisionLog:
    """The last `capacity` decisions, oldest dropped first."""

    def __init__(self, capacity: int = 1000) -> None:
        self._capacity = capacity
        self._ring: OrderedDict[int, Decision] = OrderedDict()

    def add(self, decision: Decision) -> None:
        self._ring[decision.id] = decision
        while len(self._ring) > self._capacity:
            self._ring.popitem(last=False)

    def get(self, id: int) -> Decision | None:
        return self._ring.get(id)

    def latest(self, n: int = 50, filters: Callable[[Decision], bool] | None = None) -> list[Decision]:
        """Newest first."""
        out: list[Decision] = []
        for decision in reversed(self._ring.values()):
            if len(out) >= n:
                break
            if filters is None or filters(decision):
                out.append(decision)
        return out

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._ring.values())
