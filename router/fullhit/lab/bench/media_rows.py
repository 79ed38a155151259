"""Reading `/encode` bodies: what it costs to find the keys, and what it would cost to parse all of the JSON."""

from __future__ import annotations

import argparse
import base64
import json
import random
import time
from collections.abc import Callable
from statistics import median

import msgspec

from fullhit.http.encoder.imagecheck import inspect_image
from fullhit.http.encoder.media import parse_encode

from .table import Row

__all__ = ["rows"]

COMMAND = "fullhit bench --only media"
SIZES = {"2 KB": 2_000, "300 KB": 300_000, "6 MB": 6_000_000}
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00"


def rows(args: argparse.Namespace) -> list[Row]:
    out = []
    for name, size in SIZES.items():
        body = _body(size)
        ours = _cpu(lambda body=body: parse_encode(body, inspect_image), args.rounds, size)  # type: ignore[misc]
        full = _cpu(lambda body=body: msgspec.json.decode(body), args.rounds, size)  # type: ignore[misc]
        what = f"keys and picture check of a {name} body, CPU"
        if size > 1_000_000:
            out.append(Row.at_most(what, ours * 1e3, "ms", 1.0, COMMAND))
        else:
            out.append(Row.info(what, ours * 1e6, "us", COMMAND))
        out.append(Row.info(f"the same against a full JSON parse, {name}", full / ours, "x", COMMAND))
    return out


def _body(size: int) -> bytes:
    rng = random.Random(size)
    pictures = []
    for _ in range(max(1, size // 1_500_000)):
        raw = JPEG + rng.randbytes(max(100, size * 3 // 4 // max(1, size // 1_500_000) - 400))
        pictures.append("data:image/jpeg;base64," + base64.b64encode(raw).decode())
    fields = {"req_id": "r_local_part_0", "num_parts": 1, "part_idx": 0, "modality": "IMAGE", "mm_items": pictures}
    return json.dumps({**fields, "prefill_host": "127.0.0.1", "embedding_port": None}).encode()


def _cpu(run: Callable[[], object], rounds: int, size: int) -> float:
    """CPU seconds of one call: the median over rounds of the mean of a batch."""
    batch = max(5, 200_000 // max(1, size // 100))
    batch = min(batch, 2_000)
    took = []
    for _ in range(rounds):
        started = time.thread_time()
        for _ in range(batch):
            run()
        took.append((time.thread_time() - started) / batch)
    return median(took)
