"""The words of the core: settings, requests, reasons, errors.

Plain values only. Nothing here does I/O, reads a clock or keeps state, so every other package may import
it freely. Sizes and limits name their unit; a setting that makes no sense is refused when it is built, with
a message that says what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

__all__ = [
    "DEFAULT_RATIO",
    "DeviceClass",
    "Key",
    "NoEligibleKind",
    "NoEligibleWorker",
    "PoolFull",
    "PoolSettings",
    "Reason",
    "SelectRequest",
    "WorkerSpec",
    "device_class",
    "parse_ratio",
]

Key = bytes
"""Identity of one encoded media item inside a pool: always 16 bytes."""

DEFAULT_RATIO = 8
"""How many times slower a CPU encoder is taken to be: Dynamo's default, so that a pool moved here behaves alike."""

_CPU_DEVICE = re.compile(r"cpu(:\d+)?\Z", re.IGNORECASE)


class Reason(StrEnum):
    """Why a worker was chosen; also the value of `x-fullhit-reason`.

    `full_hit`     the chosen worker holds every key of the request, confirmed by its events
    `predicted`    the same, but by our own model of a worker that publishes nothing
    `partial_hit`  some eligible worker is believed to hold some of the keys
    `miss`         no eligible worker is believed to hold any of them
    `no_media`     the request carries no media item at all
    `pending`      reserved: an encode of the key is in flight there
    """

    FULL_HIT = "full_hit"
    PARTIAL_HIT = "partial_hit"
    MISS = "miss"
    NO_MEDIA = "no_media"
    PREDICTED = "predicted"
    PENDING = "pending"


NoEligibleKind = Literal["empty_pool", "all_busy", "all_down", "all_excluded"]


class NoEligibleWorker(Exception):
    """Nobody can take the request now.

    `kind` tells apart what an operator does about it:

    `empty_pool`    no worker is known: register one
    `all_busy`      some worker would do but is at its in-flight limit: wait (`retryable`)
    `all_down`      workers are known, none is ready (down, not probed yet, or draining)
    `all_excluded`  every worker that could take it has been tried already by this request
    """

    def __init__(self, pool: str, kind: NoEligibleKind, detail: str = "") -> None:
        self.pool = pool
        self.kind: NoEligibleKind = kind
        advice = {
            "empty_pool": "it has no workers; register one, or list it in the configuration",
            "all_busy": "every ready worker is at its in-flight limit; retry shortly or raise max_inflight",
            "all_down": "no worker is ready (down, not probed yet, or draining); see /workers for each one's state",
            "all_excluded": "every worker that could take this request has already failed it",
        }[kind]
        super().__init__(f"pool {pool!r}: {advice}{' (' + detail + ')' if detail else ''}")

    @property
    def retryable(self) -> bool:
        """True when waiting may help: workers exist."""
        return self.kind != "empty_pool"


class PoolFull(ValueError):
    """`add_worker` beyond `PoolSettings.max_workers`."""


def device_class(device: str) -> str:
    """`"cpu"` for `cpu` and `cpu:0`; `"gpu"` for anything else (cuda, xpu, hpu, rocm, or an empty string).

    >>> device_class("cuda:1"), device_class("CPU")
    ('gpu', 'cpu')
    """
    return "cpu" if _CPU_DEVICE.match(device.strip()) else "gpu"


