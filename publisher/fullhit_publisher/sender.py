"""The publisher's life on its own event loop: connect, speak, notice trouble, connect again.

One rule keeps readers right: what cannot be known to have arrived is treated as lost. Changes wait in the
state while there is no connection and go out when there is one; that loses nothing. But deltas handed over
since the last confirmed PING of a connection that then broke may or may not have arrived, so the next delta
carries the resync mark.

All messages of the event subject leave through one gate (``_order``) in the order of their sequence numbers.
A heartbeat is made inside the gate, so it never speaks of a delta that follows it. Snapshots go to the
asker's own subject, beside the stream, and are paced by confirmations so that a large one neither fills a
server's buffers nor holds up deltas.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from .dynamo import DynamoBook, DynamoTarget, portions
from .state import CacheStats, PublisherState
from .transports.base import Connection, Transport, TransportError
from .wire import (
    Delta,
    Heartbeat,
    Snapshot,
    SnapshotRequest,
    Update,
    WireError,
    decode_envelope,
    decode_message,
    encode,
    events_subject,
    snapshot_subject,
)

__all__ = ["Counters", "PublisherOptions", "Sender"]

_log = logging.getLogger("fullhit_publisher")

# A snapshot waits for the server after this many parts: 4 MiB at the default part size.
_PARTS_PER_CONFIRM = 8
# A connection that held this long was a good one; the next failure starts with the shortest pause.
_GOOD_SESSION_SECONDS = 5.0
_SECONDS_BETWEEN_COMPLAINTS = 60.0


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """Rarely changed settings of a publisher. Times in seconds.

    >>> PublisherOptions(io_timeout=2.0).max_pending_keys
    100000
    """

    max_pending_keys: int = 100_000
    """Changes kept while the broker is away. Beyond it they are dropped and routers read a snapshot instead.
    """
    max_message_bytes: int = 512 * 1024
    """Size of deltas and snapshot parts; a smaller limit of the broker wins."""
    hold: float = 0.001
    """Pause between a change and its delta, so that a burst travels as one."""
    connect_timeout: float = 5.0
    io_timeout: float = 5.0
    """How long the broker may owe an answer before the connection is given up."""
    close_timeout: float = 2.0
    """What ``close`` grants to the last words."""
    backoff_min: float = 0.1
    backoff_max: float = 5.0
    max_snapshot_requests: int = 64
    """Askers waiting for a snapshot; more are turned away and ask again."""

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "io_timeout", "close_timeout", "backoff_min"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        if self.backoff_max < self.backoff_min:
            raise ValueError("backoff_max must not be below backoff_min")
        if self.hold < 0 or self.max_snapshot_requests < 1:
            raise ValueError("hold must not be negative and max_snapshot_requests at least 1")


@dataclass(slots=True)
class Counters:
    """What a publisher has done since it was made."""

    connected: bool = False
    published: int = 0
    """Messages handed to the broker."""
    published_bytes: int = 0
    deltas: int = 0
    heartbeats: int = 0
    snapshots: int = 0
    """Snapshots answered in full."""
    snapshot_parts: int = 0
    connects: int = 0
    """Connections made."""
    reconnects: int = 0
    """Connections made after the first."""
    connect_failures: int = 0
    lost_marks: int = 0
    """How often readers had to be told that they may have missed something."""
    overflows: int = 0
    """How often ``max_pending_keys`` was exceeded."""
    requests_rejected: int = 0
    """Snapshot requests that were malformed or meant for another worker."""
    requests_dropped: int = 0
    """Snapshot requests turned away because too many were waiting."""
    dynamo_messages: int = 0
    """Messages for Dynamo's own front ends."""
    dynamo_repairs: int = 0
    """How often all keys had to be said to them again, after a loss."""


