"""From bytes of a Dynamo deployment's event plane to the streams of one pool's workers.

Three things happen on the way, and none of them raises for what a peer sent:

* Messages are read and refused by cause. A publisher's id belongs to one worker: a message that suddenly names another
  is refused, unless that goes on, for then the first one was wrong.
* Where the same message can come several ways (several brokers), it is taken once, by publisher and count.
* A message can be earlier than the discovery record of its worker, and the first deltas of a fresh encoder are the ones
  a router wants most. So messages of unknown workers wait for a few seconds, within bounds. Those of a dead worker are
  dropped then, and never reach the index.
"""

from __future__ import annotations

import math
import re
import time
from base64 import b64decode
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from fullhit_publisher import wire
from fullhit_publisher.wire import Envelope, WireError

from .dynamo_scope import DynamoScope, Subject, parse_subject
from .ingest import Ingest
from .messages import Delta, decode_dynamo

__all__ = ["DynamoFeed", "FeedSettings", "decode_nats"]

_LOG_INTERVAL: Final = 10.0
_MAX_SUBJECTS: Final = 10_000
_JSON_START: Final = re.compile(rb"\s*\{")
_KEY_BYTES: Final = 128
"""A key as an object of its own, with its place in a list."""
_REPEATS: Final = 2
"""Messages in a row that must name another worker until the publisher is believed to be that one's."""


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """Bounds. Times in seconds."""

    patience: float = 5.0
    """How long a message waits for its worker to be discovered. Too low: a fresh encoder's first keys are missed."""
    max_waiting_bytes: int = 32 * 1024 * 1024
    max_waiting: int = 10_000
    remembered: int = 100_000
    """Publishers, and (publisher, sequence) pairs for telling copies."""


class _Early(NamedTuple):
    until: float
    delta: Delta
    data: bytes


class _Owner(NamedTuple):
    worker_id: int
    challenger: int
    times: int


class _LooseJson(msgspec.Struct):
    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: list[int] | str | dict[str, Any]


_json: Final = msgspec.json.Decoder(_LooseJson)


def decode_nats(data: bytes, limits: wire.Limits) -> Envelope:
    """An envelope as NATS carries it: msgpack, or JSON with the payload as an array of byte values (or as base64, or as
    an object). The payload's own bytes may be JSON as well.

    Raises WireError.
    """
    if not _JSON_START.match(data[:16]):
        return wire.decode_envelope(data, limits)
    if len(data) > limits.max_message_bytes:
        raise WireError("too_large", f"message of {len(data)} bytes, limit {limits.max_message_bytes}")
    try:
        loose = _json.decode(data)
        payload = _payload(loose.payload)
    except Exception as error:
        raise WireError("envelope", f"{type(error).__name__}: {error}"[:200]) from None
    if not all(0 <= number <= wire.MAX_U64 for number in (loose.publisher_id, loose.sequence, loose.published_at)):
        raise WireError("range", "a number is no unsigned 64-bit integer")
    return Envelope(loose.publisher_id, loose.sequence, loose.published_at, loose.topic, payload)


def _payload(value: list[int] | str | dict[str, Any]) -> bytes:
    if isinstance(value, dict):
        return msgspec.msgpack.encode(value)
    raw = b64decode(value, validate=True) if isinstance(value, str) else bytes(value)
    return msgspec.msgpack.encode(msgspec.json.decode(raw)) if _JSON_START.match(raw[:16]) else raw


