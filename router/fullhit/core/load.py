"""Who is how busy: the eligible workers of a group, in order of load.

Theory. Only eligible workers (ready, not draining, below their limit) are in here at all, so the least loaded one
needs no filter. Where all weights are equal, load is an integer that moves by one: a bucket per level, each an
insertion-ordered dictionary, gives the exact minimum in constant time, and taking the oldest of a bucket makes ties
rotate. Each level also has a mask of its members, so that "the least loaded of these holders" is an AND per level
however many holders there are. Where weights differ, `inflight / weight` is a fraction, and a sorted list takes the
place of the buckets: exact still, a few times slower.

The kind of order follows from the weights of *all* members of the group, eligible or not: otherwise one heavy worker
that keeps reaching its limit would rebuild the group on every request.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

from sortedcontainers import SortedKeyList

from .worker import Worker

__all__ = ["Group", "LevelBuckets", "LoadOrder", "Picture", "WeightedOrder", "levels_of", "members_of"]

_FEW = 8  # members that are cheaper to visit one by one than to look for level by level
_PICTURE_LEVELS = 64
_PICTURE_WORKERS = 16


Picture = tuple[int | tuple[int, int], ...]
"""Masks of workers by in-flight count, the place in the tuple being the count; or pairs (count, mask)."""


class LoadOrder(Protocol):
    """Eligible workers by load. `mask` arguments are sets of slots and must be non-empty subsets of the members."""

    def join(self, worker: Worker) -> None: ...
    def leave(self, worker: Worker) -> None: ...
    def shift(self, worker: Worker) -> None:
        """The worker's `inflight` has changed."""

    def reslot(self, worker: Worker, old_bit: int) -> None:
        """The worker's `bit` has changed."""

    def first(self) -> Worker:
        """Least loaded of all, the longest at that load."""

    def lowest(self) -> int:
        """All that have the least load."""

    def least(self, mask: int, by_slot: list[Worker | None]) -> int:
        """Those of `mask` with the least load."""

    def oldest(self, tied: int, by_slot: list[Worker | None]) -> Worker:
        """The longest at its load among `tied`, which all have the same load."""

    def below(self, load: float) -> int:
        """Those whose load is under `load`."""

    def picture(self) -> Picture:
        """Loads at this moment, for explanations; cheap."""

    def __iter__(self) -> Iterator[Worker]: ...


def members_of(mask: int, by_slot: list[Worker | None]) -> Iterator[Worker]:
    """The workers whose bits are set, highest slot first."""
    while mask:
        slot = mask.bit_length() - 1
        worker = by_slot[slot]
        assert worker is not None
        yield worker
        mask ^= 1 << slot


def levels_of(picture: Picture) -> Iterator[tuple[int, int]]:
    """(in-flight count, workers that have it), the least loaded first."""
    for level, part in enumerate(picture):
        yield (level, part) if isinstance(part, int) else part


