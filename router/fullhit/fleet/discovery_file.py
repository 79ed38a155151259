"""Dynamo's file discovery: a directory tree in which every record is a file.

An owner touches its files every few seconds for as long as it lives; nobody removes those of a killed process. So a
file counts for as long as its time of modification moves: one that was not touched for ``lease`` seconds is gone,
though it is still there. That is measured on our own clock, from one look to the next; the file system's clock, which
may be another machine's, is believed only at first sight, where it spares us the workers of last week.

Looking is a poll in a thread, because the tree may be on a network file system that hangs; a look that fails changes
nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from .discovery import CHANNELS, INSTANCES, MAX_RECORD_BYTES, MAX_RECORDS

__all__ = ["FileBackend"]

DEFAULT_LEASE = 10.0
"""Seconds; what Dynamo itself takes. Its owners touch their files every third of it."""
_DEPTH = 8


class FileBackend:
    """Follows the records under ``root``, the folder of ``DYN_FILE_KV``. Times in seconds."""

    def __init__(
        self,
        root: str | Path,
        *,
        interval: float = 0.5,
        lease: float = DEFAULT_LEASE,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.error = "not started"
        self.looks = 0
        self._root = Path(root)
        self._interval = interval
        self._lease = lease
        self._clock = clock
        self._wall_clock = wall_clock
        self._files: dict[str, _File] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self, on_store: Callable[[Mapping[str, bytes]], None]) -> None:
        """Begin to look; returns at once."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(on_store), name="fullhit-discovery")

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self.error = "closed"

    async def _run(self, on_store: Callable[[Mapping[str, bytes]], None]) -> None:
        while True:
            try:
                store = await asyncio.to_thread(self.look)
                self.error = ""
                on_store(store)
            except OSError as error:
                self.error = f"cannot read {self._root}: {error.strerror or error}"
            self.looks += 1
            await asyncio.sleep(self._interval)

    def look(self) -> dict[str, bytes]:
        """The records that live now. Raises OSError when the tree cannot be read; then nothing is known to have
        changed."""
        os.stat(self._root)
        seen: dict[str, _File] = {}
        for prefix in (INSTANCES, CHANNELS):
            for path, entry in _walk(self._root / prefix.rstrip("/"), prefix, _DEPTH):
                if len(seen) >= MAX_RECORDS:
                    break
                try:
                    stat = entry.stat()
                    seen[path] = self._file(path, entry.path, stat)
                except OSError:
                    continue  # gone between listing and reading
        self._files = seen
        now = self._clock()
        return {path: file.value for path, file in seen.items() if file.value and now - file.moved_at <= self._lease}

    def _file(self, path: str, place: str, stat: os.stat_result) -> _File:
        mark = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        known = self._files.get(path)
        if known is not None and known.mark == mark:
            return known
        now = self._clock()
        moved_at = now
        if known is None:
            age = self._wall_clock() - stat.st_mtime
            if age > 0:
                moved_at = now - age
        with open(place, "rb") as file:
            value = file.read(MAX_RECORD_BYTES + 1)
        if not value and known is not None:
            value = known.value  # emptied to be written anew
        return _File(mark, moved_at, value)


class _File:
    """What was seen of a file. ``moved_at``: when it was last touched, on our clock."""

    __slots__ = ("mark", "moved_at", "value")

    def __init__(self, mark: tuple[int, int, int], moved_at: float, value: bytes) -> None:
        self.mark = mark
        self.moved_at = moved_at
        self.value = value


def _walk(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, os.DirEntry[str]]]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if depth:
                yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", depth - 1)
        else:
            yield prefix + entry.name, entry
