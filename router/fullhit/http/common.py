"""What every seat needs: addresses of servers, ids of requests, and since when each worker has been working."""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from fullhit.http.wire import Origin, Request

__all__ = ["InFlight", "Origins", "request_id_line", "request_id_of"]

_MAX_ID: Final = 256


class InFlight:
    """When the calls which each worker is busy with began: a stuck worker shows by its oldest one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started: dict[str, dict[object, float]] = {}

    def begin(self, worker: str, call: object) -> None:
        """``call`` (any object of its own) to ``worker`` begins; tell `end` once."""
        calls = self._started.get(worker)
        if calls is None:
            calls = self._started[worker] = {}
        calls[call] = self._clock()

    def end(self, worker: str, call: object) -> None:
        calls = self._started[worker]
        del calls[call]
        if not calls:
            del self._started[worker]

    def oldest(self) -> dict[str, float]:
        """Age in seconds of the oldest call by worker; without those that have none."""
        now = self._clock()
        return {worker: now - next(iter(calls.values())) for worker, calls in self._started.items()}

    def __len__(self) -> int:
        return sum(map(len, self._started.values()))


class Origins:
    """Worker URL -> `Origin`. https URLs get one TLS context for all."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._known: dict[str, Origin] = {}

    def of(self, url: str) -> Origin:
        origin = self._known.get(url)
        if origin is None:
            parts = urlsplit(url)
            secure = parts.scheme == "https"
            if secure and self._tls is None:
                self._tls = ssl.create_default_context()
            port = parts.port or (443 if secure else 80)
            origin = Origin(parts.hostname or "", port, self._tls if secure else None)
            if len(self._known) > 65_536:
                self._known.clear()
            self._known[url] = origin
        return origin


def request_id_of(request: Request) -> tuple[bytes, bool]:
    """The request's ``x-request-id``, and whether it came with one; a fresh one otherwise."""
    if b"x-request-id" in request.names:
        given = request.get(b"x-request-id")
        if given and len(given) <= _MAX_ID and given.isascii() and given.decode().isprintable():
            return given, True
    # Unique is all it has to be; asking the kernel for entropy would cost as much as choosing an encoder.
    return b"%032x" % random.getrandbits(128), False


def request_id_line(request_id: bytes) -> bytes:
    """The header line of an id from `request_id_of`, which lets nothing through that could end a line."""
    return b"x-request-id: %b\r\n" % request_id
