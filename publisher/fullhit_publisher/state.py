"""What a publisher knows, without I/O: the keys held, what readers have been told, and how to catch up.

Three sets matter. The *mirror* is what the cache holds now. The *announced* set is what a reader holds who
has applied every delta so far. *Pending* is the difference between the two, in both directions. Only mirror
and pending are stored; the announced set follows from them. So

* a change costs O(1), and a change undone before it was sent costs nothing on the wire;
* the digest of the announced set is the digest of the mirror XOR that of pending, and a heartbeat or a
  snapshot is exact for the last sequence number even while further changes wait;
* nothing is ever queued per call: a burst of a million calls on ten keys leaves ten keys pending.

Pending is bounded all the same. When it overflows it is dropped, as is a delta whose delivery is unknown:
the mirror stays right, readers do not know it, and the next delta says so (``resync``), upon which they read
a snapshot.

Keys are told apart by their 16-byte form, because that is what readers do. Two spellings of one key are one
key.

Sequence numbers count deltas within an epoch, from 1. A new epoch begins when the cache restarts empty. It
is the Unix time in nanoseconds, raised above the last one if the clock went back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .keys import Key, fold, key_hash
from .wire import DEFAULT_LIMITS, Delta, Heartbeat, Snapshot, Update, encoded_key_bytes

__all__ = ["MIN_MESSAGE_BYTES", "CacheStats", "PublisherState", "SnapshotView"]

MIN_MESSAGE_BYTES = 8 * 1024
"""Least useful message size: the longest key (1024 characters, 4 bytes each) and the message around it."""

# Envelope, field names, array headers and the largest numbers take 300 bytes; the rest is reserve.
_OVERHEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a heartbeat tells about the cache beside its keys. Sizes in bytes."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    inflight: int = 0
    """Requests being encoded."""
    hits: int = 0
    misses: int = 0


class SnapshotView:
    """All keys announced as of one moment; cutting them into messages needs no lock and may take its time."""

    def __init__(self, worker_id: int, pool: str, epoch: int, seq: int, keys: list[str]) -> None:
        self.worker_id = worker_id
        self.pool = pool
        self.epoch = epoch
        self.seq = seq
        self.keys = keys

    def parts(self, request_id: int, max_message_bytes: int) -> Iterator[Snapshot]:
        """Messages of at most ``max_message_bytes`` each; one without keys when the cache is empty."""
        budget = max(max_message_bytes - _OVERHEAD_BYTES - 4 * len(self.pool), 1)
        bounds = [0]
        room = budget
        for at, key in enumerate(self.keys):
            size = encoded_key_bytes(key)
            if size > room and at > bounds[-1]:
                bounds.append(at)
                room = budget
            room -= size
        bounds.append(len(self.keys))
        total = len(bounds) - 1
        for part in range(total):
            keys = self.keys[bounds[part] : bounds[part + 1]]
            yield Snapshot(self.worker_id, self.epoch, self.seq, self.pool, request_id, part, total, keys)


class PublisherState:
    """Mirror of one worker's cache and the messages that keep readers in step. Not thread-safe.

    ``clock_ns`` gives Unix time in nanoseconds and names epochs. ``max_pending_keys`` bounds the changes
    waiting to be sent, ``max_message_bytes`` each message.
    """

    def __init__(
        self,
        worker_id: int,
        *,
        clock_ns: Callable[[], int],
        pool: str = "default",
        url: str = "",
        device: str = "",
        interval_ms: int = 1000,
        max_pending_keys: int = 100_000,
        max_message_bytes: int = 512 * 1024,
    ) -> None:
        if max_pending_keys < 1:
            raise ValueError("max_pending_keys must be at least 1")
        if max_message_bytes < MIN_MESSAGE_BYTES:
            raise ValueError(f"max_message_bytes must be at least {MIN_MESSAGE_BYTES}")
        self.worker_id = worker_id
        self.pool = pool
        self.url = url
        self.device = device
        self.interval_ms = interval_ms
        self.overflows = 0
        """How often pending changes had to be dropped."""
        self.lost_marks = 0
        """How often a delta had to carry ``resync``, or will."""
        self._clock_ns = clock_ns
        self._max_pending_keys = max_pending_keys
        self._max_message_bytes = max_message_bytes
        self._stats = CacheStats()
        self._mirror: dict[Key, str] = {}
        self._to_add: dict[Key, str] = {}
        self._to_remove: dict[Key, str] = {}
        self._mirror_digest = 0
        self._pending_digest = 0
        self._resync = False
        self._seq = 0
        self._epoch = clock_ns()

    def __repr__(self) -> str:
        return (
            f"<PublisherState worker={self.worker_id} epoch={self._epoch} seq={self._seq} keys={len(self._mirror)} "
            f"pending=+{len(self._to_add)}-{len(self._to_remove)}{' resync' if self._resync else ''}>"
        )

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def seq(self) -> int:
        """Number of the last delta made; 0 before the first of this epoch."""
        return self._seq

    @property
    def digest(self) -> int:
        """Digest of the mirror, changes not yet sent included."""
        return self._mirror_digest

    @property
    def has_news(self) -> bool:
        """Whether ``next_delta`` has something to say."""
        return self._resync or bool(self._to_add) or bool(self._to_remove)

    @property
    def pending_keys(self) -> int:
        return len(self._to_add) + len(self._to_remove)

    def __len__(self) -> int:
        return len(self._mirror)

    def keys(self) -> list[str]:
        """The mirror, as the keys were first written."""
        return list(self._mirror.values())

    def announces(self, key: Key) -> bool:
        """Whether a reader holds this key who has applied every delta so far."""
        return key in self._to_remove or (key in self._mirror and key not in self._to_add)

    def apply(self, added: Iterable[str], removed: Iterable[str]) -> bool:
        """Take a change of the cache; within one call the removals come last. True when anything changed.

        Raises TypeError for a key that is not text and ValueError for one that is too long or not encodable
        as UTF-8; in these cases nothing is taken.
        """
        adding = _checked(added)
        removing = _checked(removed)
        before = len(self._to_add), len(self._to_remove), self._mirror_digest
        for text in adding:
            key = fold(text)
            if key not in self._mirror:
                self._mirror[key] = text
                self._turn(key, text, self._to_add, self._to_remove)
        for text in removing:
            key = fold(text)
            if key in self._mirror:
                # The spelling that readers have seen.
                self._turn(key, self._mirror.pop(key), self._to_remove, self._to_add)
        if self.pending_keys > self._max_pending_keys:
            self._drop_pending()
            self.overflows += 1
            self.mark_lost()
        return before != (len(self._to_add), len(self._to_remove), self._mirror_digest)

    def mark_lost(self) -> None:
        """Readers may have missed something: the next delta tells them to read a snapshot."""
        if not self._resync:
            self._resync = True
            self.lost_marks += 1

    def reset(self) -> None:
        """The cache restarted empty: a new epoch with nothing held and nothing said."""
        self._epoch = max(self._clock_ns(), self._epoch + 1)
        self._seq = 0
        self._resync = False
        self._mirror.clear()
        self._mirror_digest = 0
        self._drop_pending()

    def set_stats(self, stats: CacheStats) -> None:
        """Figures for the next heartbeats."""
        self._stats = stats

    def next_delta(self, max_message_bytes: int | None = None) -> Delta | None:
        """The next message to send, or None when readers have been told everything.

        Call until None: many changes make several deltas. A resync mark without changes makes an empty one.
        """
        if not self.has_news:
            return None
        limit = min(max_message_bytes or self._max_message_bytes, self._max_message_bytes)
        room = max(limit - _OVERHEAD_BYTES - 4 * len(self.pool), 1)
        removed, room = self._take(self._to_remove, room, nothing_yet=True)
        added: list[str] = []
        if not self._to_remove:
            added, room = self._take(self._to_add, room, nothing_yet=not removed)
        self._seq += 1
        resync, self._resync = self._resync, False
        return Delta(self.worker_id, Update(added, removed), self._epoch, self._seq, self.pool, resync)

    def heartbeat(self) -> Heartbeat:
        """What readers hold when they have applied delta ``seq``."""
        stats = self._stats
        return Heartbeat(
            worker_id=self.worker_id,
            epoch=self._epoch,
            seq=self._seq,
            pool=self.pool,
            keys=len(self._mirror) - len(self._to_add) + len(self._to_remove),
            digest=self._mirror_digest ^ self._pending_digest,
            capacity_bytes=stats.capacity_bytes,
            used_bytes=stats.used_bytes,
            url=self.url,
            device=self.device,
            inflight=stats.inflight,
            interval_ms=self.interval_ms,
            hits=stats.hits,
            misses=stats.misses,
        )

    def snapshot(self) -> SnapshotView:
        """The keys that readers hold when they have applied delta ``seq``; copies references, so O(keys)."""
        if self._to_add:
            keys = [text for key, text in self._mirror.items() if key not in self._to_add]
        else:
            keys = list(self._mirror.values())
        keys.extend(self._to_remove.values())
        return SnapshotView(self.worker_id, self.pool, self._epoch, self._seq, keys)

    def _turn(self, key: Key, text: str, into: dict[Key, str], out_of: dict[Key, str]) -> None:
        """A key changed sides: either that undoes a pending change, or it is a new one."""
        bits = key_hash(key)
        self._mirror_digest ^= bits
        self._pending_digest ^= bits
        if out_of.pop(key, None) is None:
            into[key] = text

    def _take(self, pending: dict[Key, str], room: int, *, nothing_yet: bool) -> tuple[list[str], int]:
        """Move keys out of ``pending`` while they fit into ``room`` bytes, at least one if nothing was taken
        yet.
        """
        taken: list[Key] = []
        for key, text in pending.items():
            size = encoded_key_bytes(text)
            if size > room and (taken or not nothing_yet):
                break
            room -= size
            taken.append(key)
        for key in taken:
            self._pending_digest ^= key_hash(key)
        return [pending.pop(key) for key in taken], room

    def _drop_pending(self) -> None:
        self._to_add.clear()
        self._to_remove.clear()
        self._pending_digest = 0


def _checked(keys: Iterable[str]) -> list[str]:
    if isinstance(keys, str | bytes):
        raise TypeError("pass a list of keys, not one key")
    checked = list(keys)
    for key in checked:
        if type(key) is not str:
            raise TypeError(f"a cache key must be text, not {type(key).__name__}")
        if len(key) > DEFAULT_LIMITS.max_key_chars:
            raise ValueError(f"cache key of {len(key)} characters, limit {DEFAULT_LIMITS.max_key_chars}")
        if not key.isascii():
            key.encode()  # UnicodeEncodeError, a ValueError, for lone surrogates
    return checked
