"""The publisher as an encoder uses it, over a broker in memory that can be broken at will."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fullhit_publisher import (
    EmbeddingCache,
    EmbeddingCachePublisher,
    MemoryBroker,
    MemoryTransport,
    PublisherOptions,
    TransportError,
    fold,
    wire,
)
from fullhit_publisher.keys import digest

URL = "http://127.0.0.1:30002"
QUICK = PublisherOptions(backoff_min=0.01, backoff_max=0.02, io_timeout=0.2, close_timeout=1.0)
Wait = Callable[[Callable[[], object], str], None]


class Bench:
    """One publisher, one broker, one reader."""

    def __init__(self, reader_type: Any) -> None:
        self.broker = MemoryBroker()
        self.publishers: list[EmbeddingCachePublisher] = []
        self._reader_type = reader_type

    def publisher(self, **changes: Any) -> EmbeddingCachePublisher:
        settings: dict[str, Any] = {
            "transport": MemoryTransport(self.broker),
            "heartbeat_interval": 0.05,
            "options": QUICK,
        }
        publisher = EmbeddingCachePublisher(URL, **{**settings, **changes})
        self.publishers.append(publisher)
        return publisher

    def reader(self, publisher: EmbeddingCachePublisher) -> Any:
        subject = wire.snapshot_subject(publisher.pool, publisher.worker_id)
        reader = self._reader_type(
            publisher.worker_id,
            publisher.pool,
            lambda data: self.broker.request(subject, data, "_INBOX.reader"),
        )
        self.broker.add_reader(reader.on_event)
        return reader


@pytest.fixture
def bench(naive_reader: Any) -> Iterator[Bench]:
    bench = Bench(naive_reader)
    yield bench
    for publisher in bench.publishers:
        publisher.close()


def request(publisher: EmbeddingCachePublisher, number: int = 1, **changes: Any) -> bytes:
    fields = {"worker_id": publisher.worker_id, "pool": publisher.pool, "request_id": number, **changes}
    return wire.encode(wire.SnapshotRequest(**fields), publisher_id=1, sequence=0, published_at=0)


def test_changes_arrive_in_order_and_at_once(bench: Bench, wait_until: Wait) -> None:
    publisher = bench.publisher(heartbeat_interval=600.0)
    reader = bench.reader(publisher)
    publisher.start()
    wait_until(lambda: reader.beats, "the first heartbeat")
    began = time.monotonic()
    publisher.publish_delta(["a", "b"], [])
    wait_until(lambda: reader.deltas, "the first delta")
    assert time.monotonic() - began < 15
    publisher.publish_delta(["c"], ["a"])
    wait_until(lambda: len(reader.deltas) == 2, "the second delta")
    assert [(delta.seq, delta.added, delta.removed, delta.resync) for delta in reader.deltas] == [
        (1, ["a", "b"], [], False),
        (2, ["c"], ["a"], False),
    ]
    assert reader.sequences == list(range(len(reader.sequences)))


def test_heartbeats_come_while_nothing_happens(bench: Bench, wait_until: Wait) -> None:
    cache: EmbeddingCache[bytes] = EmbeddingCache(100)
    publisher = bench.publisher(device="cpu", pool="vl").attach(cache)
    cache.put("a", b"123")
    cache.get("a")
    cache.get("b")
    publisher.set_stats(inflight=3, hits=99)
    reader = bench.reader(publisher)
    publisher.start()
    wait_until(lambda: len(reader.beats) >= 4, "four heartbeats")
    beat = reader.beats[-1]
    assert (beat.url, beat.device, beat.pool, beat.interval_ms) == (URL, "cpu", "vl", 50)
    assert (beat.capacity_bytes, beat.used_bytes, beat.inflight, beat.hits, beat.misses) == (100, 3, 3, 1, 1)
    assert (beat.seq, beat.keys, beat.digest) == (1, 1, digest([fold("a")]))


def test_an_attached_cache_is_followed_from_what_it_holds(bench: Bench, wait_until: Wait) -> None:
    cache: EmbeddingCache[bytes] = EmbeddingCache(3)
    cache.put("early", b"1")
    publisher = bench.publisher().attach(cache)
    assert publisher.attach(cache) is publisher
    with pytest.raises(ValueError, match="one cache"):
        publisher.attach(EmbeddingCache(1))
    reader = bench.reader(publisher)
    publisher.start()
    for name in "abcd":
        cache.put(name, b"1")
    cache.pop("c")
    wait_until(lambda: reader.keys == set(cache.keys()) == {"b", "d"}, "the reader")
    publisher.close()
    cache.put("late", b"1")
    assert sorted(publisher.keys()) == ["b", "d"]


def test_a_burst_travels_as_few_messages(bench: Bench, wait_until: Wait) -> None:
    publisher = bench.publisher(heartbeat_interval=600.0)
    reader = bench.reader(publisher)
    for number in range(5000):
        publisher.publish_delta([f"k{number}"], [f"k{number - 10}"])
    publisher.start()
    wait_until(lambda: len(reader.keys) == 10, "the reader")
    assert len(reader.deltas) == 1


def test_what_happened_while_the_broker_was_away_arrives_later(bench: Bench, wait_until: Wait) -> None:
    bench.broker.stop()
    publisher = bench.publisher()
    reader = bench.reader(publisher)
    publisher.start()
    publisher.publish_delta(["a", "b"], [])
    wait_until(lambda: publisher.counters.connect_failures >= 3, "three attempts")
    publisher.publish_delta(["c"], ["a"])
    assert not publisher.counters.connected
    bench.broker.start()
    wait_until(lambda: reader.keys == {"b", "c"}, "the reader")
    assert not any(delta.resync for delta in reader.deltas)
    assert publisher.counters.lost_marks == 0


def test_deltas_that_may_have_been_lost_are_announced_as_such(bench: Bench, wait_until: Wait) -> None:
    publisher = bench.publisher(heartbeat_interval=600.0)
    reader = bench.reader(publisher)
    publisher.start()
    wait_until(lambda: reader.beats, "the first heartbeat")
    publisher.publish_delta(["a"], [])
    wait_until(lambda: reader.deltas, "the first delta")
    bench.broker.stop()  # no confirmation came since
    wait_until(lambda: not publisher.counters.connected, "the loss")
    beats = len(reader.beats)
    publisher.publish_delta(["b"], [])
    bench.broker.start()
    wait_until(lambda: len(reader.deltas) > 1, "the second delta")
    assert (reader.deltas[1].seq, reader.deltas[1].added, reader.deltas[1].resync) == (2, ["b"], True)
    assert len(reader.beats) == beats + 1, "a heartbeat at once"
    wait_until(lambda: reader.snapshots and reader.keys == {"a", "b"}, "the snapshot")
    assert publisher.counters.lost_marks == 1
    assert publisher.counters.reconnects == 1


def test_a_network_that_swallows_everything_is_noticed(bench: Bench, wait_until: Wait) -> None:
    publisher = bench.publisher()
    reader = bench.reader(publisher)
    publisher.start()
    publisher.publish_delta(["a"], [])
    wait_until(lambda: reader.keys == {"a"}, "the first key")
    bench.broker.freeze()
    publisher.publish_delta(["b"], [])
    wait_until(lambda: publisher.counters.connects >= 2, "a new connection")
    assert bench.broker.swallowed > 0
    bench.broker.start()
    publisher.publish_delta(["c"], [])
    wait_until(lambda: reader.keys == {"a", "b", "c"}, "the reader")
    assert publisher.counters.lost_marks >= 1


def test_an_overflow_is_made_good_by_a_snapshot(bench: Bench, wait_until: Wait) -> None:
    bench.broker.stop()
    options = PublisherOptions(max_pending_keys=10, backoff_min=0.01, backoff_max=0.02)
    publisher = bench.publisher(options=options)
    reader = bench.reader(publisher)
    publisher.start()
    publisher.publish_delta([f"k{number}" for number in range(100)], [])
    publisher.publish_delta(["x"], ["k1"])
    assert publisher.counters.overflows == 1
    bench.broker.start()
    wait_until(lambda: reader.keys == set(publisher.keys()) and len(reader.keys) == 100, "the reader")
    assert any(delta.resync for delta in reader.deltas)


def test_messages_keep_below_the_limit_of_the_broker(bench: Bench, wait_until: Wait) -> None:
    bench.broker.max_payload = 8192
    publisher = bench.publisher()
    reader = bench.reader(publisher)
    publisher.publish_delta([f"{number:032x}" for number in range(5000)], [])
    publisher.start()
    wait_until(lambda: len(reader.keys) == 5000, "the reader")
    assert len(reader.deltas) > 20
    reader.doubt()
    wait_until(lambda: reader.snapshots, "the snapshot")
    assert len(reader.snapshots[-1]) > 20
    assert publisher.counters.connect_failures == 0


def test_a_reset_begins_a_new_epoch_and_says_so_at_once(bench: Bench, wait_until: Wait) -> None:
    publisher = bench.publisher(heartbeat_interval=600.0)
    reader = bench.reader(publisher)
    publisher.start()
    publisher.publish_delta(["a"], [])
    wait_until(lambda: reader.keys == {"a"}, "the key")
    epoch = reader.epoch
    publisher.reset()
    wait_until(lambda: reader.epoch > epoch and not reader.keys, "the new epoch")
    publisher.publish_delta(["b"], [])
    wait_until(lambda: reader.keys == {"b"} and reader.seq == 1, "the first delta of the new epoch")


def test_bad_snapshot_requests_are_counted_and_survived(bench: Bench, wait_until: Wait) -> None:
    publisher = bench.publisher()
    reader = bench.reader(publisher)
    publisher.start()
    wait_until(lambda: reader.beats, "the first heartbeat")
    subject = wire.snapshot_subject(publisher.pool, publisher.worker_id)
    beat = wire.encode(reader.beats[0], publisher_id=1, sequence=0, published_at=0)
    for data, reply in (
        (b"", "_INBOX.x"),
        (b"\x91" * 1000, "_INBOX.x"),
        (beat, "_INBOX.x"),
        (request(publisher, worker_id=1), "_INBOX.x"),
        (request(publisher, pool="other"), "_INBOX.x"),
        (request(publisher), ""),
        (request(publisher), "_INBOX.*"),
        (request(publisher), "a b"),
        (request(publisher), "x" * 1000),
        (request(publisher), wire.events_subject("default", 1)),
    ):
        assert bench.broker.request(subject, data, reply) == 1
    wait_until(lambda: publisher.counters.requests_rejected == 10, "the counter")
    assert publisher.counters.snapshots == 0
    publisher.publish_delta(["a"], [])
    wait_until(lambda: reader.keys == {"a"}, "the reader")


def test_askers_are_answered_once_each_and_their_number_is_bounded(bench: Bench, wait_until: Wait) -> None:
    publisher = bench.publisher(options=PublisherOptions(max_snapshot_requests=3), heartbeat_interval=600.0)
    answers: list[tuple[str, int]] = []

    def collect(subject: str, data: bytes) -> None:
        message = wire.decode_message(wire.decode_envelope(data))
        if isinstance(message, wire.Snapshot):
            answers.append((subject, message.request_id))

    bench.broker.add_reader(collect)
    publisher.start()
    wait_until(lambda: publisher.counters.heartbeats, "the connection")
    busy, held = threading.Event(), threading.Event()

    def hold(_subject: str, data: bytes) -> None:
        busy.set()
        held.wait(20)

    # While the loop is busy in a delta, requests pile up: the same one five times, and two askers too many.
    bench.broker.add_reader(hold)
    publisher.publish_delta(["a"], [])
    assert busy.wait(20)
    loop, sender = publisher._loop, publisher._sender
    assert loop is not None and sender is not None
    for _ in range(5):
        loop.call_soon_threadsafe(sender._on_request, request(publisher, 7), "_INBOX.a")
    loop.call_soon_threadsafe(sender._on_request, request(publisher, 8), "_INBOX.a")
    for asker in "bcde":
        loop.call_soon_threadsafe(sender._on_request, request(publisher, 1), f"_INBOX.{asker}")
    held.set()
    wait_until(lambda: len(answers) == 3, "the answers")
    assert sorted(answers) == [("_INBOX.a", 8), ("_INBOX.b", 1), ("_INBOX.c", 1)]
    assert publisher.counters.requests_dropped == 2


def test_eight_threads_and_a_broker_that_comes_and_goes(bench: Bench, wait_until: Wait) -> None:
    cache: EmbeddingCache[bytes] = EmbeddingCache(50)
    publisher = bench.publisher().attach(cache)
    reader = bench.reader(publisher)
    publisher.start()
    done = threading.Event()

    def disturb() -> None:
        while not done.wait(0.03):
            bench.broker.stop()
            done.wait(0.02)
            bench.broker.start()

    def work(seed: int) -> None:
        for step in range(1500):
            key = str((step * 7 + seed * 131) % 200)
            cache.put(key, b"x") if step % 4 else cache.pop(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    trouble = threading.Thread(target=disturb)
    for thread in (*threads, trouble):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    trouble.join()
    bench.broker.start()
    wait_until(lambda: reader.keys == set(cache.keys()) and not reader.in_doubt, "the reader")
    assert set(publisher.keys()) == set(cache.keys())


def test_publishing_neither_waits_nor_fails_whatever_the_state(bench: Bench) -> None:
    bench.broker.stop()
    publisher = bench.publisher()
    publisher.publish_delta(["before"], [])
    publisher.start()
    began = time.monotonic()
    for number in range(2000):
        publisher.publish_delta((str(number) for _ in range(1)), ())
    assert time.monotonic() - began < 10
    publisher.close()
    publisher.publish_delta(["after"], [])
    keys = set(publisher.keys())
    assert "before" in keys and "after" not in keys


def test_the_callers_mistakes_are_the_callers(bench: Bench) -> None:
    publisher = bench.publisher()
    with pytest.raises(TypeError, match="text"):
        publisher.publish_delta([1], [])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="list of keys"):
        publisher.publish_delta("abc", [])
    with pytest.raises(ValueError, match="1024"):
        publisher.publish_delta(["x" * 1025], [])
    assert publisher.keys() == []


def test_the_last_words_are_sent_on_close(bench: Bench) -> None:
    publisher = bench.publisher(heartbeat_interval=600.0)
    reader = bench.reader(publisher)
    publisher.start()
    publisher.publish_delta(["a"], [])
    publisher.close()
    assert reader.keys == {"a"}
    assert (reader.beats[-1].seq, reader.beats[-1].keys) == (1, 1)
    publisher.close()
    with pytest.raises(RuntimeError, match="closed"):
        publisher.start()
    assert "closed" in repr(publisher)


def test_close_is_bounded_when_the_broker_swallows_everything(bench: Bench, wait_until: Wait) -> None:
    publisher = bench.publisher(options=PublisherOptions(io_timeout=30.0, close_timeout=0.3))
    publisher.start()
    wait_until(lambda: publisher.counters.heartbeats, "the connection")
    bench.broker.freeze()
    publisher.publish_delta(["a"], [])
    began = time.monotonic()
    publisher.close()
    assert time.monotonic() - began < 15


def test_closing_what_was_never_started_is_harmless(bench: Bench) -> None:
    publisher = bench.publisher()
    publisher.close()
    publisher.close()


async def test_it_is_an_async_context_manager(bench: Bench) -> None:
    cache: EmbeddingCache[bytes] = EmbeddingCache(10)
    publisher = bench.publisher()
    reader = bench.reader(publisher)
    async with publisher.attach(cache) as entered:
        assert entered is publisher
        await asyncio.to_thread(cache.put, "a", b"1")
    assert reader.keys == {"a"}
    assert not any(thread.name == "fullhit-publisher" and thread.is_alive() for thread in threading.enumerate())


def test_a_fault_of_a_transport_is_logged_and_tried_again(
    bench: Bench, wait_until: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(MemoryTransport):
        attempts = 0

        async def connect(self, *args: Any) -> Any:
            Odd.attempts += 1
            if Odd.attempts == 1:
                raise KeyError("a bug")
            if Odd.attempts == 2:
                raise TransportError("away")
            return await super().connect(*args)

    publisher = bench.publisher(transport=Odd(bench.broker))
    reader = bench.reader(publisher)
    publisher.publish_delta(["a"], [])
    publisher.start()
    wait_until(lambda: reader.keys == {"a"}, "the reader")
    assert [record.levelname for record in caplog.records if "retrying" in record.message] == ["WARNING"]
    assert "is back after" in caplog.text


@pytest.mark.parametrize(
    "bad",
    [
        {"url": "http://h/path"},
        {"device": ""},
        {"pool": ""},
        {"pool": "p" * 200},
        {"heartbeat_interval": 0},
        {"event_plane": "redis://h", "transport": None},
    ],
)
def test_impossible_settings_are_refused(bench: Bench, bad: dict[str, Any]) -> None:
    settings = {"url": URL, "transport": MemoryTransport(bench.broker), **bad}
    with pytest.raises(ValueError, match=r".+"):
        EmbeddingCachePublisher(settings.pop("url"), **settings)


@pytest.mark.parametrize("bad", [{"io_timeout": 0}, {"backoff_max": 0.01}, {"hold": -1}, {"max_snapshot_requests": 0}])
def test_impossible_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"above|below|negative"):
        PublisherOptions(**bad)
