"""Dynamo's file discovery: a directory tree in which every record is a file.

An owner touches its files every few seconds for as long as it lives; nobody removes those of a killed process. So a
file counts for as long as its time of modification moves: one that was not touched for ``lease`` seconds is gone,
though it is still there. That is measured on our own clock, from one look to the next; the file system's clock, which
may be another machine's, is believed only at first sight, where it spares us the workers of last week.

Looking is a poll in a thread of its own, because the tree may be on a network file system that hangs: then the error
says so, and neither the router nor its end waits for it. Only regular files are read. A look that fails changes
nothing, and a folder of records that is there no more is a store in trouble until the lease of what it held is over.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from .discovery import CHANNELS, INSTANCES, MAX_RECORD_BYTES, MAX_RECORDS

__all__ = ["FileBackend"]

DEFAULT_LEASE = 10.0
"""Seconds; what Dynamo itself takes. Its owners touch their files every third of it."""
_DEPTH = 8
_SLOW = 10.0
"""Seconds after which a look that has not come back is an error."""


class FileBackend:
    """Follows the records under ``root``, the folder of ``DYN_FILE_KV``. Times in seconds."""

    def __init__(
        self,
        root: str | Path,
        *,
        interval: float = 0.5,
        lease: float = DEFAULT_LEASE,
        slow: float = _SLOW,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.error = "not started"
        self.looks = 0
        self._root = Path(root)
        self._interval = interval
        self._lease = lease
        self._slow = slow
        self._clock = clock
        self._wall_clock = wall_clock
        self._files: dict[str, _File] = {}
        self._missing = ""
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
            looking = _in_thread(self.look)
            try:
                while not (await asyncio.wait({looking}, timeout=self._slow))[0]:
                    self.error = f"{self._root} does not answer: reading it takes over {self._slow:g} s"
                on_store(looking.result())
                self.error = self._missing
            except asyncio.CancelledError:
                looking.cancel()
                raise
            except OSError as error:
                self.error = f"cannot read {self._root}: {error.strerror or error}"
            self.looks += 1
            await asyncio.sleep(self._interval)

    def look(self) -> dict[str, bytes]:
        """The records that live now. Raises OSError when the tree cannot be read; then nothing is known to have
        changed."""
        os.stat(self._root)
        seen: dict[str, _File] = {}
        missing = ""
        for prefix in (INSTANCES, CHANNELS):
            folder = self._root / prefix.rstrip("/")
            if not folder.is_dir():
                kept = {path: file for path, file in self._files.items() if path.startswith(prefix)}
                if kept:
                    missing = f"{folder} has vanished"
                seen.update(kept)
                continue
            for path, entry in _walk(folder, prefix, _DEPTH):
                if len(seen) >= MAX_RECORDS:
                    break
                try:
                    seen[path] = self._file(path, entry.path, entry.stat())
                except OSError:
                    continue  # gone between listing and reading, or nothing that can be read
        now = self._clock()
        living = {path: file for path, file in seen.items() if now - file.moved_at <= self._lease}
        self._files = living if missing else seen
        self._missing = missing
        return {path: file.value for path, file in living.items() if file.value}

    def _file(self, path: str, place: str, status: os.stat_result) -> _File:
        mark = (status.st_mtime_ns, status.st_size, status.st_ino)
        known = self._files.get(path)
        if known is not None and known.mark == mark:
            return known
        now = self._clock()
        moved_at = now
        if known is None:
            age = self._wall_clock() - status.st_mtime
            if age > 0:
                moved_at = now - age
        value = _read_regular(place)
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


def _read_regular(place: str) -> bytes:
    """The beginning of a file. Raises OSError for a pipe or a device, the opening of which could wait for ever."""
    handle = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{place} is no regular file")
        return file.read(MAX_RECORD_BYTES + 1)


def _in_thread(work: Callable[[], dict[str, bytes]]) -> asyncio.Future[dict[str, bytes]]:
    """Do it in a thread that nobody waits for: those of `asyncio.to_thread` hold up the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[dict[str, bytes]] = loop.create_future()

    def tell(result: dict[str, bytes] | Exception) -> None:
        if future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def run() -> None:
        try:
            result: dict[str, bytes] | Exception = work()
        except Exception as error:
            result = error
        try:
            loop.call_soon_threadsafe(tell, result)
        except RuntimeError:
            pass  # the loop has ended meanwhile

    threading.Thread(target=run, name="fullhit-discovery", daemon=True).start()
    return future
