"""One pool: its workers (see `roster`) and the choice among them.

Theory. `select` looks, asks the policy, and takes the in-flight slot, in one call without anything awaited between:
on one event loop that makes choosing and taking atomic. The slot comes as a `Ticket` which gives it back exactly
once, to the worker object it was taken from. `select` is one long function on purpose: it runs once a request, and on
this scale every call inside it shows.

Not thread-safe: call it from one thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count

from .decision import Decision
from .policies import Surroundings, make_policy, policy_class
from .roster import Fill, Roster
from .types import Key, NoEligibleKind, NoEligibleWorker, PoolSettings, Reason, SelectRequest
from .worker import Ticket, Worker

__all__ = ["Fill", "Pool"]

_FULL_HIT, _PREDICTED, _PARTIAL_HIT = Reason.FULL_HIT, Reason.PREDICTED, Reason.PARTIAL_HIT
_MISS, _NO_MEDIA = Reason.MISS, Reason.NO_MEDIA  # an enumeration's members cost a look-up each time


class Pool(Roster):
    """Workers which are interchangeable, and their index.

    `counters`     events worth counting: `refused_worker_cap`, `refused_pool_cap` (keys not taken), `unknown_worker`
                   (told about a worker that is not here), `refused_worker` (`add_worker` over the cap), `forced_sweep`
    `blind`        decisions about keys, and no full hits, taken while what some eligible worker holds was in doubt:
                   with full knowledge they might have been others
    `on_capacity`  called whenever a worker may have become eligible again
    """

    def __init__(
        self,
        name: str,
        settings: PoolSettings | None = None,
        *,
        clock: Callable[[], float],
        rng: random.Random | None = None,
        ids: Iterator[int] | None = None,
    ) -> None:
        settings = settings if settings is not None else PoolSettings()
        super().__init__(name, settings, policy_class(settings.policy).by_class)
        self.blind = 0
        self._clock = clock
        self._ids = ids if ids is not None else count(1)
        chance = rng if rng is not None else random.Random()
        self._policy = make_policy(settings.policy, Surroundings(settings, self._groups, self._ring, chance))

    def select(self, request: SelectRequest) -> Decision:
        """Choose a worker and take one of its in-flight slots (unless `dry_run`). Raises NoEligibleWorker."""
        eligible = self._eligible
        excluded: tuple[Worker, ...] = ()
        if request.exclude:
            known = self._workers
            excluded = tuple([w for w in map(known.get, request.exclude) if w is not None and w.group is not None])
            for w in excluded:
                eligible ^= w.bit
        if not eligible:
            raise self._refusal(request)
        look = Decision()
        look.request = request
        look.scene = self._scene
        look.eligible = eligible
        look.excluded = excluded
        full = predicted = some = 0
        masks: list[int] = []
        keys = request.keys
        if keys:
            shards = self._index.shards
            every = eligible
            for key in keys:
                mask = shards[key[15]].get(key, 0)
                masks.append(mask)
                every &= mask
            if request.alternatives:
                every = self._widen(masks, request.alternatives, eligible)
            if every and not request.unkeyed:
                full = every & self._confirmed
                predicted = every & self._unconfirmed
            if not full:
                for mask in masks:
                    some |= mask
                some &= eligible
        look.masks = masks
        look.full = full
        look.predicted = predicted
        look.some = some

        look.worker = worker = self._policy.choose(look)

        bit = worker.bit
        if full & bit:
            reason = _FULL_HIT
        elif predicted & bit:
            reason = _PREDICTED
        elif some or full:
            reason = _PARTIAL_HIT
        elif keys or request.items or request.unkeyed:
            reason = _MISS
        else:
            reason = _NO_MEDIA
        look.reason = reason
        look.inflight = worker.inflight
        look.pictures = pictures = []
        for group in self._groups:
            pictures.append(group.order.picture())  # noqa: PERF401 (a comprehension is a call)
        look.id = next(self._ids)
        look.at = self._clock()
        if request.dry_run:
            look.ticket = None
            return look
        if not full and keys and self._scene.doubtful & eligible:
            self.blind += 1
        look.ticket = ticket = Ticket()
        ticket.worker = worker
        ticket._owner = self
        ticket.encoding = encoding = reason is not _FULL_HIT and reason is not _PREDICTED
        mine = worker.group
        assert mine is not None
        worker.inflight += 1
        mine.inflight += 1
        if encoding:
            worker.encoding += 1
            mine.encoding += 1
        if self._policy.watches:
            self._policy.taken(worker)
        if worker.max_inflight is not None and worker.inflight >= worker.max_inflight:
            self._leave(worker)
        else:
            mine.order.shift(worker)
        return look

    def _widen(self, masks: list[int], alternatives: tuple[tuple[Key, ...], ...], eligible: int) -> int:
        """Let whoever holds another key for an item count as its holder; returns who of `eligible` holds all items."""
        mask_of = self._index.mask
        for i, others in enumerate(alternatives[: len(masks)]):
            for key in others:
                masks[i] |= mask_of(key)
            eligible &= masks[i]
        for mask in masks[len(alternatives) :]:
            eligible &= mask
        return eligible

    def give_back(self, ticket: Ticket) -> None:
        """For `Ticket.release` alone, which calls it once."""
        worker, encoding = ticket.worker, ticket.encoding
        worker.inflight -= 1
        if encoding:
            worker.encoding -= 1
        group = worker.group
        if group is not None:
            group.inflight -= 1
            if encoding:
                group.encoding -= 1
            group.order.shift(worker)
        else:
            self._review(worker)

    def encoding_over(self, ticket: Ticket) -> bool:
        """For `Ticket.encoded` alone, which calls it for one that encodes and is not released."""
        ticket.encoding = False
        worker = ticket.worker
        worker.encoding -= 1
        if worker.group is not None:
            worker.group.encoding -= 1
        return True

    def _refusal(self, request: SelectRequest) -> NoEligibleWorker:
        workers = self._workers.values()
        kind: NoEligibleKind
        if not workers:
            kind = "empty_pool"
        elif any(w.fit and w.id not in request.exclude for w in workers):
            kind = "all_busy"
        elif any(w.fit for w in workers):
            kind = "all_excluded"
        else:
            kind = "all_down"
        return NoEligibleWorker(self.name, kind, f"{len(workers)} known" if workers else "")

    def _joined(self, worker: Worker) -> None:
        if self._policy.watches:
            self._policy.joined(worker)

    def _left(self, worker: Worker) -> None:
        if self._policy.watches:
            self._policy.left(worker)

    def __repr__(self) -> str:
        size = f"workers={len(self._workers)} keys={self._index.keys}"
        return f"<Pool {self.name} {self.settings.policy} {size} {self._groups}>"
