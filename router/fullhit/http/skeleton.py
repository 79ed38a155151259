"""JSON bodies with long strings in them, parsed without walking through these strings.

A body with inline pictures is megabytes of base64 around some hundred bytes of JSON, and every JSON parser walks all of
it: 1.6 ms at 6 MB for the fastest one, on the loop that also has to answer others. So a body is cut to a *skeleton*:

1. Find the strings. Outside of a string each ``"`` opens one, inside of it the first ``"`` behind an even number of
   backslashes closes it, so hopping from quote to quote at memchr speed tells exactly where the strings lie, whatever
   else the text is.
2. A long string without any backslash is the same text escaped and unescaped. It is replaced by a short placeholder;
   the rest, about 1 KB, goes to a parser, which judges it in full.
3. Where a placeholder comes out, whoever reads the result asks `Slices.take` for the text it stands for.

The answer must be that of the full parse, so each doubt leads there (`Doubt`, or None from `cut`): the body has
thousands of strings or long runs of backslashes, the placeholder's text or an escaped ASCII letter (which could spell
it) occurs in what is left, or a placeholder came out where the reader cannot use it. The two differ in one way only:
excised text is not searched for raw control characters and malformed UTF-8, which no base64 holds; the worker refuses
those.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

__all__ = ["LONG_BYTES", "PLAIN_BYTES", "Doubt", "Slices", "cut", "has_placeholder"]

PLAIN_BYTES: Final = 8 * 1024
"""Bodies up to here are better parsed whole: the detour would not pay."""
LONG_BYTES: Final = 2 * 1024
"""Strings from here on are excised. msgspec reads 2 KB in half a microsecond, an excision costs about one."""
_MAX_HOPS: Final = 4_096
"""Quotes looked at before the skeleton gives up: about 0.6 ms of Python at worst. Real bodies have 40 to 200."""
_MAX_BACKSLASH_RUN: Final = 32

_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C
_NONCE: Final = secrets.token_hex(8)
"""Unguessable part of the placeholders; never leaves the process."""

_ASCII_ESCAPE: Final = re.compile(rb"\\u00[2-7]")


class Doubt(Exception):
    """The skeleton might read this body otherwise than a parser would."""


class Slices:
    """The excised strings by their placeholder."""

    __slots__ = ("spans", "used", "view")

    def __init__(self, view: memoryview, spans: dict[str, tuple[int, int]]) -> None:
        self.view = view
        self.spans = spans
        self.used = 0

    def take(self, text: str) -> memoryview | None:
        """The excised text for which ``text`` stands, or None when it stands for itself."""
        span = self.spans.get(text)
        if span is None:
            return None
        self.used += 1
        return self.view[span[0] : span[1]]


def has_placeholder(raw: bytes) -> bool:
    """Whether one stands in this piece of JSON."""
    return _NONCE.encode() in raw


def cut(body: bytes | bytearray) -> tuple[bytes, Slices] | None:
    """Replace the long strings of a JSON text by placeholders; None when in doubt."""
    find = body.find
    view = memoryview(body)
    pieces: list[bytes | memoryview] = []
    spans: dict[str, tuple[int, int]] = {}
    done = 0
    opening = find(_QUOTE)
    hops = 0
    while opening >= 0:
        closing = find(_QUOTE, opening + 1)
        while closing > 0 and body[closing - 1] == _BACKSLASH:
            first = closing - 1
            while first > opening and body[first - 1] == _BACKSLASH and closing - first <= _MAX_BACKSLASH_RUN:
                first -= 1
            if closing - first > _MAX_BACKSLASH_RUN:
                return None
            if (closing - first) % 2 == 0:
                break
            closing = find(_QUOTE, closing + 1)
            hops += 1
        hops += 1
        if closing < 0 or hops > _MAX_HOPS:
            return None
        start = opening + 1
        if closing - start >= LONG_BYTES and find(_BACKSLASH, start, closing) < 0:
            mark = f"@{_NONCE}:{len(spans)}@"
            spans[mark] = (start, closing)
            pieces.append(view[done:start])
            pieces.append(mark.encode())
            done = closing
        opening = find(_QUOTE, closing + 1)
    if not spans:
        return None
    pieces.append(view[done:])
    rest = b"".join(pieces)
    if rest.count(_NONCE.encode()) != len(spans) or (b"\\u00" in rest and _ASCII_ESCAPE.search(rest)):
        return None
    return rest, Slices(view, spans)