class LevelBuckets:
    """Order for equal weights."""

    __slots__ = ("_clock", "_dicts", "_low", "_masks")

    def __init__(self, clock: Iterator[int]) -> None:
        self._clock = clock
        self._dicts: list[dict[Worker, None]] = [{}]
        self._masks: list[int] = [0]
        self._low = 0  # the lowest level that has members; 0 when there are none

    def join(self, worker: Worker) -> None:
        level = worker.inflight
        dicts, masks = self._dicts, self._masks
        empty = not dicts[self._low]
        while level >= len(dicts):
            dicts.append({})
            masks.append(0)
        dicts[level][worker] = None
        masks[level] |= worker.bit
        worker.level = level
        worker.stamp = next(self._clock)
        if empty or level < self._low:
            self._low = level

    def leave(self, worker: Worker) -> None:
        level = worker.level
        bucket = self._dicts[level]
        del bucket[worker]
        self._masks[level] ^= worker.bit
        if not bucket:
            self._emptied(level)

    def shift(self, worker: Worker) -> None:
        old, new = worker.level, worker.inflight
        dicts, masks, bit = self._dicts, self._masks, worker.bit
        if new >= len(dicts):
            dicts.append({})  # load moves by one, so one level is enough
            masks.append(0)
        bucket = dicts[old]
        del bucket[worker]
        masks[old] ^= bit
        dicts[new][worker] = None
        masks[new] |= bit
        worker.level = new
        worker.stamp = next(self._clock)
        if new < self._low:
            self._low = new
        if not bucket:
            self._emptied(old)

    def _emptied(self, level: int) -> None:
        dicts = self._dicts
        if level == len(dicts) - 1:
            while len(dicts) > 1 and not dicts[-1]:
                dicts.pop()
                self._masks.pop()
        low = self._low
        if level == low:
            top = len(dicts)
            while low < top and not dicts[low]:
                low += 1
            self._low = low if low < top else 0

    def reslot(self, worker: Worker, old_bit: int) -> None:
        self._masks[worker.level] ^= old_bit | worker.bit

    def first(self) -> Worker:
        return next(iter(self._dicts[self._low]))

    def lowest(self) -> int:
        return self._masks[self._low]

    def least(self, mask: int, by_slot: list[Worker | None]) -> int:
        masks = self._masks
        low = self._low
        tied = masks[low] & mask
        if tied:
            return tied
        if mask.bit_count() > _FEW:
            while not tied:
                low += 1
                tied = masks[low] & mask
            return tied
        best = len(masks)
        while mask:
            slot = mask.bit_length() - 1
            worker = by_slot[slot]
            assert worker is not None
            bit = worker.bit
            mask ^= bit
            if worker.level < best:
                best = worker.level
                tied = bit
            elif worker.level == best:
                tied |= bit
        return tied

    def oldest(self, tied: int, by_slot: list[Worker | None]) -> Worker:
        if tied.bit_count() > _FEW:
            some = by_slot[tied.bit_length() - 1]
            assert some is not None
            return next(w for w in self._dicts[some.level] if w.bit & tied)
        return min(members_of(tied, by_slot), key=_stamp)

    def below(self, load: float) -> int:
        out = 0
        if self._dicts[self._low]:
            weight = self.first().weight
            for level in range(self._low, len(self._masks)):
                if level / weight >= load:
                    break
                out |= self._masks[level]
        return out

    def picture(self) -> Picture:
        masks = self._masks
        if len(masks) <= _PICTURE_LEVELS:
            return tuple(masks)
        levels = range(self._low, min(len(masks), self._low + _PICTURE_LEVELS))
        return tuple([(level, masks[level]) for level in levels])

    def __iter__(self) -> Iterator[Worker]:
        for bucket in self._dicts:
            yield from bucket

    def __repr__(self) -> str:
        return f"<LevelBuckets {[[w.id for w in bucket] for bucket in self._dicts]}>"


def _stamp(worker: Worker) -> int:
    return worker.stamp


def _load_key(worker: Worker) -> tuple[float, int]:
    return worker.load_key


