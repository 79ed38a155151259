"""Events of Dynamo's publishers, as captured from its releases: what they say, and that nothing else they could say
does harm."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullhit.core import Pool, Reason, SelectRequest, WorkerSpec
from fullhit.events import Ingest, IngestSettings, StreamSettings
from fullhit.events.dynamo_feed import DynamoFeed, FeedSettings, decode_nats
from fullhit.events.dynamo_scope import DynamoScope, escape, parse_subject
from fullhit.events.messages import decode_dynamo
from fullhit_publisher import wire
from fullhit_publisher.identity import dynamo_name
from fullhit_publisher.keys import fold

MESSAGES = json.loads((Path(__file__).parent / "data" / "dynamo_messages.json").read_text())
CAPTURES = sorted({row["capture"] for row in MESSAGES})
SUBJECT = "namespace.ns.component.encoder.endpoint.generate.multimodal_embedding_cache"
TOPIC = "multimodal_embedding_cache"
LIMITS = wire.Limits()
A, B, C, D = (hashlib.sha256(letter).hexdigest() for letter in (b"a", b"b", b"c", b"d"))
W, OTHER = 2**63 + 12345, 77


class Desk:
    """One pool that follows namespace ``ns``, a clock that stands still, and a pen for Dynamo's messages."""

    def __init__(self, scope: DynamoScope | None = None, feed: FeedSettings | None = None, **rules: object) -> None:
        self.now = 1000.0
        self.pool = Pool("enc", clock=lambda: self.now)
        self.ingest = Ingest(
            {"enc": self.pool},
            IngestSettings(stream=StreamSettings(**rules)),  # type: ignore[arg-type]
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
            rng=random.Random(1),
        )
        self.ingest.dynamo_up("enc")
        self.feed = DynamoFeed("enc", scope or DynamoScope("ns"), self.ingest, feed, clock=lambda: self.now)

    def add(self, *numbers: int) -> None:
        for number in numbers:
            name = dynamo_name(number)
            self.pool.add_worker(WorkerSpec(id=name, url=""))
            self.pool.set_ready(name, True)
            self.ingest.worker_added("enc", name)
            self.feed.worker_joined(number)

    def remove(self, number: int) -> None:
        self.pool.remove_worker(dynamo_name(number))
        self.ingest.worker_removed("enc", dynamo_name(number))

    def say(self, sequence: int, added=(), removed=(), *, worker: int = W, publisher: int = 1, subject: str = SUBJECT):
        self.feed.nats(subject, message(sequence, added, removed, worker=worker, publisher=publisher))

    def work(self) -> None:
        while self.ingest.run_slices():
            pass

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.work()
            assert self.ingest.tick(self.now) == [], "nobody answers snapshot requests"
            self.now = min(end, max(self.now + 0.001, min(self.ingest.deadline, self.now + 60)))
        self.ingest.tick(self.now)
        self.feed.expire()

    def held(self, number: int = W, keys=(A, B, C, D)) -> set[str]:
        self.work()
        return {key for key in keys if self.pool.holds(dynamo_name(number), fold(key))}

    def state(self, number: int = W) -> str:
        stream = self.ingest.stream("enc", dynamo_name(number))
        return str(stream.state) if stream is not None else "none"

    def full_hit(self, *keys: str) -> bool:
        request = SelectRequest(keys=tuple(map(fold, keys)), items=len(keys), dry_run=True)
        return self.pool.select(request).reason is Reason.FULL_HIT

    def picture(self) -> dict[int, int]:
        """Digest of each worker's entries."""
        return {int(w.id.removeprefix("dynamo:")): self.pool.digest(w.id) for w in self.pool.workers()}


def message(sequence, added=(), removed=(), *, worker=W, publisher=1, topic=TOPIC, payload=None) -> bytes:
    if payload is None:
        payload = {"worker_id": worker, "update": {"added_keys": list(added), "removed_keys": list(removed)}}
    return msgspec.msgpack.encode(
        {
            "publisher_id": publisher,
            "sequence": sequence,
            "published_at": 1_796_000_000_000,
            "topic": topic,
            "payload": msgspec.msgpack.encode(payload),
        }
    )


