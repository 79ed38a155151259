"""The event wire: Fullhit v1, which is NVIDIA Dynamo's embedding-cache event with fields that Dynamo ignores.

Two layers of msgpack. The *envelope* says who published (a number drawn anew by each publisher object), a
count of its publications, when, and under which topic; its ``payload`` is the second layer, whose shape the
topic decides:

=================================  ===============================================================
topic                              payload
=================================  ===============================================================
``multimodal_embedding_cache``     ``Delta``: keys that entered and left a worker's cache
``fullhit_heartbeat``              ``Heartbeat``: the state a reader's copy ought to have
``fullhit_snapshot_request``       ``SnapshotRequest``: a reader asks for all keys
``fullhit_snapshot``               ``Snapshot``: one part of the answer
=================================  ===============================================================

A Dynamo reader takes our deltas as they are (same field names, same order, its own fields first) and skips
the topics it does not know. In the other direction every payload that Dynamo has ever put under the first
topic decodes here, including two forms that never left its development branch: a delta without epoch and
sequence is ``Delta`` with those fields None, a list of all keys is ``DynamoSnapshot``.

Within a delta, removals come before additions. Our own publisher never names a key in both.

Bytes from a network are not trusted. A decoder either returns a message whose every field is in range or
raises ``WireError`` with a cause from ``CAUSES``; nothing else escapes, whatever the bytes. Sizes are
bounded by ``Limits``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from .subjects import events_subject, parse_events_subject, snapshot_subject

__all__ = [
    "CAUSES",
    "DEFAULT_LIMITS",
    "MAX_U64",
    "TOPIC_DELTA",
    "TOPIC_HEARTBEAT",
    "TOPIC_SNAPSHOT",
    "TOPIC_SNAPSHOT_REQUEST",
    "Delta",
    "DynamoSnapshot",
    "Envelope",
    "Heartbeat",
    "Limits",
    "Message",
    "Snapshot",
    "SnapshotRequest",
    "Update",
    "WireError",
    "check_origin",
    "decode_envelope",
    "decode_message",
    "decode_zmq_frame",
    "encode",
    "encode_envelope",
    "encode_payload",
    "encoded_key_bytes",
    "events_subject",
    "parse_events_subject",
    "snapshot_subject",
    "topic_of",
]

TOPIC_DELTA: Final = "multimodal_embedding_cache"
TOPIC_HEARTBEAT: Final = "fullhit_heartbeat"
TOPIC_SNAPSHOT_REQUEST: Final = "fullhit_snapshot_request"
TOPIC_SNAPSHOT: Final = "fullhit_snapshot"

MAX_U64: Final = 2**64 - 1

CAUSES: Final = frozenset(
    (
        "envelope",  # not msgpack, or not an envelope
        "payload",  # the payload is not what the topic promises
        "topic",  # a topic nobody here reads
        "range",  # a number or a text outside its bounds
        "key_too_long",
        "too_many_keys",
        "too_large",  # the message as a whole
        "identity",  # speaks for another worker or pool than the subject says
        "frame",  # ZMQ framing around the envelope
    )
)
"""Every value of ``WireError.cause``; a closed set, fit for a metric label."""

# Bounds of short texts, in characters. Names longer than these are mistakes or attacks.
_MAX_URL_CHARS: Final = 2048
_MAX_NAME_CHARS: Final = 256
_MAX_PARTS: Final = 1_000_000
_ZMQ_FRAME_VERSION: Final = 1
_ZMQ_HEADER_BYTES: Final = 5


class WireError(Exception):
    """The peer sent bytes that are no valid message. ``cause`` is one of ``CAUSES``."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader accepts. Above these a message is refused, not shortened."""

    max_message_bytes: int = 16 * 1024 * 1024
    """Envelope and payload together. NATS carries 1 MiB by default, 64 MiB at most."""
    max_key_chars: int = 1024
    """Dynamo's longest key has 129 characters."""
    max_keys_per_message: int = 1_000_000


DEFAULT_LIMITS: Final = Limits()


class Envelope(msgspec.Struct, frozen=True):
    """The outer map, its fields in the order in which Dynamo writes them."""

    publisher_id: int
    sequence: int
    published_at: int
    """Unix time in milliseconds."""
    topic: str
    payload: bytes


