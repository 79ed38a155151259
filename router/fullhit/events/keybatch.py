"""Keys of one message, folded to 16 bytes a slice at a time.

A snapshot part carries tens of thousands of keys, and decoding them all at once stalls the event loop for
milliseconds. But such arrays are regular: every element is the same two-byte header and the same number of hex
digits. So the array is kept as the bytes that arrived, and a slice is cut out, decoded and folded when its turn
comes. Arrays that are not regular, and short ones, are decoded at once by ``fullhit_publisher.wire`` like any
other message: one meaning, two speeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from fullhit_publisher.keys import Key, fold_many

__all__ = ["FoldedKeys", "KeyBatch", "PackedKeys", "TextKeys"]

_decode_texts = msgspec.msgpack.Decoder(list[str]).decode
# msgpack header of a text of 32..255 bytes: 0xd9 and its length. Lengths of keys that are digests.
_DIGEST_WIDTHS = (32, 64)
_MAX_ARRAY_16 = 65_535


class KeyBatch(Protocol):
    """A sized run of keys, read once and in slices."""

    def __len__(self) -> int: ...

    def slices(self, size: int) -> Iterator[Sequence[Key]]:
        """Runs of at most ``size`` keys; nothing for an empty batch."""
        ...


class FoldedKeys:
    """Keys already in their 16-byte form."""

    __slots__ = ("keys",)

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def slices(self, size: int) -> Iterator[Sequence[Key]]:
        keys = self.keys
        if len(keys) <= size:
            if keys:
                yield keys
            return
        for at in range(0, len(keys), size):
            yield keys[at : at + size]


class TextKeys:
    """Keys as published, decoded but not yet folded."""

    __slots__ = ("texts",)

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def slices(self, size: int) -> Iterator[Sequence[Key]]:
        for at in range(0, len(self.texts), size):
            yield fold_many(self.texts[at : at + size])


class PackedKeys:
    """Keys still in msgpack, all of one width. Made by ``PackedKeys.parse``."""

    __slots__ = ("_body", "_count", "_stride")

    def __init__(self, body: bytes, count: int, stride: int) -> None:
        self._body = body
        self._count = count
        self._stride = stride

    @classmethod
    def parse(cls, raw: bytes) -> PackedKeys | None:
        """Take a msgpack array of digests of one width; None when it is anything else, also when it is
        empty."""
        if raw[:1] == b"\xdc":
            count, start = int.from_bytes(raw[1:3], "big"), 3
        elif raw[:1] == b"\xdd":
            count, start = int.from_bytes(raw[1:5], "big"), 5
        else:
            return None
        for width in _DIGEST_WIDTHS:
            stride = width + 2
            if (
                count
                and len(raw) - start == count * stride
                and raw[start::stride].count(0xD9) == count
                and raw[start + 1 :: stride].count(width) == count
            ):
                return cls(raw[start:], count, stride)
        return None

    def __len__(self) -> int:
        return self._count

    def slices(self, size: int) -> Iterator[Sequence[Key]]:
        """Raises UnicodeDecodeError or msgspec.ValidationError when a text is not UTF-8."""
        size = min(size, _MAX_ARRAY_16)
        for at in range(0, self._count, size):
            count = min(size, self._count - at)
            run = self._body[at * self._stride : (at + count) * self._stride]
            yield fold_many(_decode_texts(b"\xdc" + count.to_bytes(2, "big") + run))
