"""`device-aware-weighted`: a full-hit holder if there is one, else the weighted device group.

Theory. Encoding is expensive and depends on the device; fetching what is already encoded is cheap on any. So a worker
that holds every key wins outright, GPU before CPU, the least loaded among several. Everything else must encode, and
is split between the classes so that a class which is `ratio` times slower gets work only while it has less than its
share. Only requests that really encode count for the share; counting hits would starve the slow class of work it
could do. Inside the group load decides first; what a worker holds only breaks ties, because a partial hit still has
to encode. When nothing else tells the tied workers apart, the first key that none of them holds picks its place on the
ring: the next miss of that picture, here or in another replica, goes to the same worker.
"""

from __future__ import annotations

from ..load import Group
from ..look import GroupBudgets, Look, most_held
from ..types import Key
from ..worker import Worker
from .base import Policy, Surroundings

__all__ = ["DeviceAwareWeighted"]

_FEW = 8  # holders that are cheaper to compare one by one than to look for level by level

_HOLDS = "least in-flight of them, the fastest device class first"
_HOLDS_ANY = "least in-flight of them, whatever the device class"
_NOTHING = "nothing to match; least in-flight of the group, the longest idle first"
_LEAST = "least in-flight of the group"
_MOST = "least in-flight of the group, most keys held among equals"
_PLACE = "least in-flight of the group, ring place of the first missing key among equals"
_MOST_PLACE = "least in-flight of the group, among equals most keys held, then ring place of the first missing key"


class DeviceAwareWeighted(Policy):
    by_class = True

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._prefer_fast = around.settings.full_hit_prefer == "gpu"

    def choose(self, look: Look) -> Worker:
        holders = look.full or look.predicted
        if not holders:
            return self._weighted(look)
        look.budget = ()
        look.candidates = holders
        look.note = _HOLDS if self._prefer_fast else _HOLDS_ANY
        by_slot = look.scene.by_slot
        best = by_slot[holders.bit_length() - 1]
        assert best is not None
        others = holders ^ best.bit
        if others:
            if others.bit_count() >= _FEW:
                return self._among_many(look, holders)
            holders = others
            best_rank = self._rank(best)
            while holders:
                worker = by_slot[holders.bit_length() - 1]
                assert worker is not None
                holders ^= worker.bit
                rank = self._rank(worker)
                if rank < best_rank:
                    best, best_rank = worker, rank
        return best

    def _rank(self, worker: Worker) -> tuple[int, float, int]:
        group = worker.group
        assert group is not None
        return (group.rank if self._prefer_fast else 0, worker.inflight / worker.weight, worker.stamp)

    def _among_many(self, look: Look, holders: int) -> Worker:
        best: Worker | None = None
        for group in self._groups:
            mine = holders & group.mask
            if mine:
                worker = group.pick(mine, look.scene.by_slot)
                if best is None or self._rank(worker) < self._rank(best):
                    best = worker
                if self._prefer_fast:
                    break
        assert best is not None
        return best

    def _weighted(self, look: Look) -> Worker:
        group = self._group(look)
        order = group.order
        by_slot = look.scene.by_slot
        look.candidates = mask = group.mask & look.eligible
        keys = look.request.keys
        if not keys:
            look.note = _NOTHING
            return group.pick(mask, by_slot) if look.excluded else order.first()
        tied = order.least(mask, by_slot) if look.excluded else order.lowest()
        look.note = _LEAST
        if tied & (tied - 1):
            if look.some & tied:
                tied = most_held(look.masks, tied)
                if tied & (tied - 1):
                    look.note = _MOST_PLACE
                    return self._ring.nearest(_first_missing(keys, look.masks, tied), tied, by_slot)
                look.note = _MOST
            else:
                look.note = _PLACE
                return self._ring.nearest(keys[0], tied, by_slot)
        worker = by_slot[tied.bit_length() - 1]
        assert worker is not None
        return worker

    def _group(self, look: Look) -> Group:
        """The device group that must take the request: the fastest, unless a slower one has less than its share."""
        groups = self._groups
        if not look.excluded and len(groups) == 2:  # the usual case, worked out by hand
            fast, slow = groups
            if fast.n and slow.n and fast.weight == fast.n and slow.weight == slow.n:
                allowed = fast.encoding * slow.n * fast.ratio // (slow.ratio * fast.n)
                look.budget = (fast, fast.n, fast.encoding, None, slow, slow.n, slow.encoding, allowed)
                return slow if slow.encoding < allowed else fast
        chosen: Group | None = None
        base_ratio = base_n = base_encoding = 0
        base_weight = 0.0
        budget: GroupBudgets = ()
        for group in groups:
            n, weight, encoding = group.n, group.weight, group.encoding
            for worker in look.excluded:
                if worker.group is group:
                    n -= 1
                    weight -= worker.weight
                    encoding -= worker.encoding
            if not n:
                continue
            if chosen is None:
                chosen = group
                base_ratio, base_n, base_weight, base_encoding = group.ratio, n, weight, encoding
                budget = (group, n, encoding, None)
                continue
            if weight == n and base_weight == base_n:
                allowed = base_encoding * n * base_ratio // (group.ratio * base_n)
            else:
                allowed = int(base_encoding * weight * base_ratio // (group.ratio * base_weight))
            budget += (group, n, encoding, allowed)
            if encoding < allowed:
                chosen = group
                break
        assert chosen is not None
        look.budget = budget
        return chosen


def _first_missing(keys: tuple[Key, ...], masks: list[int], tied: int) -> Key:
    """The first key that none of the tied workers holds; if there is none, the first that not all of them hold."""
    for i, mask in enumerate(masks):
        if not mask & tied:
            return keys[i]
    for i, mask in enumerate(masks):
        if mask & tied != tied:
            return keys[i]
    return keys[0]
