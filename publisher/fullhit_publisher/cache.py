"""An LRU cache of embeddings, bounded in bytes, which tells what enters and leaves.

One entry is one media item. The cache does not look at values: it needs their size, nothing else, so a
tensor, an array or a handle to device memory are the same to it.

Listeners hear of every change of the set of keys, in the order in which the changes happened: they are
called under the lock of the cache. Otherwise two threads could report "removed" and "added" of one key in
the wrong order, and a router would believe the contrary of the truth until somebody notices. So a listener
must be quick and must not call the cache; ``EmbeddingCachePublisher.publish_delta`` is such a one. Hits
change no set and are not reported.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from .wire import DEFAULT_LIMITS

__all__ = ["ChangeListener", "EmbeddingCache", "PutResult"]

_log = logging.getLogger(__name__)

V = TypeVar("V")

ChangeListener = Callable[[list[str], list[str]], None]
"""Called with the keys added and the keys removed; both lists are the listener's own."""


class PutResult(NamedTuple):
    """What ``EmbeddingCache.put`` did."""

    stored: bool
    added: list[str]
    """The key, when it was not there before."""
    removed: list[str]
    """Keys evicted to make room."""


class EmbeddingCache(Generic[V]):
    """Thread-safe LRU cache from key text to embedding, at most ``capacity_bytes`` in all.

    >>> cache = EmbeddingCache[bytes](10)
    >>> cache.put("a", b"12345678")
    PutResult(stored=True, added=['a'], removed=[])
    >>> cache.put("b", b"1234")
    PutResult(stored=True, added=['b'], removed=['a'])

    ``size_of`` gives the bytes of a value; by default its ``nbytes``, as arrays and tensors have, or the
    length of bytes. An entry counts as at least one byte, so that empty values cannot pile up. ``on_change``
    is the first listener. Raises ValueError for a negative capacity; a cache of capacity 0 stores nothing.
    """

    def __init__(
        self,
        capacity_bytes: int,
        on_change: ChangeListener | None = None,
        size_of: Callable[[V], int] | None = None,
    ) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must not be negative, is {capacity_bytes}")
        self._capacity = int(capacity_bytes)
        self._size_of: Callable[[V], int] = size_of or default_size
        self._listeners: tuple[ChangeListener, ...] = () if on_change is None else (on_change,)
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self._used = 0
        self._hits = 0
        self._misses = 0

    def __repr__(self) -> str:
        return f"<EmbeddingCache {len(self._entries)} keys, {self._used} of {self._capacity} bytes>"

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def hits(self) -> int:
        """``get`` calls that found their key."""
        return self._hits

    @property
    def misses(self) -> int:
        return self._misses

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        """Whether the key is held; neither counted as a hit nor as a use."""
        return key in self._entries

    def keys(self) -> list[str]:
        """All keys, the least recently used first."""
        with self._lock:
            return list(self._entries)

    def get(self, key: str) -> V | None:
        """The value, which becomes the most recently used one, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: str, value: V) -> PutResult:
        """Store a value as the most recently used one and evict the least recently used ones for it.

        A value larger than the whole cache is not stored, and what the cache holds under its key stays.
        Replacing a value adds no key. Raises TypeError or ValueError for a key that cannot be published (not
        text, over 1024 characters, not encodable as UTF-8) and for a value without a size; the cache is then
        unchanged.
        """
        _check_key(key)
        size = int(self._size_of(value))
        if size < 0:
            raise ValueError(f"size of a cached value must not be negative, is {size}")
        size = max(size, 1)
        with self._lock:
            if size > self._capacity:
                return PutResult(False, [], [])
            old = self._entries.pop(key, None)
            if old is not None:
                self._used -= old[1]
            removed: list[str] = []
            while self._used + size > self._capacity:
                victim, (_, freed) = self._entries.popitem(last=False)
                self._used -= freed
                removed.append(victim)
            self._entries[key] = (value, size)
            self._used += size
            added = [key] if old is None else []
            self._tell(added, removed)
            return PutResult(True, added, removed)

    def pop(self, key: str) -> V | None:
        """Remove a key and return its value, or None when it is not held."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return None
            self._used -= entry[1]
            self._tell([], [key])
            return entry[0]

    def clear(self) -> None:
        """Remove everything; the counters of hits and misses stay."""
        with self._lock:
            removed = list(self._entries)
            self._entries.clear()
            self._used = 0
            self._tell([], removed)

    def add_listener(self, listener: ChangeListener) -> None:
        """Report changes to ``listener`` from now on, beginning with all keys held as added.

        Atomic: between that first report and the next change nothing is missed.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)
            if self._entries:
                _call(listener, list(self._entries), [])

    def remove_listener(self, listener: ChangeListener) -> None:
        """Report no more to ``listener``; nothing happens when it was not registered."""
        with self._lock:
            self._listeners = tuple(one for one in self._listeners if one != listener)

    def _tell(self, added: list[str], removed: list[str]) -> None:
        if added or removed:
            for listener in self._listeners:
                _call(listener, list(added), list(removed))


def default_size(value: object) -> int:
    """``value.nbytes``, or the length of a bytes object. Raises TypeError for anything else."""
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(value, bytes | bytearray):
        return len(value)
    raise TypeError(f"{type(value).__name__} has no nbytes: pass size_of=... to EmbeddingCache")


def _check_key(key: str) -> None:
    if type(key) is not str:
        raise TypeError(f"a cache key must be text, not {type(key).__name__}")
    if len(key) > DEFAULT_LIMITS.max_key_chars:
        raise ValueError(f"cache key of {len(key)} characters, limit {DEFAULT_LIMITS.max_key_chars}")
    if not key.isascii():
        key.encode()


def _call(listener: ChangeListener, added: list[str], removed: list[str]) -> None:
    # An encode must not fail because somebody who only watches does.
    try:
        listener(added, removed)
    except Exception:
        _log.exception("a listener of the embedding cache failed on %d added, %d removed", len(added), len(removed))