def parse_ratio(text: str | None, default: int = DEFAULT_RATIO) -> int:
    """The value of `DYN_ENCODER_CUDA_TO_CPU_RATIO`: an integer of at least 1, anything else is `default`.

    Dynamo reads `0`, `abc` and `2.5` as its default without a word, so that is what the variable means here too;
    a configured ratio is checked strictly instead (`PoolSettings`).
    """
    if text is None or re.fullmatch(r"\+?\d{1,18}", text.strip(), re.ASCII) is None:
        return default
    return int(text) or default


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """One class of device in the weighted group rule.

    `ratio`: how many times slower than the fastest class a worker of this class encodes (integer >= 1; 1 = fastest).
    `devices`: device names that belong to it; the part before a colon is compared, in lower case.
    """

    name: str
    ratio: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What is known about a worker before it has said anything.

    `id` is the identity (the worker's normalised URL). `weight`: relative speed, > 0. `max_inflight`: requests it
    may have at once, None = no limit.
    """

    id: str
    url: str
    device: str = "cuda"
    weight: float = 1.0
    max_inflight: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a worker needs an id; its normalised URL is the usual one")
        if not 0 < self.weight <= 1e6:
            raise ValueError(f"weight of worker {self.id}: {self.weight} is not between 0 (exclusive) and 1e6")
        if self.max_inflight is not None and self.max_inflight < 1:
            raise ValueError(
                f"max_inflight of worker {self.id}: {self.max_inflight} is below 1; leave it out for no limit"
            )


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How one pool selects and what it may remember.

    >>> PoolSettings(policy="device-aware-weighted", ratio=8)          # doctest: +ELLIPSIS
    PoolSettings(policy='device-aware-weighted', ...)

    `classes` replaces the CPU/GPU split by any number of device classes; a device that none of them names falls
    into the first. Left empty it means gpu (ratio 1) and cpu (ratio `ratio`).
    `max_keys` bounds distinct keys in the index (about 110 bytes each), `max_keys_per_worker` what one worker may
    claim. `predicted_bytes` / `predicted_entries` model the cache of a worker that publishes nothing.
    """

    policy: str = "device-aware-weighted"
    ratio: int = DEFAULT_RATIO
    full_hit_prefer: Literal["gpu", "any"] = "gpu"
    classes: tuple[DeviceClass, ...] = ()
    predict: bool = True
    predicted_bytes: int = 4 << 30
    predicted_entries: int = 100_000
    max_keys: int = 10_000_000
    max_keys_per_worker: int = 2_000_000
    max_workers: int = 4096
    bounded_load: float = 1.25
    ring_points: int = 64
    parity: Literal["none", "dynamo"] = "none"  # choose as another router does (`parity.make_pool`), ignoring `policy`

    def __post_init__(self) -> None:
        if self.ratio < 1:
            raise ValueError(f"ratio: {self.ratio} is below 1; it says how many times slower a CPU encoder is")
        if self.full_hit_prefer not in ("gpu", "any"):
            raise ValueError(f"full_hit.prefer: {self.full_hit_prefer!r} is neither 'gpu' nor 'any'")
        if self.bounded_load <= 1:
            raise ValueError(f"bounded_load: {self.bounded_load} must be above 1 (1.25 = 25 % over the average)")
        if self.parity not in ("none", "dynamo"):
            raise ValueError(f"parity: {self.parity!r} is neither 'none' nor 'dynamo'")
        for name in ("predicted_bytes", "predicted_entries", "max_keys", "max_keys_per_worker", "max_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if not 1 <= self.ring_points <= 4096:
            raise ValueError(f"ring_points: {self.ring_points} is not between 1 and 4096")
        names = [c.name for c in self.classes]
        if len(set(names)) != len(names):
            raise ValueError(f"classes: a name appears twice in {names}")
        for c in self.classes:
            if c.ratio < 1:
                raise ValueError(f"classes.{c.name}.ratio: {c.ratio} is below 1")

    def device_classes(self) -> tuple[DeviceClass, ...]:
        """The classes in force, fastest first; equal ratios keep their configured order."""
        if not self.classes:
            return (DeviceClass("gpu", 1, ()), DeviceClass("cpu", self.ratio, ("cpu",)))
        return tuple(sorted(self.classes, key=lambda c: c.ratio))

    def class_of(self, device: str) -> str:
        """Name of the class a device belongs to."""
        if not self.classes:
            return device_class(device)
        base = device.strip().lower().partition(":")[0]
        for c in self.classes:
            if base in c.devices:
                return c.name
        return self.classes[0].name


@dataclass(slots=True)
class SelectRequest:
    """What a selection needs to know of a request.

    `keys` are distinct and in prompt order. `items` counts media items, repeated and unkeyed ones included;
    `unkeyed` counts those for which no key can be computed: with one of them a full hit cannot be promised.
    `exclude`: worker ids that must not be chosen (already tried). `dry_run`: answer, but take no slot.
    `alternatives`: other keys which do as well as the one at the same place in `keys`; empty, or as long as `keys`.
    """

    keys: tuple[Key, ...] = ()
    items: int = 0
    request_id: str = ""
    exclude: frozenset[str] = frozenset()
    dry_run: bool = False
    unkeyed: int = 0
    alternatives: tuple[tuple[Key, ...], ...] = ()
