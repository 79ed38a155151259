"""The event plane: how many keys a second the intake takes, and how long a large snapshot holds up the loop.

Everything from the bytes of a message to the index: envelope, payload, the worker's stream, the pool. Deltas carry 100
keys. The snapshot has 1,000,000 keys in the parts that the publisher makes, and replaces as many entries which the
sweep then has to strike out; its steps are what the event loop would run without a pause: taking in one part, or one
slice. Times are CPU time of the thread, because of hundreds of steps the longest would otherwise be one preemption. The
garbage collector runs as it does in the router, after `gc.freeze`.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from statistics import median

from fullhit.core import Pool, WorkerSpec
from fullhit.events import Ingest
from fullhit_publisher import wire
from fullhit_publisher.identity import worker_id_for
from fullhit_publisher.keys import digest, fold_many
from fullhit_publisher.state import SnapshotView

from .table import Row

__all__ = ["rows"]

COMMAND = "fullhit bench --only events"
KEYS = 1_000_000
QUICK_KEYS = 50_000
BATCH = 100
PART_BYTES = 512 * 1024
OTHERS = 63
URL = "http://encoder-0.invalid:30002"
NUMBER = worker_id_for(URL)
EPOCH = 1


def rows(args: argparse.Namespace) -> list[Row]:
    count = QUICK_KEYS if args.quick else KEYS
    size = "1 M" if count == KEYS else f"{count:,}"
    rng = random.Random(5)
    keys = [rng.randbytes(16).hex() for _ in range(count)]
    deltas = _deltas(keys)
    beat = _beat(len(deltas), keys)
    rates, longest, totals = [], [], []
    for _ in range(args.rounds):
        gc.collect()
        gc.freeze()
        try:
            rate, intake = _deltas_per_second(deltas, count)
            worst, total = _snapshot(intake, keys, beat)
        finally:
            gc.unfreeze()
        rates.append(rate)
        longest.append(worst)
        totals.append(total)
    return [
        Row.at_least(f"event decode + apply, {BATCH} keys each", median(rates), "keys/s", 1e6, COMMAND),
        Row.at_most(f"snapshot of {size} keys, longest step", median(longest) * 1e3, "ms", 1.0, COMMAND),
        Row.info(f"snapshot of {size} keys, all steps", median(totals), "s", COMMAND),
    ]


class _Intake:
    """An `Ingest` with one busy worker among others, on a clock that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pool = Pool("default", clock=lambda: self.now)
        self.ingest = Ingest({"default": self.pool}, clock=lambda: self.now, rng=random.Random(1))
        self.ingest.plane_up()
        for number in range(1, OTHERS + 1):
            self._add(f"http://encoder-{number}.invalid:30002")
        self._add(URL)
        self.subject = wire.events_subject("default", NUMBER)

    def _add(self, url: str) -> None:
        self.pool.add_worker(WorkerSpec(id=url, url=url))
        self.ingest.worker_added("default", url)


def _deltas_per_second(deltas: list[bytes], keys: int) -> tuple[float, _Intake]:
    intake = _Intake()
    feed, subject = intake.ingest.feed, intake.subject
    began = time.thread_time()
    for delta in deltas:
        feed(subject, delta)
    spent = time.thread_time() - began
    _expect(intake, keys)
    return keys / spent, intake


def _snapshot(intake: _Intake, keys: list[str], beat: bytes) -> tuple[float, float]:
    """Longest step and sum of all steps, in seconds, of replacing what the worker holds."""
    ingest = intake.ingest
    seq = len(keys) // BATCH
    ingest.feed(intake.subject, _beat(seq, keys[1:]))  # differs: a snapshot is wanted
    intake.now += 60
    requests = [request for request in ingest.tick() if request.worker_id == NUMBER]
    for _ in range(50):
        if requests:
            break
        intake.now += 1
        requests = [request for request in ingest.tick() if request.worker_id == NUMBER]
    view = SnapshotView(NUMBER, "default", EPOCH, seq, keys)
    parts = [
        wire.encode(part, publisher_id=1, sequence=part.part, published_at=0)
        for part in view.parts(requests[0].request_id, PART_BYTES)
    ]
    worst = total = 0.0

    def step(work: Callable[[], object]) -> object:
        nonlocal worst, total
        began = time.thread_time()
        result = work()
        spent = time.thread_time() - began
        worst, total = max(worst, spent), total + spent
        return result

    for part in parts:
        step(lambda part=part: ingest.feed_snapshot(part))  # type: ignore[misc]
        while step(ingest.run_slices):
            pass
    ingest.feed(intake.subject, beat)
    _expect(intake, len(keys))
    return worst, total


def _expect(intake: _Intake, keys: int) -> None:
    """A bench of something that does not work is worth nothing."""
    stream = intake.ingest.stream("default", URL)
    held = intake.pool.key_count(URL)
    if stream is None or stream.state != "live" or held != keys:
        raise RuntimeError(f"the intake holds {held} keys of {keys}, stream {stream}")


def _deltas(keys: list[str]) -> list[bytes]:
    return [
        wire.encode(
            wire.Delta(NUMBER, wire.Update(keys[at : at + BATCH], []), EPOCH, at // BATCH + 1, "default"),
            publisher_id=1,
            sequence=at // BATCH,
            published_at=0,
        )
        for at in range(0, len(keys), BATCH)
    ]


def _beat(seq: int, keys: list[str]) -> bytes:
    beat = wire.Heartbeat(NUMBER, EPOCH, seq, "default", len(keys), digest(fold_many(keys)), url=URL)
    return wire.encode(beat, publisher_id=1, sequence=10**9 + len(keys) % 2, published_at=0)
