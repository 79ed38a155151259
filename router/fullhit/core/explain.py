"""The account of a decision, rendered from its `Look` when somebody asks.

Nothing here runs on the hot path. What is shown is the state at decision time: masks and level pictures were kept
as they were, so a worker that has since moved on still appears with the load it had then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .load import levels_of
from .look import Look
from .types import Reason
from .worker import Worker

__all__ = ["CANDIDATES", "KEYS", "render"]

CANDIDATES = 16
KEYS = 32
"""Keys whose holders are listed."""


def render(look: Look, worker: Worker, reason: Reason) -> dict[str, Any]:
    """JSON-ready parts of a record: policy, why, inputs, counts, groups, holders, candidates. Keys as hexadecimal text.

    `holders` has up to `KEYS` keys, with up to `CANDIDATES` workers each that are believed to hold them, eligible or
    not, and which of those were doubtful. At most `CANDIDATES` candidates: the chosen one, then full holders, other
    holders and the rest, each by load. `inflight` is None for one that was too far from the least loaded for its load
    to be kept.
    """
    request = look.request
    by_slot = look.scene.by_slot
    holders = 0
    for mask in look.masks:
        holders |= mask
    some = holders & look.eligible
    chosen = 1 << by_slot.index(worker)
    order: dict[int, None] = {chosen: None}
    for mask in (look.full, look.predicted, some & look.candidates, some, look.candidates, look.eligible):
        for bit in _by_load(look, mask):
            if len(order) >= CANDIDATES:
                break
            order.setdefault(bit)
    passed_over = [w.id for slot, w in enumerate(by_slot) if w and (holders ^ some) >> slot & 1]
    return {
        "policy": look.scene.policy,
        "why": _why(look, some, reason),
        "inputs": {
            "keys": [key.hex() for key in request.keys],
            **_alternatives(look),
            "items": request.items,
            "unkeyed": request.unkeyed,
            "exclude": sorted(request.exclude),
            "dry_run": request.dry_run,
        },
        "counts": {
            "eligible": look.eligible.bit_count(),
            "full_hit": look.full.bit_count(),
            "predicted": look.predicted.bit_count(),
            "holding_some": some.bit_count(),
            "compared": look.candidates.bit_count(),
        },
        "groups": [
            {"class": group.name, "ratio": group.ratio, "workers": n, "encoding": encoding, "allowed": allowed}
            for group, n, encoding, allowed in _budgets(look)
        ],
        "holders": [
            _holders(look, key.hex(), mask) for key, mask in zip(request.keys[:KEYS], look.masks[:KEYS], strict=True)
        ],
        "candidates": [
            _candidate(look, bit, look.inflight if bit == chosen else _inflight(look, bit), bit == chosen)
            for bit in order
        ],
        "ineligible_holders": passed_over[:CANDIDATES],
    }


def _alternatives(look: Look) -> dict[str, Any]:
    """For each key the others that do as well, where the request has any."""
    found = look.request.alternatives
    return {"alternatives": [[key.hex() for key in keys] for keys in found]} if found else {}


def _budgets(look: Look) -> list[tuple[Any, ...]]:
    flat = look.budget
    return [flat[i : i + 4] for i in range(0, len(flat), 4)]


def _by_load(look: Look, mask: int) -> Iterator[int]:
    """Bits of `mask`, the least loaded first as far as the pictures reach, the rest by slot."""
    for picture in look.pictures:
        for _, part in levels_of(picture):
            here = part & mask
            mask ^= here
            yield from _bits(here)
    yield from _bits(mask)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        mask ^= bit
        yield bit


def _inflight(look: Look, bit: int) -> int | None:
    for picture in look.pictures:
        for inflight, part in levels_of(picture):
            if part & bit:
                return inflight
    return None


def _holders(look: Look, key: str, mask: int) -> dict[str, Any]:
    # A slot without a worker is being filled, or waits to be swept.
    by_slot = look.scene.by_slot
    seats = [slot for bit in _bits(mask) if (slot := bit.bit_length() - 1) < len(by_slot)]
    names = {slot: worker.id for slot in seats if (worker := by_slot[slot]) is not None}
    shown = list(names)[:CANDIDATES]
    return {
        "key": key,
        "workers": [names[slot] for slot in shown],
        "doubtful": [names[slot] for slot in shown if look.scene.doubtful >> slot & 1],
        "more": len(names) - len(shown),
    }


def _candidate(look: Look, bit: int, inflight: int | None, chosen: bool) -> dict[str, Any]:
    worker = look.scene.by_slot[bit.bit_length() - 1]
    assert worker is not None
    held = sum(1 for mask in look.masks if mask & bit)
    return {
        "worker": worker.id,
        "class": worker.device_class,
        "inflight": inflight,
        "keys_held": held,
        "doubtful": bool(look.scene.doubtful & bit),
        "predicted": held > 0 and not look.scene.publishing & bit,
        "chosen": chosen,
    }


def _why(look: Look, some: int, reason: Reason) -> str:
    keys = len(look.request.keys)
    found = {
        Reason.FULL_HIT: f"{look.full.bit_count()} eligible worker(s) hold all {keys} keys",
        Reason.PREDICTED: f"{look.predicted.bit_count()} eligible worker(s) should hold all {keys} keys, as we predict",
        Reason.PARTIAL_HIT: f"{some.bit_count()} eligible worker(s) hold some of the {keys} keys",
        Reason.MISS: f"no eligible worker holds any of the {keys} keys",
        Reason.NO_MEDIA: "the request has no media item",
        Reason.PENDING: "an encode of the keys is in flight",
    }[reason]
    text = f"{found}; {look.note}"
    for group, _, encoding, allowed in _budgets(look)[1:]:
        text += f"; {group.name} has {encoding} encoding of {allowed} allowed"
    return text
