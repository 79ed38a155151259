"""Putting a picture that says "unreadable image" in the place of one that no decoder takes.

A language server of SGLang 0.5.23 with ``zmq_to_scheduler`` does not survive a failed ``/encode``. The one bad
picture is therefore replaced by a good one on which a person and a model can read what happened: the client
that erred gets a poor answer, everybody else gets theirs. Only that item changes; the rest of the body stays
byte for byte. A ``content_hash`` of the replaced item is dropped, because the encoder would compare it with
the bytes and answer 400.

`rewrite` finds the item.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Collection, Mapping
from functools import cache
from typing import Final

import msgspec

from .rewrite import CannotRewrite, item_spans, splice

__all__ = ["substitute_items", "unreadable_png", "unreadable_uri"]

_SIZE: Final = 224
"""Width and height of the picture in pixels: what most vision encoders take without scaling."""
_WORDS: Final = ("UNREADABLE", "IMAGE")

# Capital letters, five columns by seven rows, a row per byte.
_FONT: Final[Mapping[str, bytes]] = {
    "A": b"\x0e\x11\x11\x1f\x11\x11\x11",
    "B": b"\x1e\x11\x11\x1e\x11\x11\x1e",
    "D": b"\x1e\x11\x11\x11\x11\x11\x1e",
    "E": b"\x1f\x10\x10\x1e\x10\x10\x1f",
    "G": b"\x0e\x11\x10\x17\x11\x11\x0e",
    "I": b"\x0e\x04\x04\x04\x04\x04\x0e",
    "L": b"\x10\x10\x10\x10\x10\x10\x1f",
    "M": b"\x11\x1b\x15\x15\x11\x11\x11",
    "N": b"\x11\x19\x15\x13\x11\x11\x11",
    "R": b"\x1e\x11\x11\x1e\x14\x12\x11",
    "U": b"\x11\x11\x11\x11\x11\x11\x0e",
}


def substitute_items(body: bytes | bytearray | memoryview, indices: Collection[int], items: int) -> bytes:
    """``body`` with the given elements of ``mm_items`` replaced; all other bytes as they were.

    ``body`` must be a valid ``/encode`` body with ``items`` elements in ``mm_items``. Raises CannotRewrite.
    """
    body = bytes(body)
    spans = item_spans(body)
    if len(spans) != items:
        raise CannotRewrite("the elements of mm_items were not found one by one")
    wanted = [spans[index] for index in sorted(indices)]
    return splice(body, [(start, end, _replaced(msgspec.json.decode(body[start:end]))) for start, end in wanted])


@cache
def unreadable_png() -> bytes:
    """A 224x224 PNG: a crossed-out box with the words UNREADABLE IMAGE, dark on light."""
    rows = [bytearray(b"\xf2" * _SIZE) for _ in range(_SIZE)]
    edge, last = 8, _SIZE - 9
    for at in range(edge, last + 1):
        for thick in range(4):
            for x, y in ((at, edge + thick), (at, last - thick), (edge + thick, at), (last - thick, at)):
                rows[y][x] = 0x30
            for y in (at, _SIZE - 1 - at):
                rows[y][min(at + thick, last)] = 0xB0
    scale = 3
    top = (_SIZE - len(_WORDS) * 10 * scale) // 2
    for line, word in enumerate(_WORDS):
        left = (_SIZE - (len(word) * 6 - 1) * scale) // 2
        y0 = top + line * 10 * scale
        for y in range(y0 - 4, y0 + 7 * scale + 4):
            for x in range(left - 4, left + (len(word) * 6 - 1) * scale + 4):
                rows[y][x] = 0xF2
        for place, letter in enumerate(word):
            for row, bits in enumerate(_FONT[letter]):
                for column in range(5):
                    if bits & (0x10 >> column):
                        x0 = left + (place * 6 + column) * scale
                        for dy in range(scale):
                            rows[y0 + row * scale + dy][x0 : x0 + scale] = b"\x10" * scale
    pixels = b"".join(b"\0" + bytes(value for value in row for _ in range(3)) for row in rows)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", struct.pack(">IIBBBBB", _SIZE, _SIZE, 8, 2, 0, 0, 0)),
            _chunk(b"IDAT", zlib.compress(pixels, 9)),
            _chunk(b"IEND", b""),
        )
    )


@cache
def unreadable_uri() -> str:
    """The same as a ``data:`` URI."""
    return "data:image/png;base64," + base64.b64encode(unreadable_png()).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _replaced(item: object) -> object:
    if not isinstance(item, dict) or "url" not in item:
        return unreadable_uri()
    return {**{name: value for name, value in item.items() if name != "content_hash"}, "url": unreadable_uri()}