class Update(msgspec.Struct, frozen=True):
    """Keys that entered and keys that left; removals are applied first."""

    added_keys: list[str]
    removed_keys: list[str]


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of one worker's cache.

    ``epoch``, ``seq`` and ``pool`` are None in what Dynamo publishes. ``resync`` says that changes before
    this one may have been lost: the reader's copy is not to be trusted until it has read a snapshot.
    """

    worker_id: int
    update: Update
    epoch: int | None = None
    seq: int | None = None
    pool: str | None = None
    resync: bool = False

    @property
    def added(self) -> list[str]:
        return self.update.added_keys

    @property
    def removed(self) -> list[str]:
        return self.update.removed_keys


class Heartbeat(msgspec.Struct, frozen=True):
    """What a reader's copy of this worker's keys must look like once it has applied delta ``seq`` of
    ``epoch``.
    """

    worker_id: int
    epoch: int
    seq: int
    """The last one used; 0 when this epoch has published no delta yet."""
    pool: str
    keys: int
    digest: int
    """XOR of ``keys.key_hash`` over all keys held."""
    capacity_bytes: int = 0
    used_bytes: int = 0
    url: str = ""
    device: str = ""
    inflight: int = 0
    interval_ms: int = 0
    """Time to the next heartbeat; a reader may worry after a few of them."""
    hits: int = 0
    misses: int = 0


class SnapshotRequest(msgspec.Struct, frozen=True):
    """Asks a worker for all its keys. ``request_id`` comes back in the answer."""

    worker_id: int
    pool: str
    request_id: int


class Snapshot(msgspec.Struct, frozen=True):
    """Part ``part`` (from 0) of ``parts`` of all keys held as of delta ``seq`` of ``epoch``."""

    worker_id: int
    epoch: int
    seq: int
    pool: str
    request_id: int
    part: int
    parts: int
    keys: list[str]


class DynamoSnapshot(msgspec.Struct, frozen=True):
    """All keys of a worker, as two unreleased revisions of Dynamo published them. Read only."""

    worker_id: int
    keys: list[str]


Message = Delta | Heartbeat | SnapshotRequest | Snapshot | DynamoSnapshot


class _LooseEnvelope(msgspec.Struct):
    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: bytes | list[int]


_encoder: Final = msgspec.msgpack.Encoder()
_envelope_decoder: Final = msgspec.msgpack.Decoder(_LooseEnvelope)
_delta_decoder: Final = msgspec.msgpack.Decoder(Delta)
_heartbeat_decoder: Final = msgspec.msgpack.Decoder(Heartbeat)
_request_decoder: Final = msgspec.msgpack.Decoder(SnapshotRequest)
_snapshot_decoder: Final = msgspec.msgpack.Decoder(Snapshot)
_any_decoder: Final = msgspec.msgpack.Decoder()

_TOPICS: Final[dict[type, str]] = {
    Delta: TOPIC_DELTA,
    Heartbeat: TOPIC_HEARTBEAT,
    SnapshotRequest: TOPIC_SNAPSHOT_REQUEST,
    Snapshot: TOPIC_SNAPSHOT,
}


# Encoding. Our own messages: nothing to distrust, so nothing is checked.


def topic_of(message: Delta | Heartbeat | SnapshotRequest | Snapshot) -> str:
    """The topic under which a message travels."""
    return _TOPICS[type(message)]


def encode_payload(message: Delta | Heartbeat | SnapshotRequest | Snapshot) -> bytes:
    """The inner msgpack map of a message."""
    return _encoder.encode(message)


def encode_envelope(envelope: Envelope) -> bytes:
    """The outer msgpack map, ``payload`` as a byte string."""
    return _encoder.encode(envelope)


def encode(
    message: Delta | Heartbeat | SnapshotRequest | Snapshot,
    *,
    publisher_id: int,
    sequence: int,
    published_at: int,
) -> bytes:
    """A message in its envelope, ready for a transport. ``published_at`` is Unix time in milliseconds."""
    return _encoder.encode(
        Envelope(publisher_id, sequence, published_at, _TOPICS[type(message)], _encoder.encode(message))
    )


def encoded_key_bytes(key: str) -> int:
    """Bytes that a key takes up inside a message: a header of 1, 2, 3 or 5 bytes and its UTF-8 form."""
    size = len(key) if key.isascii() else len(key.encode())
    if size < 32:
        return size + 1
    if size < 256:
        return size + 2
    return size + 3 if size < 65536 else size + 5


# Decoding.


def decode_envelope(data: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS) -> Envelope:
    """Read the outer map: any order of fields, unknown fields skipped, payload as bytes or as an array of
    byte values.

    Raises WireError with cause ``envelope``, ``range`` or ``too_large``.
    """
    if len(data) > limits.max_message_bytes:
        raise WireError("too_large", f"message of {len(data)} bytes, limit {limits.max_message_bytes}")
    try:
        loose = _envelope_decoder.decode(data)
        payload = loose.payload if isinstance(loose.payload, bytes) else bytes(loose.payload)
    except Exception as error:  # the decoder also raises UnicodeDecodeError, RecursionError, MemoryError
        raise WireError("envelope", _short(error)) from None
    _check_u64(loose.publisher_id, loose.sequence, loose.published_at)
    _check_text(loose.topic, _MAX_NAME_CHARS, "topic")
    return Envelope(loose.publisher_id, loose.sequence, loose.published_at, loose.topic, payload)


def decode_message(envelope: Envelope, limits: Limits = DEFAULT_LIMITS) -> Message:
    """Read the payload as its topic demands.

    Raises WireError with cause ``topic``, ``payload``, ``range``, ``key_too_long``, ``too_many_keys`` or
    ``too_large``.
    """
    payload = envelope.payload
    if len(payload) > limits.max_message_bytes:
        raise WireError("too_large", f"payload of {len(payload)} bytes, limit {limits.max_message_bytes}")
    match envelope.topic:
        case "multimodal_embedding_cache":
            return _decode_delta(payload, limits)
        case "fullhit_heartbeat":
            return _decode_heartbeat(payload)
        case "fullhit_snapshot":
            return _decode_snapshot(payload, limits)
        case "fullhit_snapshot_request":
            return _decode_request(payload)
        case other:
            raise WireError("topic", f"unknown topic {other[:64]!r}")


def decode_zmq_frame(frame: bytes | bytearray | memoryview, limits: Limits = DEFAULT_LIMITS) -> Envelope:
    """Read frame 3 of Dynamo's ZMQ form: version byte 1, length of the rest as u32 big-endian, envelope."""
    view = memoryview(frame)
    if len(view) < _ZMQ_HEADER_BYTES:
        raise WireError("frame", f"{len(view)} bytes hold no frame header")
    if view[0] != _ZMQ_FRAME_VERSION:
        raise WireError("frame", f"frame version {view[0]}, known is {_ZMQ_FRAME_VERSION}")
    length = int.from_bytes(view[1:_ZMQ_HEADER_BYTES], "big")
    if length != len(view) - _ZMQ_HEADER_BYTES:
        raise WireError("frame", f"header says {length} bytes, {len(view) - _ZMQ_HEADER_BYTES} follow")
    return decode_envelope(view[_ZMQ_HEADER_BYTES:], limits)


