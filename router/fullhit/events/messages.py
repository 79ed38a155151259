"""From bytes to the messages that streams take: ``fullhit_publisher.wire`` with a fast lane for bulk.

Every message means what ``wire.decode_message`` says it means. Only large deltas and snapshot parts whose keys are
regular take the shorter way, which leaves the keys packed (``keybatch.py``); at the first doubt they take the long
one, which also gives the reason why bytes are refused.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from fullhit_publisher import wire
from fullhit_publisher.wire import Envelope, Limits, WireError

from .effects import Changes
from .incarnation import Origin
from .keybatch import FoldedKeys, KeyBatch, PackedKeys, TextKeys

__all__ = ["Beat", "Delta", "Part", "Received", "decode", "decode_dynamo"]

_BULK_BYTES: Final = 512
"""Payloads above this (a dozen keys) are worth the shorter way."""
_SMALL_BYTES: Final = 16 * 1024
"""Irregular arrays below this are decoded here, not by the long way."""
_NONE: Final = FoldedKeys(())
_MAX_NAME_CHARS: Final = 256


class Delta(NamedTuple):
    """A change of a cache. For publishers without epochs ``origin`` holds what stands in for one."""

    worker_id: int
    pool: str | None
    origin: Origin
    seq: int
    resync: bool
    changes: Changes
    whole: bool = False
    """``changes`` adds everything there is."""


class Part(NamedTuple):
    """A part of a snapshot."""

    worker_id: int
    pool: str | None
    origin: Origin
    request_id: int
    seq: int
    part: int
    parts: int
    keys: KeyBatch


class Beat(NamedTuple):
    """A heartbeat."""

    worker_id: int
    pool: str | None
    origin: Origin
    heartbeat: wire.Heartbeat


Received = Delta | Beat | Part


class _BulkUpdate(msgspec.Struct):
    added_keys: msgspec.Raw
    removed_keys: msgspec.Raw


class _BulkDelta(msgspec.Struct):
    worker_id: int
    update: _BulkUpdate
    epoch: int
    seq: int
    pool: str
    resync: bool = False


class _BulkForeign(msgspec.Struct):
    worker_id: int
    update: _BulkUpdate


class _BulkSnapshot(msgspec.Struct):
    worker_id: int
    epoch: int
    seq: int
    pool: str
    request_id: int
    part: int
    parts: int
    keys: msgspec.Raw


_bulk_delta: Final = msgspec.msgpack.Decoder(_BulkDelta)
_bulk_foreign: Final = msgspec.msgpack.Decoder(_BulkForeign)
_bulk_snapshot: Final = msgspec.msgpack.Decoder(_BulkSnapshot)
_texts: Final = msgspec.msgpack.Decoder(list[str])


def decode(envelope: Envelope, limits: Limits) -> Received:
    """Read the payload. Raises WireError."""
    if len(envelope.payload) > _BULK_BYTES:
        bulk = _decode_bulk(envelope, limits)
        if bulk is not None:
            return bulk
    message = wire.decode_message(envelope, limits)
    if isinstance(message, wire.Delta):
        update = message.update
        changes = Changes(
            TextKeys(update.added_keys) if update.added_keys else _NONE,
            TextKeys(update.removed_keys) if update.removed_keys else _NONE,
        )
        if message.epoch is None or message.seq is None:
            # Dynamo: the publisher is the incarnation, and its count, from 0, numbers the deltas.
            origin = _origin(envelope, envelope.publisher_id, ordered=False)
            return Delta(message.worker_id, message.pool, origin, envelope.sequence + 1, False, changes)
        origin = _origin(envelope, message.epoch)
        return Delta(message.worker_id, message.pool, origin, message.seq, message.resync, changes)
    if isinstance(message, wire.Heartbeat):
        return Beat(message.worker_id, message.pool, _origin(envelope, message.epoch), message)
    if isinstance(message, wire.Snapshot):
        return Part(
            message.worker_id,
            message.pool,
            _origin(envelope, message.epoch),
            message.request_id,
            message.seq,
            message.part,
            message.parts,
            TextKeys(message.keys),
        )
    raise WireError("topic", f"nothing for a router: {type(message).__name__}")


def decode_dynamo(envelope: Envelope, limits: Limits) -> Delta:
    """Read the payload of a message from Dynamo's event plane: all its generations, and our own publisher's, whose
    further fields mean nothing there. Who speaks and what is counted is the envelope's word. Raises WireError."""
    if envelope.topic != wire.TOPIC_DELTA:
        raise WireError("topic", f"nothing for a router: {envelope.topic[:64]!r}")
    origin = _origin(envelope, envelope.publisher_id, ordered=False)
    seq = envelope.sequence + 1
    if len(envelope.payload) > _BULK_BYTES:
        bulk = _decode_foreign(envelope.payload, limits)
        if bulk is not None:
            return Delta(bulk[0], None, origin, seq, False, bulk[1])
    message = wire.decode_message(envelope, limits)
    if isinstance(message, wire.DynamoSnapshot):
        return Delta(message.worker_id, None, origin, seq, False, Changes(TextKeys(message.keys), _NONE), True)
    if not isinstance(message, wire.Delta):
        raise WireError("topic", f"nothing for a router: {type(message).__name__}")
    changes = Changes(TextKeys(message.added), TextKeys(message.removed))
    return Delta(message.worker_id, None, origin, seq, message.resync, changes)


