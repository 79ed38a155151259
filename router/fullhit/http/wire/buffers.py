"""Memory for bodies.

`bytearray(n)` writes n zeros before anybody can use it: for a body of 6 MB that is the best part of a millisecond in
which the loop does nothing else, and for a body that was only announced it turns a promise into resident memory.
The C API makes a bytearray without touching it. Even so, memory that is new to the process costs a page fault for every
4 KiB, a fifth of all CPU at 300 KB a request; so buffers whose request is over are kept, warm, for the next ones.

A buffer is only taken back when it can be proven that nobody else has it: no reference but ours, no view into it
(resizing refuses while there is one). A handler may therefore keep a body as long as it likes.

What lies in a buffer before it has been filled may be an old body. The connection hands it on only when every byte of
it has been written.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

__all__ = ["BufferPool"]

SMALLEST, LARGEST = 16, 23
"""Sizes kept: powers of two from 64 KiB to 8 MiB."""


def _c_api() -> tuple[Callable[[int], bytearray], Callable[[bytearray, int], object] | None]:
    try:
        make = ctypes.pythonapi.PyByteArray_FromStringAndSize
        resize = ctypes.pythonapi.PyByteArray_Resize
    except AttributeError:  # not CPython
        return bytearray, None
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)
    resize.restype = ctypes.c_int
    resize.argtypes = (ctypes.py_object, ctypes.c_ssize_t)

    def unwritten(size: int) -> bytearray:
        made: bytearray = make(None, size)
        return made

    return unwritten, resize


class BufferPool:
    """Spare buffers up to `limit` bytes together."""

    __slots__ = ("_limit", "_resize", "_spare", "_taken", "_unwritten", "kept")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spare: dict[int, list[bytearray]] = {}
        self._taken = False
        self._unwritten, self._resize = _c_api()
        self.kept = 0

    def warm(self, size: int) -> bool:
        """A spare buffer for this size is there."""
        return bool(self._spare.get((size - 1).bit_length()))

    def take(self, size: int) -> bytearray:
        """A buffer of `size` bytes with no particular content."""
        power = (size - 1).bit_length()
        if self._resize is None or not SMALLEST <= power <= LARGEST:
            return self._unwritten(size)
        spare = self._spare.get(power)
        if spare:
            self._taken = True
            self.kept -= 1 << power
            buffer = spare.pop()
        else:
            buffer = self._unwritten(1 << power)
        self._resize(buffer, size)
        return buffer

    def give(self, holder: list[bytearray]) -> None:
        """Take back the one buffer in `holder`, which is emptied, if nobody else has it."""
        buffer = holder.pop()
        size = len(buffer)
        power = (size - 1).bit_length()
        whole = 1 << power
        if self._resize is None or not SMALLEST <= power <= LARGEST or self.kept + whole > self._limit:
            return
        if sys.getrefcount(buffer) != 2:  # ours and the call's
            return
        try:
            self._resize(buffer, whole)
        except BufferError:
            return
        self.kept += whole
        self._spare.setdefault(power, []).append(buffer)

    def age(self) -> None:
        """Call now and then: lets one buffer go when none was needed since the last call."""
        taken, self._taken = self._taken, False
        if taken or not self.kept:
            return
        for power in sorted(self._spare, reverse=True):
            if self._spare[power]:
                self._spare[power].pop()
                self.kept -= 1 << power
                return
