"""One pool whose workers are those of a Dynamo deployment: discovery, event plane and fleet, connected.

Discovery says who is a worker of the pool: an instance is one for as long as its lease lives, and is never probed,
because it has no URL. The event plane says what the workers hold. Where publishers have sockets of their own, discovery
also says where they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from fullhit.events import EventLog, EventMetrics, Ingest, NatsSettings
from fullhit.events.dynamo_feed import DynamoFeed, FeedSettings
from fullhit.events.dynamo_nats import DynamoNats
from fullhit.events.dynamo_scope import DynamoScope
from fullhit.events.dynamo_zmq import DynamoZmq
from fullhit.fleet.discovery import Backend, Channel, Directory, Instance
from fullhit.fleet.discovery_etcd import EtcdBackend
from fullhit.fleet.discovery_file import FileBackend
from fullhit_publisher.identity import dynamo_name
from fullhit_publisher.wire import TOPIC_DELTA

__all__ = ["DynamoOptions", "DynamoPool", "LeasedFleet", "make_backend"]

_HOUSEKEEPING = 1.0


class LeasedFleet(Protocol):
    """What is needed of the fleet."""

    def add_leased(self, id: str, *, pool: str, device: str, labels: Mapping[str, str]) -> object: ...
    def remove_leased(self, id: str, *, cause: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class DynamoOptions:
    """``plane``: ``nats`` or ``zmq``. ``nats``: server URLs. ``brokers``: XPUB URLs of ZMQ brokers, none = direct.
    ``discovery``: ``file:PATH`` or ``etcd:URL[,URL]``. Times in seconds."""

    scope: DynamoScope
    discovery: str
    plane: str = "nats"
    nats: str = "nats://127.0.0.1:4222"
    brokers: Sequence[str] = ()
    lease: float = 10.0
    nats_settings: NatsSettings = field(default_factory=NatsSettings)
    feed: FeedSettings = field(default_factory=FeedSettings)


def make_backend(text: str, lease: float) -> Backend:
    """``file:PATH`` or ``etcd:URL``. Raises ValueError."""
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileBackend(rest, lease=lease)
    if kind == "etcd" and rest:
        return EtcdBackend(rest)
    raise ValueError("expected file:PATH (the folder of DYN_FILE_KV) or etcd:URL")


class DynamoPool:
    """See the module text.

    Raises ValueError for options that cannot be, ImportError, with what to install, for a missing package.
    """

    def __init__(
        self,
        pool: str,
        options: DynamoOptions,
        ingest: Ingest,
        fleet: LeasedFleet,
        *,
        clock: Callable[[], float] = time.monotonic,
        metrics: EventMetrics | None = None,
        log: EventLog | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.pool = pool
        self._options = options
        self._ingest = ingest
        self._fleet = fleet
        self._metrics = metrics
        self._log = log
        self.feed = DynamoFeed(
            pool, options.scope, ingest, options.feed, clock=clock, count=self._refused, log=self._bad_message
        )
        self.directory = Directory(self._wanted)
        self._backend = backend if backend is not None else make_backend(options.discovery, options.lease)
        self._nats: DynamoNats | None = None
        self._zmq: DynamoZmq | None = None
        if options.plane == "zmq":
            self._zmq = DynamoZmq(options.brokers, self.feed, ingest, log=log, clock=clock)
        else:
            self._nats = DynamoNats(options.nats, self.feed, ingest, options.nats_settings, log=log, clock=clock)
        self._plane: DynamoNats | DynamoZmq = self._zmq or self._nats  # type: ignore[assignment]
        self._task: asyncio.Task[None] | None = None
        self._malformed = 0
        self._discovery_error = self._backend.error

    async def start(self) -> None:
        """Begin; returns at once."""
        await self._plane.start()
        await self._backend.start(self.take_store)
        self._task = asyncio.create_task(self._keep_house(), name="fullhit-dynamo")

    async def close(self) -> None:
        """End. The workers stay as they are."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await self._backend.close()
        await self._plane.close()

    def status(self) -> dict[str, Any]:
        """JSON-ready; for ``/readyz``."""
        return {
            "plane": asdict(self._plane.status()),
            "discovery_error": self._backend.error,
            "workers": len(self.directory.instances),
            "publishers": len(self.directory.channels),
            "malformed_records": self.directory.malformed,
            "messages": self.feed.messages,
            "waiting": self.feed.waiting,
            "refused": dict(self.feed.counters),
        }

    def take_store(self, store: Mapping[str, bytes]) -> None:
        """Discovery as it is now."""
        changes = self.directory.update(store)
        for instance in changes.left:
            self._fleet.remove_leased(dynamo_name(instance.instance_id), cause="lease ended")
        for instance in changes.joined:
            self._join(instance)
        if self._zmq is not None and not self._options.brokers:
            for channel in changes.closed:
                self._zmq.shut(channel.publisher_id)
            for channel in changes.opened:
                if channel.kind.lower() == "zmq":
                    self._zmq.open(channel.publisher_id, channel.address)
        if self.directory.malformed != self._malformed:
            self._malformed = self.directory.malformed
            self._tell("warning", "discovery_record_malformed", detail=self.directory.last_error)

    def _join(self, instance: Instance) -> None:
        name = dynamo_name(instance.instance_id)
        labels = {
            "namespace": instance.namespace,
            "component": instance.component,
            "endpoint": instance.endpoint,
        }
        try:
            self._fleet.add_leased(name, pool=self.pool, device=instance.device, labels=labels)
        except ValueError as error:
            self._tell("error", "discovery_refused", worker=name, detail=str(error))
            return
        self.feed.worker_joined(instance.instance_id)

    def _wanted(self, record: Instance | Channel) -> bool:
        scope = self._options.scope
        if isinstance(record, Channel):
            return record.topic == TOPIC_DELTA and scope.covers(record.namespace, record.component, record.endpoint)
        return bool(record.namespace and record.component and record.endpoint) and scope.covers(*record[:3])

    async def _keep_house(self) -> None:
        while True:
            self.feed.expire()
            error = self._backend.error
            if error != self._discovery_error:
                self._discovery_error = error
                if error:
                    self._tell("warning", "discovery_down", detail=error)
                else:
                    self._tell("info", "discovery_up", workers=len(self.directory.instances))
            await asyncio.sleep(_HOUSEKEEPING)

    def _refused(self, cause: str) -> None:
        if self._metrics is not None:
            self._metrics.count("fullhit_events_rejected_total", cause=cause)

    def _bad_message(self, cause: str, detail: str) -> None:
        self._tell("warning", "event_rejected", cause=cause, detail=detail)

    def _tell(self, level: str, event: str, **fields: object) -> None:
        if self._log is not None:
            self._log(level, event, pool=self.pool, **fields)