def play(desk: Desk, row: dict) -> None:
    if "subject" in row:
        desk.feed.nats(row["subject"], bytes.fromhex(row["hex"]))
    else:
        frames = [bytes.fromhex(part) for part in row["head"]] + [bytes.fromhex(row["frame"] + row["hex"])]
        desk.feed.zmq(frames, {row["publisher_id"]: ""} if row["transport"] == "zmq-direct" else None)


def scope_of(rows: list[dict]) -> DynamoScope:
    names = parse_subject(rows[0].get("subject", "namespace.capns.multimodal_embedding_cache"))
    assert names is not None
    return DynamoScope(names.namespace)


# What was captured.


@pytest.mark.parametrize("capture", CAPTURES)
def test_captured_messages_of_every_release_and_transport_say_what_was_published(capture: int) -> None:
    rows = [row for row in MESSAGES if row["capture"] == capture]
    for row in rows:
        data = bytes.fromhex(row["hex"])
        envelope = decode_nats(data, LIMITS)
        if "frame" in row:
            assert wire.decode_zmq_frame(bytes.fromhex(row["frame"]) + data) == envelope
        delta = decode_dynamo(envelope, LIMITS)
        assert (delta.worker_id, delta.origin.publisher_id) == (row["worker_id"], row["publisher_id"])
        assert delta.seq == row["sequence"] + 1 and not delta.origin.ordered and not delta.whole
        assert list(delta.changes.added.all()) == [fold(key) for key in row["added"]]
        assert list(delta.changes.removed.all()) == [fold(key) for key in row["removed"]]
        assert wire.decode_message(envelope) == wire.Delta(row["worker_id"], wire.Update(row["added"], row["removed"]))
    desk = Desk(scope_of(rows))
    desk.add(rows[0]["worker_id"])
    for row in rows:
        play(desk, row)
    stream = desk.ingest.stream("enc", dynamo_name(rows[0]["worker_id"]))
    assert stream is not None and stream.applied == stream.head == rows[-1]["sequence"] + 1
    assert desk.feed.counters == {} and desk.feed.messages == len(rows)


def test_releases_that_publish_to_different_scopes_are_followed_at_once() -> None:
    desk = Desk(DynamoScope("capns", "encoder"))
    rows = [row for row in MESSAGES if scope_of([row]).namespace == "capns"]
    desk.add(*{row["worker_id"] for row in rows})
    for row in sorted(rows, key=lambda row: row["sequence"]):
        play(desk, row)
    assert {row["release"] for row in rows} == {"1.3.1", "1.4.2", "1.6.1"}
    assert desk.feed.messages == len(rows) and desk.feed.counters == {}


OLDER = [
    ({"worker_id": W, "update": {"Delta": {"added_keys": [B], "removed_keys": [A]}}}, {B}),
    ({"worker_id": W, "update": {"Snapshot": {"cache_keys": [B, C]}}}, {B, C}),
    ({"worker_id": W, "cache_keys": [C]}, {C}),
    ({"worker_id": W, "cache_keys": []}, set()),
    ({"worker_id": W, "update": {"added_keys": [B], "removed_keys": []}, "epoch": 9, "seq": 4, "pool": "x"}, {A, B}),
]


@pytest.mark.parametrize(("payload", "held"), OLDER)
def test_payloads_of_other_generations_and_of_our_own_publisher_are_understood(payload: dict, held: set[str]) -> None:
    desk = Desk()
    desk.add(W)
    desk.say(0, [A])
    desk.feed.nats(SUBJECT, message(1, payload=payload))
    assert desk.held() == held
    assert desk.state() == "live"


