"""Dynamo's own front ends are told as well: their wire, their index under losses, the publisher's life around it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fullhit_publisher import (
    DynamoTarget,
    EmbeddingCachePublisher,
    MemoryBroker,
    MemoryTransport,
    PublisherOptions,
    fold,
    wire,
)
from fullhit_publisher.dynamo import DynamoBook, escape_name, portions
from fullhit_publisher.wire import Update

TARGET = DynamoTarget("prod", "encoder", "generate", 2**64 - 3)
QUICK = PublisherOptions(backoff_min=0.01, backoff_max=0.02, io_timeout=0.2, close_timeout=1.0)
KEYS = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(39)]


class DynamoIndex:
    """What Dynamo's index makes of the messages: removals before additions, nothing else of them is looked at."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.messages: list[bytes] = []

    def read(self, subject: str, data: bytes) -> None:
        if subject == TARGET.subject:
            self.messages.append(data)
            envelope = msgspec.msgpack.decode(data)
            payload = msgspec.msgpack.decode(envelope["payload"])
            assert payload["worker_id"] == TARGET.instance_id
            self.keys -= set(payload["update"]["removed_keys"])
            self.keys |= set(payload["update"]["added_keys"])


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def index(broker: MemoryBroker) -> DynamoIndex:
    index = DynamoIndex()
    broker.add_reader(index.read)
    return index


@pytest.fixture
def publisher(broker: MemoryBroker) -> Iterator[EmbeddingCachePublisher]:
    publisher = EmbeddingCachePublisher(
        dynamo=TARGET, transport=MemoryTransport(broker), heartbeat_interval=0.05, options=QUICK
    )
    yield publisher
    publisher.close()


def test_a_message_is_byte_for_byte_as_a_dynamo_publisher_builds_it(
    index: DynamoIndex, publisher: EmbeddingCachePublisher, wait_until: Any
) -> None:
    publisher.publish_delta([KEYS[0]], [])
    publisher.start()
    wait_until(lambda: index.keys, "the first key")
    data = index.messages[0]
    envelope = msgspec.msgpack.decode(data)
    assert list(envelope) == ["publisher_id", "sequence", "published_at", "topic", "payload"]
    assert data[0] == 0x85
    assert envelope["sequence"] == 0
    assert 0 < envelope["publisher_id"] < 2**53
    assert envelope["topic"] == "multimodal_embedding_cache"
    assert isinstance(envelope["payload"], bytes)
    update = {"added_keys": [KEYS[0]], "removed_keys": []}
    assert envelope["payload"] == msgspec.msgpack.encode({"worker_id": TARGET.instance_id, "update": update})
    publisher.publish_delta([KEYS[1]], [KEYS[0]])
    wait_until(lambda: index.keys == {KEYS[1]}, "the change")
    assert [msgspec.msgpack.decode(one)["sequence"] for one in index.messages] == list(range(len(index.messages)))


def test_the_subject_escapes_names_as_dynamo_does() -> None:
    assert escape_name("My_NS-1 .*>é") == "My_NS-1%20%2E%2A%3E%C3%A9"
    target = DynamoTarget.for_endpoint("dyn://My_NS-1.Back End.generate", 5)
    assert target.subject == ("namespace.My_NS-1.component.Back%20End.endpoint.generate.multimodal_embedding_cache")
    assert target.name == "dynamo:5"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: DynamoTarget("", "c", "e", 1),
        lambda: DynamoTarget("n", "c", "e", 2**64),
        lambda: DynamoTarget("n", "c", "e", -1),
        lambda: DynamoTarget("n", "c", "e", 1, refresh=0.5),
        lambda: DynamoTarget.for_endpoint("a.b", 1),
        lambda: EmbeddingCachePublisher(),
        lambda: EmbeddingCachePublisher("http://127.0.0.1:1", dynamo=TARGET),
    ],
)
def test_what_cannot_be_a_target_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError):
        wrong()


def test_both_planes_name_the_instance_and_heartbeats_name_it_as_routers_do(
    broker: MemoryBroker, index: DynamoIndex, publisher: EmbeddingCachePublisher, wait_until: Any
) -> None:
    beats: list[wire.Heartbeat] = []

    def read(subject: str, data: bytes) -> None:
        if subject == wire.events_subject("default", TARGET.instance_id):
            message = wire.decode_message(wire.decode_envelope(data))
            if isinstance(message, wire.Heartbeat):
                beats.append(message)

    broker.add_reader(read)
    publisher.start()
    wait_until(lambda: beats, "a heartbeat")
    assert (beats[0].worker_id, beats[0].url) == (TARGET.instance_id, TARGET.name)


def test_after_a_break_the_index_is_right_again_removals_included(
    broker: MemoryBroker, index: DynamoIndex, publisher: EmbeddingCachePublisher, wait_until: Any
) -> None:
    publisher.publish_delta(KEYS[:10], [])
    publisher.start()
    wait_until(lambda: index.keys == set(KEYS[:10]), "the first keys")
    broker.freeze()  # swallows without an error: what is said now is lost
    publisher.publish_delta(KEYS[10:12], KEYS[:5])
    wait_until(lambda: broker.swallowed >= 2, "a message into the void")
    wait_until(lambda: not publisher.counters.connected, "the end of the connection")
    broker.start()
    wait_until(lambda: index.keys == set(KEYS[5:12]), "the repaired index")
    assert publisher.counters.dynamo_repairs == 1


