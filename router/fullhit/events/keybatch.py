"""Keys of one message, folded to 16 bytes a slice at a time.

A snapshot part carries tens of thousands of keys, and decoding them all at once stalls the event loop for
milliseconds. But such arrays are regular: every element is the same two-byte header and the same number of hex
digits. So the array is kept as the bytes that arrived, and a slice is cut out, decoded and folded when its turn
comes. Arrays that are not regular, and short ones, are decoded at once by ``fullhit_publisher.wire`` like any
other message: one meaning, two speeds.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Iterator, Sequence
from functools import lru_cache
from struct import Struct
from typing import Protocol

import msgspec

from fullhit_publisher.keys import Key, fold_many

__all__ = ["FoldedKeys", "KeyBatch", "PackedKeys", "TextKeys"]

_decode_texts = msgspec.msgpack.Decoder(list[str]).decode
# msgpack header of a text of 32..255 bytes: 0xd9 and its length. Lengths of keys that are digests.
_DIGEST_WIDTHS = (32, 64)
_HEADER = 2
_MAX_SLICE = 4096
_COPY_BELOW = 16 * 1024
"""Bytes up to which a copy, which is quicker to look at, costs less than it gains."""


class KeyBatch(Protocol):
    """A sized run of keys, read once and in slices."""

    def __len__(self) -> int: ...

    def slices(self, size: int) -> Iterator[Sequence[Key]]:
        """Runs of at most ``size`` keys; nothing for an empty batch."""
        ...

    def all(self) -> Sequence[Key]:
        """All keys at once, for batches known to be small."""
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

    def all(self) -> Sequence[Key]:
        return self.keys


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

    def all(self) -> Sequence[Key]:
        return fold_many(self.texts)


class PackedKeys:
    """Keys still in msgpack, all of one width. Made by ``PackedKeys.parse``."""

    __slots__ = ("_body", "_count", "_width")

    def __init__(self, body: bytes | memoryview, count: int, width: int) -> None:
        self._body = body
        self._count = count
        self._width = width

    @classmethod
    def parse(cls, array: bytes | msgspec.Raw) -> PackedKeys | None:
        """Take a msgpack array of texts of one width, that of a digest; None when it is anything else, also when it
        is empty. A large buffer is kept as it is, without a copy."""
        raw = memoryview(array) if len(memoryview(array)) > _COPY_BELOW else bytes(array)
        first = raw[0] if raw else 0
        if 0x90 < first <= 0x9F:
            count, start = first & 0x0F, 1
        elif first == 0xDC:
            count, start = int.from_bytes(raw[1:3], "big"), 3
        elif first == 0xDD:
            count, start = int.from_bytes(raw[1:5], "big"), 5
        else:
            return None
        for width in _DIGEST_WIDTHS:
            stride = width + _HEADER
            if (
                count
                and len(raw) - start == count * stride
                and bytes(raw[start::stride]).count(0xD9) == count
                and bytes(raw[start + 1 :: stride]).count(width) == count
            ):
                return cls(raw[start:], count, width)
        return None

    def __len__(self) -> int:
        return self._count

    def slices(self, size: int) -> Iterator[Sequence[Key]]:
        """Raises ValueError (UnicodeDecodeError, msgspec.ValidationError) when a text is not UTF-8."""
        size = min(size, _MAX_SLICE)
        stride = self._width + _HEADER
        for at in range(0, self._count, size):
            count = min(size, self._count - at)
            yield _fold_packed(bytes(self._body[at * stride : (at + count) * stride]), count, self._width)

    def all(self) -> Sequence[Key]:
        """Raises as ``slices`` does."""
        if self._count > _MAX_SLICE:
            return [key for run in self.slices(_MAX_SLICE) for key in run]
        return _fold_packed(bytes(self._body), self._count, self._width)


def _fold_packed(run: bytes, count: int, width: int) -> Sequence[Key]:
    """As ``fold_many`` of the texts in ``run``. Deleting the bytes of the header wherever they stand leaves the digits
    alone: no hex digit is one of them, and a text that holds one becomes too short."""
    digits = run.translate(None, bytes((0xD9, width)))
    raw = b""
    if len(digits) == count * width:
        try:
            raw = unhexlify(digits)
        except ValueError:
            raw = b""
    if raw.hex().encode() != digits or not raw:
        return fold_many(_decode_texts(b"\xdc" + count.to_bytes(2, "big") + run))
    keys: tuple[Key, ...] = _splitter(count, width).unpack(raw)
    return keys


@lru_cache(maxsize=512)
def _splitter(count: int, width: int) -> Struct:
    """Cuts ``count`` digests into keys of their first 16 bytes."""
    return Struct(("16s" if width == 32 else "16s16x") * count)
