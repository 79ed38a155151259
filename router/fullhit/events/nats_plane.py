"""The event plane over core NATS: keeps one ``NatsLink`` alive for ever and feeds the intake from it.

Connecting never holds up the start of the router and is never given up. What is believed about a connection is only
what was proved lately:

* a PING unanswered within its time, and the connection is replaced (case C44);
* snapshot requests to workers that are heard, without any answer, and it is replaced too, for then the way back is
  broken although all else works (case C45); seldom, because the workers may be to blame;
* messages dropped because we were too slow make every stream doubtful, once at once, and once more when the messages
  that waited at that moment have been read, because a heartbeat among those knows nothing of the loss (case C46).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from .dispatcher import Dispatcher
from .ingest import Ingest
from .nats_link import Handlers, NatsLink, NatsSettings, PlaneError, parse_servers
from .observer import EventLog
from .plane import OutgoingRequest, PlaneStatus

__all__ = ["NatsPlane"]

_TURN = 0.0005
"""Seconds of callbacks after which the event loop gets a turn."""
_GOOD_SECONDS = 5.0
"""A connection that lived this long resets the backoff."""
_COMPLAINT_INTERVAL = 60.0


class NatsPlane:
    """``servers``: one NATS URL or several with commas between. Raises ValueError for a malformed one.

    ``rebuilds`` counts connections replaced for want of trust, ``dropped`` messages lost on our side.
    """

    def __init__(
        self,
        servers: str,
        ingest: Ingest,
        settings: NatsSettings | None = None,
        *,
        log: EventLog | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rebuilds = 0
        self.dropped = 0
        self._servers = parse_servers(servers)
        self._ingest = ingest
        self._settings = settings or NatsSettings()
        self._log = log
        self._rng = rng or random.Random()
        self._clock = clock
        self._dispatcher = Dispatcher(ingest, self._send, clock)
        self._handlers = Handlers(self._on_event, self._on_snapshot, self._on_dropped, self._on_trouble)
        self._link: NatsLink | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._connects = 0
        self._error = "not started"
        self._trouble = ""
        self._complained_at = -_COMPLAINT_INTERVAL
        self._turn_began = 0.0
        self._remark: int | None = None
        self._distrusted_at = -float("inf")
        self._distrust_pause = self._settings.distrust_pause

    @property
    def url(self) -> str:
        """Where the servers are, without secrets."""
        return ",".join(f"{server.scheme}://{server.address}" for server in self._servers)

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        if not self._tasks:
            self._error = "connecting"
            self._tasks = [
                asyncio.create_task(self._stay_connected(), name="fullhit-nats"),
                asyncio.create_task(self._dispatcher.run(), name="fullhit-events"),
            ]

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
        last = self._ingest.last_message_at
        return PlaneStatus(
            kind="nats",
            url=self.url,
            connected=self._link is not None,
            last_message_age=None if last is None else self._clock() - last,
            connects=self._connects,
            error=self._error or self._trouble,
        )

    # Connections, one after the other.

    async def _stay_connected(self) -> None:
        attempt = 0
        turn = 0
        while True:
            began = self._clock()
            link = NatsLink(self._servers[turn % len(self._servers)], self._settings, self._handlers)
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
        self._tell("info", "event_plane_up", url=self.url, connects=self._connects)
        self._ingest.plane_up()
        self._dispatcher.wake()

    def _leave(self) -> None:
        if self._link is not None:
            self._link = None
            self._ingest.plane_lost()
            self._dispatcher.wake()

    async def _watch(self, link: NatsLink) -> None:
        """Returns when the connection should be replaced. Raises PlaneError with the reason it broke."""
        settings = self._settings
        while True:
            try:
                async with asyncio.timeout(settings.watchdog_interval):
                    await link.lost.wait()
            except TimeoutError:
                pass
            try:
                await link.prove()
            except PlaneError:
                self.rebuilds += not link.lost.is_set()
                raise
            if self._distrusts():
                self.rebuilds += 1
                raise PlaneError("snapshot requests are not answered on this connection, although workers are heard")

    def _distrusts(self) -> bool:
        missing = self._ingest.replies_missing
        now = self._clock()
        if missing < self._settings.replies_missing:
            if missing == 0 and now - self._distrusted_at > 10 * self._distrust_pause:
                self._distrust_pause = self._settings.distrust_pause
            return False
        if now - self._distrusted_at < self._distrust_pause:
            return False
        if self._distrusted_at > 0:
            self._distrust_pause = min(2 * self._distrust_pause, 10 * self._settings.distrust_pause)
        self._distrusted_at = now
        return True

    # Messages.

    async def _on_event(self, subject: str, data: bytes) -> None:
        self._ingest.feed(subject, data)
        if self._remark is not None:
            self._remark -= 1
            if self._remark <= 0:
                self._remark = None
                self._ingest.messages_lost("slow_consumer")
        await self._give_turn()

    async def _on_snapshot(self, data: bytes) -> None:
        self._ingest.feed_snapshot(data)
        await self._give_turn()

    async def _give_turn(self) -> None:
        """Let the loop run after some time of callbacks; hold the subscription back while too much waits."""
        self._dispatcher.notice()
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
            self._ingest.messages_lost("slow_consumer")
            self._dispatcher.wake()
        self._remark = max(waiting, 1)

    def _on_trouble(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            self._tell("error", "event_plane_refuses", detail=text)
            self._ingest.messages_lost("plane_error")

    def _send(self, request: OutgoingRequest) -> None:
        if self._link is not None:
            self._link.request(request.subject, request.data)

    def _complain(self, text: str) -> None:
        self._error = text
        now = self._clock()
        if now - self._complained_at >= _COMPLAINT_INTERVAL:
            self._complained_at = now
            self._tell("warning", "event_plane_down", url=self.url, detail=text)

    def _tell(self, level: str, event: str, **fields: object) -> None:
        if self._log is not None:
            self._log(level, event, **fields)
