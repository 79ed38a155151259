"""The rendezvous of a prefill and a decode worker, put into a body without writing the body anew.

Both legs of a pair get the client's body with three members more (SGLang: ``bootstrap_host``, ``bootstrap_port``,
``bootstrap_room``; lists of equal length for a batch). They are spliced in before the last brace: megabytes of pictures
are copied once and looked at by nobody. A client's own members of these names are taken out first, whatever their
spelling, for two requests in one room bring both schedulers down (SGLang issue 40125).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

import msgspec

from .generation import BOOTSTRAP, BadBody

__all__ = ["MAX_ROOM", "Rendezvous", "new_rooms", "spliced"]

MAX_ROOM: Final = 2**63 - 1

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """``rooms``: one number a sequence. ``port`` None lets the workers take their own setting. ``batch``: lists."""

    host: str
    port: int | None
    rooms: tuple[int, ...]
    batch: bool = False


def new_rooms(count: int | None, rng: random.Random) -> tuple[int, ...]:
    """Fresh uniform rooms from 0 to 2**63 - 1, for one request and one attempt."""
    return tuple(rng.randint(0, MAX_ROOM) for _ in range(count or 1))


def spliced(body: bytes | bytearray, where: Rendezvous, *, clean: bool) -> bytes:
    """The body with the rendezvous in it. ``clean``: it has no such members of its own. ``body`` is a JSON object, as
    far as `read_generation` can tell. Raises BadBody where it is none after all.

    >>> spliced(b'{"a": 1}', Rendezvous("h", 8998, (7,)), clean=True)
    b'{"a": 1,"bootstrap_host":"h","bootstrap_port":8998,"bootstrap_room":7}'
    """
    if not clean:
        try:
            found = _members.decode(body)
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
        ) as error:  # in text that was passed over before
            raise BadBody(f"the body is not valid JSON: {error}") from None
        members = {name: value for name, value in found.items() if name not in BOOTSTRAP}
        body = msgspec.json.encode(members)
    end = len(body)
    while body[end - 1 : end] in (b" ", b"\t", b"\r", b"\n"):
        end -= 1
    end -= 1  # the brace
    at = end
    while body[at - 1 : at] in (b" ", b"\t", b"\r", b"\n"):
        at -= 1
    comma = b"" if body[at - 1 : at] == b"{" else b","
    n = len(where.rooms)
    values = (
        (where.host, where.port, where.rooms[0])
        if not where.batch
        else ([where.host] * n, [where.port] * n, where.rooms)
    )
    added = msgspec.json.encode(dict(zip(BOOTSTRAP, values, strict=True)))
    return b"".join((memoryview(body)[:end], comma, added[1:], memoryview(body)[end + 1 :]))
