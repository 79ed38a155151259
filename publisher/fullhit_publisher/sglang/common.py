"""What all processes of one encoder hold in common. Pure.

With data parallelism SGLang chooses the process for a request by its own count of pending ones, so a worker can promise
a hit only on what *every* process holds: the intersection of their caches. It is kept by counting holders; a change
costs time proportional to its keys.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CommonKeys"]


class CommonKeys:
    """The keys that all of ``size`` ranks hold. Empty until each of them has said something, and from the moment that
    one is lost: nobody knows what would meet a request there.

    ``change`` and ``lose`` return what the intersection gains and loses, as ``(added, removed)``.
    Raises ValueError for a size below 1.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"an encoder has at least one process, not {size}")
        self._ranks: list[set[str] | None] = [None] * size
        self._holders: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<CommonKeys {len(self.keys())} keys of {len(self._ranks)} ranks>"

    def keys(self) -> set[str]:
        """The intersection itself; takes time proportional to all keys."""
        size = len(self._ranks)
        return {key for key, holders in self._holders.items() if holders == size}

    def change(self, rank: int, added: Sequence[str], removed: Sequence[str]) -> tuple[list[str], list[str]]:
        """A rank has changed its cache; keys in both lists end as removed. Raises IndexError for an unknown rank."""
        if rank < 0:
            raise IndexError(rank)
        held = self._ranks[rank]
        if held is None:
            held = self._ranks[rank] = set()
        size = len(self._ranks)
        gained, lost = [], []
        leaving = set(removed)
        for key in dict.fromkeys(added):
            if key not in held and key not in leaving:
                held.add(key)
                holders = self._holders[key] = self._holders.get(key, 0) + 1
                if holders == size:
                    gained.append(key)
        for key in leaving & held:
            held.discard(key)
            if self._release(key):
                lost.append(key)
        return gained, lost

    def lose(self, rank: int) -> tuple[list[str], list[str]]:
        """A rank is gone, or does not say any more what it holds."""
        held = self._ranks[rank]
        self._ranks[rank] = None
        return [], [key for key in held or () if self._release(key)]

    def _release(self, key: str) -> bool:
        """One holder less; whether all ranks held the key before."""
        before = self._holders[key]
        if before == 1:
            del self._holders[key]
        else:
            self._holders[key] = before - 1
        return before == len(self._ranks)
