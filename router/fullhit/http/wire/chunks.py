"""The chunked transfer coding, for both directions.

`ChunkScanner` walks over the bytes and tells where the message ends. With a sink it also collects the payload
(a request body, or an answer that is read whole); without one it only checks the framing, which is what a
relay needs: the bytes themselves are passed on as they are, chunk boundaries included.

Strict: hexadecimal sizes without sign or blanks, at most 16 digits; CRLF only; chunk extensions are tolerated
when they are printable and short (servers do send them), trailers are checked for their form and dropped from
collected bodies. Everything else is an error, because two parsers that repair the same mistake differently are
how requests are smuggled.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["ChunkError", "ChunkScanner"]

MAX_LINE: Final = 4096
"""Bytes of one chunk-size line with its extensions."""
MAX_TRAILERS: Final = 16 * 1024
"""Bytes of the trailer section."""

_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILER: Final = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*)?\r\n")


class ChunkError(ValueError):
    """The chunk framing is broken."""


class ChunkTooLarge(ValueError):
    """The payload is larger than the limit allows."""


class ChunkScanner:
    """Feed it slices of the stream in order; `done` turns true at the end of the message."""

    __slots__ = ("_left", "_limit", "_partial", "_sink", "_trailer_bytes", "_trailers", "done", "payload")

    def __init__(self, sink: bytearray | None = None, limit: int | None = None) -> None:
        self._sink = sink
        self._limit = limit
        self._left = 0  # bytes of the current chunk still to come, its CRLF included
        self._partial = b""  # an unfinished line
        self._trailers = False
        self._trailer_bytes = 0
        self.payload = 0
        self.done = False

    def feed(self, data: bytes | bytearray | memoryview, start: int, end: int) -> int:
        """Take `data[start:end]`; returns the index after the last byte that belongs to the message.

        Raises ChunkError or ChunkTooLarge (payload above the limit).
        """
        view = data if isinstance(data, memoryview) else memoryview(data)
        at = start
        while at < end and not self.done:
            left = self._left
            at = self._take_chunk(view, at, end, left) if left else self._take_line(view, at, end)
        return at

    def _take_chunk(self, view: memoryview, at: int, end: int, left: int) -> int:
        room = end - at
        if left > 2:
            size = min(room, left - 2)
            if self._sink is not None:
                self._sink += view[at : at + size]
            at += size
            left -= size
            room -= size
        if left <= 2 and room:
            take = min(room, left)
            if view[at : at + take] != b"\r\n"[2 - left : 2 - left + take]:
                raise ChunkError("chunk does not end with CRLF")
            at += take
            left -= take
        self._left = left
        return at

    def _take_line(self, view: memoryview, at: int, end: int) -> int:
        partial = self._partial
        stop = min(end, at + MAX_LINE + 2 - len(partial))
        fresh = bytes(view[at:stop]) if stop - at <= 64 else bytes(view[at : at + 64])
        cut = fresh.find(b"\n")
        if cut < 0 and stop - at > 64:
            fresh = bytes(view[at:stop])
            cut = fresh.find(b"\n")
        if cut < 0:
            self._partial = partial + fresh
            if len(self._partial) > MAX_LINE:
                raise ChunkError("chunk size line too long")
            self._check_partial()
            return at + len(fresh)
        line = partial + fresh[: cut + 1]
        self._partial = b""
        if self._trailers:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > MAX_TRAILERS or _TRAILER.fullmatch(line) is None:
                raise ChunkError("malformed or oversized trailers")
            if line == b"\r\n":
                self.done = True
            return at + cut + 1
        match = _SIZE.fullmatch(line)
        if match is None:
            raise ChunkError("malformed chunk size")
        size = int(match[1], 16)
        if size:
            self.payload += size
            if self._limit is not None and self.payload > self._limit:
                raise ChunkTooLarge
            self._left = size + 2
        else:
            self._trailers = True
        return at + cut + 1

    def _check_partial(self) -> None:
        """Refuse at once what can never become a size line, rather than wait for its end."""
        if not self._trailers and _SIZE_START.match(self._partial) is None:
            raise ChunkError("malformed chunk size")


_SIZE_START: Final = re.compile(rb"[0-9A-Fa-f]{1,16}(?:[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r?)?\Z")
