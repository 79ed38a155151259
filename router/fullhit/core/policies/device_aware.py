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
from ..look import GroupBudget, Look, most_held
from ..types import Key
from ..worker import Worker
from .base import Policy, Surroundings

__all__ = ["DeviceAwareWeighted"]


class DeviceAwareWeighted(Policy):
    by_class = True

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._prefer_fast = around.settings.full_hit_prefer == "gpu"

    def choose(self, look: Look) -> Worker:
        holders = look.full or look.predicted
        if holders:
            return self._full_hit(look, holders)
        return self._weighted(look)

    def _full_hit(self, look: Look, holders: int) -> Worker:
        best: Worker | None = None
        by_slot = look.by_slot
        look.candidates = holders
        for group in look.groups:
            mine = holders & group.mask
            if not mine:
                continue
            worker = group.pick(mine, by_slot)
            if self._prefer_fast:
                look.candidates = mine
                look.note = "holds every key; least in-flight of the holders in the fastest class that has one"
                return worker
            if best is None or (worker.inflight / worker.weight, worker.stamp) < (
                best.inflight / best.weight,
                best.stamp,
            ):
                best = worker
        assert best is not None
        look.note = "holds every key; least in-flight of all holders"
        return best

    def _weighted(self, look: Look) -> Worker:
        group, mask = self._group(look)
        by_slot = look.by_slot
        if not look.keys:
            look.candidates = mask
            look.note = "nothing to match; least in-flight of the group, longest idle first"
            return group.pick(mask, by_slot)
        tied = group.order.least(mask, by_slot)
        look.candidates = mask
        look.note = "least in-flight of the group"
        if tied & (tied - 1) and look.some & tied:
            tied = most_held(look.masks, tied)
            look.note = "least in-flight of the group; most keys held among equals"
        if tied & (tied - 1):
            look.note += "; ring place of the first missing key among equals"
            return self._ring.nearest(_first_missing(look, tied), tied, by_slot)
        worker = by_slot[tied.bit_length() - 1]
        assert worker is not None
        return worker

    def _group(self, look: Look) -> tuple[Group, int]:
        """The device group that must take the request, and its workers that may."""
        chosen: Group | None = None
        base_ratio = base_n = base_encoding = 0
        base_weight = 0.0
        budget: list[GroupBudget] = []
        for group in look.groups:
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
                budget.append((group.name, group.ratio, n, encoding, None))
                continue
            if weight == n and base_weight == base_n:
                allowed = base_encoding * n * base_ratio // (group.ratio * base_n)
            else:
                allowed = int(base_encoding * weight * base_ratio // (group.ratio * base_weight))
            budget.append((group.name, group.ratio, n, encoding, allowed))
            if encoding < allowed:
                chosen = group
                break
        assert chosen is not None
        look.budget = tuple(budget)
        return chosen, chosen.mask & look.eligible


def _first_missing(look: Look, tied: int) -> Key:
    """The first key that none of the tied workers holds; if there is none, the first that not all of them hold."""
    for key, mask in zip(look.keys, look.masks, strict=True):
        if not mask & tied:
            return key
    for key, mask in zip(look.keys, look.masks, strict=True):
        if mask & tied != tied:
            return key
    return look.keys[0]
