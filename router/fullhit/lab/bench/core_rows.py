"""The core: how long a selection takes, what the index weighs, and how long its housekeeping holds up the loop.

The pool of the selection rows: 1,000 workers, three of four GPU, one of four CPU; 1,000,000 keys spread evenly, one in
twenty with up to five holders more. Requests carry four keys; a third are full hits, a third hold three known keys of
different workers and one unknown, a third are all unknown. 500 requests are in flight. Each call of `select` is timed
by itself on the wall clock, so other load on the machine shows in p99. Slices of housekeeping are timed by CPU time of
the thread: the longest of hundreds, where one preemption would otherwise be all there is to see.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fullhit.core import Pool, PoolSettings, SelectRequest, Ticket, WorkerSpec
from fullhit.core.index import Index

from .table import Row

__all__ = ["rows"]

COMMAND = "fullhit bench --only core"
WORKERS = 1_000
KEYS = 1_000_000
QUICK_KEYS = 50_000
REQUESTS = 30_000
IN_FLIGHT = 500
FILL = 250  # keys a slice of a snapshot takes
SWEEP = 500  # keys a slice of the sweep visits


def rows(args: argparse.Namespace) -> list[Row]:
    keys = QUICK_KEYS if args.quick else KEYS
    size = "1 M" if keys == KEYS else f"{keys:,}"
    out = [
        Row.at_most(f"index, one holder a key, {size} keys", _weight(keys, 1), "B/entry", 150, COMMAND),
        Row.at_most(f"index, three holders a key, {size} keys", _weight(keys, 3), "B/entry", 150, COMMAND),
    ]
    bench = _Bench(keys)
    gc.collect()
    gc.freeze()
    try:
        out += bench.selections(args.rounds, size)
        out += bench.housekeeping(args.rounds, size)
    finally:
        gc.unfreeze()
    return out


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _weight(keys: int, holders: int) -> float:
    """Bytes of resident memory per (key, holder), the key's own bytes included; holders drawn from 1,000 workers."""
    rng = random.Random(1)
    gc.collect()
    before = _resident()
    index = Index(2 * keys, 2 * keys)
    slots = [index.allocate() for _ in range(WORKERS)]
    for _ in range(keys):
        key = (rng.randbytes(16),)
        for slot in rng.sample(slots, holders):
            index.add(slot, key)
    return (_resident() - before) / index.entries


@dataclass
class _Timing:
    p50: float
    p99: float


class _Bench:
    def __init__(self, keys: int) -> None:
        self.rng = rng = random.Random(2)
        self.pool = Pool("bench", PoolSettings(), clock=time.monotonic, rng=random.Random(3))
        self.ids = [f"http://10.0.{i // 250}.{i % 250}:30000" for i in range(WORKERS)]
        for i, id in enumerate(self.ids):
            self.pool.add_worker(WorkerSpec(id, id, "cpu" if i % 4 == 3 else "cuda"))
            self.pool.set_ready(id, True)
        self.keys = [rng.randbytes(16) for _ in range(keys)]
        self.held: list[list[bytes]] = [self.keys[i::WORKERS] for i in range(WORKERS)]
        for key in self.keys[::20]:
            for _ in range(rng.randrange(1, 6)):
                self.held[rng.randrange(WORKERS)].append(key)
        for id, mine in zip(self.ids, self.held, strict=True):
            self.pool.apply_delta(id, mine, [])

    def selections(self, rounds: int, size: str) -> list[Row]:
        what = f"select, {WORKERS:,} workers, {size} keys, 4 keys a request"
        kinds: dict[str, Callable[[], tuple[bytes, ...]]] = {
            "full hit": lambda: tuple(self.rng.sample(self.rng.choice(self.held), 4)),
            "partial hit": lambda: (*self.rng.sample(self.keys, 3), self.rng.randbytes(16)),
            "miss": lambda: tuple(self.rng.randbytes(16) for _ in range(4)),
        }
        makers = list(kinds.values())
        mixed = [self._time(lambda: self.rng.choice(makers)()) for _ in range(rounds)]
        out = [
            Row.at_most(f"{what}, p50", median(t.p50 for t in mixed), "us", 5, COMMAND),
            Row.at_most(f"{what}, p99", median(t.p99 for t in mixed), "us", 50, COMMAND),
        ]
        for name, maker in kinds.items():
            one = [self._time(maker) for _ in range(rounds)]
            out.append(Row.info(f"  {name} only, p50", median(t.p50 for t in one), "us", COMMAND))
        return out

    def _time(self, maker: Callable[[], tuple[bytes, ...]]) -> _Timing:
        """Percentiles of one call, in microseconds."""
        rng, select, clock = self.rng, self.pool.select, time.perf_counter_ns
        requests = [SelectRequest(maker(), 4) for _ in range(REQUESTS)]
        taken: list[Ticket] = []
        times = []
        for request in requests:
            began = clock()
            decision = select(request)
            times.append(clock() - began)
            assert decision.ticket is not None
            taken.append(decision.ticket)
            if len(taken) > IN_FLIGHT:
                i = rng.randrange(IN_FLIGHT)
                taken[i], taken[-1] = taken[-1], taken[i]
                taken.pop().release()
        for ticket in taken:
            ticket.release()
        times.sort()
        return _Timing(times[len(times) // 2] / 1e3, times[len(times) * 99 // 100] / 1e3)

    def housekeeping(self, rounds: int, size: str) -> list[Row]:
        fills, commits, sweeps = [], [], []
        for i in range(rounds):
            id = self.ids[i]
            fill = self.pool.begin_fill(id)
            fills.append(max(_slices(fill.add, self.keys)))
            began = time.thread_time_ns()
            fill.commit()
            commits.append((time.thread_time_ns() - began) / 1e6)
            for removed in self.ids[100 * (i + 1) : 100 * (i + 1) + 50]:
                self.pool.remove_worker(removed)
            sweeps.append(max(_until_done(lambda: self.pool.sweep(SWEEP))))
        return [
            Row.at_most(f"snapshot of {size} keys, longest slice of {FILL}", median(fills), "ms", 1, COMMAND),
            Row.at_most(f"snapshot of {size} keys, swapping it in", median(commits), "ms", 1, COMMAND),
            Row.at_most(f"50 workers gone, {size} keys, longest sweep of {SWEEP}", median(sweeps), "ms", 1, COMMAND),
        ]


def _slices(add: Callable[[list[bytes]], object], keys: list[bytes]) -> Iterator[float]:
    """CPU milliseconds of each slice."""
    for at in range(0, len(keys), FILL):
        part = keys[at : at + FILL]
        began = time.thread_time_ns()
        add(part)
        yield (time.thread_time_ns() - began) / 1e6


def _until_done(sweep: Callable[[], bool]) -> Iterator[float]:
    more = True
    while more:
        began = time.thread_time_ns()
        more = sweep()
        yield (time.thread_time_ns() - began) / 1e6