def test_an_overflow_while_the_broker_is_away_is_repaired(
    broker: MemoryBroker, index: DynamoIndex, wait_until: Any
) -> None:
    publisher = EmbeddingCachePublisher(
        dynamo=TARGET,
        transport=MemoryTransport(broker),
        heartbeat_interval=0.05,
        options=PublisherOptions(backoff_min=0.01, backoff_max=0.02, max_pending_keys=3),
    )
    try:
        publisher.publish_delta(KEYS[:3], [])
        publisher.start()
        wait_until(lambda: index.keys == set(KEYS[:3]), "the first keys")
        broker.stop()
        wait_until(lambda: not publisher.counters.connected, "the end of the connection")
        publisher.publish_delta(KEYS[3:20], KEYS[:2])
        broker.start()
        wait_until(lambda: index.keys == set(KEYS[2:20]), "the repaired index")
    finally:
        publisher.close()


def test_a_cache_that_began_anew_is_emptied_there(
    index: DynamoIndex, publisher: EmbeddingCachePublisher, wait_until: Any
) -> None:
    publisher.publish_delta(KEYS[:5], [])
    publisher.start()
    wait_until(lambda: index.keys == set(KEYS[:5]), "the first keys")
    publisher.reset()
    wait_until(lambda: not index.keys, "the empty index")
    publisher.publish_delta(KEYS[5:6], [])
    wait_until(lambda: index.keys == set(KEYS[5:6]), "the new life")


def test_with_refresh_a_front_end_that_comes_late_learns_everything(broker: MemoryBroker, wait_until: Any) -> None:
    target = DynamoTarget("prod", "encoder", "generate", TARGET.instance_id, refresh=1)
    publisher = EmbeddingCachePublisher(
        dynamo=target, transport=MemoryTransport(broker), heartbeat_interval=0.05, options=QUICK
    )
    try:
        publisher.publish_delta(KEYS, [])
        publisher.start()
        wait_until(lambda: publisher.counters.dynamo_messages, "the first message")
        late = DynamoIndex()
        broker.add_reader(late.read)
        wait_until(lambda: late.keys == set(KEYS), "the late front end")
        assert publisher.counters.dynamo_repairs == 0
    finally:
        publisher.close()


@given(st.lists(st.integers(1, 700), max_size=60), st.integers(600, 5000))
def test_portions_keep_order_lose_nothing_and_fit(lengths: list[int], limit: int) -> None:
    keys = ["k" * length for length in lengths]
    runs = list(portions(keys, limit))
    assert [key for run in runs for key in run] == keys
    for run in runs:
        size = len(wire.encode(wire.Delta(1, Update(run, [])), publisher_id=1, sequence=1, published_at=1))
        assert len(run) == 1 or size <= limit


class BookMachine(RuleBasedStateMachine):
    """A cache, a book, a lossy way, and Dynamo's index at its end. After a repair both hold the same."""

    def __init__(self) -> None:
        super().__init__()
        self.book = DynamoBook(7)
        self.cache: set[str] = set()
        self.index: set[str] = set()
        self.under_way: list[Update] = []

    def deliver(self, update: Update) -> None:
        self.index -= set(update.removed_keys)
        self.index |= set(update.added_keys)

    def say(self, update: Update) -> None:
        if update.added_keys or update.removed_keys:
            self.under_way.append(self.book.record(update).update)

    @rule(added=st.sets(st.sampled_from(KEYS[:8])), removed=st.sets(st.sampled_from(KEYS[:8])))
    def change(self, added: set[str], removed: set[str]) -> None:
        added -= removed
        update = Update(sorted(added - self.cache), sorted(removed & self.cache))
        self.cache = (self.cache | added) - removed
        self.say(update)

    @rule(removed=st.sets(st.sampled_from(KEYS[:8])))
    def change_that_is_never_said(self, removed: set[str]) -> None:
        self.cache -= removed
        self.book.lost()

    @rule()
    def arrive(self) -> None:
        for update in self.under_way:
            self.deliver(update)
        self.under_way.clear()
        self.book.confirmed()

    @rule(cut=st.integers(0, 5))
    def break_off(self, cut: int) -> None:
        for update in self.under_way[:cut]:
            self.deliver(update)
        if self.under_way:
            self.book.lost()
        self.under_way.clear()

    @rule()
    def repair(self) -> None:
        if self.book.stale:
            self.book.stale = False
            announced = {fold(key) for key in self.cache}
            for keys in portions(self.book.to_repair(self.cache), 600):
                self.say(self.book.update_for(keys, announced.__contains__))
            self.arrive()
            assert self.index == self.cache

    @invariant()
    def without_trouble_the_index_is_the_cache(self) -> None:
        if not self.book.stale and not self.under_way:
            assert self.index == self.cache
            assert len(self.book) == len(self.cache)


TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
