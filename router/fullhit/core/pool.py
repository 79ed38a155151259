"""Workers of one pool, what they hold, and the choice among them. Simple form; see the modules to come."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from xxhash import xxh3_64_intdigest

from .decision import Decision
from .types import Key, NoEligibleWorker, PoolSettings, Reason, SelectRequest, WorkerSpec
from .worker import Ticket, Worker

__all__ = ["Fill", "Pool"]


class Fill:
    """A worker's whole set of keys in the making; readers see nothing of it before `commit`."""

    def __init__(self, pool: Pool, worker: Worker) -> None:
        self._pool = pool
        self._worker = worker
        self._keys: set[Key] = set()
        self.open = True

    def add(self, keys: Iterable[Key]) -> None:
        if self.open:
            self._keys.update(keys)

    def commit(self) -> bool:
        if not self.open or not self._worker.present:
            return False
        self.open = False
        self._pool._held[self._worker.id] = self._keys
        self._worker.key_count = len(self._keys)
        self._worker.publishing = True
        return True

    def abort(self) -> None:
        self.open = False


class Pool:
    def __init__(
        self,
        name: str,
        settings: PoolSettings | None = None,
        *,
        clock: Callable[[], float],
        rng: random.Random | None = None,
    ) -> None:
        self.name = name
        self.settings = settings or PoolSettings()
        self.counters: dict[str, int] = {}
        self.on_capacity: list[Callable[[], None]] = []
        self._clock = clock
        self._rng = rng or random.Random()
        self._workers: dict[str, Worker] = {}
        self._held: dict[str, set[Key]] = {}
        self._next_id = 0

    def add_worker(self, spec: WorkerSpec) -> Worker:
        worker = self._workers.get(spec.id)
        if worker is None:
            worker = Worker(spec, self.settings.class_of(spec.device), len(self._workers))
            self._workers[spec.id] = worker
            self._held[spec.id] = set()
        return worker

    def remove_worker(self, id: str) -> bool:
        worker = self._workers.pop(id, None)
        if worker is None:
            return False
        worker.present = False
        self._held.pop(id)
        return True

    def sweep(self, budget_entries: int = 1000) -> bool:
        return False

    def get(self, id: str) -> Worker | None:
        return self._workers.get(id)

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def _flag(self, id: str, name: str, value: bool) -> None:
        worker = self._workers.get(id)
        if worker is not None:
            before = worker.eligible
            setattr(worker, name, value)
            if worker.eligible and not before:
                self._tell()

    def set_ready(self, id: str, ready: bool) -> None:
        self._flag(id, "ready", ready)

    def set_draining(self, id: str, draining: bool) -> None:
        self._flag(id, "draining", draining)

    def set_publishing(self, id: str, publishing: bool) -> None:
        worker = self._workers.get(id)
        if worker is not None and worker.publishing != publishing:
            self.clear(id)
            worker.publishing = publishing

    def set_doubtful(self, id: str, doubtful: bool) -> None:
        self._flag(id, "doubtful", doubtful)

    def apply_delta(self, id: str, added: Sequence[Key], removed: Sequence[Key]) -> None:
        self.set_publishing(id, True)
        held = self._held.get(id)
        if held is not None:
            held.difference_update(removed)
            held.update(added)
            self._workers[id].key_count = len(held)

    def clear(self, id: str) -> None:
        if id in self._held:
            self._held[id] = set()
            self._workers[id].key_count = 0

    def begin_fill(self, id: str) -> Fill:
        return Fill(self, self._workers[id])

    def digest(self, id: str) -> int:
        out = 0
        for key in self._held.get(id, ()):
            out ^= xxh3_64_intdigest(key)
        return out

    def key_count(self, id: str) -> int:
        return len(self._held.get(id, ()))

    def record_encoded(self, id: str, keys: Sequence[tuple[Key, int]]) -> None:
        worker = self._workers.get(id)
        if worker is not None and self.settings.predict and not worker.publishing:
            self._held[id].update(key for key, _ in keys)
            worker.key_count = len(self._held[id])

    def select(self, request: SelectRequest) -> Decision:
        if not self._workers:
            raise NoEligibleWorker(self.name, "empty_pool")
        able = [w for w in self._workers.values() if w.eligible and w.id not in request.exclude]
        if not able:
            some = any(w.fit for w in self._workers.values())
            raise NoEligibleWorker(self.name, "all_busy" if some else "all_down")
        keys = set(request.keys)
        reason = Reason.MISS if keys or request.items or request.unkeyed else Reason.NO_MEDIA
        if any(keys & self._held[w.id] for w in able):
            reason = Reason.PARTIAL_HIT
        full = [w for w in able if keys and not request.unkeyed and keys <= self._held[w.id] and not w.doubtful]
        confirmed = [w for w in full if w.publishing]
        if full:
            reason = Reason.FULL_HIT if confirmed else Reason.PREDICTED
            able = confirmed or full
        worker = min(able, key=lambda w: (w.inflight, w.stamp))
        self._next_id += 1
        ticket = None
        if not request.dry_run:
            encoding = reason not in (Reason.FULL_HIT, Reason.PREDICTED)
            worker.inflight += 1
            worker.encoding += encoding
            worker.stamp = self._next_id
            ticket = Ticket(worker, encoding, self._give_back)
        return Decision(self._next_id, request, worker, reason, ticket, self._clock(), ())

    def _give_back(self, worker: Worker, encoding: bool) -> None:
        before = worker.eligible
        worker.inflight -= 1
        worker.encoding -= encoding
        if worker.eligible and not before:
            self._tell()

    def _tell(self) -> None:
        for callback in list(self.on_capacity):
            callback()
