"""`parity = "dynamo"`: a pool that chooses exactly as the reference's `device-aware-weighted` router does.

For fleets that move over and want to see the same choices first. Where the reference is deterministic the choice is the
same; where it draws, it is drawn from the same workers with the same odds. What differs from this project's own rule:

1.  A worker that holds every key of the request wins, whatever its device, the least loaded of them first.
2.  Such a request is not booked: it raises nobody's load.
3.  Items without key are passed over: a request with one can still be a full hit. A request without any key cannot.
4.  Anything less than a full hit counts for nothing. The two classes, CPU and the rest, share by an integer budget:
    `floor(load of the rest x CPU workers / (ratio x other workers))`, in unsigned 64-bit arithmetic that saturates.
    The CPU class takes the request while its own load is below that. The least loaded of the class is chosen.
5.  Load is the number of booked requests, weights play no part, and ties are drawn evenly.
6.  Doubt is unknown: what was said once is believed until it is taken back.
7.  A worker that leaves and comes back under its id finds the load it had.

What a pool knows of its workers' caches comes from the same streams as elsewhere, which forget after a loss or a
restart where the reference goes on believing; the choice is the reference's, given the same index.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from .decision import Decision
from .load import members_of
from .look import Look
from .policies import Policy, Surroundings
from .pool import Pool
from .types import PoolSettings, Reason, SelectRequest
from .worker import Ticket, Worker

__all__ = ["DynamoParity", "ParityPool", "make_pool"]

_MAX_U64 = 2**64 - 1
_HOLDS = "parity: any holder of all keys, least booked, even draw among equals; not booked"
_GROUP = "parity: least booked of the group, even draw among equals"


class DynamoParity(Policy):
    """The rule. `loads`: booked requests by worker id; a missing one has none."""

    by_class = True

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self.loads: dict[str, int] = {}

    def choose(self, look: Look) -> Worker:
        holders = look.eligible if look.masks else 0
        for mask in look.masks:
            holders &= mask
        look.full = holders
        look.predicted = 0
        look.budget = ()
        look.note = _HOLDS if holders else _GROUP
        if not holders:
            holders = self._group(look)
        look.candidates = holders
        return self._least(holders, look)

    def _least(self, mask: int, look: Look) -> Worker:
        loads = self.loads
        tied: list[Worker] = []
        least = -1
        for worker in members_of(mask, look.scene.by_slot):
            load = loads.get(worker.id, 0)
            if load < least or least < 0:
                least = load
                tied = [worker]
            elif load == least:
                tied.append(worker)
        return tied[0] if len(tied) == 1 else self._rng.choice(tied)

    def _group(self, look: Look) -> int:
        eligible = look.eligible
        by_slot = look.scene.by_slot
        others, cpu = self._groups[0], self._groups[-1]
        cpu_mask = cpu.mask & eligible
        other_mask = eligible ^ cpu_mask
        if not cpu_mask or not other_mask:
            return eligible
        n_cpu, n_other = cpu_mask.bit_count(), other_mask.bit_count()
        cpu_load = sum(self.loads.get(worker.id, 0) for worker in members_of(cpu_mask, by_slot))
        other_load = sum(self.loads.get(worker.id, 0) for worker in members_of(other_mask, by_slot))
        allowed = min(other_load * n_cpu, _MAX_U64) // min(self._settings.ratio * n_other, _MAX_U64)
        look.budget = (others, n_other, other_load, None, cpu, n_cpu, cpu_load, allowed)
        return cpu_mask if cpu_load < allowed else other_mask


class ParityPool(Pool):
    """A pool with that rule. Raises ValueError for settings that it cannot honour."""

    def __init__(
        self,
        name: str,
        settings: PoolSettings,
        *,
        clock: Callable[[], float],
        rng: random.Random | None = None,
        ids: Iterator[int] | None = None,
    ) -> None:
        if settings.classes:
            raise ValueError("parity: 'dynamo' knows CPU and other devices; leave device_ratios out")
        # The reference predicts nothing: what no event has said is not held.
        settings = replace(settings, policy="device-aware-weighted", predict=False)
        super().__init__(name, settings, clock=clock, rng=rng, ids=ids)
        chance = rng if rng is not None else random.Random()
        self._rule = DynamoParity(Surroundings(settings, self._groups, self._ring, chance))
        self._policy = self._rule
        self._scene = self._scene._replace(policy="dynamo-parity")

    def select(self, request: SelectRequest) -> Decision:
        """As `Pool.select`. The ticket of a full hit holds nothing."""
        seen = replace(request, unkeyed=0, dry_run=True)
        look = super().select(seen)
        look.request = request
        worker = look.worker
        if look.full & worker.bit:
            look.reason = Reason.FULL_HIT
        elif look.some or look.full:
            look.reason = Reason.PARTIAL_HIT
        elif request.keys or request.items or request.unkeyed:
            look.reason = Reason.MISS
        if request.dry_run:
            return look
        look.ticket = ticket = Ticket()
        ticket.worker = worker
        ticket._owner = self
        ticket.encoding = look.reason is not Reason.FULL_HIT
        if ticket.encoding:
            self._book(worker)
        return look

    def _book(self, worker: Worker) -> None:
        loads = self._rule.loads
        loads[worker.id] = loads.get(worker.id, 0) + 1
        group = worker.group
        assert group is not None  # it was eligible a moment ago
        worker.inflight += 1
        worker.encoding += 1
        group.inflight += 1
        group.encoding += 1
        if worker.busy:
            self._leave(worker)
        else:
            group.order.shift(worker)

    def give_back(self, ticket: Ticket) -> None:
        """For `Ticket.release` alone, which calls it once."""
        if not ticket.encoding:
            return
        loads = self._rule.loads
        left = loads[ticket.worker.id] - 1
        if left:
            loads[ticket.worker.id] = left
        else:
            del loads[ticket.worker.id]
        super().give_back(ticket)

    def encoding_over(self, ticket: Ticket) -> bool:
        """Nothing changes: the reference counts a request until its answer has ended."""
        return False


def make_pool(
    name: str,
    settings: PoolSettings,
    *,
    clock: Callable[[], float],
    rng: random.Random | None = None,
    ids: Iterator[int] | None = None,
) -> Pool:
    """The pool that the settings ask for."""
    kind = ParityPool if settings.parity == "dynamo" else Pool
    return kind(name, settings, clock=clock, rng=rng, ids=ids)
