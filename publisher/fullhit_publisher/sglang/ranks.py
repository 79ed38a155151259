"""Encoder processes of one encoder tell its main process what they hold, and that one publishes what all hold.

The main process listens on a Unix socket in a folder of its own that only its user can enter; path and key reach the
spawned processes by the environment, and whoever connects must know the key. Messages are JSON: first
``{"rank": n, "device": "..."}``, then ``{"added": [...], "removed": [...], "hits": n, "misses": n, "used": n,
"capacity": n}``. A connection that ends, or that says what nobody understands, is a rank of which nothing is known any
more. A rank tries for a while to connect and then goes on without: SGLang's work never waits for any of this.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final, Protocol

from ..cache import EmbeddingCache
from .common import CommonKeys

__all__ = ["RankListener", "RankReporter", "Told"]

_log = logging.getLogger("fullhit_publisher")

_SOCKET: Final = "FULLHIT_RANKS_SOCKET"
_KEY: Final = "FULLHIT_RANKS_KEY"
_MAX_MESSAGE: Final = 64 * 1024 * 1024
"""Bytes; a million keys of 64 characters."""
_PATIENCE: Final = 60.0
_INTERVAL: Final = 1.0
"""Seconds after which a process tells its figures although nothing has changed."""
_FIGURES: Final = ("hits", "misses", "used", "capacity")


class Told(Protocol):
    """Who is told what all ranks hold: an `EmbeddingCachePublisher`."""

    def publish_delta(self, added: list[str], removed: list[str], /) -> None: ...
    def set_stats(self, *, capacity_bytes: int, used_bytes: int, hits: int, misses: int) -> None: ...


class RankListener:
    """The main process's end. ``make(device)`` is called once, when the first rank has said what it runs on."""

    def __init__(self, size: int, make: Callable[[str], Told], environ: MutableMapping[str, str]) -> None:
        self._common = CommonKeys(size)
        self._figures = [dict.fromkeys(_FIGURES, 0) for _ in range(size)]
        self._make = make
        self._told: Told | None = None
        self._lock = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="fullhit-"))  # mode 0700
        key = secrets.token_bytes(32)
        self._listener = Listener(str(self._folder / "ranks"), "AF_UNIX", authkey=key)
        environ[_SOCKET], environ[_KEY] = str(self._folder / "ranks"), key.hex()
        self._seats: list[Connection[Any, Any] | None] = [None] * size
        self._closed = False
        threading.Thread(target=self._accept, name="fullhit-ranks", daemon=True).start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if not self._closed:
            self._closed = True
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except Exception as error:  # a stranger without the key, or the end
                if not self._closed:
                    _log.warning("an encoder process could not be heard: %s: %s", type(error).__name__, error)
                    time.sleep(0.1)
                continue
            threading.Thread(target=self._hear, args=(connection,), name="fullhit-rank", daemon=True).start()

    def _hear(self, connection: Connection[Any, Any]) -> None:
        rank = -1
        try:
            with connection:
                first = _read(connection)
                rank = self._seat(connection, first)
                while True:
                    self._take(rank, connection, _read(connection))
        except (EOFError, OSError):
            pass
        except Exception as error:
            _log.warning("encoder process %d says what cannot be understood: %s", rank, error)
        finally:
            self._leave(rank, connection)

    def _seat(self, connection: Connection[Any, Any], first: Mapping[str, Any]) -> int:
        rank = int(first["rank"])
        with self._lock:
            if not 0 <= rank < len(self._seats) or self._seats[rank] is not None:
                raise ValueError(f"rank {rank} is taken, or none of {len(self._seats)}")
            if self._told is None:
                self._told = self._make(str(first["device"]))
            self._seats[rank] = connection
            self._tell(self._common.change(rank, (), ()))
        return rank

    def _take(self, rank: int, connection: Connection[Any, Any], message: Mapping[str, Any]) -> None:
        figures = {name: int(message[name]) for name in _FIGURES}
        with self._lock:
            if self._seats[rank] is connection:
                self._figures[rank] = figures
                self._tell(self._common.change(rank, _texts(message["added"]), _texts(message["removed"])))

    def _leave(self, rank: int, connection: Connection[Any, Any]) -> None:
        with self._lock:
            if rank >= 0 and self._seats[rank] is connection:
                self._seats[rank] = None
                self._tell(self._common.lose(rank))
                if not self._closed:
                    _log.warning("encoder process %d is not heard any more: nothing is published", rank)

    def _tell(self, change: tuple[list[str], list[str]]) -> None:
        added, removed = change
        told = self._told
        if told is None:
            return
        if added or removed:
            told.publish_delta(added, removed)
        sums = {name: sum(figures[name] for figures in self._figures) for name in _FIGURES}
        told.set_stats(
            capacity_bytes=sums["capacity"], used_bytes=sums["used"], hits=sums["hits"], misses=sums["misses"]
        )


class RankReporter:
    """An encoder process's end: reports every change of ``cache`` from a thread of its own."""

    def __init__(self, rank: int, cache: EmbeddingCache[Any], device: str, environ: Mapping[str, str]) -> None:
        """Raises KeyError when the main process does not listen."""
        self._place, self._key = environ[_SOCKET], bytes.fromhex(environ[_KEY])
        self._rank, self._device, self._cache = rank, device, cache
        self._changes: queue.SimpleQueue[tuple[list[str], list[str]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="fullhit-rank", daemon=True).start()

    def _run(self) -> None:
        try:
            with self._connect() as connection:
                _write(connection, {"rank": self._rank, "device": self._device})
                self._cache.add_listener(self._note)
                while True:
                    try:
                        added, removed = self._changes.get(timeout=_INTERVAL)
                    except queue.Empty:
                        added, removed = [], []
                    cache = self._cache
                    figures = (cache.hits, cache.misses, cache.used_bytes, cache.capacity_bytes)
                    message = {"added": added, "removed": removed, **dict(zip(_FIGURES, figures, strict=True))}
                    _write(connection, message)
        except Exception as error:
            _log.warning("this process does not tell what it holds any more: %s: %s", type(error).__name__, error)
        finally:
            self._cache.remove_listener(self._note)

    def _note(self, added: list[str], removed: list[str]) -> None:
        self._changes.put((added, removed))

    def _connect(self) -> Connection[Any, Any]:
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                return Client(self._place, "AF_UNIX", authkey=self._key)
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)


def _read(connection: Connection[Any, Any]) -> dict[str, Any]:
    message = json.loads(connection.recv_bytes(_MAX_MESSAGE))
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def _write(connection: Connection[Any, Any], message: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _texts(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(key, str) for key in value):
        raise ValueError("keys must be texts")
    return value
