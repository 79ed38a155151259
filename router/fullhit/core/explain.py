"""The account of a decision, rendered from its `Look` when somebody asks.

Nothing here runs on the hot path. What is shown is the state at decision time: masks and level pictures were kept
as they were, so a worker that has since moved on still appears with the load it had then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .load import inflight_in
from .look import Look
from .types import Reason, SelectRequest
from .worker import Worker

__all__ = ["CANDIDATES", "render"]

CANDIDATES = 16


def render(look: Look, request: SelectRequest, worker: Worker, reason: Reason) -> dict[str, Any]:
    """JSON-ready parts of a record: policy, why, inputs, counts, groups, candidates. Keys as hexadecimal text.

    At most `CANDIDATES` candidates: the chosen one, then full holders, other holders and the rest, each by load.
    `inflight` is None for one that was too far from the least loaded for its load to be kept.
    """
    chosen = next((1 << slot for slot, w in enumerate(look.by_slot) if w is worker), 0)
    order: dict[int, None] = {chosen: None}
    for mask in (look.full, look.predicted, look.some & look.candidates, look.some, look.candidates, look.eligible):
        for bit in _by_load(look, mask):
            if len(order) >= CANDIDATES:
                break
            order.setdefault(bit)
    holders = 0
    for mask in look.masks:
        holders |= mask
    passed_over = [w.id for slot, w in enumerate(look.by_slot) if w and (holders & ~look.eligible) >> slot & 1]
    return {
        "policy": look.policy,
        "why": _why(look, reason),
        "inputs": {
            "keys": [key.hex() for key in look.keys],
            "items": request.items,
            "unkeyed": request.unkeyed,
            "exclude": sorted(request.exclude),
            "dry_run": request.dry_run,
        },
        "counts": {
            "eligible": look.eligible.bit_count(),
            "full_hit": look.full.bit_count(),
            "predicted": look.predicted.bit_count(),
            "holding_some": look.some.bit_count(),
            "compared": look.candidates.bit_count(),
        },
        "groups": [
            {"class": name, "ratio": ratio, "workers": n, "encoding": encoding, "allowed": allowed}
            for name, ratio, n, encoding, allowed in look.budget
        ],
        "candidates": [
            _candidate(look, bit, look.inflight if bit == chosen else _inflight(look, bit), bit == chosen)
            for bit in order
        ],
        "ineligible_holders": passed_over[:CANDIDATES],
    }


def _by_load(look: Look, mask: int) -> Iterator[int]:
    """Bits of `mask`, the least loaded first as far as the pictures reach, the rest by slot."""
    for picture in look.pictures:
        parts = picture[2] if picture[0] == "levels" else [bit for bit, _ in picture[1]]
        for part in parts:
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
        found = inflight_in(picture, bit)
        if found is not None:
            return found
    return None


def _candidate(look: Look, bit: int, inflight: int | None, chosen: bool) -> dict[str, Any]:
    worker = look.by_slot[bit.bit_length() - 1]
    assert worker is not None
    held = sum(1 for mask in look.masks if mask & bit)
    return {
        "worker": worker.id,
        "class": worker.device_class,
        "inflight": inflight,
        "keys_held": held,
        "doubtful": bool(look.doubtful & bit),
        "predicted": held > 0 and not look.publishing & bit,
        "chosen": chosen,
    }


def _why(look: Look, reason: Reason) -> str:
    keys = len(look.keys)
    found = {
        Reason.FULL_HIT: f"{look.full.bit_count()} eligible worker(s) hold all {keys} keys",
        Reason.PREDICTED: f"{look.predicted.bit_count()} eligible worker(s) should hold all {keys} keys, as we predict",
        Reason.PARTIAL_HIT: f"{look.some.bit_count()} eligible worker(s) hold some of the {keys} keys",
        Reason.MISS: f"no eligible worker holds any of the {keys} keys",
        Reason.NO_MEDIA: "the request has no media item",
        Reason.PENDING: "an encode of the keys is in flight",
    }[reason]
    text = f"{found}; {look.note}"
    for name, _, _, encoding, allowed in look.budget[1:]:
        text += f"; {name} has {encoding} encoding of {allowed} allowed"
    return text
