"""`consistent-hash`: the request's first key decides, within a bound on load.

Theory. Plain consistent hashing keeps a picture's requests together and lets a hot picture drown its worker. With
bounded loads (Mirrokni, Thorup, Zadimoghaddam) no worker may have more than `bounded_load` times its fair share of
what is in flight, this request included; a full one is passed over and the next on the ring takes the request, so
that the overflow of a hot key also gathers in one place.
"""

from __future__ import annotations

from ..look import Look
from ..worker import Worker
from .base import Policy, Surroundings

__all__ = ["ConsistentHash"]


class ConsistentHash(Policy):
    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._factor = around.settings.bounded_load

    def choose(self, look: Look) -> Worker:
        group = self._groups[0]
        eligible = look.eligible
        by_slot = look.scene.by_slot
        keys = look.request.keys
        look.budget = ()
        if not keys:
            look.candidates = eligible
            look.note = "no key to place; least in-flight"
            return group.pick(eligible, by_slot)
        inflight, weight = group.inflight, group.weight
        for worker in look.excluded:
            inflight -= worker.inflight
            weight -= worker.weight
        bound = self._factor * (inflight + 1) / weight  # of inflight / weight; the least loaded is always under it
        under = group.order.below(bound) & eligible
        look.candidates = under or eligible
        look.note = f"ring place of the first key among workers under {bound:.3g} in flight per weight"
        return self._ring.nearest(keys[0], under or eligible, by_slot)
