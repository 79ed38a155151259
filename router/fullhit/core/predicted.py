"""A model of the cache of a worker that publishes nothing: an LRU over what we sent there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from .types import Key

__all__ = ["PredictedCache"]


class PredictedCache:
    """Bounded by bytes and by entries, whichever fills first.

    >>> cache = PredictedCache(max_bytes=10, max_entries=100)
    >>> cache.admit([(b"a" * 16, 6), (b"b" * 16, 6)])
    ([b'bbbbbbbbbbbbbbbb'], [b'aaaaaaaaaaaaaaaa'])
    """

    __slots__ = ("_sizes", "max_bytes", "max_entries", "used_bytes")

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.used_bytes = 0
        self._sizes: OrderedDict[Key, int] = OrderedDict()

    def admit(self, items: Iterable[tuple[Key, int]]) -> tuple[list[Key], list[Key]]:
        """The worker has just seen these keys (size in bytes). Returns what it holds now and what it dropped for it.

        An item larger than the whole cache is not kept, as an encoder would not keep it.
        """
        sizes = self._sizes
        touched: dict[Key, None] = {}
        evicted: dict[Key, None] = {}
        for key, size in items:
            if size > self.max_bytes:
                continue
            self.used_bytes += size - sizes.pop(key, 0)
            sizes[key] = size
            touched[key] = None
            evicted.pop(key, None)
            while self.used_bytes > self.max_bytes or len(sizes) > self.max_entries:
                oldest, freed = sizes.popitem(last=False)
                self.used_bytes -= freed
                touched.pop(oldest, None)
                evicted[oldest] = None
        return list(touched), list(evicted)

    def clear(self) -> None:
        self._sizes.clear()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes
