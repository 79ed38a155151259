"""Encoders without a broker: each brings its events over a line of its own.

`LinePlane` is an event plane whose messages do not come from a broker but from whoever holds a `Line`: the gRPC
servicer, one line a stream. What a line says is put into the same bytes that a broker would carry and fed to the same
intake, so every rule of the event protocol (order, gaps, digests, incarnations, limits) holds here too. What a line may
speak for is fixed when it is opened; its messages carry no names.

One worker has one line. A newer one ends the older: the encoder has come back before we noticed that it had gone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fullhit.events.linked import LinkedIngest
from fullhit.events.plane import OutgoingRequest, PlaneStatus
from fullhit.fleet.member import Source
from fullhit.fleet.registry import Fleet
from fullhit_publisher import wire

__all__ = ["Line", "LineClosed", "LinePlane", "LineWorker"]

_LONGEST_SLEEP = 1.0
_MAX_REQUESTS = 16
"""Snapshot requests waiting for a line. The intake has one outstanding per worker, so older ones are timed out."""
_HIGH_WATER = 4 << 20
"""Bytes a worker may have waiting before its line is read no further."""


class LineClosed(Exception):
    """The router ended the line; ``code`` is ``replaced``, ``removed`` or ``leaving``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class LineWorker:
    """Who opens a line. None leaves what is known or assumed."""

    url: str
    pool: str = ""
    device: str | None = None
    weight: float | None = None
    max_inflight: int | None = None
    labels: dict[str, str] = field(default_factory=dict)


class Line:
    """One encoder's connection. Made by `LinePlane.open`; close it on every path."""

    def __init__(self, plane: LinePlane, pool: str, worker: str, worker_id: int) -> None:
        self.pool = pool
        self.worker = worker
        self.worker_id = worker_id
        self._plane = plane
        self._subject = wire.events_subject(pool, worker_id)
        self._requests: deque[int] = deque(maxlen=_MAX_REQUESTS)
        self._ended: LineClosed | None = None
        self._news = asyncio.Event()
        self.send = self._send  # one object: the intake tells lines apart by it

    def heartbeat(self, **fields: Any) -> None:
        """Fields as in `wire.Heartbeat`, but those that name the worker."""
        beat = wire.Heartbeat(worker_id=self.worker_id, pool=self.pool, url=self.worker, **fields)
        self._plane.feed(self._subject, beat)

    def delta(self, added: list[str], removed: list[str], epoch: int, seq: int, resync: bool) -> None:
        """A change of the cache; see `wire.Delta`."""
        update = wire.Update(added, removed)
        self._plane.feed(self._subject, wire.Delta(self.worker_id, update, epoch, seq, self.pool, resync))

    def snapshot(self, keys: list[str], **fields: int) -> None:
        """One part of an answer to a snapshot request; see `wire.Snapshot`."""
        self._plane.feed_snapshot(wire.Snapshot(worker_id=self.worker_id, pool=self.pool, keys=keys, **fields))

    async def breathe(self) -> None:
        """Wait while much of what this line said is not worked off, so that the peer slows down."""
        ingest = self._plane.ingest
        if ingest.has_work:
            await asyncio.sleep(0)
        while ingest.waiting(self.pool, self.worker) > _HIGH_WATER:  # noqa: ASYNC110 (the intake tells nobody)
            await asyncio.sleep(0.005)

    async def request(self) -> int:
        """The id of the next snapshot request. Raises `LineClosed` when the router ends the line."""
        while not self._requests:
            if self._ended is not None:
                raise self._ended
            self._news.clear()
            await self._news.wait()
        return self._requests.popleft()

    def end(self, code: str, message: str) -> None:
        """Make `request` raise `LineClosed`."""
        self._requests.clear()
        self._ended = self._ended or LineClosed(code, message)
        self._news.set()

    def close(self) -> None:
        """The stream is over. A second call does nothing."""
        self._plane._closed(self)

    def _send(self, request: OutgoingRequest) -> None:
        self._requests.append(request.request_id)
        self._news.set()


class LinePlane:
    """All lines. An `EventPlane`: start it, give it to nobody else, close it."""

    def __init__(
        self,
        ingest: LinkedIngest,
        fleet: Fleet,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.ingest = ingest
        self._fleet = fleet
        self._clock = clock
        self._wall_clock = wall_clock
        self._lines: dict[str, Line] = {}
        # Counts on over all lines and, being time, over restarts: a returning encoder is never taken for an old one.
        self._sequence = itertools.count(int(wall_clock() * 1e9))
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._opened = 0

    def __len__(self) -> int:
        return len(self._lines)

    async def start(self) -> None:
        """Begin the housekeeping."""
        self._fleet.on_removed.append(self._removed)
        self._task = asyncio.create_task(self._run(), name="fullhit-lines")

    async def close(self) -> None:
        """End all lines."""
        if self._removed in self._fleet.on_removed:
            self._fleet.on_removed.remove(self._removed)
        for line in list(self._lines.values()):
            line.end("leaving", "the router is leaving")
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def status(self) -> PlaneStatus:
        """Connected whenever it runs: there is no broker to lose."""
        heard = self.ingest.last_message_at
        age = None if heard is None else self._clock() - heard
        return PlaneStatus("lines", "", self._task is not None, age, self._opened, "")

    def open(self, worker: LineWorker) -> Line:
        """Register the worker and open its line. Raises ValueError with the reason."""
        member = self._fleet.add(
            worker.url,
            source=Source.REGISTERED,
            pool=worker.pool or None,
            device=worker.device,
            weight=worker.weight,
            max_inflight=worker.max_inflight,
            labels=worker.labels or None,
        )
        former = self._lines.get(member.id)
        if former is not None:
            former.end("replaced", f"{member.id} has opened another stream")
        line = Line(self, member.pool, member.id, member.worker_id)
        self._lines[member.id] = line
        self._opened += 1
        self.ingest.link(member.pool, member.id, line.send)
        self._wake.set()
        return line

    def feed(self, subject: str, message: wire.Heartbeat | wire.Delta) -> None:
        """Hand a message to the intake."""
        self.ingest.feed(subject, self._encode(message))
        self._wake.set()

    def feed_snapshot(self, message: wire.Snapshot) -> None:
        """Hand a part of a snapshot to the intake."""
        self.ingest.feed_snapshot(self._encode(message))
        self._wake.set()

    def _encode(self, message: wire.Heartbeat | wire.Delta | wire.Snapshot) -> bytes:
        return wire.encode(
            message,
            publisher_id=message.worker_id,
            sequence=next(self._sequence),
            published_at=int(self._wall_clock() * 1000),
        )

    def _closed(self, line: Line) -> None:
        self.ingest.unlink(line.pool, line.worker, line.send)
        if self._lines.get(line.worker) is line:
            del self._lines[line.worker]

    def _removed(self, pool: str, worker: str) -> None:
        line = self._lines.get(worker)
        if line is not None:
            line.end("removed", f"{worker} was removed from the fleet")

    async def _run(self) -> None:
        ingest = self.ingest
        while True:
            self._wake.clear()
            more = ingest.run_slices()
            now = self._clock()
            if now >= ingest.links_deadline:
                ingest.tick_links(now)
            if more:
                await asyncio.sleep(0)
                continue
            pause = min(max(ingest.links_deadline - self._clock(), 0.001), _LONGEST_SLEEP)
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                pass
