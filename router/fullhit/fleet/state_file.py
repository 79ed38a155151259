"""The state file: read once at the start, written again whenever what it should say has changed.

A file is replaced as a whole, so a reader finds the old one or the new one. Whatever goes wrong with it, the router
works on: a file that cannot be read is put aside and said in the log, and one that cannot be written is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from os import fsync as sync
from pathlib import Path

from fullhit.fleet.registry import Fleet
from fullhit.fleet.remembered import MAX_BYTES, Remembered, StateUnreadable, decode, encode
from fullhit.fleet.types import FleetObserver

__all__ = ["StateFile"]

LOOK_SECONDS = 1.0
"""How often is looked for a change; also the pause after a write that failed, times ten."""


class StateFile:
    """``path`` belongs to one router. ``fleet`` is what is remembered."""

    def __init__(self, path: str | Path, fleet: Fleet, observer: FleetObserver) -> None:
        self.error = ""
        """Why the last write failed; empty when it did not."""
        self._path = Path(path)
        self._fleet = fleet
        self._observer = observer
        self._written = b""
        self._task: asyncio.Task[None] | None = None
        self._pending: asyncio.Future[None] | None = None

    def load(self) -> int:
        """Add the workers that the file remembers and the fleet does not know yet; returns how many. Raises nothing."""
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return 0
        except OSError as error:
            self._tell("state_file_ignored", path=str(self._path), cause=str(error))
            return 0
        try:
            if len(data) > MAX_BYTES:
                raise StateUnreadable(f"it has more than {MAX_BYTES} bytes")
            workers = decode(data)
        except StateUnreadable as error:
            aside = self._path.with_name(self._path.name + ".damaged")
            with contextlib.suppress(OSError):
                os.replace(self._path, aside)
            self._tell("state_file_ignored", path=str(self._path), cause=str(error), kept_as=str(aside))
            return 0
        restored = sum(map(self._restore, workers))
        self._observer.event("state_file_read", path=str(self._path), workers=restored)
        return restored

    async def start(self) -> None:
        """Begin to write what changes."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="fullhit-state-file")

    async def close(self) -> None:
        """Write what is left, and stop."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            if self._pending is not None and not self._pending.done():
                await asyncio.wait({self._pending})  # an older state must not come last
            await self._write(self._state())

    def _restore(self, row: Remembered) -> bool:
        try:
            if self._fleet.get(row.url) is not None:
                return False  # the configuration names it
            member = self._fleet.add(
                row.url,
                source=row.source,
                pool=row.pool,
                device=row.device,
                weight=row.weight,
                max_inflight=row.max_inflight,
                labels=row.labels,
            )
            if row.draining:
                self._fleet.drain(member.id)
        except ValueError as error:
            self._tell("worker_not_restored", worker=row.url[:200], pool=row.pool[:100], cause=str(error))
            return False
        return True

    async def _run(self) -> None:
        while True:
            wrong = not await self._write(self._state())
            await asyncio.sleep(LOOK_SECONDS * (10 if wrong else 1))

    def _state(self) -> bytes:
        return encode(self._fleet, self._fleet.settings.max_inflight)

    async def _write(self, data: bytes) -> bool:
        if data == self._written:
            return True
        try:
            self._pending = asyncio.ensure_future(asyncio.to_thread(_replace, self._path, data))
            await asyncio.shield(self._pending)
        except OSError as error:
            if not self.error:
                self._tell("state_file_not_written", path=str(self._path), cause=str(error))
            self.error = str(error)
            return False
        if self.error:
            self._observer.event("state_file_written_again", path=str(self._path))
        self.error = ""
        self._written = data
        return True

    def _tell(self, kind: str, **fields: object) -> None:
        self._observer.event(kind, "warning", **fields)


def _replace(path: Path, data: bytes) -> None:
    """Write beside the file, then take its place. Raises OSError, and leaves nothing behind then."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            sync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