def check_origin(message: Message, pool: str, worker_id: int) -> None:
    """Refuse a message that speaks for another worker or pool than the channel it came through.

    ``pool`` and ``worker_id`` are what the subject says. Raises WireError with cause ``identity``.
    """
    if message.worker_id != worker_id:
        raise WireError("identity", f"worker {message.worker_id} on the channel of worker {worker_id}")
    claimed = None if isinstance(message, DynamoSnapshot) else message.pool
    if claimed is not None and claimed != pool:
        raise WireError("identity", f"pool {claimed[:64]!r} on a channel of pool {pool[:64]!r}")


def _decode_delta(payload: bytes, limits: Limits) -> Delta | DynamoSnapshot:
    try:
        delta = _delta_decoder.decode(payload)
    except Exception:
        return _decode_old_delta(payload, limits)
    _check_u64(delta.worker_id)
    if (delta.epoch is None) is not (delta.seq is None):
        raise WireError("payload", "epoch and seq go together")
    if delta.epoch is not None and delta.seq is not None:
        _check_u64(delta.epoch, delta.seq)
        if delta.seq == 0:
            raise WireError("range", "deltas are counted from 1")
    if delta.pool is not None:
        _check_text(delta.pool, _MAX_NAME_CHARS, "pool")
    _check_keys(delta.update.added_keys, limits)
    _check_keys(delta.update.removed_keys, limits)
    if len(delta.update.added_keys) + len(delta.update.removed_keys) > limits.max_keys_per_message:
        raise WireError("too_many_keys", f"limit {limits.max_keys_per_message}")
    return delta


