"""The intake of the event planes: bytes in, index up to date, snapshot requests out.

``Ingest`` owns a lane for each worker that the fleet has added. A plane feeds it what arrives, calls ``run_slices``
until there is nothing left to do, and ``tick`` when its ``deadline`` has come, sending what that returns. Nothing here
waits, blocks or raises because of what a peer sent: bad messages are counted by cause and logged seldom.

Bounds: one call does about ``slice_keys`` keys of work; what waits is bounded per worker and over all; snapshot
requests outstanding are bounded over all workers, so that a restarted router asks a large fleet in turns while it
already serves (case A7).
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from fullhit.core import Pool, Worker
from fullhit_publisher import wire
from fullhit_publisher.identity import dynamo_instance, normalize_url, worker_id_for
from fullhit_publisher.keys import Key
from fullhit_publisher.wire import Heartbeat, WireError

from . import effects as fx
from .effects import Effect
from .lane import Backlog, Lane, PoolEntries, Promised
from .messages import Beat, Delta, Part, Received, decode
from .observer import EventLog, EventMetrics, NullMetrics
from .plane import OutgoingRequest
from .settings import IngestSettings
from .stream import WorkerStream

__all__ = ["Ingest", "StreamStatus"]

_MESSAGE_COST = 10
"""What a message costs beside its keys, in keys."""
_MAX_SUBJECTS = 10_000
_SILENT_AFTER = 30.0
"""Seconds after which a worker that never published is mentioned in the log; then every ``_SILENT_REPEAT``."""
_SILENT_REPEAT = 600.0
_REQUEST_RETRY = 0.1

Address = tuple[str, int]


class StreamStatus(msgspec.Struct, frozen=True):
    """One worker's stream, for ``/workers`` and ``/readyz``."""

    pool: str
    worker: str
    worker_id: int
    state: str
    epoch: int | None
    applied: int | None
    head: int
    keys: int
    doubts: list[str]
    resync: str
    """Why a snapshot is wanted; empty when none is."""
    heard_age: float | None
    """Seconds since its last message; None when it never sent one."""
    messages: int
    protocol: str
    """What it speaks: ``fullhit``, or ``dynamo`` for Dynamo's own publishers."""
    waiting_bytes: int
    quarantine: str
    """Why it is in quarantine; empty when it is not."""