def test_the_envelope_may_come_as_json_with_the_payload_as_numbers_or_as_base64() -> None:
    desk = Desk()
    desk.add(W)
    payload = msgspec.msgpack.encode({"worker_id": W, "update": {"added_keys": [A], "removed_keys": []}})
    envelope = {"publisher_id": 1, "sequence": 0, "published_at": 5, "topic": TOPIC, "payload": list(payload)}
    desk.feed.nats(SUBJECT, json.dumps(envelope).encode())
    assert desk.held() == {A}
    second = msgspec.msgpack.encode({"worker_id": W, "update": {"added_keys": [B], "removed_keys": []}})
    desk.feed.nats(SUBJECT, msgspec.json.encode({**envelope, "sequence": 1, "payload": second}))
    assert desk.held() == {A, B}
    third = {"worker_id": W, "update": {"added_keys": [C], "removed_keys": [A]}}
    desk.feed.nats(SUBJECT, json.dumps({**envelope, "sequence": 2, "payload": third}).encode())
    fourth = list(json.dumps({"worker_id": W, "update": {"added_keys": [D], "removed_keys": []}}).encode())
    desk.feed.nats(SUBJECT, json.dumps({**envelope, "sequence": 3, "payload": fourth}).encode())
    assert desk.held() == {B, C, D} and desk.state() == "live"
    desk.feed.nats(SUBJECT, json.dumps({**envelope, "payload": [300]}).encode())
    desk.feed.nats(SUBJECT, b'{"publisher_id": 1')
    assert desk.feed.counters == {"envelope": 2}


# Names.


@pytest.mark.parametrize("name", ["a", "My_NS-1", "Back End", "a.b*c>d", "grün", "%41"])
def test_names_survive_their_subject(name: str) -> None:
    subject = f"namespace.{escape(name)}.component.{escape(name)}.endpoint.{escape(name)}.{TOPIC}"
    assert parse_subject(subject) == (name, name, name)
    scope = DynamoScope(name, name, name)
    assert subject in scope.subjects()
    assert f"namespace.{escape(name)}.{TOPIC}" in scope.subjects()
    assert not any(token in ("", "*", ">") for text in scope.subjects() for token in text.split("."))


def test_only_the_names_that_the_pool_follows_concern_it() -> None:
    desk = Desk(DynamoScope("ns", "encoder", "generate"))
    desk.add(W)
    for subject in (
        f"namespace.other.{TOPIC}",
        f"namespace.ns.component.backend.{TOPIC}",
        f"namespace.ns.component.encoder.endpoint.clear.{TOPIC}",
    ):
        desk.say(0, [A], subject=subject)
    assert desk.held() == set() and desk.feed.counters == {}
    desk.say(0, [A], subject=f"namespace.ns.{TOPIC}")
    desk.say(1, [B], subject=f"namespace.ns.component.encoder.{TOPIC}")
    desk.say(2, [C])
    assert desk.held() == {A, B, C}
    assert DynamoScope("ns").subjects() == [
        f"namespace.ns.{TOPIC}",
        f"namespace.ns.component.*.{TOPIC}",
        f"namespace.ns.component.*.endpoint.*.{TOPIC}",
    ]


# Streams.


def test_a_gap_makes_doubtful_for_the_time_of_doubt_and_then_it_starts_from_nothing() -> None:
    desk = Desk(doubt_ttl=100.0)
    desk.add(W)
    desk.say(0, [A])
    assert desk.full_hit(A)
    desk.say(2, [B])
    assert desk.state() == "doubtful" and desk.held() == {A, B} and not desk.full_hit(B)
    desk.wait(101)
    assert desk.state() == "unknown" and desk.held() == set()
    desk.say(3, [C])
    assert desk.state() == "live" and desk.full_hit(C)


def test_a_new_publisher_clears_what_the_one_before_said_and_its_late_words_are_dropped() -> None:
    desk = Desk()
    desk.add(W)
    desk.say(0, [A], publisher=1)
    desk.say(0, [B], publisher=2)
    assert desk.held() == {B}
    desk.say(1, [C], publisher=1)
    assert desk.held() == {B} and desk.state() == "live"