class WeightedOrder:
    """Order for weights that differ: by `inflight / weight`, then by how long at that load."""

    __slots__ = ("_clock", "_list")

    def __init__(self, clock: Iterator[int]) -> None:
        self._clock = clock
        self._list: Any = SortedKeyList(key=_load_key)

    def join(self, worker: Worker) -> None:
        worker.stamp = next(self._clock)
        worker.load_key = (worker.inflight / worker.weight, worker.stamp)
        self._list.add(worker)

    def leave(self, worker: Worker) -> None:
        self._list.remove(worker)

    def shift(self, worker: Worker) -> None:
        self._list.remove(worker)
        self.join(worker)

    def reslot(self, worker: Worker, old_bit: int) -> None:
        pass

    def first(self) -> Worker:
        worker: Worker = self._list[0]
        return worker

    def lowest(self) -> int:
        least = self.first().load_key[0]
        out = 0
        for worker in self._list:
            if worker.load_key[0] > least:
                break
            out |= worker.bit
        return out

    def least(self, mask: int, by_slot: list[Worker | None]) -> int:
        tied, best = 0, -1.0
        if mask.bit_count() <= _FEW:
            for worker in members_of(mask, by_slot):
                load = worker.load_key[0]
                if not tied or load < best:
                    best, tied = load, worker.bit
                elif load == best:
                    tied |= worker.bit
            return tied
        for worker in self._list:
            load = worker.load_key[0]
            if tied and load > best:
                break
            if worker.bit & mask:
                best = load
                tied |= worker.bit
        return tied

    def oldest(self, tied: int, by_slot: list[Worker | None]) -> Worker:
        return min(members_of(tied, by_slot), key=_stamp)

    def below(self, load: float) -> int:
        out = 0
        for worker in self._list:
            if worker.load_key[0] >= load:
                break
            out |= worker.bit
        return out

    def picture(self) -> Picture:
        return tuple([(worker.inflight, worker.bit) for worker in islice(self._list, _PICTURE_WORKERS)])

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._list)

    def __repr__(self) -> str:
        return f"<WeightedOrder {[(w.id, w.load_key[0]) for w in self._list]}>"


class Group:
    """The eligible workers of one device class with their sums. A pool whose policy knows no classes has one group.

    `n`, `weight`, `inflight`, `encoding`, `mask` are over eligible members only; `uniform` says that all members,
    eligible or not, weigh the same.
    """

    __slots__ = (
        "_clock",
        "_weights",
        "encoding",
        "inflight",
        "mask",
        "n",
        "name",
        "order",
        "rank",
        "ratio",
        "uniform",
        "weight",
    )

    def __init__(self, name: str, ratio: int, clock: Iterator[int], rank: int = 0) -> None:
        self.name = name
        self.rank = rank  # 0 = the fastest class
        self.ratio = ratio
        self.n = 0
        self.weight = 0.0
        self.inflight = 0
        self.encoding = 0
        self.mask = 0
        self.uniform = True
        self._clock = clock
        self._weights: dict[float, int] = {}
        self.order: LoadOrder = LevelBuckets(clock)

    def enroll(self, weight: float) -> None:
        """A worker of this weight belongs to the group from now on, eligible or not."""
        self._weights[weight] = self._weights.get(weight, 0) + 1
        self._choose_order()

    def dismiss(self, weight: float) -> None:
        left = self._weights[weight] - 1
        if left:
            self._weights[weight] = left
        else:
            del self._weights[weight]
        self._choose_order()

    def _choose_order(self) -> None:
        self.uniform = len(self._weights) <= 1
        wanted = LevelBuckets if self.uniform else WeightedOrder
        if type(self.order) is not wanted:
            members = sorted(self.order, key=_stamp)
            self.order = wanted(self._clock)
            for worker in members:
                self.order.join(worker)

    def join(self, worker: Worker) -> None:
        worker.group = self
        self.n += 1
        self.weight += worker.weight
        self.inflight += worker.inflight
        self.encoding += worker.encoding
        self.mask |= worker.bit
        self.order.join(worker)

    def leave(self, worker: Worker) -> None:
        worker.group = None
        self.n -= 1
        self.weight = self.weight - worker.weight if self.n else 0.0
        self.inflight -= worker.inflight
        self.encoding -= worker.encoding
        self.mask ^= worker.bit
        self.order.leave(worker)

    def reslot(self, worker: Worker, old_bit: int) -> None:
        self.mask ^= old_bit | worker.bit
        self.order.reslot(worker, old_bit)

    def pick(self, mask: int, by_slot: list[Worker | None]) -> Worker:
        """The least loaded of `mask`, the longest at that load among equals."""
        tied = self.order.least(mask, by_slot)
        if not tied & (tied - 1):
            worker = by_slot[tied.bit_length() - 1]
            assert worker is not None
            return worker
        return self.order.oldest(tied, by_slot)

    def __repr__(self) -> str:
        return f"<Group {self.name} n={self.n} encoding={self.encoding} {self.order!r}>"