class Ingest:
    """See the module text.

    ``on_unknown_worker(pool, heartbeat)`` is called, now and then, for a heartbeat of a worker nobody added; its url
    has been checked against its id. ``on_heartbeat(pool, worker id, heartbeat)`` is called for each of a known one.
    """

    def __init__(
        self,
        pools: Mapping[str, Pool],
        settings: IngestSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        metrics: EventMetrics | None = None,
        log: EventLog | None = None,
        on_unknown_worker: Callable[[str, Heartbeat], None] | None = None,
        on_heartbeat: Callable[[str, str, Heartbeat], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings or IngestSettings()
        self.counters: dict[str, int] = {}
        """Everything counted so far, by metric name and labels (worker ids left out)."""
        self.replies_missing = 0
        """Snapshot requests in a row to living workers that no plane brought an answer to."""
        self.last_message_at: float | None = None
        self._pools = pools
        self._clock = clock
        self._wall_clock = wall_clock
        self._metrics = metrics or NullMetrics()
        self._log_line = log
        self._on_unknown_worker = on_unknown_worker
        self._on_heartbeat = on_heartbeat
        self._rng = rng or random.Random()
        self._lanes: dict[Address, Lane] = {}
        self._active: deque[Lane] = deque()
        self._backlog = Backlog()
        self._addresses: dict[str, Address | None] = {}
        self._strangers: dict[Address, float] = {}
        self._logged: dict[tuple[str, str], float] = {}
        self._plane_up = False
        self._sweeping = False
        self._deadline = math.inf
        self._silence_check = clock() + _SILENT_AFTER
        self._publisher_id = self._rng.getrandbits(53) | 1
        self._sequence = 0
        self._dynamo_up: set[str] = set()
        self.promised: Promised = lambda pool, worker, keys: False
        """Asked when a worker of Dynamo's adds keys that it ought to hold already."""
        self.on_work: Callable[[], None] = lambda: None
        """Called when something was fed that a dispatcher may have to act upon."""

    # Workers come and go.

    def worker_added(self, pool: str, worker_id: str) -> None:
        """The pool has this worker now: follow its events, and ask it for what it holds.

        Raises KeyError when the pool does not have it.
        """
        home = self._pools[pool]
        worker = home.get(worker_id)
        if worker is None:
            raise KeyError(f"pool {pool!r} has no worker {worker_id!r}")
        address = _address_of(pool, worker_id)
        known = self._lanes.get(address)
        if known is not None:
            if known.worker is worker:
                return
            self._close(address)
        self._open(home, worker, dynamo=address[1] < 0)
        self._strangers.pop(address, None)

    def _open(self, home: Pool, worker: Worker, *, dynamo: bool) -> Lane:
        """A lane for a worker of which nothing is known. ``dynamo``: it speaks as Dynamo's publishers do."""
        now = self._clock()
        stream = WorkerStream(PoolEntries(home, worker, self._was_promised), self.settings.stream, self._rng)
        number = worker_id_for(worker.id)
        lane = Lane(home, worker, number, stream, self._report, self._backlog, self.settings.slice_keys)
        lane.added_at = now
        lane.dynamo = dynamo
        stream.answers = not dynamo
        self._lanes[_address_of(home.name, worker.id)] = lane
        if not (home.name in self._dynamo_up if dynamo else self._plane_up):
            self._carry_out(lane, stream.plane_down(now))
        self._carry_out(lane, stream.start(now))
        return lane

    def worker_removed(self, pool: str, worker_id: str) -> None:
        """Drop all that waits for this worker; what still arrives for it is a stranger's."""
        self._close(_address_of(pool, worker_id))

    def _close(self, address: Address) -> None:
        lane = self._lanes.pop(address, None)
        if lane is not None:
            lane.close()

    # Messages.

    def feed(self, subject: str, data: bytes) -> None:
        """A message arrived on an events subject."""
        self.last_message_at = self._clock()
        address = self._address(subject)
        if address is None:
            self._reject("subject", subject[:100])
            return
        lane = self._lane_at(address)
        if lane is None:
            self._stranger(address, data)
        elif lane.dynamo:
            self._first_words(lane, data)
        elif lane.busy or lane.waiting:
            self._put_off(lane, data, None)
        else:
            self._handle(lane, data, None)

    def feed_snapshot(self, data: bytes) -> None:
        """A message arrived in the inbox for snapshots."""
        self.last_message_at = self._clock()
        limits = self.settings.limits
        try:
            received = decode(wire.decode_envelope(data, limits), limits)
            if not isinstance(received, Part):
                raise WireError("topic", "no snapshot in the inbox")
        except WireError as error:
            self._reject(error.cause, error.detail)
            return
        lane = self._lane_at((received.pool or "", received.worker_id))
        if lane is None or lane.dynamo:
            self._reject("unknown_worker", "snapshot")
        elif lane.busy or lane.waiting:
            self._put_off(lane, data, received)
        else:
            self._handle(lane, data, received)

    def feed_dynamo(self, pool: str, delta: Delta, data: bytes) -> bool:
        """A message, read from ``data``, arrived on the event plane of a Dynamo deployment; False when the pool has no
        such worker.

        A worker that speaks our own protocol says there what it says here, and is listened to here. Only when it has
        not been heard here for ``gone_after``, the other plane counts again.
        """
        lane = self._lanes.get((pool, ~delta.worker_id))
        if lane is None:
            return False
        self.last_message_at = self._clock()
        if not lane.dynamo:
            if self.last_message_at - lane.stream.last_heard <= self.settings.stream.gone_after:
                self._metrics.count("fullhit_events_total", worker=lane.worker.id, kind="other_plane")
                return True
            lane = self._change_over(lane, dynamo=True)
        if lane.busy or lane.waiting:
            self._put_off(lane, data, delta)
        else:
            self._handle(lane, data, delta)
        self.on_work()
        return True

    def messages_lost(self, cause: str, dynamo_pool: str | None = None) -> None:
        """The plane had to drop messages of some workers: every stream is in doubt."""
        self._count("fullhit_events_rejected_total", cause=cause)
        now = self._clock()
        for lane in self._lanes_of(dynamo_pool):
            self._carry_out(lane, lane.stream.loss(cause, now))

    def worker_returned(self, pool: str, worker_id: str) -> None:
        """The worker may be a new process: in doubt until its next heartbeat agrees."""
        lane = self._lanes.get((pool, worker_id_for(worker_id)))
        if lane is not None:
            self._carry_out(lane, lane.stream.loss("registered_again", self._clock()))

    def worker_contradicts(self, pool: str, worker_id: str, seconds: float) -> None:
        """Its cache was found not to have what it publishes: in doubt for so long, and until it was asked."""
        lane = self._lanes.get((pool, worker_id_for(worker_id)))
        if lane is not None:
            self._carry_out(lane, lane.stream.contradicted(seconds, self._clock()))

    def plane_lost(self) -> None:
        """No broker any more. Entries stay trusted for ``plane_grace``."""
        if not self._plane_up:
            return
        self._plane_up = False
        now = self._clock()
        for lane in self._lanes_of(None):
            self._carry_out(lane, lane.stream.plane_down(now))

    def plane_up(self) -> None:
        """Connected, and all subscriptions are in place."""
        self._plane_up = True
        self.replies_missing = 0
        now = self._clock()
        for lane in self._lanes_of(None):
            self._carry_out(lane, lane.stream.plane_up(now))

    def dynamo_lost(self, pool: str) -> None:
        """As ``plane_lost``, for the event plane of this pool's Dynamo deployment."""
        if pool in self._dynamo_up:
            self._dynamo_up.discard(pool)
            now = self._clock()
            for lane in self._lanes_of(pool):
                self._carry_out(lane, lane.stream.plane_down(now))

    def dynamo_up(self, pool: str) -> None:
        """As ``plane_up``, for the event plane of this pool's Dynamo deployment."""
        self._dynamo_up.add(pool)
        now = self._clock()
        for lane in self._lanes_of(pool):
            self._carry_out(lane, lane.stream.plane_up(now))

    # Work.

    @property
    def has_work(self) -> bool:
        """``run_slices`` has something to do now."""
        return bool(self._active) or self._sweeping

    @property
    def backlog_bytes(self) -> int:
        """Size of all messages that wait."""
        return self._backlog.bytes

    def run_slices(self) -> bool:
        """Do one slice of what was put off: about ``slice_keys`` keys. True while there is more."""
        budget = self.settings.slice_keys
        if self._active:
            lane = self._active.popleft()
            lane.active = False
            used = 0
            try:
                used = lane.run(budget)
            except Exception as error:
                self._undecodable(lane, error)
            while not lane.busy and lane.waiting and used < budget:
                used += _MESSAGE_COST + self._handle(lane, *lane.take())
            self._activate(lane)
        self._sweeping = False
        for pool in self._pools.values():
            if pool.sweep(budget):
                self._sweeping = True
        return self.has_work

    @property
    def deadline(self) -> float:
        """When ``tick`` should be called at the latest; infinity when nothing will ever be due."""
        return min(self._deadline, self._silence_check) if self._lanes else math.inf

    def tick(self, now: float | None = None) -> list[OutgoingRequest]:
        """Act on the clock. Returns the snapshot requests to send."""
        if now is None:
            now = self._clock()
        if now >= self._silence_check:
            self._silence_check = now + _SILENT_AFTER
            self._mention_silent(now)
        if now < self._deadline:
            return []
        requests: list[OutgoingRequest] = []
        outstanding = self.snapshots_outstanding
        self._deadline = math.inf
        wishes: list[tuple[float, Lane]] = []
        for lane in list(self._lanes.values()):
            stream = lane.stream
            if now >= stream.deadline:
                self._carry_out(lane, stream.tick(now))
            if now >= stream.request_due:
                wishes.append((stream.request_due, lane))
            else:
                self._expect(lane)
        wishes.sort(key=lambda wish: wish[0])
        for _, lane in wishes:
            if outstanding >= self.settings.max_snapshots:
                self._deadline = min(self._deadline, now + _REQUEST_RETRY)
                break
            request_id = lane.stream.poll(now)
            if request_id is not None:
                outstanding += 1
                requests.append(self._request(lane, request_id))
            self._expect(lane)
        return requests

    # State.

    @property
    def snapshots_outstanding(self) -> int:
        """Snapshots asked for and not yet here."""
        return sum(lane.stream.outstanding for lane in self._lanes.values())

    @property
    def snapshots_waiting(self) -> int:
        """Workers to be asked for one as soon as fewer are outstanding."""
        now = self._clock()
        return sum(now >= lane.stream.request_due for lane in self._lanes.values())

    def status(self) -> list[StreamStatus]:
        """One row a worker."""
        now = self._clock()
        return [_row(pool, lane.number, lane, now) for (pool, _), lane in self._lanes.items()]

    def stream(self, pool: str, worker_id: str) -> WorkerStream | None:
        """The stream of one worker, for tests and status."""
        lane = self._lanes.get(_address_of(pool, worker_id))
        return None if lane is None else lane.stream

    @property
    def silent_workers(self) -> list[str]:
        """Workers that were added and never published anything (case A8)."""
        now = self._clock()
        return [lane.worker.id for lane in self._silent(now)]

    # Inside.

    def _lane_at(self, address: Address) -> Lane | None:
        """The lane of a worker by the number it goes by: of a URL, or a Dynamo instance's own."""
        lane = self._lanes.get(address)
        return self._lanes.get((address[0], ~address[1])) if lane is None else lane

    def _first_words(self, lane: Lane, data: bytes) -> None:
        """A worker that was taken for one of Dynamo's publishers speaks our own protocol. Its heartbeat opens it."""
        limits = self.settings.limits
        try:
            received = decode(wire.decode_envelope(data, limits), limits)
            self._check(lane, received)
            if not isinstance(received, Beat):
                raise WireError("unknown_worker", f"worker {lane.number} has sent no heartbeat yet")
        except WireError as error:
            self._reject(error.cause, f"{lane.worker.id}: {error.detail}")
            return
        self._handle(self._change_over(lane, dynamo=False), data, received)

    def _change_over(self, lane: Lane, *, dynamo: bool) -> Lane:
        """Listen to the worker of this lane in the other protocol. What was believed of it is void: the one counts
        where the other does not."""
        home, worker = lane.pool, lane.worker
        self._close(_address_of(home.name, worker.id))
        home.set_publishing(worker.id, False)
        home.clear(worker.id)
        home.set_doubtful(worker.id, False)
        self._log("info", "protocol", worker.id, protocol="dynamo" if dynamo else "fullhit")
        return self._open(home, worker, dynamo=dynamo)

    def _address(self, subject: str) -> Address | None:
        try:
            return self._addresses[subject]
        except KeyError:
            if len(self._addresses) >= _MAX_SUBJECTS:
                self._addresses.clear()
            address = wire.parse_events_subject(subject)
            self._addresses[subject] = address
            return address

    def _was_promised(self, pool: str, worker: str, keys: Sequence[Key]) -> bool:
        return self.promised(pool, worker, keys)

    def _lanes_of(self, dynamo_pool: str | None) -> list[Lane]:
        """Lanes fed by our own plane, or by that of a pool's Dynamo deployment."""
        if dynamo_pool is None:
            return [lane for lane in self._lanes.values() if not lane.dynamo]
        return [lane for lane in self._lanes.values() if lane.dynamo and lane.pool.name == dynamo_pool]

    def _put_off(self, lane: Lane, data: bytes, received: Received | None) -> None:
        settings = self.settings
        size = len(data)
        if (
            lane.waiting_bytes + size > settings.max_lane_bytes
            or self.backlog_bytes + size > settings.max_backlog_bytes
        ):
            self._reject("backlog_full", lane.worker.id)
            self._carry_out(lane, lane.stream.loss("backlog_full", self._clock()))
            return
        lane.put(data, received)
        self._activate(lane)

    def _activate(self, lane: Lane) -> None:
        if (lane.busy or lane.waiting) and not lane.active:
            lane.active = True
            self._active.append(lane)

    def _handle(self, lane: Lane, data: bytes, received: Received | None) -> int:
        """Take one message, already read if it came to the inbox; returns the number of keys worked off."""
        if received is None:
            limits = self.settings.limits
            try:
                received = decode(wire.decode_envelope(data, limits), limits)
                self._check(lane, received)
            except WireError as error:
                self._reject(error.cause, f"{lane.worker.id}: {error.detail}")
                return 0
        lane.messages += 1
        now = self._clock()
        stream = lane.stream
        size = 0
        if isinstance(received, Delta):
            self._metrics.count("fullhit_events_total", worker=lane.worker.id, kind="delta")
            self._metrics.observe_lag(max(0.0, self._wall_clock() - received.origin.published_at / 1000))
            size = received.changes.size
            effects = stream.delta(
                received.origin, received.seq, received.resync, received.changes, now, received.whole
            )
        elif isinstance(received, Beat):
            self._metrics.count("fullhit_events_total", worker=lane.worker.id, kind="heartbeat")
            beat = received.heartbeat
            effects = stream.heartbeat(received.origin, beat.seq, beat.keys, beat.digest, beat.interval_ms / 1000, now)
            if self._on_heartbeat is not None:
                self._call(self._on_heartbeat, lane.pool.name, lane.worker.id, beat)
        else:
            self._metrics.count("fullhit_events_total", worker=lane.worker.id, kind="snapshot")
            self.replies_missing = 0
            size = len(received.keys)
            effects = stream.part(
                received.origin,
                received.request_id,
                received.seq,
                received.part,
                received.parts,
                received.keys,
                now,
            )
        return self._carry_out(lane, effects, size <= self.settings.slice_keys)

    def _check(self, lane: Lane, received: Received) -> None:
        """Refuse among a worker's events what is none, or speaks for somebody else. Raises WireError."""
        if isinstance(received, Part):
            raise WireError("topic", "a snapshot among the events")
        if received.worker_id != lane.number:
            raise WireError("identity", f"speaks for worker {received.worker_id}")
        if received.pool is not None and received.pool != lane.pool.name:
            raise WireError("identity", f"speaks for pool {received.pool[:64]!r}")
        if isinstance(received, Beat):
            url = received.heartbeat.url
            if url and url != lane.url_checked:
                _check_url(url, lane.number)
                lane.url_checked = url

    def _carry_out(self, lane: Lane, effects: list[Effect], at_once: bool = True) -> int:
        used = 0
        try:
            used = lane.carry_out(effects, at_once)
        except Exception as error:
            self._undecodable(lane, error)
        if lane.busy or lane.waiting:
            self._activate(lane)
        if not lane.stream.routine:
            self._expect(lane)
        return used

    def _undecodable(self, lane: Lane, error: Exception) -> None:
        """Keys that were taken for text are none: what they said is lost."""
        self._reject("payload", f"{lane.worker.id}: {type(error).__name__}: {error}")
        lane.carry_out(lane.stream.loss("payload", self._clock()))
        self._expect(lane)

    def _expect(self, lane: Lane) -> None:
        self._deadline = min(self._deadline, lane.stream.deadline, lane.stream.request_due)

    def _request(self, lane: Lane, request_id: int) -> OutgoingRequest:
        self._sequence += 1
        pool = lane.pool.name
        return OutgoingRequest(
            pool,
            lane.number,
            request_id,
            wire.snapshot_subject(pool, lane.number),
            wire.encode(
                wire.SnapshotRequest(lane.number, pool, request_id),
                publisher_id=self._publisher_id,
                sequence=self._sequence,
                published_at=int(self._wall_clock() * 1000),
            ),
        )

    def _stranger(self, address: Address, data: bytes) -> None:
        pool, number = address
        if pool not in self._pools:
            self._reject("pool", pool[:64])
            return
        try:
            envelope = wire.decode_envelope(data, self.settings.limits)
            if envelope.topic != wire.TOPIC_HEARTBEAT:
                self._reject("unknown_worker", str(number))
                return
            message = wire.decode_message(envelope, self.settings.limits)
            wire.check_origin(message, pool, number)
            if not isinstance(message, Heartbeat) or not message.url:
                self._reject("unknown_worker", str(number))
                return
            _check_url(message.url, number)
            if dynamo_instance(message.url) is not None:
                raise WireError("unknown_worker", "discovery does not know this instance")
        except WireError as error:
            self._reject(error.cause, f"unknown worker {number}: {error.detail}")
            return
        now = self._clock()
        if now < self._strangers.get(address, -math.inf):
            return
        if len(self._strangers) >= self.settings.max_strangers:
            self._strangers.clear()
        self._strangers[address] = now + self.settings.announce_interval
        self._count("fullhit_events_rejected_total", cause="unknown_worker")
        if self._on_unknown_worker is not None:
            self._call(self._on_unknown_worker, pool, message)

    def _report(self, lane: Lane, effect: fx.Count | fx.Note | fx.TimedOut) -> None:
        if isinstance(effect, fx.Count):
            self._count(effect.name, **effect.labels)
        elif isinstance(effect, fx.Note):
            self._log(effect.level, effect.event, lane.worker.id, **effect.fields)
        elif effect.alive:
            self.replies_missing += 1

    def _count(self, name: str, **labels: str) -> None:
        key = name
        if labels:
            key += "{" + ",".join(f"{label}={value}" for label, value in sorted(labels.items())) + "}"
        self.counters[key] = self.counters.get(key, 0) + 1
        self._metrics.count(name, **labels)

    def _reject(self, cause: str, detail: str) -> None:
        self._count("fullhit_events_rejected_total", cause=cause)
        self._log("warning", "event_rejected", "", cause=cause, detail=detail)

    def _log(self, level: str, event: str, worker: str, /, **fields: object) -> None:
        """One line per event, worker and cause in ``log_interval`` seconds."""
        if self._log_line is None:
            return
        key = (f"{event}/{fields.get('cause', '')}", worker)
        now = self._clock()
        if now < self._logged.get(key, -math.inf):
            return
        if len(self._logged) >= self.settings.max_strangers:
            self._logged.clear()
        self._logged[key] = now + self.settings.log_interval
        self._log_line(level, event, **({"worker": worker} if worker else {}), **fields)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        """A listener's fault must not stop the stream that told it."""
        try:
            callback(*args)
        except Exception as error:
            self._log("error", "event_listener_failed", "", cause=type(error).__name__, detail=str(error)[:200])

    def _silent(self, now: float) -> Iterator[Lane]:
        # A warm encoder of Dynamo's publishes nothing, so its silence says nothing.
        return (
            lane
            for lane in self._lanes.values()
            if not lane.messages and not lane.dynamo and now - lane.added_at >= _SILENT_AFTER
        )

    def _mention_silent(self, now: float) -> None:
        if not self._plane_up:
            return
        for lane in self._silent(now):
            if now >= lane.mention_at:
                lane.mention_at = now + _SILENT_REPEAT
                self._log("warning", "worker_never_published", lane.worker.id, seconds=round(now - lane.added_at))


def _address_of(pool: str, worker_id: str) -> Address:
    """Dynamo's instance ids are complemented, hence negative: no worker of ours, whatever its number, has one."""
    instance = dynamo_instance(worker_id)
    return (pool, worker_id_for(worker_id) if instance is None else ~instance)


def _row(pool: str, number: int, lane: Lane, now: float) -> StreamStatus:
    stream = lane.stream
    return StreamStatus(
        pool=pool,
        worker=lane.worker.id,
        worker_id=number,
        state=str(stream.state),
        epoch=stream.epoch,
        applied=stream.applied,
        head=stream.head,
        keys=lane.worker.key_count,
        doubts=sorted(stream.doubts),
        resync=stream.resync_cause,
        heard_age=now - stream.last_heard if lane.messages else None,
        messages=lane.messages,
        protocol="dynamo" if lane.dynamo else "fullhit",
        waiting_bytes=lane.waiting_bytes,
        quarantine=stream.quarantine_cause if stream.state == "quarantined" else "",
    )


def _check_url(url: str, number: int) -> None:
    """A worker is its URL, or its instance in a Dynamo deployment. Raises WireError when that is another number."""
    try:
        name = url if dynamo_instance(url) is not None else normalize_url(url)
    except ValueError as error:
        raise WireError("identity", str(error)) from None
    if worker_id_for(name) != number:
        raise WireError("identity", f"the url {name} is not that of worker {number}")
