"""What a router writes down of its workers, so that the next one knows them. Pure.

SGLang's encoders register once in their life. A router that was restarted would never hear of those that publish no
events, nor of what an operator had added by hand. Workers from the configuration and from another's discovery are not
written down: the configuration and the discovery say what is true of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from fullhit.fleet.member import Member, Source

__all__ = ["MAX_BYTES", "Remembered", "StateUnreadable", "decode", "encode"]

VERSION = 1
MAX_BYTES = 64 * 1024 * 1024
_KEPT = (Source.ADMIN, Source.REGISTERED, Source.DISCOVERED)


class StateUnreadable(ValueError):
    """What was read is no state, or one of another version; the text says why."""


class Remembered(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker. ``device`` only where it was named by somebody."""

    url: str
    pool: str
    source: Source
    device: str | None = None
    weight: float = 1.0
    max_inflight: int | None = None
    labels: dict[str, str] = {}
    draining: bool = False


class _State(msgspec.Struct):
    version: int
    workers: list[Remembered]


class _Version(msgspec.Struct):
    version: int


def encode(members: Iterable[Member], caps: Mapping[str, int]) -> bytes:
    """The state file's content: JSON, the same for the same workers. ``caps``: by pool, the in-flight cap of workers
    that name none, which the configuration may change."""
    rows = [
        Remembered(
            url=member.id,
            pool=member.pool,
            source=member.source,
            device=member.spec.device if member.device_given else None,
            weight=member.spec.weight,
            max_inflight=None if member.spec.max_inflight == caps.get(member.pool) else member.spec.max_inflight,
            labels=dict(member.spec.labels),
            draining=member.draining,
        )
        for member in members
        if member.source in _KEPT and member.remove_at is None
    ]
    return msgspec.json.format(msgspec.json.encode(_State(VERSION, rows)), indent=1) + b"\n"


def decode(data: bytes) -> list[Remembered]:
    """The workers in a state file. Raises StateUnreadable."""
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise StateUnreadable(f"its version is {version}, this router knows {VERSION}")
        workers = msgspec.json.decode(data, type=_State).workers
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateUnreadable(str(error)[:200]) from None
    return [one for one in workers if one.source in _KEPT]
