"""Dynamo's event plane over core NATS: one connection, replaced for ever, feeding one pool.

Lives by the rules of ``nats_plane.py``, less what Dynamo has no counterpart for: nothing is retained, nothing can be
asked for, so a message lost is only known by the next one of the same publisher, and entries then stay doubtful.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from .dynamo_feed import DynamoFeed
from .ingest import Ingest
from .nats_link import Handlers, NatsLink, NatsSettings, PlaneError, parse_servers
from .observer import EventLog
from .plane import PlaneStatus

__all__ = ["DynamoNats"]

_TURN = 0.0005
_GOOD_SECONDS = 5.0
_COMPLAINT_INTERVAL = 60.0


class DynamoNats:
    """``servers``: one NATS URL or several with commas between. Raises ValueError for a malformed one."""

    def __init__(
        self,
        servers: str,
        feed: DynamoFeed,
        ingest: Ingest,
        settings: NatsSettings | None = None,
        *,
        log: EventLog | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropped = 0
        self._servers = parse_servers(servers)
        self._feed = feed
        self._ingest = ingest
        self._settings = settings or NatsSettings()
        self._log = log
        self._rng = rng or random.Random()
        self._clock = clock
        self._handlers = Handlers(self._on_event, self._on_reply, self._on_dropped, self._on_trouble)
        self._link: NatsLink | None = None
        self._task: asyncio.Task[None] | None = None
        self._connects = 0
        self._error = "not started"
        self._trouble = ""
        self._complained_at = -_COMPLAINT_INTERVAL
        self._turn_began = 0.0
        self._remark: int | None = None
        self._last_at: float | None = None

    @property
    def url(self) -> str:
        """Where the servers are, without secrets."""
        return ",".join(f"{server.scheme}://{server.address}" for server in self._servers)

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        if self._task is None:
            self._error = "connecting"
            self._task = asyncio.create_task(self._stay_connected(), name="fullhit-dynamo-nats")

    async def close(self) -> None:
        """End the connection. Bounded by ``close_timeout``."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()
        self._error = "closed"

    def status(self) -> PlaneStatus:
        age = None if self._last_at is None else self._clock() - self._last_at
        return PlaneStatus("nats", self.url, self._link is not None, age, self._connects, self._error or self._trouble)

    async def _stay_connected(self) -> None:
        attempt = turn = 0
        while True:
            began = self._clock()
            server = self._servers[turn % len(self._servers)]
            link = NatsLink(server, self._settings, self._handlers, self._feed.scope.subjects())
            turn += 1
            try:
                await link.open()
                self._enter(link)
                await self._watch(link)
            except PlaneError as error:
                self._complain(str(error))
            finally:
                self._leave()
                await link.close()
            attempt = 0 if self._clock() - began > _GOOD_SECONDS else attempt + 1
            low, high = self._settings.backoff_min, self._settings.backoff_max
            await asyncio.sleep(self._rng.uniform(low, max(low, min(high, low * 2.0 ** min(attempt, 16)))))

    def _enter(self, link: NatsLink) -> None:
        self._link = link
        self._connects += 1
        self._error = self._trouble = ""
        self._remark = None
        self._complained_at = -_COMPLAINT_INTERVAL
        self._tell("info", "dynamo_plane_up", connects=self._connects)
        self._ingest.dynamo_up(self._feed.pool)
        self._ingest.on_work()

    def _leave(self) -> None:
        if self._link is not None:
            self._link = None
            self._ingest.dynamo_lost(self._feed.pool)
            self._ingest.on_work()

    async def _watch(self, link: NatsLink) -> None:
        """Raises PlaneError with the reason the connection broke."""
        while True:
            try:
                async with asyncio.timeout(self._settings.watchdog_interval):
                    await link.lost.wait()
            except TimeoutError:
                pass
            await link.prove()

    async def _on_event(self, subject: str, data: bytes) -> None:
        self._last_at = self._clock()
        self._feed.nats(subject, data)
        if self._remark is not None:
            self._remark -= 1
            if self._remark <= 0:
                self._remark = None
                self._ingest.messages_lost("slow_consumer", self._feed.pool)
        if self._ingest.backlog_bytes > self._ingest.settings.max_backlog_bytes // 2:
            await asyncio.sleep(0.001)
            self._turn_began = self._clock()
        elif self._clock() - self._turn_began > _TURN:
            await asyncio.sleep(0)
            self._turn_began = self._clock()

    async def _on_reply(self, data: bytes) -> None:
        """Nothing was asked for."""

    def _on_dropped(self, waiting: int) -> None:
        self.dropped += 1
        if self._remark is None:
            self._tell("warning", "events_dropped", waiting=waiting)
            self._ingest.messages_lost("slow_consumer", self._feed.pool)
            self._ingest.on_work()
        self._remark = max(waiting, 1)

    def _on_trouble(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            self._tell("error", "event_plane_refuses", detail=text)
            self._ingest.messages_lost("plane_error", self._feed.pool)

    def _complain(self, text: str) -> None:
        self._error = text
        now = self._clock()
        if now - self._complained_at >= _COMPLAINT_INTERVAL:
            self._complained_at = now
            self._tell("warning", "dynamo_plane_down", detail=text)

    def _tell(self, level: str, event: str, **fields: object) -> None:
        if self._log is not None:
            self._log(level, event, pool=self._feed.pool, url=self.url, **fields)
