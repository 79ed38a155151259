"""Everything one selection looks at, as raw integers.

A `Look` is filled by the pool, read by the policy, and then kept: a `Decision` is a look with an outcome, and the same
fields explain the choice later. Keeping them costs nothing, because all of it is immutable: holder sets, masks and
load pictures are integers and tuples, and the `Scene` is replaced, never changed, when a slot changes hands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .load import Picture
from .types import SelectRequest
from .worker import Worker

__all__ = ["GroupBudgets", "Look", "Scene", "most_held"]

GroupBudgets = tuple[Any, ...]
"""Four fields a group, one group after the other in one flat tuple (fewer objects for the collector to visit): the
group, its eligible workers, requests that encode there, how many the ratio allows (None: the fastest class)."""


class Scene(NamedTuple):
    """What stays the same over many selections: who sits in which slot, and what their entries are worth."""

    pool: str
    policy: str
    by_slot: list[Worker | None]
    doubtful: int
    publishing: int


class Look:
    """The view of one selection.

    `masks`      for each key of the request, the slots under which it is filed
    `eligible`   slots that may be chosen (exclusions taken out)
    `full`       of those, the ones that hold every key, confirmed; 0 when the request has an unkeyed item
    `predicted`  the same, by our own prediction
    `some`       of those, the ones believed to hold at least one key, doubtful and predicted ones too (0 beside `full`)
    `excluded`   workers that would be eligible but must not be chosen
    """

    __slots__ = (
        "budget",
        "candidates",
        "eligible",
        "excluded",
        "full",
        "inflight",
        "masks",
        "note",
        "pictures",
        "predicted",
        "request",
        "scene",
        "some",
    )

    scene: Scene
    request: SelectRequest
    masks: list[int]
    eligible: int
    full: int
    predicted: int
    some: int
    excluded: tuple[Worker, ...]
    # written by the policy
    candidates: int
    budget: GroupBudgets
    note: str
    # written by the pool just before the slot is taken
    pictures: list[Picture]
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