class Sender:
    """Runs inside one event loop; ``lock`` guards ``state``, which other threads change."""

    def __init__(
        self,
        state: PublisherState,
        lock: threading.Lock,
        transport: Transport,
        options: PublisherOptions,
        *,
        heartbeat_interval: float,
        collect_stats: Callable[[], CacheStats],
        rng: random.Random | None = None,
        dynamo: DynamoTarget | None = None,
    ) -> None:
        self.counters = Counters()
        self._state = state
        self._lock = lock
        self._transport = transport
        self._options = options
        self._interval = heartbeat_interval
        self._collect_stats = collect_stats
        self._rng = rng or random.Random()
        self._events_subject = events_subject(state.pool, state.worker_id)
        self._snapshot_subject = snapshot_subject(state.pool, state.worker_id)
        self._publisher_id = secrets.randbits(53) or 1
        self._sequence = 0
        self._unconfirmed = 0
        self._beat_at = 0.0
        self._requests: dict[str, SnapshotRequest] = {}
        self._serving: tuple[str, int] | None = None
        self._wake = asyncio.Event()
        self._asked = asyncio.Event()
        self._stop = asyncio.Event()
        self._order = asyncio.Lock()
        self._in_session = False
        self._complained_at = -_SECONDS_BETWEEN_COMPLAINTS
        self._down_since: float | None = None
        self._dynamo = dynamo
        self._book = DynamoBook(dynamo.instance_id) if dynamo is not None else None
        self._dynamo_id = secrets.randbits(53) or 1
        self._dynamo_sequence = 0
        self._dynamo_epoch = state.epoch
        self._refresh_at = float("inf")

    def wake(self) -> None:
        """There is something to send. Call in the event loop's thread."""
        self._wake.set()

    def beat_now(self) -> None:
        """Send a heartbeat without waiting for its time."""
        self._beat_at = 0.0
        self._wake.set()

    def stop(self) -> None:
        """Say the last words and return from ``run``."""
        self._stop.set()
        self._wake.set()

    async def run(self) -> None:
        """Publish until ``stop``; bounded by ``close_timeout`` after it."""
        talking = asyncio.create_task(self._talk())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({talking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if self._in_session or self._down_since is None:
            # Connected, or about to be for all we know: the last words are worth a wait.
            await asyncio.wait({talking}, timeout=self._options.close_timeout)
        stopping.cancel()
        talking.cancel()
        await asyncio.wait({talking, stopping}, timeout=self._options.close_timeout)
        if talking.done() and not talking.cancelled():
            talking.result()

    async def _talk(self) -> None:
        attempt = 0
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection = await self._transport.connect(
                    self._snapshot_subject, self._on_request, self._options.connect_timeout
                )
            except Exception as error:
                self.counters.connect_failures += 1
                self._complain(error)
            else:
                began = loop.time()
                await self._hold_session(connection)
                if loop.time() - began > _GOOD_SESSION_SECONDS:
                    attempt = 0
            if self._stop.is_set():
                return
            await self._pause(attempt)
            attempt += 1
            if self._stop.is_set():
                return

    async def _hold_session(self, connection: Connection) -> None:
        self._note_connected()
        self._in_session = self.counters.connected = True
        try:
            await self._session(connection)
        except Exception as error:
            self._complain(error)
        finally:
            self._in_session = self.counters.connected = False
            if self._unconfirmed:
                self._unconfirmed = 0
                if self._book is not None:
                    self._book.lost()
                with self._lock:
                    self._state.mark_lost()
            self._requests.clear()
            await connection.close(min(self._options.io_timeout, self._options.close_timeout))

    async def _session(self, connection: Connection) -> None:
        snapshots = asyncio.create_task(self._serve_snapshots(connection))
        watch = asyncio.create_task(connection.lost.wait())
        helpers = (snapshots, watch)
        for helper in helpers:
            helper.add_done_callback(lambda _: self._wake.set())
        loop = asyncio.get_running_loop()
        self._beat_at = 0.0
        if self._dynamo is not None and self._dynamo.refresh:
            self._refresh_at = loop.time() + self._dynamo.refresh
        try:
            while not self._stop.is_set():
                self._wake.clear()
                if snapshots.done():
                    snapshots.result()
                if watch.done():
                    raise TransportError("the connection was lost")
                if loop.time() >= self._beat_at:
                    self._beat_at = loop.time() + self._interval
                    await self._send_heartbeat(connection)
                    await self._send_deltas(connection)
                    await self._confirm(connection)
                else:
                    await self._send_deltas(connection)
                if self._book is not None:
                    await self._keep_dynamo_right(connection, self._book)
                try:
                    async with asyncio.timeout_at(self._beat_at):
                        await self._wake.wait()
                except TimeoutError:
                    continue
                if self._options.hold and not self._stop.is_set():
                    await asyncio.sleep(self._options.hold)
            await self._send_deltas(connection)
            await self._send_heartbeat(connection)
            await self._confirm(connection)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _send_deltas(self, connection: Connection) -> None:
        limit = self._part_bytes(connection)
        while True:
            async with self._order:
                with self._lock:
                    delta = self._state.next_delta(limit)
                if delta is None:
                    return
                self._unconfirmed += 1
                await self._publish(connection, self._events_subject, delta)
                self.counters.deltas += 1
                if self._book is not None:
                    await self._tell_dynamo(connection, self._book, delta)
            await asyncio.sleep(0)

    async def _send_heartbeat(self, connection: Connection) -> None:
        async with self._order:
            with self._lock:
                self._state.set_stats(self._collect_stats())
                beat = self._state.heartbeat()
            await self._publish(connection, self._events_subject, beat)
            self.counters.heartbeats += 1

    async def _confirm(self, connection: Connection) -> None:
        sent = self._unconfirmed
        await connection.confirm(self._options.io_timeout)
        self._unconfirmed -= sent
        if self._book is not None and not self._unconfirmed:
            self._book.confirmed()

    async def _publish(self, connection: Connection, subject: str, message: Delta | Heartbeat) -> None:
        sequence = self._sequence
        self._sequence += 1
        await self._hand_over(connection, subject, message, sequence)

    async def _hand_over(
        self, connection: Connection, subject: str, message: Delta | Heartbeat | Snapshot, sequence: int
    ) -> None:
        now = time.time_ns() // 1_000_000
        data = encode(message, publisher_id=self._publisher_id, sequence=sequence, published_at=now)
        await connection.publish(subject, data)
        self.counters.published += 1
        self.counters.published_bytes += len(data)

    # Dynamo's front ends.

    async def _tell_dynamo(self, connection: Connection, book: DynamoBook, delta: Delta) -> None:
        """The same change for Dynamo's front ends. Call inside the gate."""
        if delta.resync:
            book.lost()  # changes before this one were never said
        await self._publish_dynamo(connection, book, delta.update)

    async def _keep_dynamo_right(self, connection: Connection, book: DynamoBook) -> None:
        epoch = self._state.epoch
        if epoch != self._dynamo_epoch:
            self._dynamo_epoch = epoch
            book.lost()  # the cache began anew: what was said is void
        if book.stale or asyncio.get_running_loop().time() >= self._refresh_at:
            await self._say_again(connection, book)

    async def _say_again(self, connection: Connection, book: DynamoBook) -> None:
        """Every key that is held, and every removal that may have been missed."""
        loop = asyncio.get_running_loop()
        target = self._dynamo
        assert target is not None
        if target.refresh:
            self._refresh_at = loop.time() + target.refresh
        mending, book.stale = book.stale, False
        try:
            with self._lock:
                announced = self._state.snapshot().keys
            for number, keys in enumerate(portions(book.to_repair(announced), self._part_bytes(connection))):
                async with self._order:
                    with self._lock:
                        update = book.update_for(keys, self._state.announces)
                    await self._publish_dynamo(connection, book, update)
                if number % _PARTS_PER_CONFIRM == _PARTS_PER_CONFIRM - 1:
                    await self._confirm(connection)
                else:
                    await asyncio.sleep(0)
        except BaseException:
            book.stale = book.stale or mending
            raise
        self.counters.dynamo_repairs += mending

    async def _publish_dynamo(self, connection: Connection, book: DynamoBook, update: Update) -> None:
        if not update.added_keys and not update.removed_keys:
            return
        target = self._dynamo
        assert target is not None
        self._unconfirmed += 1
        message = book.record(update)
        sequence = self._dynamo_sequence
        self._dynamo_sequence += 1
        now = time.time_ns() // 1_000_000
        data = encode(message, publisher_id=self._dynamo_id, sequence=sequence, published_at=now)
        await connection.publish(target.subject, data)
        self.counters.dynamo_messages += 1

    # Snapshots.

    def _on_request(self, data: bytes, reply: str) -> None:
        try:
            request = decode_message(decode_envelope(data))
        except WireError:
            self.counters.requests_rejected += 1
            return
        ours = self._state.worker_id, self._state.pool
        if not isinstance(request, SnapshotRequest) or (request.worker_id, request.pool) != ours:
            self.counters.requests_rejected += 1
            return
        if not _may_answer_to(reply):
            self.counters.requests_rejected += 1
            return
        if self._serving == (reply, request.request_id):
            return
        if reply not in self._requests and len(self._requests) >= self._options.max_snapshot_requests:
            self.counters.requests_dropped += 1
            return
        # One waiting request for each asker: what it asked last.
        self._requests[reply] = request
        self._asked.set()

    async def _serve_snapshots(self, connection: Connection) -> None:
        limit = self._part_bytes(connection)
        while True:
            await self._asked.wait()
            self._asked.clear()
            while self._requests:
                reply = next(iter(self._requests))
                request = self._requests.pop(reply)
                self._serving = reply, request.request_id
                try:
                    await self._send_deltas(connection)
                    with self._lock:
                        view = self._state.snapshot()
                    for part in view.parts(request.request_id, limit):
                        await self._hand_over(connection, reply, part, part.part)
                        self.counters.snapshot_parts += 1
                        if part.part % _PARTS_PER_CONFIRM == _PARTS_PER_CONFIRM - 1:
                            await connection.confirm(self._options.io_timeout)
                        else:
                            await asyncio.sleep(0)
                    self.counters.snapshots += 1
                finally:
                    self._serving = None

    def _part_bytes(self, connection: Connection) -> int:
        return min(self._options.max_message_bytes, connection.max_payload)

    # Trouble.

    async def _pause(self, attempt: int) -> None:
        low, high = self._options.backoff_min, self._options.backoff_max
        delay = self._rng.uniform(low, max(low, min(high, low * 2.0 ** min(attempt, 16))))
        try:
            async with asyncio.timeout(delay):
                await self._stop.wait()
        except TimeoutError:
            pass

    def _note_connected(self) -> None:
        self.counters.connects += 1
        if self.counters.connects > 1:
            self.counters.reconnects += 1
        if self._down_since is None:
            _log.info("publishing embedding-cache changes over %s", self._transport.name)
        else:
            seconds = asyncio.get_running_loop().time() - self._down_since
            _log.warning("event plane %s is back after %.1f s", self._transport.name, seconds)
        self._down_since = None

    def _complain(self, error: Exception) -> None:
        """Log that the event plane is away, once a minute; a fault of our own comes with its traceback."""
        now = asyncio.get_running_loop().time()
        if self._down_since is None:
            self._down_since = now
        if now - self._complained_at >= _SECONDS_BETWEEN_COMPLAINTS:
            self._complained_at = now
            _log.warning(
                "event plane %s: %s; the encoder works on, retrying",
                self._transport.name,
                error,
                exc_info=None if isinstance(error, TransportError) else error,
            )


def _may_answer_to(reply: str) -> bool:
    """Whether a reply subject is one, and not somebody's event stream."""
    if not reply or len(reply) > 512 or reply.startswith("fullhit."):
        return False
    return not any(char <= " " or char in "*>\x7f" for char in reply)
