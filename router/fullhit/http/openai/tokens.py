"""When does an answer's first token arrive? Seen in the bytes that pass, without holding any of them up.

In a stream of server-sent events it is the first ``data:`` line: comments, which servers send to keep a connection
alive, and ``event:`` lines do not count. In any other answer it is the first byte of the body. Lines may be cut
anywhere, also by the framing of chunks.
"""

from __future__ import annotations

from typing import Final

from fullhit.http.wire.chunks import ChunkError, ChunkScanner

__all__ = ["FirstToken", "payload_of"]

_WANTED: Final = b"data:"
_BOM: Final = b"\xef\xbb\xbf"


class FirstToken:
    """Feed it the body as it comes; ``seen`` turns true once. ``sse``: the body is a stream of events. ``chunked``: its
    chunk framing is still around it.

    >>> watch = FirstToken(sse=True, chunked=False)
    >>> watch.feed(b": keep-alive\\n\\nda"), watch.feed(b"ta: {}")
    (False, True)
    """

    __slots__ = ("_line", "_payload", "_scanner", "_sse", "_start", "seen")

    def __init__(self, *, sse: bool, chunked: bool) -> None:
        self._sse = sse
        self._payload = bytearray()
        self._scanner = ChunkScanner(self._payload) if chunked else None
        self._line: bytes | None = b""  # what the present line began with; None: it is of no interest
        self._start = True
        self.seen = False

    def feed(self, piece: bytes) -> bool:
        """The next piece; returns ``seen``."""
        if self.seen:
            return True
        payload = piece
        if self._scanner is not None:
            try:
                self._scanner.feed(piece, 0, len(piece))
            except ChunkError:
                return False  # the connection checks the framing and ends the answer
            payload = bytes(self._payload)
            self._payload.clear()
        if payload:
            self.seen = self._look(payload) if self._sse else True
        return self.seen

    def _look(self, payload: bytes) -> bool:
        for part in payload.splitlines(keepends=True):
            if self._line is not None:
                line = self._line + part[: len(_BOM) + len(_WANTED)]
                if self._start:
                    if _BOM.startswith(line):
                        self._line = line
                        continue
                    line = line.removeprefix(_BOM)
                if line.startswith(_WANTED):
                    return True
                self._line = line if _WANTED.startswith(line) else None
            if part.endswith((b"\n", b"\r")):
                self._line = b""
            self._start = False
        return False


def payload_of(beginning: bytes, chunked: bool) -> bytes:
    """The payload in the first bytes of a body."""
    if not chunked:
        return beginning
    payload = bytearray()
    try:
        ChunkScanner(payload).feed(beginning, 0, len(beginning))
    except ChunkError:
        pass
    return bytes(payload)
