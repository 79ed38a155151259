"""A load generator that speaks gRPC and costs little: one HTTP/2 connection a client, one question at a time.

Why not grpcio's client: in Python it takes about two thirds of the CPU that the router does, so on two shared cores
much of what is measured would be the client. What this one speaks is the part of RFC 9113 that it needs and no more:
settings and pings are acknowledged and large receive windows offered; its own send window is not tracked, since one
short question is outstanding and the server opens the window again as it reads (were it not to, it would reset the
stream, which is an error here); header blocks of the answers are not decoded; a lost connection is an error.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Final

__all__ = ["LeanClient", "LoadFailed"]

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_MAX_WINDOW: Final = 2**31 - 1
_FIRST_WINDOW: Final = 65_535
_TABLE_SIZE, _INITIAL_WINDOW = 1, 4


class LoadFailed(Exception):
    """The server ended a stream or the connection."""


class LeanClient(asyncio.Protocol):
    """Asks, waits for the answer, asks again.

    ``question`` returns the next serialized message, or None when there is none; then the connection is closed and
    ``finished`` is done. ``answered`` is given each answer's bytes. ``session``: all questions go over one stream;
    otherwise each is a call of its own. ``method``: the path, for instance ``/fullhit.v1.Router/Select``.
    """

    def __init__(
        self,
        method: str,
        authority: str,
        question: Callable[[], bytes | None],
        answered: Callable[[bytes], None],
        *,
        session: bool,
    ) -> None:
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._question = question
        self._answered = answered
        self._session = session
        self._head = b"\x83\x86" + b"".join(  # :method POST and :scheme http are in HPACK's own table
            _literal(name, value)
            for name, value in (
                (":path", method),
                (":authority", authority),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
            )
        )
        self._stream = -1
        self._received = bytearray()
        self._message = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        settings = struct.pack(">HIHI", _TABLE_SIZE, 0, _INITIAL_WINDOW, _MAX_WINDOW)
        window = struct.pack(">I", _MAX_WINDOW - _FIRST_WINDOW)
        self._transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window))
        if self._session:
            self._stream = 1
            self._transport.write(_frame(_HEADERS, _END_HEADERS, 1, self._head))
        self._ask()

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        at = 0
        while len(received) - at >= 9:
            size = int.from_bytes(received[at : at + 3], "big")
            if len(received) - at < 9 + size:
                break
            self._frame(received[at + 3], received[at + 4], bytes(received[at + 9 : at + 9 + size]))
            at += 9 + size
        del received[:at]

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(LoadFailed(f"the connection was lost: {error}"))

    def _frame(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == _DATA:
            self._message += payload
            if self._session:
                self._complete()
        elif kind == _HEADERS and flags & _END_STREAM:
            if self._session:
                self._fail(LoadFailed("the session was ended"))
            else:
                self._complete()
        elif kind == _SETTINGS and not flags & _ACK:
            self._transport.write(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, payload))
        elif kind in (_RST_STREAM, _GOAWAY):
            self._fail(LoadFailed(f"the server sent {'RST_STREAM' if kind == _RST_STREAM else 'GOAWAY'}"))

    def _complete(self) -> None:
        """An answer, if all of it is here: five bytes of gRPC (compressed or not, length), then the message."""
        message = self._message
        if len(message) < 5 or len(message) < 5 + int.from_bytes(message[1:5], "big"):
            if not self._session:
                self._fail(LoadFailed("the call ended without an answer"))
            return
        try:
            self._answered(bytes(message[5:]))
        except Exception as error:
            self._fail(error)
            return
        message.clear()
        self._ask()

    def _ask(self) -> None:
        question = self._question()
        if question is None:
            if not self.finished.done():
                self.finished.set_result(None)
            self._transport.close()
            return
        data = b"\0" + struct.pack(">I", len(question)) + question
        if self._session:
            self._transport.write(_frame(_DATA, 0, 1, data))
        else:
            self._stream += 2
            head = _frame(_HEADERS, _END_HEADERS, self._stream, self._head)
            self._transport.write(head + _frame(_DATA, _END_STREAM, self._stream, data))

    def _fail(self, error: Exception) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)
        if self._transport is not None:
            self._transport.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header that goes into no table (RFC 7541, 6.2.2); names and values here are under 127 bytes."""
    if max(len(name), len(value)) > 126:
        raise ValueError(f"too long for a short literal: {name}: {value}")
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
