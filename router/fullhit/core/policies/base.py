"""What a policy is: a choice from a `Look`, and nothing else.

A policy takes no slot and changes no load; the pool does that right after `choose`, with nothing in between. A policy
that keeps an order of its own hears of workers that become eligible (`joined`), cease to be (`left`) and are taken
(`taken`, not called for a dry run).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..load import Group
from ..look import Look
from ..ring import Ring
from ..types import PoolSettings
from ..worker import Worker

__all__ = ["Policy", "Surroundings"]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a policy may use beside the look: the pool's settings, load groups (fastest class first), ring, chance."""

    settings: PoolSettings
    groups: list[Group]
    ring: Ring
    rng: random.Random


class Policy:
    """Base of all policies.

    `by_class`  the pool keeps one load group per device class (otherwise one for all)
    `watches`   `joined`, `left` and `taken` want to be called
    """

    by_class = False
    watches = False

    def __init__(self, around: Surroundings) -> None:
        self._settings = around.settings
        self._groups = around.groups
        self._ring = around.ring
        self._rng = around.rng

    def choose(self, look: Look) -> Worker:
        """One of `look.eligible` (not empty). Writes `look.candidates`, `look.note`, `look.budget`."""
        raise NotImplementedError

    def joined(self, worker: Worker) -> None: ...

    def left(self, worker: Worker) -> None: ...

    def taken(self, worker: Worker) -> None: ...