class DynamoFeed:
    """The way into one pool. ``counters`` counts what was refused, by cause."""

    def __init__(
        self,
        pool: str,
        scope: DynamoScope,
        ingest: Ingest,
        settings: FeedSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[str], None] | None = None,
        log: Callable[[str, str], None] | None = None,
    ) -> None:
        self.pool = pool
        self.scope = scope
        self.messages = 0
        self.counters: dict[str, int] = {}
        self._ingest = ingest
        self._settings = settings or FeedSettings()
        self._clock = clock
        self._count = count
        self._log = log
        self._logged: dict[str, float] = {}
        self._subjects: dict[str, Subject | None] = {}
        self._owners: OrderedDict[int, _Owner] = OrderedDict()
        self._seen: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._early: deque[_Early] = deque()
        self._early_bytes = 0

    # What planes call.

    def nats(self, subject: str, data: bytes) -> None:
        """A message arrived on a NATS subject."""
        if not self._concerns(subject):
            return
        try:
            envelope = decode_nats(data, self._ingest.settings.limits)
        except WireError as error:
            self.refuse(error.cause, error.detail)
            return
        self._take(envelope, data)

    def zmq(self, frames: list[bytes], publishers: Mapping[int, object] | None = None) -> None:
        """A ZMQ message arrived. ``publishers``: those that discovery knows, where they are looked for there; None from
        a broker, where copies are dropped and the first frame tells the scope."""
        try:
            if len(frames) != 4:
                raise WireError("frame", f"{len(frames)} frames, 4 expected")
            if len(frames[1]) != 8 or len(frames[2]) != 8:
                raise WireError("frame", "publisher and sequence have 8 bytes each")
            subject = frames[0].decode("utf-8", "replace")
            if publishers is None:
                if not self._concerns(subject):
                    return
            elif subject != wire.TOPIC_DELTA and parse_subject(subject) is None:
                raise WireError("topic", f"unknown topic {subject[:64]!r}")
            envelope = wire.decode_zmq_frame(frames[3], self._ingest.settings.limits)
            publisher = int.from_bytes(frames[1], "big")
            if (publisher, int.from_bytes(frames[2], "big")) != (envelope.publisher_id, envelope.sequence):
                raise WireError("identity", "the frames name another publication than the envelope")
            if publishers is not None and publisher not in publishers:
                raise WireError("identity", f"publisher {publisher} is not in discovery")
        except WireError as error:
            self.refuse(error.cause, error.detail)
            return
        self._take(envelope, frames[3], once=publishers is None)

    def worker_joined(self, worker_id: int) -> None:
        """The worker is in the pool now: what waited for it goes in, in its order."""
        self.expire()
        if not self._early:
            return
        waiting, self._early = self._early, deque()
        self._early_bytes = 0
        for early in waiting:
            if early.delta.worker_id == worker_id:
                self._deliver(early.delta, early.data)
            else:
                self._wait(early)

    def refuse(self, cause: str, detail: str) -> None:
        """Count a bad message, and mention it now and then."""
        self.counters[cause] = self.counters.get(cause, 0) + 1
        if self._count is not None:
            self._count(cause)
        now = self._clock()
        if self._log is not None and now >= self._logged.get(cause, -math.inf):
            self._logged[cause] = now + _LOG_INTERVAL
            self._log(cause, detail)

    @property
    def waiting(self) -> int:
        """Messages that wait for their worker to be discovered."""
        return len(self._early)

    # Inside.

    def _concerns(self, subject: str) -> bool:
        try:
            names = self._subjects[subject]
        except KeyError:
            if len(self._subjects) >= _MAX_SUBJECTS:
                self._subjects.clear()
            names = self._subjects[subject] = parse_subject(subject)
        if names is None:
            # Others' topics under our prefix are their business; what ends like ours and is not, is bad.
            if subject.endswith(wire.TOPIC_DELTA):
                self.refuse("subject", subject[:100])
            return False
        return self.scope.covers(*names)

    def _take(self, envelope: Envelope, data: bytes, once: bool = False) -> None:
        try:
            delta = decode_dynamo(envelope, self._ingest.settings.limits)
        except WireError as error:
            self.refuse(error.cause, error.detail)
            return
        except Exception as error:  # a decoder's own surprise must not end the subscription
            self.refuse("payload", f"{type(error).__name__}: {error}"[:200])
            return
        if once and self._copy(envelope.publisher_id, envelope.sequence):
            return
        self.messages += 1
        if not self._deliver(delta, data):
            self.expire()
            self._wait(_Early(self._clock() + self._settings.patience, delta, data))

    def _copy(self, publisher: int, sequence: int) -> bool:
        key = (publisher, sequence)
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > self._settings.remembered:
            self._seen.popitem(last=False)
        return False

    def _deliver(self, delta: Delta, data: bytes) -> bool:
        publisher = delta.origin.publisher_id
        owner = self._owners.get(publisher)
        if owner is not None and owner.worker_id != delta.worker_id:
            times = owner.times + 1 if owner.challenger == delta.worker_id else 1
            if times < _REPEATS:
                self._owners[publisher] = _Owner(owner.worker_id, delta.worker_id, times)
                self.refuse("identity", f"publisher {publisher} of worker {owner.worker_id} names {delta.worker_id}")
                return True
            owner = None
        if not self._ingest.feed_dynamo(self.pool, delta, data):
            return False
        if owner is None:
            self._owners[publisher] = _Owner(delta.worker_id, delta.worker_id, 0)
            if len(self._owners) > self._settings.remembered:
                self._owners.popitem(last=False)
        elif owner.times:
            self._owners[publisher] = _Owner(owner.worker_id, owner.worker_id, 0)
        return True

    def _wait(self, early: _Early) -> None:
        settings, size = self._settings, _size(early)
        if len(self._early) >= settings.max_waiting or self._early_bytes + size > settings.max_waiting_bytes:
            self.refuse("unknown_worker", f"worker {early.delta.worker_id}; too much waits already")
            return
        self._early.append(early)
        self._early_bytes += size

    def expire(self) -> None:
        """Let time pass: drop what has waited in vain."""
        now = self._clock()
        while self._early and self._early[0].until <= now:
            early = self._early.popleft()
            self._early_bytes -= _size(early)
            self.refuse("unknown_worker", f"worker {early.delta.worker_id} is not in discovery")


def _size(early: _Early) -> int:
    """What it costs to keep: its bytes, and its keys as objects."""
    changes = early.delta.changes
    return len(early.data) + _KEY_BYTES * (len(changes.added) + len(changes.removed))
