"""Consistent hashing of keys over workers, restricted to any subset of them.

Theory. A key must fall to the same worker in every replica of the router, and must stay there when other workers
come and go, so that misses of one picture gather in one place. Rendezvous hashing gives that but asks every
candidate; with a thousand idle workers that is a thousand hashes. A ring of points (64 a worker of weight 1) gives
the same with one binary search, and restricting it to a subset keeps its promise: the owner is the nearest point
whose worker is in the subset. For a large subset the walk from the key's place is short; for a small one each of its
workers is asked for its own nearest point. Both ways give the same answer.

Points depend on worker ids alone. Changes are noted at once and worked into the sorted list at the next look-up;
points of removed workers stay until they are a quarter of the ring, because a removed worker's bit is 0 and so is
in no subset.
"""

from __future__ import annotations

from bisect import bisect_left

from xxhash import xxh3_64_intdigest

from .types import Key
from .worker import Worker

__all__ = ["Ring"]

_TURN = 1 << 64
_MAX_POINTS = 4096  # of one worker
_FEW = 16  # subset size up to which asking each member beats walking, at 1,000 workers


class Ring:
    """Members are added and removed by object; `nearest` answers for a subset given as a mask of slots."""

    def __init__(self, points: int) -> None:
        self._per_worker = points
        self._places: list[int] = []  # sorted
        self._fresh: list[int] = []
        self._owner: dict[int, Worker] = {}
        self._own: dict[Worker, list[int]] = {}
        self._dead = 0

    def add(self, worker: Worker) -> None:
        n = max(1, min(_MAX_POINTS, round(self._per_worker * worker.weight)))
        name = worker.id.encode()
        places = sorted({xxh3_64_intdigest(b"%b#%d" % (name, i)) for i in range(n)})
        self._own[worker] = places
        for place in places:
            if place not in self._owner:
                self._fresh.append(place)
            self._owner[place] = worker

    def remove(self, worker: Worker) -> None:
        """Forget a worker whose bit is 0 from now on."""
        self._dead += len(self._own.pop(worker, ()))

    def reweigh(self, worker: Worker) -> None:
        """The weight of a member has changed: it gets another number of points."""
        del self._own[worker]
        self.add(worker)
        self._dead = len(self._owner)

    def nearest(self, key: Key, mask: int, by_slot: list[Worker | None]) -> Worker:
        """The member of `mask` (not empty) whose point follows the key's place most closely, going round."""
        place = xxh3_64_intdigest(key)
        best: Worker | None = None
        if mask.bit_count() <= _FEW:
            shortest = _TURN
            own = self._own
            while mask:
                slot = mask.bit_length() - 1
                worker = by_slot[slot]
                assert worker is not None
                mask ^= worker.bit
                places = own[worker]
                at = bisect_left(places, place)
                gap = places[at] - place if at < len(places) else places[0] + _TURN - place
                if best is None or gap < shortest:
                    shortest = gap
                    best = worker
            assert best is not None
            return best
        if self._fresh or self._dead:
            self._settle()
        places, owner = self._places, self._owner
        at = bisect_left(places, place)
        for i in range(at, len(places)):
            best = owner[places[i]]
            if best.bit & mask:
                return best
        for i in range(at):
            best = owner[places[i]]
            if best.bit & mask:
                return best
        raise AssertionError("mask has members that are not on the ring")

    def _settle(self) -> None:
        if self._dead * 4 > len(self._owner):
            self._owner = owner = {place: worker for worker, own in self._own.items() for place in own}
            self._places = [place for place in self._places if place in owner]
            self._fresh = [place for place in self._fresh if place in owner]
            self._dead = 0
        if self._fresh:
            self._places += sorted(self._fresh)
            self._places.sort()  # two sorted runs: a merge
            self._fresh = []

    def __len__(self) -> int:
        return len(self._own)
