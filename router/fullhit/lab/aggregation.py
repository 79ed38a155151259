"""The two pure halves of SGLang's EPD receiver: how media is split into parts, and how parts become one embedding.

The split knows no load, no health and no cache: it shuffles. Over several encoder URLs that is the random split which
Fullhit replaces; over path-prefixed aliases of one router it makes parts of one picture each. The aggregation
believes the ``num_parts`` and ``part_idx`` that come back, and cannot bear a second copy of a part.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fullhit.lab.embedding import PartHeader

__all__ = ["MODALITIES", "Aggregation", "Part", "RequestFailed", "split"]

# Modalities in the order in which SGLang numbers parts.
MODALITIES = ("IMAGE", "VIDEO", "AUDIO")


@dataclass(frozen=True, slots=True)
class Part:
    """One ``/encode``: some items of one modality for one URL."""

    part_idx: int
    url_index: int
    modality: str
    items: tuple[object, ...]


class RequestFailed(Exception):
    """The request cannot be answered. ``status`` is what the end user would see.

    ``would_stop_server``: SGLang 0.5.23 with a Qwen-VL model and a text prompt would have gone down with it.
    """

    def __init__(self, rid: str, message: str, status: int, *, would_stop_server: bool = False) -> None:
        super().__init__(f"{message} (request {rid})")
        self.rid = rid
        self.status = status
        self.would_stop_server = would_stop_server


def split(items: Mapping[str, Sequence[object]], urls: int, rng: random.Random) -> tuple[Part, ...]:
    """SGLang's split of ``{modality: items}`` over ``urls`` URL indices; the parts in ``part_idx`` order."""
    order = list(range(urls))
    rng.shuffle(order)
    parts: list[Part] = []
    offset = 0
    for modality in sorted(items, key=MODALITIES.index):
        media = items[modality]
        share, remainder = divmod(len(media), urls)
        counts = [share] * urls
        for step in range(remainder):
            counts[order[(offset + step) % urls]] += 1
        offset += remainder
        start = 0
        for url_index, count in enumerate(counts):
            if count:
                chosen = tuple(media[start : start + count])
                parts.append(Part(len(parts), url_index, modality, chosen))
                start += count
    return tuple(parts)


class Aggregation:
    """The parts of one request as they come in at one rank. Pure; ``add`` says whether all are there."""

    def __init__(self, rid: str, *, fatal: bool = True) -> None:
        self.rid = rid
        self.fatal = fatal
        self.parts: dict[int, tuple[PartHeader, bytes]] = {}
        self.num_parts: int | None = None

    def __repr__(self) -> str:
        return f"<Aggregation {self.rid} {sorted(self.parts)} of {self.num_parts}>"

    def add(self, header: PartHeader, payload: bytes) -> bool:
        """Take one part. Raises RequestFailed for an error part, a second copy, or a changed ``num_parts``."""
        if header.error_message is not None:
            raise RequestFailed(self.rid, header.error_message, header.error_code or 500, would_stop_server=self.fatal)
        if header.part_idx in self.parts:
            raise RequestFailed(
                self.rid, f"duplicate embedding part {header.part_idx}", 500, would_stop_server=self.fatal
            )
        if self.num_parts is None:
            self.num_parts = header.num_parts
        if header.num_parts != self.num_parts or not 0 <= header.part_idx < header.num_parts:
            raise RequestFailed(self.rid, f"part {header.part_idx} of {header.num_parts} does not fit", 500)
        self.parts[header.part_idx] = (header, payload)
        return self.complete

    @property
    def complete(self) -> bool:
        return self.num_parts is not None and len(self.parts) == self.num_parts

    def headers(self) -> tuple[PartHeader, ...]:
        return tuple(self.parts[index][0] for index in sorted(self.parts))

    def embedding(self) -> bytes:
        """All payloads in prompt order."""
        return b"".join(self.parts[index][1] for index in sorted(self.parts))
