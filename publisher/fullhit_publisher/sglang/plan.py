"""Which items of a batch are held, which must be encoded, and how the results go together. Pure.

A batch is the items of one or several requests, one behind the other. An item has a key when the router can compute the
same one: the very function that the router uses says so. An item without key is encoded and not kept. An item that
stands in a batch twice is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..keys import item_key, key_text

__all__ = ["Plan", "batch_keys", "make_plan"]

T = TypeVar("T")


def batch_keys(
    requests: Sequence[Mapping[str, object]], items_per_request: Sequence[int], modality: str
) -> list[str | None]:
    """The key of each item in the order of the batch, None for an item without one.

    ``requests``: bodies of ``/encode``. ``items_per_request``: how many entries SGLang's preprocessing made of each; a
    request where that is not one entry for each element of ``mm_items`` has no keys, for nobody can tell which entry
    belongs to which.
    """
    keys: list[str | None] = []
    for request, count in zip(requests, items_per_request, strict=True):
        items = request.get("mm_items")
        if not isinstance(items, Sequence) or isinstance(items, str) or len(items) != count:
            keys += [None] * count
            continue
        for item in items:
            key = item_key(item, modality)
            keys.append(None if key is None else key_text(key))
    return keys


@dataclass(slots=True)
class Plan(Generic[T]):
    """``held``: place -> what the cache holds. ``encode``: places to encode, ascending. ``same_as``: place -> an
    earlier place of the batch with the same key that is encoded. The three together are all places.
    """

    size: int
    held: dict[int, T] = field(default_factory=dict)
    encode: list[int] = field(default_factory=list)
    same_as: dict[int, int] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Everything must be encoded: nothing is saved, and SGLang's own way is the best one."""
        return len(self.encode) == self.size

    def in_order(self, encoded: Sequence[T]) -> list[T]:
        """The pieces of the batch in its order; ``encoded``: results for ``encode``, in its order."""
        pieces = dict(zip(self.encode, encoded, strict=True))
        return [
            self.held[place] if place in self.held else pieces[self.same_as.get(place, place)]
            for place in range(self.size)
        ]


def make_plan(keys: Sequence[str | None], look_up: Callable[[str, int], T | None]) -> Plan[T]:
    """``look_up(key, place)`` gives what is held and fits the place, or None."""
    plan: Plan[T] = Plan(len(keys))
    first: dict[str, int] = {}
    for place, key in enumerate(keys):
        if key is None:
            plan.encode.append(place)
            continue
        earlier = first.get(key)
        if earlier is not None:
            plan.same_as[place] = earlier
            continue
        held = look_up(key, place)
        if held is not None:
            plan.held[place] = held
        else:
            plan.encode.append(place)
            first[key] = place
    return plan
