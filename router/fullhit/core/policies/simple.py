"""Policies that do not look at what is cached. The reason of a decision still tells what the choice happened to hit."""

from __future__ import annotations

from ..look import Look
from ..worker import Worker
from .base import Policy, Surroundings

__all__ = ["LeastLoaded", "PowerOfTwo", "Random", "RoundRobin"]

_TRIES = 8  # draws before falling back to listing who is left; only exclusions make a draw fail


class LeastLoaded(Policy):
    """Exactly the least loaded worker (`inflight / weight`), ties in turn."""

    def choose(self, look: Look) -> Worker:
        look.budget = ()
        look.candidates = look.eligible
        look.note = "least in-flight"
        if not look.excluded:
            return self._groups[0].order.first()
        return self._groups[0].pick(look.eligible, look.scene.by_slot)


class RoundRobin(Policy):
    """Everybody in turn. A worker that becomes eligible (again) goes to the end of the queue."""

    watches = True

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._queue: dict[Worker, None] = {}

    def joined(self, worker: Worker) -> None:
        self._queue[worker] = None

    def left(self, worker: Worker) -> None:
        del self._queue[worker]

    def taken(self, worker: Worker) -> None:
        del self._queue[worker]
        self._queue[worker] = None

    def choose(self, look: Look) -> Worker:
        look.budget = ()
        look.candidates = look.eligible
        look.note = "next in turn"
        eligible = look.eligible
        return next(worker for worker in self._queue if worker.bit & eligible)


class _Drawn(Policy):
    """Keeps the eligible workers in a list, so that one can be drawn in constant time."""

    watches = True

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._members: list[Worker] = []
        self._place: dict[Worker, int] = {}

    def joined(self, worker: Worker) -> None:
        self._place[worker] = len(self._members)
        self._members.append(worker)

    def left(self, worker: Worker) -> None:
        place = self._place.pop(worker)
        last = self._members.pop()
        if last is not worker:
            self._members[place] = last
            self._place[last] = place

    def _allowed(self, look: Look) -> list[Worker]:
        eligible = look.eligible
        return [worker for worker in self._members if worker.bit & eligible]


class Random(_Drawn):
    """Any eligible worker, in proportion to its weight. Costs time in the number of workers where weights differ."""

    def choose(self, look: Look) -> Worker:
        look.budget = ()
        look.candidates = look.eligible
        look.note = "drawn at random"
        members = self._members
        if self._groups[0].uniform:
            for _ in range(_TRIES):
                worker = self._rng.choice(members)
                if worker.bit & look.eligible:
                    return worker
            return self._rng.choice(self._allowed(look))
        allowed = self._allowed(look)
        return self._rng.choices(allowed, [worker.weight for worker in allowed])[0]


class PowerOfTwo(_Drawn):
    """The less loaded of two different workers drawn at random; the first drawn where they are equal."""

    def choose(self, look: Look) -> Worker:
        look.budget = ()
        look.note = "less in-flight of two drawn at random"
        members = self._members
        if not look.excluded and len(members) > 1:
            n = len(members)
            i = int(self._rng.random() * n)
            j = int(self._rng.random() * (n - 1))
            first, second = members[i], members[j if j < i else j + 1]
        else:
            allowed = self._allowed(look)
            if len(allowed) == 1:
                look.candidates = allowed[0].bit
                return allowed[0]
            first, second = self._rng.sample(allowed, 2)
        look.candidates = first.bit | second.bit
        return second if second.inflight / second.weight < first.inflight / first.weight else first