def test_several_living_publishers_of_one_worker_are_counted_apart() -> None:
    desk = Desk()
    desk.add(W)
    desk.say(0, [A], publisher=1)
    desk.say(5, [B], publisher=2)
    desk.wait(5)
    desk.say(1, [C], publisher=1)  # the first one lives on
    desk.say(6, [D], publisher=2)
    assert desk.held() == {B, C, D} and desk.state() == "live"
    desk.say(2, [], [C], publisher=1)
    desk.say(7, [A], publisher=2)
    assert desk.held() == {A, B, D} and desk.state() == "live"
    desk.say(9, [C], publisher=2)  # a gap of one
    assert desk.state() == "doubtful"
    desk.say(2, [C], publisher=1)
    assert desk.ingest.counters["fullhit_events_rejected_total{cause=duplicate}"] == 1


def test_a_third_publisher_begins_anew_and_those_that_live_come_back() -> None:
    desk = Desk()
    desk.add(W)
    for publisher in (1, 2, 3):
        desk.say(0, [A], publisher=publisher)
        desk.wait(3)
    for sequence in (1, 2):
        for publisher, key in ((1, B), (2, C), (3, D)):
            desk.say(sequence, [key] if sequence == 1 else [], publisher=publisher)
    assert desk.held() == {A, B, C, D} and desk.state() == "live"


def test_no_number_of_publishers_puts_a_dynamo_worker_into_quarantine() -> None:
    desk = Desk()
    desk.add(W)
    for round_ in range(3):
        for publisher in range(40):
            desk.say(round_, [A], publisher=publisher)
        desk.wait(5)
    assert desk.state() in ("live", "doubtful")


def test_a_vanished_worker_takes_its_keys_along_and_late_events_do_not_bring_them_back() -> None:
    desk = Desk()
    desk.add(W, OTHER)
    desk.say(0, [A])
    desk.say(0, [A], worker=OTHER, publisher=2)
    desk.remove(W)
    desk.say(1, [B])
    assert desk.feed.waiting == 1
    desk.wait(6)
    assert desk.feed.waiting == 0 and desk.feed.counters == {"unknown_worker": 1}
    desk.add(W)
    assert desk.held() == set() and desk.held(OTHER) == {A}


def test_messages_that_come_before_their_worker_is_discovered_are_not_lost() -> None:
    desk = Desk()
    desk.say(0, [A, B])
    desk.say(1, [C], [A])
    desk.say(0, [D], worker=OTHER, publisher=9)
    desk.now += 2
    desk.add(W)
    assert desk.held() == {B, C} and desk.state() == "live"
    assert desk.feed.waiting == 1


def test_what_waits_for_discovery_is_bounded() -> None:
    desk = Desk(feed=FeedSettings(max_waiting=10, max_waiting_bytes=100_000))
    for sequence in range(20):
        desk.say(sequence, [A])
    assert desk.feed.waiting == 10 and desk.feed.counters == {"unknown_worker": 10}
    desk = Desk(feed=FeedSettings(max_waiting_bytes=1000))
    desk.say(0, [A] * 100)
    assert desk.feed.waiting == 0
    desk = Desk(feed=FeedSettings(max_waiting_bytes=20_000))
    for sequence in range(20):
        desk.say(sequence, [str(n) for n in range(60)])  # 180 bytes each on the wire, some 8,000 as they wait
    assert desk.feed.waiting == 2
    desk.add(W)
    assert desk.feed.waiting == 0
    desk.say(20, ["x"] * 60, worker=OTHER, publisher=9)
    assert desk.feed.waiting == 1, "what went in has made room"


def test_a_worker_of_ours_with_the_same_number_is_another_worker() -> None:
    desk = Desk()
    url = "http://encoder.invalid:1"
    desk.pool.add_worker(WorkerSpec(id=url, url=url))
    desk.ingest.worker_added("enc", url)
    number = wire.parse_events_subject(wire.events_subject("enc", 5))
    assert number is not None
    from fullhit_publisher.identity import worker_id_for

    desk.add(worker_id_for(url))
    desk.say(0, [A], worker=worker_id_for(url))
    assert desk.held(worker_id_for(url)) == {A}
    assert not desk.pool.holds(url, fold(A))