def _decode_foreign(payload: bytes, limits: Limits) -> tuple[int, Changes] | None:
    if len(payload) > limits.max_message_bytes or limits.max_key_chars < 64:
        return None
    try:
        delta = _bulk_foreign.decode(payload)
        added, removed = _batch(delta.update.added_keys), _batch(delta.update.removed_keys)
        if added is None or removed is None:
            return None
        if not _plausible((delta.worker_id,), "", len(added) + len(removed), limits):
            return None
        return delta.worker_id, Changes(added, removed)
    except Exception:
        return None


def _origin(envelope: Envelope, epoch: int, *, ordered: bool = True) -> Origin:
    return Origin(envelope.publisher_id, envelope.sequence, envelope.published_at, epoch, ordered)


def _decode_bulk(envelope: Envelope, limits: Limits) -> Received | None:
    """A large regular message; None for anything else, also for what must be refused."""
    payload = envelope.payload
    if len(payload) > limits.max_message_bytes or limits.max_key_chars < 64:
        return None
    try:
        if envelope.topic == wire.TOPIC_SNAPSHOT:
            part = _bulk_snapshot.decode(payload)
            keys = PackedKeys.parse(part.keys)
            numbers: tuple[int, ...] = (part.worker_id, part.epoch, part.seq, part.request_id)
            if keys is None or not _plausible(numbers, part.pool, len(keys), limits):
                return None
            if not 0 <= part.part < part.parts:
                return None
            origin = _origin(envelope, part.epoch)
            return Part(part.worker_id, part.pool, origin, part.request_id, part.seq, part.part, part.parts, keys)
        if envelope.topic == wire.TOPIC_DELTA:
            delta = _bulk_delta.decode(payload)
            added, removed = _batch(delta.update.added_keys), _batch(delta.update.removed_keys)
            if added is None or removed is None or delta.seq == 0:
                return None
            numbers = (delta.worker_id, delta.epoch, delta.seq)
            if not _plausible(numbers, delta.pool, len(added) + len(removed), limits):
                return None
            origin = _origin(envelope, delta.epoch)
            return Delta(delta.worker_id, delta.pool, origin, delta.seq, delta.resync, Changes(added, removed))
    except Exception:
        return None
    return None


def _batch(raw: msgspec.Raw) -> KeyBatch | None:
    """Keys of one array; None when it is large and irregular."""
    packed = PackedKeys.parse(raw)
    if packed is not None or len(raw) > _SMALL_BYTES:
        return packed
    if len(raw) == 1:
        return _NONE
    texts = _texts.decode(raw)
    # Long keys are for the long way to refuse.
    return TextKeys(texts) if all(len(text) <= 64 for text in texts) else None


def _plausible(numbers: tuple[int, ...], pool: str, keys: int, limits: Limits) -> bool:
    return (
        min(numbers) >= 0
        and max(numbers) <= wire.MAX_U64
        and len(pool) <= _MAX_NAME_CHARS
        and keys <= limits.max_keys_per_message
    )
