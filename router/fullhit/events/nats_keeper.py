"""Keeps one connection to NATS alive for ever: what the planes over core NATS have in common.

Connecting never holds up the start of the router and is never given up. What is believed about a connection is only
what was proved lately: a PING unanswered within its time, and the connection is replaced (case C44). Messages dropped
because we were too slow make every stream doubtful, once at once, and once more when the messages that waited at that
moment have been read, because a heartbeat among those knows nothing of the loss (case C46).
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from .ingest import Ingest
from .nats_link import EVENTS, Handlers, NatsLink, NatsSettings, PlaneError, parse_servers
from .observer import EventLog
from .plane import PlaneStatus

__all__ = ["NatsKeeper"]

_TURN = 0.0005
"""Seconds of callbacks after which the event loop gets a turn."""
_GOOD_SECONDS = 5.0
"""A connection that lived this long resets the backoff."""
_COMPLAINT_INTERVAL = 60.0


class NatsKeeper(ABC):
    """``servers``: one NATS URL or several with commas between. Raises ValueError for a malformed one. ``name`` begins
    the events in the log (``NAME_up``, ``NAME_down``); ``fields`` go with each.

    ``rebuilds`` counts connections replaced for want of trust, ``dropped`` messages lost on our side.
    """

    def __init__(
        self,
        servers: str,
        ingest: Ingest,
        settings: NatsSettings | None,
        *,
        name: str,
        fields: dict[str, object],
        log: EventLog | None,
        rng: random.Random | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rebuilds = 0
        self.dropped = 0
        self._servers = parse_servers(servers)
        self._ingest = ingest
        self._settings = settings or NatsSettings()
        self._name = name
        self._fields = fields
        self._log = log
        self._rng = rng or random.Random()
        self._clock = clock
        self._handlers = Handlers(self._on_event, self._on_reply, self._on_dropped, self._on_trouble)
        self._link: NatsLink | None = None
        self._tasks: list[asyncio.Task[None]] = []
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
        if not self._tasks:
            self._error = "connecting"
            self._tasks = [asyncio.create_task(self._stay_connected(), name=f"fullhit-{self._name}"), *self._more()]

    async def close(self) -> None:
        """End the connection. Bounded by ``close_timeout``."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.result()
        self._error = "closed"

    def status(self) -> PlaneStatus:
        age = None if self._last_at is None else self._clock() - self._last_at
        return PlaneStatus("nats", self.url, self._link is not None, age, self._connects, self._error or self._trouble)

    # What the planes have each for itself.

    @abstractmethod
    def _deliver(self, subject: str, data: bytes) -> None:
        """A message arrived on a subject."""

    @abstractmethod
    def _deliver_reply(self, data: bytes) -> None:
        """A message arrived in the inbox."""

    @abstractmethod
    def _up(self) -> None:
        """Connected, and all subscriptions are in place."""

    @abstractmethod
    def _down(self) -> None:
        """Not connected any more."""

    @abstractmethod
    def _lost(self, cause: str) -> None:
        """Messages may have been lost."""

    def _subjects(self) -> Sequence[str]:
        """What to subscribe to."""
        return (EVENTS,)

    def _distrust(self) -> str:
        """Why a connection that works should be replaced; empty when it should not."""
        return ""

    def _more(self) -> list[asyncio.Task[None]]:
        """Further tasks to run beside the connection."""
        return []

    # Connections, one after the other.

    async def _stay_connected(self) -> None:
        attempt = turn = 0
        while True:
            began = self._clock()
            server = self._servers[turn % len(self._servers)]
            link = NatsLink(server, self._settings, self._handlers, self._subjects())
            turn += 1
            try:
                await link.open()
                self._enter(link)
                await self._watch(link)
            except PlaneError as error:
                self._complain(str(error))
            finally:
                if self._link is not None:
                    self._link = None
                    self._down()
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
        self._tell("info", f"{self._name}_up", connects=self._connects)
        self._up()

    async def _watch(self, link: NatsLink) -> None:
        """Raises PlaneError with the reason the connection broke, or should be replaced."""
        while True:
            try:
                async with asyncio.timeout(self._settings.watchdog_interval):
                    await link.lost.wait()
            except TimeoutError:
                pass
            try:
                await link.prove()
            except PlaneError:
                self.rebuilds += not link.lost.is_set()
                raise
            if reason := self._distrust():
                self.rebuilds += 1
                raise PlaneError(reason)

    # Messages.

    async def _on_event(self, subject: str, data: bytes) -> None:
        self._last_at = self._clock()
        self._deliver(subject, data)
        if self._remark is not None:
            self._remark -= 1
            if self._remark <= 0:
                self._remark = None
                self._lost("slow_consumer")
        await self._give_turn()

    async def _on_reply(self, data: bytes) -> None:
        self._last_at = self._clock()
        self._deliver_reply(data)
        await self._give_turn()

    async def _give_turn(self) -> None:
        """Let the loop run after some time of callbacks; hold the subscription back while too much waits."""
        if self._ingest.backlog_bytes > self._ingest.settings.max_backlog_bytes // 2:
            await asyncio.sleep(0.001)
            self._turn_began = self._clock()
        elif self._clock() - self._turn_began > _TURN:
            await asyncio.sleep(0)
            self._turn_began = self._clock()

    def _on_dropped(self, waiting: int) -> None:
        self.dropped += 1
        if self._remark is None:
            self._tell("warning", "events_dropped", waiting=waiting)
            self._lost("slow_consumer")
        self._remark = max(waiting, 1)

    def _on_trouble(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            self._tell("error", "event_plane_refuses", detail=text)
            self._lost("plane_error")

    def _complain(self, text: str) -> None:
        self._error = text
        now = self._clock()
        if now - self._complained_at >= _COMPLAINT_INTERVAL:
            self._complained_at = now
            self._tell("warning", f"{self._name}_down", detail=text)

    def _tell(self, level: str, event: str, **fields: object) -> None:
        if self._log is not None:
            self._log(level, event, url=self.url, **self._fields, **fields)
