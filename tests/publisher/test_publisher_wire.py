"""The wire against real Dynamo messages, against itself, and against arbitrary bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fullhit_publisher import wire
from fullhit_publisher.wire import Delta, Envelope, Heartbeat, Limits, Snapshot, SnapshotRequest, Update

CAPTURED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "dynamo_events.json").read_text())
U64 = st.integers(0, 2**64 - 1)
KEYS = st.lists(st.text(max_size=40), max_size=6)
NAME = st.text(max_size=20)

messages = st.one_of(
    st.builds(
        Delta,
        U64,
        st.builds(Update, KEYS, KEYS),
        U64,
        st.integers(1, 2**64 - 1),
        NAME,
        st.booleans(),
    ),
    st.builds(Delta, U64, st.builds(Update, KEYS, KEYS)),
    st.builds(Heartbeat, U64, U64, U64, NAME, U64, U64, U64, U64, NAME, NAME, U64, U64, U64, U64),
    st.builds(SnapshotRequest, U64, NAME, U64),
    st.builds(
        lambda parts, *rest: Snapshot(*rest[:5], parts // 2, parts, rest[5]),
        st.integers(1, 1000),
        U64,
        U64,
        U64,
        NAME,
        U64,
        KEYS,
    ),
)


def pack(content: object, topic: str = wire.TOPIC_DELTA, **changes: object) -> bytes:
    envelope = {"publisher_id": 1, "sequence": 2, "published_at": 3, "topic": topic}
    return msgspec.msgpack.encode({**envelope, "payload": msgspec.msgpack.encode(content), **changes})


def read(data: bytes, limits: Limits = wire.DEFAULT_LIMITS) -> wire.Message:
    return wire.decode_message(wire.decode_envelope(data, limits), limits)


def cause_of(data: bytes, limits: Limits = wire.DEFAULT_LIMITS) -> str:
    with pytest.raises(wire.WireError) as caught:
        read(data, limits)
    assert caught.value.cause in wire.CAUSES
    return caught.value.cause


def test_all_captured_releases_and_transports_are_here() -> None:
    assert len(CAPTURED) == 77
    assert {event["release"].rsplit("-", 1)[1] for event in CAPTURED} == {"1.3.1", "1.4.2", "1.6.1"}
    assert {event["transport"] for event in CAPTURED} == {"nats", "zmq-direct", "zmq-broker"}


@pytest.mark.parametrize("event", CAPTURED, ids=lambda event: f"{event['release'][-5:]}-{event['transport']}")
def test_every_captured_dynamo_message_decodes_as_stated(event: dict[str, Any]) -> None:
    data = bytes.fromhex(event["hex"])
    envelope = wire.decode_envelope(data)
    expected = event["envelope"]
    assert (envelope.publisher_id, envelope.sequence, envelope.published_at, envelope.topic) == (
        expected["publisher_id"],
        expected["sequence"],
        expected["published_at"],
        expected["topic"],
    )
    message = wire.decode_message(envelope)
    assert message == Delta(
        event["payload"]["worker_id"],
        Update(event["payload"]["update"]["added_keys"], event["payload"]["update"]["removed_keys"]),
    )
    # And back: our encoder writes the very bytes that Dynamo wrote.
    assert wire.encode_envelope(envelope) == data
    assert wire.encode_payload(message) == envelope.payload


@pytest.mark.parametrize(
    "event", [event for event in CAPTURED if "frame3_header_hex" in event], ids=lambda event: event["hex"][:40]
)
def test_every_captured_zmq_frame_decodes_as_stated(event: dict[str, Any]) -> None:
    frame = bytes.fromhex(event["frame3_header_hex"] + event["hex"])
    envelope = wire.decode_zmq_frame(frame)
    assert envelope == wire.decode_envelope(bytes.fromhex(event["hex"]))
    _, publisher_id, sequence = event["frames_0_to_2_hex"]
    assert int(publisher_id, 16) == envelope.publisher_id
    assert int(sequence, 16) == envelope.sequence


@pytest.mark.parametrize("frame", [b"", b"\x01\0\0\0", b"\x02\0\0\0\0", b"\x01\0\0\0\x05abc", b"\x01\xff\xff\xff\xff"])
def test_a_broken_zmq_frame_is_named_so(frame: bytes) -> None:
    with pytest.raises(wire.WireError) as caught:
        wire.decode_zmq_frame(frame)
    assert caught.value.cause == "frame"


def test_a_dynamo_reader_finds_its_fields_in_its_order() -> None:
    delta = Delta(7, Update(["a"], ["b"]), epoch=8, seq=9, pool="p")
    data = wire.encode(delta, publisher_id=1, sequence=2, published_at=3)
    envelope = msgspec.msgpack.decode(data)
    assert list(envelope) == ["publisher_id", "sequence", "published_at", "topic", "payload"]
    assert type(envelope["payload"]) is bytes
    assert envelope["topic"] == "multimodal_embedding_cache"
    payload = msgspec.msgpack.decode(envelope["payload"])
    assert list(payload) == ["worker_id", "update", "epoch", "seq", "pool"]
    assert payload["update"] == {"added_keys": ["a"], "removed_keys": ["b"]}
    assert list(payload["update"]) == ["added_keys", "removed_keys"]


def test_the_resync_mark_is_on_the_wire_only_when_set() -> None:
    update = Update([], [])
    assert "resync" not in msgspec.msgpack.decode(wire.encode_payload(Delta(1, update, 1, 1, "p", False)))
    assert msgspec.msgpack.decode(wire.encode_payload(Delta(1, update, 1, 1, "p", True)))["resync"] is True


def test_envelope_fields_come_in_any_order_with_strangers_and_payload_as_numbers() -> None:
    payload = msgspec.msgpack.encode({"worker_id": 5, "update": {"added_keys": ["k"], "removed_keys": []}})
    data = msgspec.msgpack.encode(
        {
            "topic": wire.TOPIC_DELTA,
            "payload": list(payload),
            "published_at_ns": 12,
            "published_at": 3,
            "extra": {"deep": [1, None]},
            "sequence": 2,
            "publisher_id": 2**64 - 1,
        }
    )
    assert read(data) == Delta(5, Update(["k"], []))
    assert wire.decode_envelope(data).publisher_id == 2**64 - 1


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"worker_id": 1, "cache_keys": ["a", "b"]}, wire.DynamoSnapshot(1, ["a", "b"])),
        ({"worker_id": 1, "update": {"Snapshot": {"cache_keys": ["a"]}}}, wire.DynamoSnapshot(1, ["a"])),
        (
            {"worker_id": 1, "update": {"Delta": {"added_keys": ["a"], "removed_keys": ["b"]}}},
            Delta(1, Update(["a"], ["b"])),
        ),
        (
            {"x": 0, "update": {"removed_keys": [], "y": 1, "added_keys": ["a"]}, "worker_id": 1},
            Delta(1, Update(["a"], [])),
        ),
    ],
)
def test_all_payload_forms_dynamo_ever_had_decode(payload: object, expected: object) -> None:
    assert read(pack(payload)) == expected


@given(messages, U64, U64, U64)
def test_messages_survive_the_round_trip(message: Any, publisher: int, sequence: int, at: int) -> None:
    data = wire.encode(message, publisher_id=publisher, sequence=sequence, published_at=at)
    envelope = wire.decode_envelope(data)
    assert envelope == Envelope(publisher, sequence, at, wire.topic_of(message), wire.encode_payload(message))
    assert wire.decode_message(envelope) == message


def decodes_or_wire_error(data: bytes) -> None:
    for decode in (read, wire.decode_zmq_frame):
        try:
            decode(data)
        except wire.WireError as error:
            assert error.cause in wire.CAUSES


@given(st.binary(max_size=300))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\x91" * 100_000)
@settings(max_examples=300)
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    decodes_or_wire_error(data)
    for topic in (wire.TOPIC_DELTA, wire.TOPIC_HEARTBEAT, wire.TOPIC_SNAPSHOT, wire.TOPIC_SNAPSHOT_REQUEST):
        decodes_or_wire_error(wire.encode_envelope(Envelope(1, 2, 3, topic, data)))


@pytest.mark.parametrize("event", CAPTURED[::11], ids=lambda event: event["hex"][30:50])
def test_every_truncation_of_a_captured_message_is_a_wire_error(event: dict[str, Any]) -> None:
    data = bytes.fromhex(event["hex"])
    for length in range(len(data)):
        assert cause_of(data[:length]) in ("envelope", "payload")


@pytest.mark.parametrize("event", CAPTURED[::20], ids=lambda event: event["hex"][30:50])
def test_every_flipped_byte_of_a_captured_message_is_survived(event: dict[str, Any]) -> None:
    data = bytes.fromhex(event["hex"])
    for at in range(len(data)):
        for change in (0x01, 0x20, 0x80, 0xFF):
            decodes_or_wire_error(data[:at] + bytes((data[at] ^ change,)) + data[at + 1 :])


@given(messages, st.integers(0, 10**6), st.integers(1, 255))
def test_any_changed_byte_of_our_messages_is_survived(message: Any, at: int, change: int) -> None:
    data = bytearray(wire.encode(message, publisher_id=1, sequence=2, published_at=3))
    data[at % len(data)] ^= change
    decodes_or_wire_error(bytes(data))


GOOD = {"worker_id": 1, "update": {"added_keys": ["a"], "removed_keys": []}}
BEAT = {"worker_id": 1, "epoch": 2, "seq": 3, "pool": "p", "keys": 0, "digest": 0}
SNAP = {"worker_id": 1, "epoch": 2, "seq": 3, "pool": "p", "request_id": 1, "part": 0, "parts": 1, "keys": []}


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "envelope"),
        (b"not msgpack at all", "envelope"),
        (msgspec.msgpack.encode({"topic": "x"}), "envelope"),
        (pack(GOOD, payload=[256]), "envelope"),
        (pack(GOOD, payload="text"), "envelope"),
        (pack(GOOD, sequence=-1), "range"),
        (pack(GOOD, sequence=1.5), "envelope"),
        (pack(GOOD, "someone_else"), "topic"),
        (pack(GOOD, "x" * 1000), "range"),
        (pack([1]), "payload"),
        (pack({**GOOD, "worker_id": -1}), "range"),
        (pack({**GOOD, "worker_id": "1"}), "payload"),
        (pack({**GOOD, "worker_id": True}), "payload"),
        (pack({**GOOD, "epoch": 1}), "payload"),
        (pack({**GOOD, "epoch": 1, "seq": 0}), "range"),
        (pack({**GOOD, "epoch": -1, "seq": 1}), "range"),
        (pack({**GOOD, "pool": "p" * 300}), "range"),
        (pack({"worker_id": 1, "update": {"added_keys": [b"bytes"], "removed_keys": []}}), "payload"),
        (pack({"worker_id": 1, "update": {"Delta": {"added_keys": [1], "removed_keys": []}}}), "payload"),
        (pack({"worker_id": 1, "update": {"Delta": {"added_keys": ["a"]}}}), "payload"),
        (pack({"worker_id": 1, "cache_keys": [1]}), "payload"),
        (pack({"worker_id": 1, "cache_keys": "abc"}), "payload"),
        (pack({"worker_id": 1, "cache_keys": ["x" * 1025]}), "key_too_long"),
        (pack({"worker_id": 1, "update": {"added_keys": ["x" * 1025], "removed_keys": []}}), "key_too_long"),
        (pack({"worker_id": 1, "update": {"added_keys": ["k" * 10**7], "removed_keys": []}}), "key_too_long"),
        (pack({**BEAT, "seq": -5}, wire.TOPIC_HEARTBEAT), "range"),
        (pack({**BEAT, "hits": -5}, wire.TOPIC_HEARTBEAT), "range"),
        (pack({**BEAT, "url": "u" * 3000}, wire.TOPIC_HEARTBEAT), "range"),
        (pack({"worker_id": 1}, wire.TOPIC_HEARTBEAT), "payload"),
        (pack({**SNAP, "parts": 0}, wire.TOPIC_SNAPSHOT), "range"),
        (pack({**SNAP, "part": 1}, wire.TOPIC_SNAPSHOT), "range"),
        (pack({**SNAP, "parts": 2**60}, wire.TOPIC_SNAPSHOT), "range"),
        (pack({"worker_id": 1}, wire.TOPIC_SNAPSHOT_REQUEST), "payload"),
    ],
)
def test_bad_messages_are_refused_with_their_cause(data: bytes, cause: str) -> None:
    assert cause_of(data) == cause


def test_limits_bound_the_message_and_the_number_of_keys() -> None:
    many = pack({"worker_id": 1, "update": {"added_keys": ["a"] * 3, "removed_keys": ["b"] * 3}})
    assert cause_of(many, Limits(max_keys_per_message=5)) == "too_many_keys"
    assert cause_of(many, Limits(max_message_bytes=20)) == "too_large"
    assert isinstance(read(many, Limits(max_keys_per_message=6)), Delta)


def test_a_message_for_another_worker_or_pool_is_an_identity_error() -> None:
    delta = Delta(1, Update([], []), 1, 1, "p")
    wire.check_origin(delta, "p", 1)
    wire.check_origin(Delta(1, Update([], [])), "any", 1)
    for pool, worker in (("p", 2), ("q", 1)):
        with pytest.raises(wire.WireError) as caught:
            wire.check_origin(delta, pool, worker)
        assert caught.value.cause == "identity"


@given(st.text(max_size=1100))
def test_the_size_of_a_key_inside_a_message_is_known(key: str) -> None:
    assert wire.encoded_key_bytes(key) == len(msgspec.msgpack.encode(key))


def test_subjects_are_as_documented() -> None:
    assert wire.events_subject("default", 42) == "fullhit.v1.default.42.events"
    assert wire.snapshot_subject("Qwen/VL 2.5", 7) == "fullhit.v1.Qwen%2FVL%202%2E5.7.snapshot"
    with pytest.raises(ValueError, match="pool"):
        wire.events_subject("", 1)


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), U64)
def test_a_subject_can_be_read_back(pool: str, worker_id: int) -> None:
    subject = wire.events_subject(pool, worker_id)
    assert subject.isascii() and subject.count(".") == 4 and not set(subject) & set(" *>")
    assert wire.parse_events_subject(subject) == (pool, worker_id)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "fullhit.v1.default.42.snapshot",
        "fullhit.v2.default.42.events",
        "fullhit.v1.default.042.events",
        "fullhit.v1.default.-1.events",
        "fullhit.v1.default.²2.events",
        "fullhit.v1.default.18446744073709551616.events",
        "fullhit.v1..42.events",
        "fullhit.v1.a b.42.events",
        "fullhit.v1.%61.42.events",
        "fullhit.v1.%2e.42.events",
        "fullhit.v1.%FF.42.events",
        "fullhit.v1.%.42.events",
        "fullhit.v1.x.42.events.more",
        "namespace.x.multimodal_embedding_cache",
    ],
)
def test_other_subjects_are_none_of_ours(subject: str) -> None:
    assert wire.parse_events_subject(subject) is None


@given(st.text())
def test_any_subject_can_be_asked_about(subject: str) -> None:
    wire.parse_events_subject(subject)
