"""Publisher, a network that loses, repeats, reorders and delays, and the router, driven by hypothesis.

Three promises. Once the network behaves, the index equals the worker's cache, and stays so without further snapshots.
Never, whatever happens, does a full hit rest on a worker that the stream knows to be doubtful. And a stream that calls
itself live holds exactly what the worker had announced as of the position it names.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import HealthCheck, example, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fullhit.core import NoEligibleWorker, Pool, Reason, SelectRequest, WorkerSpec
from fullhit.events import Ingest, IngestSettings, State, StreamSettings
from fullhit_publisher import wire
from fullhit_publisher.identity import worker_id_for
from fullhit_publisher.keys import fold
from fullhit_publisher.state import MIN_MESSAGE_BYTES, PublisherState

URL = "http://encoder-1.invalid:30002"
NUMBER = worker_id_for(URL)
SUBJECT = wire.events_subject("default", NUMBER)
# Long keys, so that a snapshot of two dozen takes several parts of the least size.
KEYS = [f"key-{n:02d}-" + "x" * 1000 for n in range(24)]
RULES = StreamSettings(quarantine=20.0, quarantine_max=40.0, max_buffered_deltas=8)
keys = st.lists(st.sampled_from(KEYS), max_size=6, unique=True)
some = st.integers(0, 1000)


class Worker:
    """The real publisher state, and what its sender does with it."""

    def __init__(self, epoch: int, publisher_id: int) -> None:
        self.state = PublisherState(
            NUMBER,
            clock_ns=lambda: epoch,
            url=URL,
            interval_ms=1000,
            max_pending_keys=8,
            max_message_bytes=MIN_MESSAGE_BYTES,
        )
        self.publisher_id = publisher_id
        self.sequence = 0
        self.announced: dict[tuple[int, int], set[frozenset[str]]] = {}
        self.note_announced()

    def note_announced(self) -> None:
        """Remember what a reader holds who is at the present position."""
        view = self.state.snapshot()
        self.announced.setdefault((view.epoch, view.seq), set()).add(frozenset(view.keys))

    def encode(self, message: wire.Delta | wire.Heartbeat, now: float) -> bytes:
        self.sequence += 1
        return wire.encode(
            message, publisher_id=self.publisher_id, sequence=self.sequence, published_at=int(now * 1000)
        )

    def news(self, now: float) -> list[bytes]:
        out = []
        while (delta := self.state.next_delta()) is not None:
            self.note_announced()
            out.append(self.encode(delta, now))
        return out

    def answer(self, request_id: int, now: float) -> list[bytes]:
        self.note_announced()
        return [
            wire.encode(part, publisher_id=self.publisher_id, sequence=part.part, published_at=int(now * 1000))
            for part in self.state.snapshot().parts(request_id, MIN_MESSAGE_BYTES)
        ]


class LossyWorld(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed: int) -> None:
        self.now = 1000.0
        self.rng = random.Random(seed)
        self.epoch = 1_000_000
        self.publishers = 0
        self.announced: dict[tuple[int, int], set[frozenset[str]]] = {}
        self.pool = Pool("default", clock=lambda: self.now)
        self.network: list[tuple[bool, bytes]] = []  # (by the snapshot inbox, bytes)
        self.requests: list[int] = []
        self.plane = True
        self.asked = 0
        self.ingest = Ingest(
            {"default": self.pool},
            IngestSettings(stream=RULES, slice_keys=4),
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
            rng=random.Random(seed),
        )
        self.start_worker(1)
        self.add_to_pool()
        self.ingest.plane_up()

    def add_to_pool(self) -> None:
        self.pool.add_worker(WorkerSpec(id=URL, url=URL))
        self.pool.set_ready(URL, True)
        self.ingest.worker_added("default", URL)

    def start_worker(self, step: int) -> None:
        self.epoch += step
        self.publishers += 1
        self.worker = Worker(self.epoch, self.publishers)
        self.worker.announced.update(self.announced)
        self.announced = self.worker.announced

    # What the worker does.

    @rule(added=keys, removed=keys)
    def change_cache(self, added: list[str], removed: list[str]) -> None:
        self.worker.state.apply(added, removed)

    @rule()
    def publish(self) -> None:
        self.send(self.worker.news(self.now))

    @rule()
    def beat(self) -> None:
        self.send([self.worker.encode(self.worker.state.heartbeat(), self.now)])

    @rule()
    def answer(self) -> None:
        if self.requests:
            request_id = self.requests.pop(0)
            self.send(self.worker.news(self.now))
            self.network += [(True, part) for part in self.worker.answer(request_id, self.now)]

    @rule()
    def connection_of_worker_breaks(self) -> None:
        self.worker.state.mark_lost()

    @rule(step=st.sampled_from((1, 1000, -500)))
    def restart_worker(self, step: int) -> None:
        self.start_worker(step)

    @rule()
    def empty_cache(self) -> None:
        self.worker.state.reset()
        self.worker.note_announced()
        self.epoch = max(self.epoch, self.worker.state.epoch)

    def send(self, messages: Iterable[bytes]) -> None:
        if self.plane:
            self.network += [(False, message) for message in messages]

    # What the network does.

    @rule(which=some, count=st.integers(1, 8))
    def deliver(self, which: int, count: int) -> None:
        for _ in range(count):
            if self.network:
                self.hand_over(*self.network.pop(which % len(self.network)))

    @rule(count=st.integers(1, 20))
    def deliver_in_order(self, count: int) -> None:
        for _ in range(min(count, len(self.network))):
            self.hand_over(*self.network.pop(0))

    @rule(which=some)
    def lose(self, which: int) -> None:
        if self.network:
            del self.network[which % len(self.network)]

    @rule(which=some)
    def repeat(self, which: int) -> None:
        if self.network:
            self.network.append(self.network[which % len(self.network)])

    @rule()
    def lose_requests(self) -> None:
        self.requests.clear()

    @rule()
    def plane_fails(self) -> None:
        self.plane = False
        self.network.clear()
        self.requests.clear()
        self.ingest.plane_lost()

    @rule()
    def plane_returns(self) -> None:
        if not self.plane:
            self.plane = True
            self.ingest.plane_up()

    @rule()
    def router_is_too_slow(self) -> None:
        self.network.clear()
        self.ingest.messages_lost("slow_consumer")

    def hand_over(self, by_inbox: bool, data: bytes) -> None:
        if by_inbox:
            self.ingest.feed_snapshot(data)
        else:
            self.ingest.feed(SUBJECT, data)

    # What the router does.

    @rule(seconds=st.sampled_from((0.01, 0.1, 1.0, 4.0, 40.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    @rule(seconds=st.sampled_from((0.5, 10.0, 60.0)))
    def cache_contradicts(self, seconds: float) -> None:
        self.ingest.worker_contradicts("default", URL, seconds)

    @rule()
    def slice(self) -> None:
        self.ingest.run_slices()

    @rule()
    def worker_leaves_and_returns(self) -> None:
        self.pool.remove_worker(URL)
        self.ingest.worker_removed("default", URL)
        self.add_to_pool()

    def tick(self) -> None:
        for request in self.ingest.tick(self.now):
            self.asked += 1
            if self.plane:
                self.requests.append(request.request_id)

    @invariant()
    def no_full_hit_rests_on_doubt(self) -> None:
        if not hasattr(self, "ingest"):
            return
        stream = self.ingest.stream("default", URL)
        worker = self.pool.get(URL)
        assert stream is not None
        assert worker is not None
        if stream.state is not State.LIVE:
            for key in KEYS:
                try:
                    decision = self.pool.select(SelectRequest(keys=(fold(key),), items=1, dry_run=True))
                except NoEligibleWorker:
                    continue
                assert decision.reason is not Reason.FULL_HIT, stream
        else:
            assert not stream.doubts, stream
            assert stream.applied == stream.head, stream
            assert stream.resync_cause == "", stream
            if not self.ingest.has_work:
                assert stream.epoch is not None
                assert stream.applied is not None
                assert self.held() in self.announced[stream.epoch, stream.applied], stream

    @precondition(lambda self: hasattr(self, "ingest"))
    @rule()
    def calm(self) -> None:
        """The network behaves from here on: everything must come right, and stay right at no cost."""
        self.plane_returns()
        for _ in range(150):
            self.second_of_calm()
            if self.right():
                break
        assert self.right(), f"{self.ingest.stream('default', URL)} against {self.worker.state}"
        asked = self.asked
        for _ in range(40):
            self.second_of_calm()
            assert self.right()
        assert self.asked == asked, "snapshots asked for without need"

    def second_of_calm(self) -> None:
        self.publish()
        self.beat()
        for _ in range(20):
            self.now += 0.05
            self.deliver_in_order(1000)
            while self.ingest.run_slices():
                pass
            self.tick()
            while self.requests:
                self.answer()

    def held(self) -> frozenset[str]:
        return frozenset(key for key in KEYS if self.pool.holds(URL, fold(key)))

    def right(self) -> bool:
        stream = self.ingest.stream("default", URL)
        held = self.held()
        return (
            stream is not None
            and stream.state is State.LIVE
            and not self.worker.state.has_news
            and held == set(self.worker.state.keys())
            and self.pool.key_count(URL) == len(held)
        )

    def teardown(self) -> None:
        if hasattr(self, "ingest"):
            self.calm()


_ = example  # seeds of past failures go here as explicit examples
TestLossyWorld = LossyWorld.TestCase
TestLossyWorld.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
