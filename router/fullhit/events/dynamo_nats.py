"""Dynamo's event plane over core NATS: one connection, kept by ``nats_keeper.py``, feeding one pool.

Dynamo has no counterpart for some of what our own plane does: nothing is retained, nothing can be asked for, so a
message lost is only known by the next one of the same publisher, and entries then stay doubtful.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from .dynamo_feed import DynamoFeed
from .ingest import Ingest
from .nats_keeper import NatsKeeper
from .nats_link import NatsSettings
from .observer import EventLog

__all__ = ["DynamoNats"]


class DynamoNats(NatsKeeper):
    """See `NatsKeeper` for ``servers`` and errors."""

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
        fields: dict[str, object] = {"pool": feed.pool}
        super().__init__(servers, ingest, settings, name="dynamo_plane", fields=fields, log=log, rng=rng, clock=clock)
        self._feed = feed

    def _subjects(self) -> Sequence[str]:
        return self._feed.scope.subjects()

    def _deliver(self, subject: str, data: bytes) -> None:
        self._feed.nats(subject, data)

    def _deliver_reply(self, data: bytes) -> None:
        """Nothing was asked for."""

    def _up(self) -> None:
        self._ingest.dynamo_up(self._feed.pool)
        self._ingest.on_work()

    def _down(self) -> None:
        self._ingest.dynamo_lost(self._feed.pool)
        self._ingest.on_work()

    def _lost(self, cause: str) -> None:
        self._ingest.messages_lost(cause, self._feed.pool)
        self._ingest.on_work()
