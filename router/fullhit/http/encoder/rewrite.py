"""Changing one thing in a JSON body, all other bytes staying as they are.

A body goes through the router byte for byte, except when a fault has to be hidden from the language server: then
a picture is replaced, or a part gets another id. Also then the rest stays untouched, since fields that we do not
know may mean something to both ends.

The body is known to be valid JSON, so a walk over its quotes and brackets is exact. It is written in Python and
runs only after a fault; ``MAX_STEPS`` bounds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

__all__ = ["MAX_STEPS", "CannotRewrite", "item_spans", "renamed", "splice"]

MAX_STEPS: Final = 50_000
"""JSON tokens walked before giving up: about 20 ms. Real bodies have some hundred."""

_TOKEN: Final = re.compile(rb'["\[\]{}]')
_BETWEEN: Final = b" \t\r\n:"
"""What may stand between a name and its value."""


class CannotRewrite(ValueError):
    """The place was not found within `MAX_STEPS`, or is written in an odd way; leave the body alone."""


def item_spans(body: bytes) -> list[tuple[int, int]]:
    """Where the elements of the (last) top-level ``mm_items`` list lie: offsets of their first byte and end.

    Elements which are neither strings, lists nor objects have no place in it. Raises CannotRewrite.
    """
    spans: list[tuple[int, int]] = []
    depth = 0
    in_items = False
    opened = 0
    for kind, start, end in _tokens(body):
        if kind == 0x22:  # A string.
            if in_items and depth == 2:
                spans.append((start, end))
            elif depth == 1 and _is_name(body, start, end) and body[start:end] == b'"mm_items"':
                in_items = True
                spans = []
            elif depth == 1 and _is_name(body, start, end):
                # Spelt with an escape it would still be mm_items to a parser.
                if b"\\" in body[start:end] and msgspec.json.decode(body[start:end]) == "mm_items":
                    raise CannotRewrite("the name mm_items is written with escapes")
                in_items = False
            continue
        if kind in b"[{":
            depth += 1
            if depth == 3:
                opened = start
        else:
            if in_items and depth == 3:
                spans.append((opened, end))
            depth -= 1
            if depth == 1:
                in_items = False
    return spans


def renamed(body: bytes | bytearray | memoryview, req_id: str) -> bytes:
    """``body`` with another top-level ``req_id``; all other bytes as they were.

    ``body`` must be a valid JSON object that has a ``req_id``. Raises CannotRewrite.

    >>> renamed(b'{ "req_id" : "a_local_part_0","n":1 }', "a_local_part_0r1")
    b'{ "req_id" : "a_local_part_0r1","n":1 }'
    """
    body = bytes(body)
    found: list[tuple[int, int, object]] = []
    depth = 0
    named = -1  # Where the name req_id ended, while its value may follow.
    for kind, start, end in _tokens(body):
        if kind != 0x22:
            depth += 1 if kind in b"[{" else -1
            named = -1
        elif depth != 1:
            pass
        elif not _is_name(body, start, end):
            if named >= 0 and not body[named:start].strip(_BETWEEN):
                found.append((start, end, req_id))
            named = -1
        else:
            named = -1
            if body[start:end] == b'"req_id"':
                named = end
            elif b"\\" in body[start:end] and msgspec.json.decode(body[start:end]) == "req_id":
                raise CannotRewrite("the name req_id is written with escapes")
    if not found:
        raise CannotRewrite("no req_id was found")
    return splice(body, found)


def splice(body: bytes, changes: Sequence[tuple[int, int, object]]) -> bytes:
    """``body`` with JSON values in the place of some spans: (first byte, end, value), in order."""
    out: list[bytes] = []
    done = 0
    for start, end, value in changes:
        out += (body[done:start], msgspec.json.encode(value))
        done = end
    out.append(body[done:])
    return b"".join(out)


def _is_name(body: bytes, start: int, end: int) -> bool:
    return body[end : end + 64].lstrip()[:1] == b":"


def _tokens(body: bytes) -> Iterator[tuple[int, int, int]]:
    """Strings (whole) and brackets in order: first byte, start, end."""
    at = 0
    for _ in range(MAX_STEPS):
        match = _TOKEN.search(body, at)
        if match is None:
            return
        start = match.start()
        at = start + 1
        if body[start] == 0x22:
            at = _string_end(body, start)
        yield body[start], start, at
    raise CannotRewrite("the body has too many parts to walk")


def _string_end(body: bytes, start: int) -> int:
    at = start + 1
    for _ in range(MAX_STEPS):
        at = body.index(b'"', at) + 1
        back = at - 2
        while back > start and body[back] == 0x5C:
            back -= 1
            if at - back > 1_000:
                raise CannotRewrite("a string of the body has too many escapes")
        if (at - 2 - back) % 2 == 0:
            return at
    raise CannotRewrite("a string of the body has too many escapes")