def test_promised_hits_that_were_encoded_after_all_speak_for_a_lost_removal() -> None:
    desk = Desk(doubt_ttl=100.0)
    promised: set[bytes] = set()
    desk.ingest.promised = lambda pool, worker, keys: (
        (pool, worker) == ("enc", dynamo_name(W)) and bool(promised & set(keys))
    )
    desk.add(W)
    desk.say(0, [A, B, C])
    for sequence in range(1, 20):
        desk.say(sequence, [A])
    assert desk.state() == "live", "nobody was promised anything"
    promised.update(map(fold, (A, B, C)))
    desk.say(20, [A])
    desk.say(21, [B])
    assert desk.state() == "live"  # may be evictions on the way
    desk.say(22, [C], [C])  # removed and added: no contradiction
    desk.say(23, [D])
    assert desk.state() == "live"
    desk.say(24, [C])
    assert desk.state() == "doubtful" and not desk.full_hit(A)


def test_a_publisher_that_is_silent_for_very_long_is_doubted_until_it_speaks() -> None:
    desk = Desk(silent_ttl=3600.0, doubt_ttl=600.0)
    desk.add(W)
    desk.say(0, [A])
    desk.wait(3590)
    assert desk.full_hit(A)
    desk.wait(20)
    assert desk.state() == "doubtful"
    desk.say(1, [B])
    assert desk.state() == "live" and desk.full_hit(A, B)


def test_the_loss_of_the_plane_is_that_of_this_deployment_alone() -> None:
    desk = Desk(plane_grace=5.0)
    desk.add(W)
    desk.say(0, [A])
    desk.ingest.plane_lost()
    desk.wait(6)
    assert desk.state() == "live"
    desk.ingest.dynamo_lost("enc")
    desk.wait(6)
    assert desk.state() == "doubtful"
    desk.ingest.dynamo_up("enc")
    desk.say(1, [B])
    assert desk.state() == "live"
    desk.ingest.messages_lost("slow_consumer", "other")
    assert desk.state() == "live"
    desk.ingest.messages_lost("slow_consumer", "enc")
    assert desk.state() == "doubtful"


def test_copies_from_several_brokers_are_taken_once() -> None:
    desk = Desk(feed=FeedSettings(remembered=100))
    desk.add(W)
    for sequence in range(300):
        envelope = message(sequence, [f"{sequence:032x}"])
        frame = b"\x01" + len(envelope).to_bytes(4, "big") + envelope
        for _ in range(3):
            desk.feed.zmq([SUBJECT.encode(), (1).to_bytes(8, "big"), sequence.to_bytes(8, "big"), frame])
    assert desk.feed.messages == 300
    assert desk.pool.key_count(dynamo_name(W)) == 300
    assert "fullhit_events_rejected_total{cause=duplicate}" not in desk.ingest.counters


def test_a_direct_publisher_that_discovery_does_not_know_is_refused() -> None:
    desk = Desk()
    desk.add(W)
    row = next(row for row in MESSAGES if row["transport"] == "zmq-direct")
    frames = [bytes.fromhex(part) for part in row["head"]] + [bytes.fromhex(row["frame"] + row["hex"])]
    desk.feed.zmq(frames, {})
    assert desk.feed.counters == {"identity": 1}


# Bad input.


