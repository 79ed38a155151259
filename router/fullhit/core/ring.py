"""Consistent hashing of keys over workers, restricted to any subset of them.

Theory. A key must fall to the same worker in every replica of the router, and must stay there when other workers
come and go, so that misses of one picture gather in one place. Rendezvous hashing gives that but asks every
candidate; with a thousand idle workers that is a thousand hashes. A ring of points (64 a worker of weight 1) gives
the same with one binary search, and restricting it to a subset keeps its promise: the owner is the nearest point
whose worker is in the subset. For a large subset the walk from the key's place is short; for a small one each of its
workers is asked for its own nearest point. Both ways give the same answer.

Places are fractions of the circle with 53 bits, exact as floats: an array of those is searched twice as fast as a list
of 64-bit integers. Points depend on worker ids alone. Changes are noted at once and worked into the sorted array at the
next look-up; points of removed workers stay until they are a quarter of the ring, because a removed worker's bit is 0
and so is in no subset.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

from xxhash import xxh3_64_intdigest

from .types import Key
from .worker import Worker

__all__ = ["Ring"]

_MAX_POINTS = 4096  # of one worker
_MANY = 512  # fresh points from which sorting anew beats inserting one by one
_FEW = 16  # subset size up to which asking each member beats walking, at 1,000 workers


def _place(data: bytes) -> float:
    """Where on the circle, 0 <= place < 1."""
    return (xxh3_64_intdigest(data) >> 11) * 2.0**-53


class Ring:
    """Members are added and removed by object; `nearest` answers for a subset given as a mask of slots."""

    def __init__(self, points: int) -> None:
        self._per_worker = points
        self._places = array("d")  # sorted
        self._owners: list[Worker] = []  # of each place
        self._fresh: list[tuple[float, Worker]] = []
        self._members: dict[Worker, None] = {}
        self._dead = 0

    def add(self, worker: Worker) -> None:
        n = max(1, min(_MAX_POINTS, round(self._per_worker * worker.weight)))
        name = worker.id.encode()
        own = sorted({_place(b"%b#%d" % (name, i)) for i in range(n)})
        self._fresh += [(place, worker) for place in own]
        own.append(own[0] + 1.0)  # going round
        worker.places = array("d", own)
        self._members[worker] = None

    def remove(self, worker: Worker) -> None:
        """Forget a worker whose bit is 0 from now on."""
        del self._members[worker]
        self._dead += len(worker.places)

    def reweigh(self, worker: Worker) -> None:
        """The weight of a member has changed: it gets another number of points."""
        self.add(worker)
        self._dead = 1 + len(self._places)

    def nearest(self, key: Key, mask: int, by_slot: list[Worker | None]) -> Worker:
        """The member of `mask` (not empty) whose point follows the key's place most closely, going round."""
        place = _place(key)
        best: Worker | None = None
        if mask.bit_count() <= _FEW:
            shortest = 2.0
            while mask:
                worker = by_slot[mask.bit_length() - 1]
                assert worker is not None
                mask ^= worker.bit
                own = worker.places
                gap = own[bisect_left(own, place)] - place
                if gap < shortest:
                    shortest = gap
                    best = worker
            assert best is not None
            return best
        owners = self._owners
        if self._fresh or self._dead * 4 > len(owners):
            self._settle()
            owners = self._owners
        at = bisect_left(self._places, place)
        for i in range(at, len(owners)):
            best = owners[i]
            if best.bit & mask:
                return best
        for i in range(at):
            best = owners[i]
            if best.bit & mask:
                return best
        raise AssertionError("mask has members that are not on the ring")

    def _settle(self) -> None:
        places, owners = self._places, self._owners
        if len(self._fresh) > _MANY or self._dead * 4 > len(places):
            everything = {place: worker for worker in self._members for place in worker.places[:-1]}
            self._places = array("d", sorted(everything))
            self._owners = [everything[place] for place in self._places]
            self._dead = 0
        else:
            for place, worker in self._fresh:
                at = bisect_left(places, place)
                if at < len(places) and places[at] == place:  # left behind by a worker that is back
                    owners[at] = worker
                else:
                    places.insert(at, place)
                    owners.insert(at, worker)
        self._fresh = []

    def __len__(self) -> int:
        return len(self._members)
