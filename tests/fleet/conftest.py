"""A clock that tests turn by hand, and a fleet around real pools."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fullhit.core import Pool, PoolSettings
from fullhit.fleet import Fleet, FleetSettings, Probe, ProbeResult


class Clock:
    """Monotonic seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


class Witness:
    """Remembers events and counters."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []
        self.counts: list[tuple[str, dict[str, object]]] = []

    def event(self, kind: str, /, level: str = "info", **fields: object) -> None:
        self.events.append((kind, fields))

    def count(self, name: str, /, **labels: object) -> None:
        self.counts.append((name, labels))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


class World:
    """A fleet with one pool (``default``), its clock and a simulated outside.

    ``health[url]`` is what a probe of that worker gives; a missing one answers well.
    """

    def __init__(self, policy: str = "least-loaded", **settings: Any) -> None:
        self.clock = Clock()
        self.witness = Witness()
        self.pool = Pool("default", PoolSettings(policy=policy), clock=self.clock, rng=random.Random(7))
        self.pools = {"default": self.pool}
        self.fleet = Fleet(
            self.pools, FleetSettings(**settings), clock=self.clock, observer=self.witness, rng=random.Random(11)
        )
        self.health: dict[str, ProbeResult] = {}
        self.probed: list[tuple[float, str]] = []
        self.next = self.clock.now
        self.hold_probes = False
        self.waiting: list[Probe] = []

    def run(self, seconds: float = 0.0) -> None:
        """Let the fleet live for a while; probes are answered at once."""
        end = self.clock.now + seconds
        while True:
            turn = self.fleet.tick()
            for probe in turn.probes:
                self.probed.append((self.clock.now, probe.id))
                if self.hold_probes:
                    self.waiting.append(probe)
                else:
                    self.fleet.probe_done(probe, self.health.get(probe.id, ProbeResult("ok")))
            if turn.wake_at > end:
                break
            self.clock.now = max(turn.wake_at, self.clock.now + 1e-3)
        self.clock.now = max(end, self.clock.now)

    def add_ready(self, *urls: str, **options: Any) -> None:
        for url in urls:
            self.fleet.add(url, **options)
        self.run()
        for url in urls:
            assert self.pool.get(url).ready, url


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def make_world() -> Callable[..., World]:
    return World


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    """``await eventually(condition)``: until it holds, for 30 seconds at most."""

    async def wait(condition: Callable[[], object]) -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end, "it never came about"
            await asyncio.sleep(0.005)

    return wait