class Spoiled:
    """A pool in which every worker of the captures holds something, and each captured message can be spoiled."""

    def __init__(self) -> None:
        self.desk = Desk(DynamoScope("capns"))
        self.rows = [r for r in MESSAGES if scope_of([r]).namespace == "capns"]
        self.workers = {row["worker_id"] for row in self.rows}
        self.desk.add(*self.workers)
        for row in self.rows:
            play(self.desk, row)
        self.desk.work()
        for number in self.workers:
            keys = [hashlib.sha256(f"{number}/{n}".encode()).digest()[:16] for n in range(20)]
            self.desk.pool.apply_delta(dynamo_name(number), keys, ())

    def others(self, worker: int) -> dict[int, int]:
        return {number: digest for number, digest in self.desk.picture().items() if number != worker}

    def check(self, row: dict, data: bytes, frames: list[bytes] | None = None) -> None:
        before = self.others(row["worker_id"])
        counted = sum(self.desk.feed.counters.values()) + self.desk.feed.messages
        if frames is None:
            self.desk.feed.nats(row["subject"], data)
        else:
            self.desk.feed.zmq(frames, {row["publisher_id"]: ""} if row["transport"] == "zmq-direct" else None)
        self.desk.work()
        assert self.others(row["worker_id"]) == before
        if frames is None:
            assert sum(self.desk.feed.counters.values()) + self.desk.feed.messages > counted


def samples(transport: str, per_capture: int = 2) -> list[dict]:
    seen: dict[int, int] = {}
    out = []
    for row in MESSAGES:
        if row["transport"] == transport and scope_of([row]).namespace == "capns":
            seen[row["capture"]] = seen.get(row["capture"], 0) + 1
            if seen[row["capture"]] <= per_capture:
                out.append(row)
    return out


@pytest.mark.parametrize("row", samples("nats"), ids=lambda row: f"{row['release']}-{row['sequence']}")
def test_every_truncation_of_a_captured_message_is_counted_and_survived(row: dict) -> None:
    spoiled = Spoiled()
    data = bytes.fromhex(row["hex"])
    refused = 0
    for length in range(len(data)):
        spoiled.check(row, data[:length])
        refused += 1
    assert sum(spoiled.desk.feed.counters.values()) == refused
    assert set(spoiled.desk.feed.counters) <= wire.CAUSES


@pytest.mark.parametrize("row", samples("nats", 1), ids=lambda row: row["release"])
def test_every_corruption_of_one_byte_is_survived_and_touches_no_other_worker(row: dict) -> None:
    spoiled = Spoiled()
    data = bytes.fromhex(row["hex"])
    rng = random.Random(5)
    for place in range(len(data)):
        spoiled.desk.now += 0.01
        for value in {data[place] ^ (1 << bit) for bit in range(8)} | set(rng.choices(range(256), k=6)):
            if value != data[place]:
                spoiled.check(row, data[:place] + bytes([value]) + data[place + 1 :])
    assert set(spoiled.desk.feed.counters) <= wire.CAUSES | {"unknown_worker"}


@pytest.mark.parametrize("transport", ["zmq-direct", "zmq-broker"])
def test_spoiled_frames_are_survived_and_touch_no_other_worker(transport: str) -> None:
    for row in samples(transport, 1):
        spoiled = Spoiled()
        frames = [bytes.fromhex(part) for part in row["head"]] + [bytes.fromhex(row["frame"] + row["hex"])]
        for number, frame in enumerate(frames):
            for length in range(len(frame)):
                spoiled.check(row, b"", [*frames[:number], frame[:length], *frames[number + 1 :]])
            for place in range(len(frame)):
                for value in (frame[place] ^ 1, frame[place] ^ 0x80, 0xFF, 0x00):
                    bad = frame[:place] + bytes([value]) + frame[place + 1 :]
                    spoiled.check(row, b"", [*frames[:number], bad, *frames[number + 1 :]])
        for count in (0, 1, 2, 3, 5):
            spoiled.check(row, b"", (frames * 2)[:count])
        assert set(spoiled.desk.feed.counters) <= wire.CAUSES | {"unknown_worker", "subject"}


@given(st.binary(max_size=300) | st.binary(max_size=40).map(lambda b: b'{"publisher_id":' + b))
@settings(max_examples=150, deadline=None)
def test_no_bytes_make_the_feed_raise(data: bytes) -> None:
    desk = Desk()
    desk.add(W)
    desk.feed.nats(SUBJECT, data)
    desk.feed.zmq([data, data[:8], data[8:16], data])
    assert desk.feed.messages == 0


