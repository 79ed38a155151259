"""NATS subjects of Fullhit v1.

A subject carries the pool and the worker, so that a reader can subscribe with wildcards and a server can be
told which encoder may publish where. The name of a pool is free text; as one token of a subject it is
percent-encoded, in the one way that gives each pool exactly one subject.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_to_bytes

__all__ = ["events_subject", "parse_events_subject", "snapshot_subject"]

_MAX_U64: Final = 2**64 - 1
_SAFE_TOKEN: Final = re.compile(rb"[A-Za-z0-9_-]")
_TOKEN: Final = re.compile(r"(?:[A-Za-z0-9_-]|%[0-9A-F]{2})+")


def events_subject(pool: str, worker_id: int) -> str:
    """NATS subject of a worker's deltas and heartbeats, one ordered stream:
    ``fullhit.v1.<pool>.<worker_id>.events``.
    """
    return f"fullhit.v1.{_pool_token(pool)}.{worker_id}.events"


def snapshot_subject(pool: str, worker_id: int) -> str:
    """NATS subject at which a worker takes snapshot requests; the answer goes to the request's reply
    subject.
    """
    return f"fullhit.v1.{_pool_token(pool)}.{worker_id}.snapshot"


def parse_events_subject(subject: str) -> tuple[str, int] | None:
    """``(pool, worker_id)`` of a subject made by ``events_subject``, None for any other text."""
    tokens = subject.split(".")
    if len(tokens) != 5 or tokens[0] != "fullhit" or tokens[1] != "v1" or tokens[4] != "events":
        return None
    number = tokens[3]
    if not (number.isascii() and number.isdecimal() and len(number) <= 20) or str(int(number)) != number:
        return None
    worker_id = int(number)
    if worker_id > _MAX_U64 or not _TOKEN.fullmatch(tokens[2]):
        return None
    try:
        pool = unquote_to_bytes(tokens[2]).decode()
    except UnicodeDecodeError:
        return None
    # One pool, one subject: an escape that was not needed is another subject.
    return (pool, worker_id) if _pool_token(pool) == tokens[2] else None


def _pool_token(pool: str) -> str:
    """Percent-encoding per UTF-8 byte, as Dynamo escapes names: a dot or a wildcard never reaches the
    subject.
    """
    if not pool:
        raise ValueError("a pool needs a name")
    return "".join(chr(byte) if _SAFE_TOKEN.match(bytes((byte,))) else f"%{byte:02X}" for byte in pool.encode("utf-8"))
