"""Memory for bodies.

`bytearray(n)` writes n zeros before anybody can use it: for a body of 6 MB that is the best part of a millisecond in
which the loop does nothing else, and for a body that was only announced it turns a promise into resident memory.
The C API makes a bytearray without touching it; the parts that are never written stay untouched address space (large
allocations) or a reused piece of the heap. Whoever takes one must hand it on only when every byte has been
written, as the connection does: what lies in it before may be an old body.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

__all__ = ["unwritten"]


def _c_api() -> Callable[[int], bytearray]:
    try:
        make = ctypes.pythonapi.PyByteArray_FromStringAndSize
    except AttributeError:  # not CPython
        return bytearray
    make.restype = ctypes.py_object
    make.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)

    def unwritten(size: int) -> bytearray:
        made: bytearray = make(None, size)
        return made

    return unwritten


unwritten: Callable[[int], bytearray] = _c_api()
"""A bytearray of `size` bytes with no particular content."""