@given(st.text(max_size=60) | st.text("namespce.%2*>", max_size=60).map(lambda t: f"namespace.{t}.{TOPIC}"))
@settings(max_examples=150, deadline=None)
def test_no_subject_makes_the_feed_raise(subject: str) -> None:
    Desk().feed.nats(subject, b"")


BAD = {
    "a key that is no text": {"worker_id": W, "update": {"added_keys": [1], "removed_keys": []}},
    "keys that are no array": {"worker_id": W, "update": {"added_keys": A, "removed_keys": []}},
    "a negative worker": {"worker_id": -5, "update": {"added_keys": [A], "removed_keys": []}},
    "a worker that is a text": {"worker_id": str(W), "update": {"added_keys": [A], "removed_keys": []}},
    "a worker that is a fraction": {"worker_id": 1.5, "update": {"added_keys": [A], "removed_keys": []}},
    "no worker": {"update": {"added_keys": [A], "removed_keys": []}},
    "no update": {"worker_id": W},
    "nothing": None,
    "a key too long": {"worker_id": W, "update": {"added_keys": ["k" * 2000], "removed_keys": []}},
}


@pytest.mark.parametrize("name", BAD)
def test_payloads_that_are_none_are_counted_by_cause(name: str) -> None:
    desk = Desk()
    desk.add(W)
    desk.say(0, [A])
    envelope = msgspec.msgpack.decode(message(1, [B]))
    desk.feed.nats(SUBJECT, msgspec.msgpack.encode({**envelope, "payload": msgspec.msgpack.encode(BAD[name])}))
    assert sum(desk.feed.counters.values()) == 1 and set(desk.feed.counters) <= wire.CAUSES
    assert desk.held() == {A}


@pytest.mark.parametrize("field", ["publisher_id", "sequence", "published_at"])
@pytest.mark.parametrize("value", [-1, "x", None, 1.5])
def test_numbers_of_the_envelope_out_of_range_are_counted(field: str, value: object) -> None:
    desk = Desk()
    desk.add(W)
    desk.feed.nats(SUBJECT, msgspec.msgpack.encode({**msgspec.msgpack.decode(message(0, [A])), field: value}))
    assert sum(desk.feed.counters.values()) == 1 and desk.held() == set()


@pytest.mark.parametrize("published_at", [0, 1, 2**64 - 1])
def test_a_clock_that_is_wrong_changes_nothing(published_at: int) -> None:
    desk = Desk()
    desk.add(W)
    for sequence, key in enumerate((A, B)):
        envelope = msgspec.msgpack.decode(message(sequence, [key]))
        desk.feed.nats(SUBJECT, msgspec.msgpack.encode({**envelope, "published_at": published_at}))
    assert desk.held() == {A, B} and desk.state() == "live"


def test_the_largest_numbers_are_numbers_like_others() -> None:
    desk = Desk()
    desk.add(2**64 - 1)
    for sequence, key in ((2**64 - 2, A), (2**64 - 1, B)):
        desk.say(sequence, [key], worker=2**64 - 1, publisher=2**64 - 1)
    assert desk.held(2**64 - 1) == {A, B} and desk.state(2**64 - 1) == "live"


def test_a_publisher_that_suddenly_names_another_worker_is_refused_until_it_goes_on() -> None:
    desk = Desk()
    desk.add(W, OTHER)
    desk.say(0, [A])
    desk.say(1, [B], worker=OTHER)
    assert desk.held(OTHER) == set() and desk.feed.counters == {"identity": 1}
    desk.say(2, [C])
    assert desk.held() == {A, C}
    desk.say(3, [D], worker=OTHER)
    desk.say(4, [D], worker=OTHER)
    assert desk.held(OTHER) == {D}


