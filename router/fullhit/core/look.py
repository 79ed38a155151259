"""Everything one selection looks at, as raw integers.

A `Look` is filled by the pool, read by the policy, and then kept by the decision: the same object explains the
choice later. That costs nothing extra because all of it is immutable: holder sets, masks and level pictures are
integers and tuples, and `by_slot` is replaced, never changed, when a slot changes hands.
"""

from __future__ import annotations

from typing import Any

from .load import Group
from .types import Key
from .worker import Worker

__all__ = ["GroupBudget", "Look", "most_held"]

GroupBudget = tuple[str, int, int, int, int | None]
"""Name, ratio, eligible workers, requests that encode there, how many the ratio allows (None: fastest class)."""


class Look:
    """The view of one selection.

    `keys`, `masks`  the request's keys and, beside each, the slots under which it is filed
    `eligible`       slots that may be chosen (exclusions taken out)
    `full`           of those, the ones that hold every key, confirmed; 0 when the request has an unkeyed item
    `predicted`      the same, by our own prediction
    `some`           of those, the ones that are believed to hold at least one key (doubtful and predicted ones too)
    `excluded`       workers that would be eligible but must not be chosen
    """

    __slots__ = (
        "budget",
        "by_slot",
        "candidates",
        "doubtful",
        "eligible",
        "excluded",
        "full",
        "groups",
        "inflight",
        "keys",
        "masks",
        "note",
        "pictures",
        "policy",
        "pool",
        "predicted",
        "publishing",
        "some",
    )

    pool: str
    policy: str
    keys: tuple[Key, ...]
    masks: list[int]
    eligible: int
    full: int
    predicted: int
    some: int
    doubtful: int
    publishing: int
    excluded: tuple[Worker, ...]
    groups: list[Group]
    by_slot: list[Worker | None]
    # written by the policy
    candidates: int
    budget: tuple[GroupBudget, ...]
    note: str
    # written by the pool just before the slot is taken
    pictures: list[tuple[Any, ...]]
    inflight: int


def most_held(masks: list[int], tied: int) -> int:
    """The part of `tied` whose workers appear in the largest number of `masks`.

    Counts all workers at once: plane k holds bit k of everybody's count (a ripple-carry adder over sets), so the cost
    is about two operations a key, whatever the number of workers.
    """
    planes: list[int] = []
    for mask in masks:
        carry = mask & tied
        k = 0
        while carry:
            if k == len(planes):
                planes.append(carry)
                break
            plane = planes[k]
            planes[k] = plane ^ carry
            carry &= plane
            k += 1
    for plane in reversed(planes):
        higher = tied & plane
        if higher:
            tied = higher
    return tied