def _decode_old_delta(payload: bytes, limits: Limits) -> Delta | DynamoSnapshot:
    """The forms Dynamo had before its first release: a tagged update, or all keys beside ``worker_id``."""
    try:
        root = _any_decoder.decode(payload)
    except Exception as error:
        raise WireError("payload", _short(error)) from None
    if not isinstance(root, dict):
        raise WireError("payload", "not a map")
    worker_id = root.get("worker_id")
    if not isinstance(worker_id, int) or isinstance(worker_id, bool):
        raise WireError("payload", "worker_id is missing or no integer")
    _check_u64(worker_id)
    update = root.get("update")
    if isinstance(update, dict):
        tagged = update.get("Delta")
        if isinstance(tagged, dict):
            added, removed = tagged.get("added_keys"), tagged.get("removed_keys")
            if isinstance(added, list) and isinstance(removed, list):
                _check_texts(added, limits)
                _check_texts(removed, limits)
                return Delta(worker_id, Update(added, removed))
        tagged = update.get("Snapshot")
        if isinstance(tagged, dict):
            root = tagged
    keys = root.get("cache_keys")
    if not isinstance(keys, list):
        raise WireError("payload", "neither a delta nor a list of keys")
    _check_texts(keys, limits)
    return DynamoSnapshot(worker_id, keys)


def _decode_heartbeat(payload: bytes) -> Heartbeat:
    try:
        beat = _heartbeat_decoder.decode(payload)
    except Exception as error:
        raise WireError("payload", _short(error)) from None
    _check_u64(beat.worker_id, beat.epoch, beat.seq, beat.keys, beat.digest, beat.capacity_bytes)
    _check_u64(beat.used_bytes, beat.inflight, beat.interval_ms, beat.hits, beat.misses)
    _check_text(beat.pool, _MAX_NAME_CHARS, "pool")
    _check_text(beat.device, _MAX_NAME_CHARS, "device")
    _check_text(beat.url, _MAX_URL_CHARS, "url")
    return beat


def _decode_request(payload: bytes) -> SnapshotRequest:
    try:
        request = _request_decoder.decode(payload)
    except Exception as error:
        raise WireError("payload", _short(error)) from None
    _check_u64(request.worker_id, request.request_id)
    _check_text(request.pool, _MAX_NAME_CHARS, "pool")
    return request


def _decode_snapshot(payload: bytes, limits: Limits) -> Snapshot:
    try:
        snapshot = _snapshot_decoder.decode(payload)
    except Exception as error:
        raise WireError("payload", _short(error)) from None
    _check_u64(snapshot.worker_id, snapshot.epoch, snapshot.seq, snapshot.request_id)
    _check_text(snapshot.pool, _MAX_NAME_CHARS, "pool")
    if not 0 <= snapshot.part < snapshot.parts <= _MAX_PARTS:
        raise WireError("range", f"part {snapshot.part} of {snapshot.parts}")
    _check_keys(snapshot.keys, limits)
    return snapshot


def _check_u64(*values: int) -> None:
    for value in values:
        if not 0 <= value <= MAX_U64:
            raise WireError("range", f"{value} is no unsigned 64-bit integer")


def _check_text(text: str, limit: int, name: str) -> None:
    if len(text) > limit:
        raise WireError("range", f"{name} of {len(text)} characters, limit {limit}")


def _check_keys(keys: Sequence[str], limits: Limits) -> None:
    if len(keys) > limits.max_keys_per_message:
        raise WireError("too_many_keys", f"{len(keys)} keys, limit {limits.max_keys_per_message}")
    longest = max(map(len, keys), default=0)
    if longest > limits.max_key_chars:
        raise WireError("key_too_long", f"key of {longest} characters, limit {limits.max_key_chars}")


def _check_texts(keys: Sequence[object], limits: Limits) -> None:
    """As ``_check_keys``, for what the untyped decoder returned."""
    if not all(type(key) is str for key in keys):
        raise WireError("payload", "a key is not a text")
    _check_keys([key for key in keys if isinstance(key, str)], limits)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