def test_ten_megabytes_of_irregular_keys_and_a_million_keys_in_one_message_are_taken_in_slices() -> None:
    desk = Desk()
    desk.add(W, OTHER)
    desk.say(0, [A], worker=OTHER, publisher=2)
    desk.say(0, [f"{n}" + "x" * 900 for n in range(11_000)])
    desk.work()
    assert desk.pool.key_count(dynamo_name(W)) == 11_000
    payload = {"worker_id": W, "update": {"added_keys": [f"{n:08x}" for n in range(1_000_000)], "removed_keys": []}}
    desk.feed.nats(SUBJECT, message(1, payload=payload))
    desk.say(2, [B])
    desk.say(1, [C], worker=OTHER, publisher=2)
    assert desk.pool.holds(dynamo_name(OTHER), fold(C)), "another worker need not wait"
    desk.work()
    assert desk.pool.key_count(dynamo_name(W)) == 1_011_001 and desk.state() == "live"
    desk.feed.nats(
        SUBJECT, message(3, payload={**payload, "update": {"added_keys": [""] * 1_000_001, "removed_keys": []}})
    )
    assert desk.feed.counters == {"too_many_keys": 1}
    desk.feed.nats(SUBJECT, b"\x85" + bytes(17 << 20))
    assert desk.feed.counters == {"too_many_keys": 1, "too_large": 1}


# A lossy network.


@st.composite
def lives(draw: st.DrawFn) -> list[tuple]:
    """Steps of one worker's life: changes of its cache, restarts of its publisher, and what the network does."""
    return draw(
        st.lists(
            st.one_of(
                st.tuples(
                    st.just("change"), st.sets(st.integers(0, 5), max_size=2), st.sets(st.integers(0, 5), max_size=2)
                ),
                st.tuples(st.just("deliver"), st.sampled_from([0, 0, 0, 0, 1])),
                st.tuples(st.just("lose"), st.just(0)),
                st.tuples(st.just("repeat"), st.just(0)),
                st.tuples(st.just("restart")),
                st.tuples(st.just("plane")),
                st.tuples(st.just("age")),
            ),
            min_size=5,
            max_size=60,
        )
    )


@given(lives())
@settings(max_examples=120, deadline=None)
def test_a_live_stream_holds_nothing_but_what_its_publisher_held_at_that_point(steps: list[tuple]) -> None:
    desk = Desk(doubt_ttl=50.0)
    desk.add(W)
    keys = [hashlib.sha256(bytes([n])).hexdigest() for n in range(6)]
    publisher, sequence = 1, 0
    held: set[int] = set()
    truth = {(1, 0): frozenset[int]()}  # (publisher, deltas so far) -> what it holds
    wire_: list[bytes] = []
    last = b""
    for step in steps:
        desk.now += 0.01
        match step:
            case ("change", added, removed):
                held = (held - (removed - added)) | added
                data = message(
                    sequence, [keys[n] for n in added], [keys[n] for n in removed - added], publisher=publisher
                )
                wire_.append(data)
                sequence += 1
                truth[publisher, sequence] = frozenset(held)
            case ("deliver", place) if wire_:
                last = wire_.pop(min(place, len(wire_) - 1))
                desk.feed.nats(SUBJECT, last)
            case ("lose", _) if wire_:
                wire_.pop(0)
            case ("repeat", _) if last:
                desk.feed.nats(SUBJECT, last)
            case ("restart",):
                publisher, sequence, held = publisher + 1, 0, set()
                truth[publisher, 0] = frozenset()
            case ("plane",):
                desk.ingest.dynamo_lost("enc")
                desk.ingest.dynamo_up("enc")
            case ("age",):
                wire_.clear()  # no network keeps messages for that long
                desk.wait(60)
        desk.work()
        stream = desk.ingest.stream("enc", dynamo_name(W))
        assert stream is not None
        found = {n for n in range(6) if desk.pool.holds(dynamo_name(W), fold(keys[n]))}
        if stream.state == "live":
            assert stream.epoch is not None and stream.applied is not None
            assert found <= truth[stream.epoch, stream.applied]
        else:
            assert not any(desk.full_hit(key) for key in keys)
