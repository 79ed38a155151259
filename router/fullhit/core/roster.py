"""The workers of a pool and what they hold: everything but the choice.

Theory. All that a choice needs is kept ready as sets of slots (masks): who is eligible, whose entries are confirmed,
whose are our own prediction. A worker's place in those sets is its slot, and a slot changes in one place only
(`_move`): on a fill, a clear, or a removal.

What keys come from decides what they are worth. Entries of a worker that publishes are confirmed, unless it is
doubtful; entries of one that does not are predicted (`record_encoded`). A worker is one or the other, never both:
its first event throws its predictions away.

Feeders (events, snapshots) never get an exception for what a worker sends: keys over a cap are left out, counted in
`counters`, and the worker is marked `truncated`. It does not become doubtful for that: what is indexed of it is as
true as ever, there is only less of it. Its digest, though, can no longer match the worker's own; do not compare them
while `truncated` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

from .index import Index
from .load import Group
from .look import Scene
from .predicted import PredictedCache
from .ring import Ring
from .types import Key, PoolFull, PoolSettings, WorkerSpec
from .worker import Worker

__all__ = ["Fill", "Roster"]

_SPARE_SLOTS = 64  # slots waiting for the sweep beyond one per worker, before a caller who never sweeps is made to


class Fill:
    """A worker's whole set of keys in the making. Readers see nothing of it before `commit`, all of it after.

    >>> fill = pool.begin_fill(id)                                   # doctest: +SKIP
    >>> for part in snapshot_parts: fill.add(part)                   # doctest: +SKIP
    >>> if fill.digest == expected: fill.commit()                    # doctest: +SKIP

    A fill is over (`open` is False) when it is committed or aborted, when its worker is removed or cleared, or when
    another fill of the same worker begins; everything it is told then is ignored.
    """

    __slots__ = ("_roster", "_slot", "_worker", "open")

    def __init__(self, roster: Roster, worker: Worker | None, slot: int) -> None:
        self._roster = roster
        self._worker = worker
        self._slot = slot
        self.open = worker is not None

    def add(self, keys: Iterable[Key]) -> None:
        if self.open:
            self._roster._index.add(self._slot, keys)

    @property
    def key_count(self) -> int:
        return self._roster._index.counts[self._slot] if self.open else 0

    @property
    def digest(self) -> int:
        return self._roster._index.digests[self._slot] if self.open else 0

    def commit(self) -> bool:
        """Swap the new set in for the old one; False if the fill was over already."""
        if not self.open or self._worker is None:
            return False
        self.open = False
        self._roster._finish_fill(self._worker, self._slot)
        return True

    def abort(self) -> None:
        if self.open and self._worker is not None:
            self.open = False
            self._roster._drop_fill(self._worker, self._slot)


class Roster:
    """Base of `Pool`. `by_class`: one load group per device class, otherwise one for all."""

    def __init__(self, name: str, settings: PoolSettings, by_class: bool) -> None:
        self.name = name
        self.settings = settings
        self.on_capacity: list[Callable[[], None]] = []
        self._index = Index(settings.max_keys, settings.max_keys_per_worker)
        self._ring = Ring(settings.ring_points)
        self._workers: dict[str, Worker] = {}
        self._predictions: dict[Worker, PredictedCache] = {}
        self._fills: dict[Worker, Fill] = {}
        self._counts = {"unknown_worker": 0, "refused_worker": 0, "forced_sweep": 0}
        self._scene = Scene(name, settings.policy, [], 0, 0)
        self._eligible = 0
        self._confirmed = 0  # publishing and not doubtful
        self._unconfirmed = 0  # not publishing and not doubtful
        self._by_class = by_class
        stamps = count(1)
        if by_class:
            self._groups = [Group(c.name, c.ratio, stamps, rank) for rank, c in enumerate(settings.device_classes())]
        else:
            self._groups = [Group("all", 1, stamps)]
        self._group_of = {group.name: group for group in self._groups}

    # -- workers

    def add_worker(self, spec: WorkerSpec) -> Worker:
        """Add a worker, not ready and holding nothing; or bring a known one's device, weight, limit, url up to date.

        Raises PoolFull beyond `max_workers`.
        """
        worker = self._workers.get(spec.id)
        if worker is not None:
            self._update(worker, spec)
            return worker
        if len(self._workers) >= self.settings.max_workers:
            self._counts["refused_worker"] += 1
            raise PoolFull(
                f"pool {self.name!r} has {len(self._workers)} workers, its max_workers; {spec.id} is not added"
            )
        worker = Worker(spec, self.settings.class_of(spec.device), self._index.allocate())
        self._workers[worker.id] = worker
        self._seat(worker.slot, worker)
        self._mark(worker)
        self._ring.add(worker)
        self._home(worker).enroll(worker.weight)
        return worker

    def remove_worker(self, id: str) -> bool:
        """Forget a worker and at once everything it held. Its tickets stay good for releasing. False if unknown."""
        worker = self._workers.pop(id, None)
        if worker is None:
            return False
        if worker.group is not None:
            self._leave(worker)
        self._home(worker).dismiss(worker.weight)
        self._end_fill(worker)
        self._predictions.pop(worker, None)
        self._seat(worker.slot, None)
        self._mark(worker, False)
        self._index.retire(worker.slot)
        worker.present = False
        worker.key_count = 0
        worker.bit = 0
        self._ring.remove(worker)
        return True

    def get(self, id: str) -> Worker | None:
        return self._workers.get(id)

    def workers(self) -> list[Worker]:
        """All workers, in the order they were added."""
        return list(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def set_ready(self, id: str, ready: bool) -> None:
        worker = self._known(id)
        if worker is not None:
            worker.ready = ready
            self._review(worker)

    def set_draining(self, id: str, draining: bool) -> None:
        worker = self._known(id)
        if worker is not None:
            worker.draining = draining
            self._review(worker)

    def set_doubtful(self, id: str, doubtful: bool) -> None:
        """Doubtful entries never make a full hit; they still break ties."""
        worker = self._known(id)
        if worker is not None:
            worker.doubtful = doubtful
            self._mark(worker)

    def set_publishing(self, id: str, publishing: bool) -> None:
        """Whether the worker's own events say what it holds. A change drops its entries: they meant something else."""
        worker = self._known(id)
        if worker is not None and worker.publishing != publishing:
            self._empty(worker)
            self._predictions.pop(worker, None)
            worker.publishing = publishing
            self._mark(worker)

    # -- what they hold

    def apply_delta(self, id: str, added: Sequence[Key], removed: Sequence[Key]) -> None:
        """A worker's own word on its cache: `removed` is applied first. Makes it a publishing worker."""
        worker = self._known(id)
        if worker is None:
            return
        if not worker.publishing:
            self.set_publishing(id, True)
        index, slot = self._index, worker.slot
        if removed:
            index.remove(slot, removed)
        if added:
            index.add(slot, added)
            worker.truncated = index.truncated[slot]
        worker.key_count = index.counts[slot]

    def clear(self, id: str) -> None:
        """The worker holds nothing (its cache restarted empty). Constant time; an open fill of it is aborted."""
        worker = self._known(id)
        if worker is not None:
            self._empty(worker)

    def begin_fill(self, id: str) -> Fill:
        """Start a new whole set for a worker. For an unknown worker the fill is over before it begins."""
        worker = self._known(id)
        if worker is None:
            return Fill(self, None, 0)
        self._end_fill(worker)
        fill = Fill(self, worker, self._allocate())
        self._fills[worker] = fill
        return fill

    def record_encoded(self, id: str, keys: Sequence[tuple[Key, int]]) -> None:
        """These keys (with their size in bytes) were encoded, or served from cache, by a worker that publishes nothing.

        Ignored for a publishing worker and where the pool does not predict.
        """
        worker = self._known(id)
        if worker is None or worker.publishing or not self.settings.predict:
            return
        cache = self._predictions.get(worker)
        if cache is None:
            cache = PredictedCache(self.settings.predicted_bytes, self.settings.predicted_entries)
            self._predictions[worker] = cache
        held, dropped = cache.admit(keys)
        index, slot = self._index, worker.slot
        index.remove(slot, dropped)
        index.add(slot, held)
        worker.truncated = index.truncated[slot]
        worker.key_count = index.counts[slot]

    def digest(self, id: str) -> int:
        """XOR of `key_hash` over the keys indexed for the worker; says nothing while it is `truncated`."""
        worker = self._workers.get(id)
        return self._index.digests[worker.slot] if worker is not None else 0

    def key_count(self, id: str) -> int:
        worker = self._workers.get(id)
        return self._index.counts[worker.slot] if worker is not None else 0

    def holds(self, id: str, key: Key) -> bool:
        """Whether the worker is believed to hold the key, on whatever grounds."""
        worker = self._workers.get(id)
        return worker is not None and self._index.holds(worker.slot, key)

    def holders(self, key: Key) -> list[Worker]:
        """Workers believed to hold the key, eligible or not."""
        mask = self._index.mask(key)
        return [w for slot, w in enumerate(self._scene.by_slot) if w is not None and mask >> slot & 1]

    def sweep(self, budget_entries: int = 1000) -> bool:
        """Clean up after removals, clears and fills: visits that many keys (0.2 to 0.8 us each). True = call again."""
        return self._index.sweep(budget_entries)

    @property
    def index_keys(self) -> int:
        """Distinct keys in memory, those that wait for the sweep included."""
        return self._index.keys

    @property
    def index_entries(self) -> int:
        """(key, worker) pairs, fills in the making included."""
        return self._index.entries

    @property
    def counters(self) -> dict[str, int]:
        """A copy of the counts since the start."""
        return {
            **self._counts,
            "refused_worker_cap": self._index.refused_slot,
            "refused_pool_cap": self._index.refused_total,
        }

    # -- eligibility and slots

    def _known(self, id: str) -> Worker | None:
        worker = self._workers.get(id)
        if worker is None:
            self._counts["unknown_worker"] += 1
        return worker

    def _home(self, worker: Worker) -> Group:
        return self._group_of[worker.device_class] if self._by_class else self._groups[0]

    def _review(self, worker: Worker) -> None:
        """Put a worker into its group or take it out, as its flags say."""
        if worker.eligible:
            if worker.group is None:
                self._home(worker).join(worker)
                self._eligible |= worker.bit
                self._joined(worker)
                for callback in tuple(self.on_capacity):
                    callback()
        elif worker.group is not None:
            self._leave(worker)

    def _leave(self, worker: Worker) -> None:
        assert worker.group is not None
        worker.group.leave(worker)
        self._eligible ^= worker.bit
        self._left(worker)

    def _update(self, worker: Worker, spec: WorkerSpec) -> None:
        worker.url, worker.labels = spec.url, dict(spec.labels)
        device_class = self.settings.class_of(spec.device)
        if (spec.device, spec.weight, spec.max_inflight) == (worker.device, worker.weight, worker.max_inflight):
            return
        if worker.group is not None:
            self._leave(worker)
        self._home(worker).dismiss(worker.weight)
        reweigh = spec.weight != worker.weight
        worker.device, worker.device_class = spec.device, device_class
        worker.weight, worker.max_inflight = spec.weight, spec.max_inflight
        self._home(worker).enroll(worker.weight)
        if reweigh:
            self._ring.reweigh(worker)
        self._review(worker)

    def _mark(self, worker: Worker, present: bool = True) -> None:
        """Bring the worker's bit in the sets that say what entries are worth up to date."""
        bit = worker.bit if present else 0
        others = ~worker.bit
        known, doubtful = worker.publishing, worker.doubtful
        scene = self._scene
        self._scene = scene._replace(
            doubtful=scene.doubtful & others | (bit if doubtful else 0),
            publishing=scene.publishing & others | (bit if known else 0),
        )
        self._confirmed = self._confirmed & others | (bit if known and not doubtful else 0)
        self._unconfirmed = self._unconfirmed & others | (bit if not known and not doubtful else 0)

    def _allocate(self) -> int:
        if self._index.slots > 2 * self.settings.max_workers + _SPARE_SLOTS:
            self._counts["forced_sweep"] += 1
            while self._index.sweep(1 << 20):
                pass
        return self._index.allocate()

    def _seat(self, slot: int, worker: Worker | None) -> None:
        seats = list(self._scene.by_slot)
        while slot >= len(seats):
            seats.append(None)
        seats[slot] = worker
        self._scene = self._scene._replace(by_slot=seats)

    def _move(self, worker: Worker, slot: int) -> None:
        """Move a worker to another slot, and with it everything that is said of it in masks."""
        old, old_bit = worker.slot, worker.bit
        self._mark(worker, False)
        worker.slot = slot
        worker.bit = self._index.bits[slot]
        self._mark(worker)
        if worker.group is not None:
            self._eligible ^= old_bit | worker.bit
            worker.group.reslot(worker, old_bit)
        self._seat(old, None)
        self._seat(slot, worker)
        self._index.retire(old)
        worker.key_count = self._index.counts[slot]
        worker.truncated = self._index.truncated[slot]

    def _empty(self, worker: Worker) -> None:
        self._end_fill(worker)
        cache = self._predictions.get(worker)
        if cache is not None:
            cache.clear()
        if self._index.counts[worker.slot] or self._index.truncated[worker.slot]:
            self._move(worker, self._allocate())

    def _end_fill(self, worker: Worker) -> None:
        fill = self._fills.get(worker)
        if fill is not None:
            fill.abort()

    def _drop_fill(self, worker: Worker, slot: int) -> None:
        del self._fills[worker]
        self._index.retire(slot)

    def _finish_fill(self, worker: Worker, slot: int) -> None:
        del self._fills[worker]
        self._predictions.pop(worker, None)
        worker.publishing = True
        self._move(worker, slot)

    def _joined(self, worker: Worker) -> None:
        """A worker has become eligible."""

    def _left(self, worker: Worker) -> None:
        """A worker has ceased to be eligible."""
