"""The event plane over core NATS: feeds the intake, and carries its snapshot requests.

Beside what keeps the connection (``nats_keeper.py``): snapshot requests to workers that are heard, without any answer,
and the connection is replaced too, for then the way back is broken although all else works (case C45); seldom, because
the workers may be to blame.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from .dispatcher import Dispatcher
from .ingest import Ingest
from .nats_keeper import NatsKeeper
from .nats_link import NatsSettings
from .observer import EventLog
from .plane import OutgoingRequest

__all__ = ["NatsPlane"]


class NatsPlane(NatsKeeper):
    """See `NatsKeeper` for ``servers`` and errors."""

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
        super().__init__(servers, ingest, settings, name="event_plane", fields={}, log=log, rng=rng, clock=clock)
        self._dispatcher = Dispatcher(ingest, self._send, clock)
        self._distrusted_at = -float("inf")
        self._distrust_pause = self._settings.distrust_pause

    def _more(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._dispatcher.run(), name="fullhit-events")]

    def _deliver(self, subject: str, data: bytes) -> None:
        self._ingest.feed(subject, data)
        self._dispatcher.notice()

    def _deliver_reply(self, data: bytes) -> None:
        self._ingest.feed_snapshot(data)
        self._dispatcher.notice()

    def _up(self) -> None:
        self._ingest.plane_up()
        self._dispatcher.wake()

    def _down(self) -> None:
        self._ingest.plane_lost()
        self._dispatcher.wake()

    def _lost(self, cause: str) -> None:
        self._ingest.messages_lost(cause)
        self._dispatcher.wake()

    def _distrust(self) -> str:
        missing = self._ingest.replies_missing
        now = self._clock()
        if missing < self._settings.replies_missing:
            if missing == 0 and now - self._distrusted_at > 10 * self._distrust_pause:
                self._distrust_pause = self._settings.distrust_pause
            return ""
        if now - self._distrusted_at < self._distrust_pause:
            return ""
        if self._distrusted_at > 0:
            self._distrust_pause = min(2 * self._distrust_pause, 10 * self._settings.distrust_pause)
        self._distrusted_at = now
        return "snapshot requests are not answered on this connection, although workers are heard"

    def _send(self, request: OutgoingRequest) -> None:
        if self._link is not None:
            self._link.request(request.subject, request.data)
