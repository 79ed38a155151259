"""A router's intake on a desk: real ``Ingest``, real ``Pool``, real wire bytes; time and network are the test's."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from fullhit.core import Pool, Reason, SelectRequest, Worker, WorkerSpec
from fullhit.events import (
    EmbeddedNats,
    Ingest,
    IngestSettings,
    NatsPlane,
    NatsSettings,
    OutgoingRequest,
    StreamSettings,
    WorkerStream,
)
from fullhit_publisher import EmbeddingCachePublisher, PublisherOptions, wire
from fullhit_publisher.identity import worker_id_for
from fullhit_publisher.keys import digest, fold

URL = "http://encoder-1.invalid:30002"
EPOCH = 1_000_000


@dataclass
class Desk:
    """One pool, one intake, a clock that stands still, and a pen for messages."""

    settings: IngestSettings = field(default_factory=IngestSettings)
    now: float = 1000.0
    publisher_id: int = 7
    log: list[tuple[str, str, dict[str, object]]] = field(default_factory=list)
    strangers: list[tuple[str, wire.Heartbeat]] = field(default_factory=list)
    beats: list[wire.Heartbeat] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = Pool("default", clock=lambda: self.now)
        self.sequence = 0
        self.ingest = Ingest(
            {"default": self.pool},
            self.settings,
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
            log=lambda level, event, **fields: self.log.append((level, event, fields)),
            on_unknown_worker=lambda pool, beat: self.strangers.append((pool, beat)),
            on_heartbeat=lambda pool, worker, beat: self.beats.append(beat),
            rng=random.Random(1),
        )
        self.requests: list[OutgoingRequest] = []

    # The router's side.

    def add(self, url: str = URL) -> Worker:
        worker = self.pool.add_worker(WorkerSpec(id=url, url=url))
        self.pool.set_ready(url, True)
        self.ingest.worker_added("default", url)
        return worker

    def remove(self, url: str = URL) -> None:
        self.pool.remove_worker(url)
        self.ingest.worker_removed("default", url)

    def stream(self, url: str = URL) -> WorkerStream:
        stream = self.ingest.stream("default", url)
        assert stream is not None
        return stream

    def state(self, url: str = URL) -> str:
        return str(self.stream(url).state)

    def wait(self, seconds: float) -> list[OutgoingRequest]:
        """Let time pass in small steps; returns the snapshot requests sent meanwhile."""
        end = self.now + seconds
        sent: list[OutgoingRequest] = []
        while True:
            self.work()
            sent += self.ingest.tick(self.now)
            if self.now >= end:
                break
            self.now = min(end, max(self.now + 0.001, min(self.ingest.deadline, self.now + 0.25)))
        self.requests += sent
        return sent

    def work(self) -> None:
        for _ in range(1_000_000):
            if not self.ingest.run_slices():
                return
        raise AssertionError("the intake never comes to an end")

    def held(self, keys: Iterable[str], url: str = URL) -> set[str]:
        return {key for key in keys if self.pool.holds(url, fold(key))}

    def full_hit(self, *keys: str) -> bool:
        """Whether a request with these keys would be a full hit."""
        decision = self.pool.select(SelectRequest(keys=tuple(map(fold, keys)), items=len(keys), dry_run=True))
        return decision.reason is Reason.FULL_HIT

    def counted(self, name: str) -> int:
        """Sum of all counters whose name starts like this."""
        return sum(value for key, value in self.ingest.counters.items() if key.startswith(name))

    # The worker's side.

    def envelope(
        self, message: wire.Delta | wire.Heartbeat | wire.Snapshot, sequence: int | None = None, publisher_id: int = 0
    ) -> bytes:
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        return wire.encode(
            message,
            publisher_id=publisher_id or self.publisher_id,
            sequence=sequence,
            published_at=int(self.now * 1000),
        )

    def delta(
        self,
        seq: int,
        added: Sequence[str] = (),
        removed: Sequence[str] = (),
        *,
        epoch: int | None = EPOCH,
        resync: bool = False,
        url: str = URL,
        pool: str = "default",
    ) -> bytes:
        update = wire.Update(list(added), list(removed))
        if epoch is None:
            return self.envelope(wire.Delta(worker_id_for(url), update), seq)
        return self.envelope(wire.Delta(worker_id_for(url), update, epoch, seq, pool, resync))

    def beat(
        self,
        seq: int,
        keys: Iterable[str] = (),
        *,
        epoch: int = EPOCH,
        url: str = URL,
        interval_ms: int = 1000,
        shown_url: str | None = None,
        wrong_digest: bool = False,
    ) -> bytes:
        folded = {fold(key) for key in keys}
        return self.envelope(
            wire.Heartbeat(
                worker_id=worker_id_for(url),
                epoch=epoch,
                seq=seq,
                pool="default",
                keys=len(folded),
                digest=digest(folded) ^ wrong_digest,
                url=url if shown_url is None else shown_url,
                device="cuda",
                interval_ms=interval_ms,
            )
        )

    def parts(
        self, request: OutgoingRequest, keys: Sequence[str], seq: int, *, parts: int = 1, epoch: int = EPOCH
    ) -> list[bytes]:
        """The answer to a snapshot request."""
        return [
            self.envelope(
                wire.Snapshot(
                    request.worker_id,
                    epoch,
                    seq,
                    request.pool,
                    request.request_id,
                    part,
                    parts,
                    list(keys[part::parts]),
                ),
                part,
            )
            for part in range(parts)
        ]

    def hear(self, *messages: bytes, url: str = URL) -> None:
        for message in messages:
            self.ingest.feed(wire.events_subject("default", worker_id_for(url)), message)

    def receive(self, *parts: bytes) -> None:
        for part in parts:
            self.ingest.feed_snapshot(part)

    def go_live(self, *keys: str, url: str = URL) -> None:
        """A worker whose cache is known: one delta with these keys has been applied."""
        self.add(url)
        self.hear(self.delta(1, keys, url=url), url=url)
        self.hear(self.beat(1, keys, url=url), url=url)
        assert self.state(url) == "live"


@pytest.fixture
def make_desk() -> Callable[..., Desk]:
    """``make_desk(silence_grace=2.0)``: a desk with other rules for streams; ``intake=`` for the rest."""

    def make(intake: dict[str, object] | None = None, **rules: object) -> Desk:
        stream = StreamSettings(**rules)  # type: ignore[arg-type]
        return Desk(IngestSettings(stream=stream, **(intake or {})))  # type: ignore[arg-type]

    return make


@pytest.fixture
def desk() -> Desk:
    return Desk()


class BlackHole:
    """A TCP proxy on loopback which can swallow everything without closing anything: a network that drops packets."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.accepted = 0

    async def start(self) -> BlackHole:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    def swallow(self) -> None:
        self._open.clear()

    def deliver(self) -> None:
        self._open.set()

    async def close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.append(writer)
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.append(other_writer)
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.transport.abort()


async def eventually(condition: Callable[[], object], what: str = "", seconds: float = 30.0) -> None:
    """Wait until ``condition()`` is true, looking often; the limit is for broken code, not for slow machines."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"never came true: {what or condition}"
        await asyncio.sleep(0.01)


class Router:
    """Pool, intake and NATS plane, as the application wires them."""

    def __init__(self, url: str, nats: NatsSettings | None = None, **rules: object) -> None:
        self.pool = Pool("default", clock=time.monotonic)
        self.log: list[tuple[str, str, dict[str, object]]] = []
        self.ingest = Ingest(
            {"default": self.pool},
            IngestSettings(stream=StreamSettings(**rules)),  # type: ignore[arg-type]
            log=self._note,
        )
        self.plane = NatsPlane(url, self.ingest, nats or QUICK, log=self._note)

    def _note(self, level: str, event: str, /, **fields: object) -> None:
        self.log.append((level, event, fields))

    def add(self, url: str = URL) -> None:
        self.pool.add_worker(WorkerSpec(id=url, url=url))
        self.pool.set_ready(url, True)
        self.ingest.worker_added("default", url)

    def state(self, url: str = URL) -> str:
        stream = self.ingest.stream("default", url)
        return "none" if stream is None else str(stream.state)

    def full_hit(self, *keys: str) -> bool:
        request = SelectRequest(keys=tuple(map(fold, keys)), items=len(keys), dry_run=True)
        return self.pool.select(request).reason is Reason.FULL_HIT


QUICK = NatsSettings(
    connect_timeout=1.0,
    watchdog_interval=0.1,
    io_timeout=0.5,
    close_timeout=0.3,
    backoff_min=0.02,
    backoff_max=0.1,
    distrust_pause=0.5,
)


@pytest.fixture
async def nats() -> AsyncIterator[EmbeddedNats]:
    server = EmbeddedNats()
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def make_router() -> AsyncIterator[Callable[..., Awaitable[Router]]]:
    """``await make_router(url, silence_grace=1.0)``: a router whose plane has been started."""
    routers: list[Router] = []

    async def make(url: str, nats: NatsSettings | None = None, **rules: object) -> Router:
        router = Router(url, nats, **rules)
        routers.append(router)
        await router.plane.start()
        return router

    yield make
    for router in routers:
        await router.plane.close()


@pytest.fixture
async def make_publisher() -> AsyncIterator[Callable[..., EmbeddingCachePublisher]]:
    """``make_publisher(event_plane)``: a real publisher in its own thread, heartbeats five times a second."""
    publishers: list[EmbeddingCachePublisher] = []

    def make(event_plane: str, url: str = URL) -> EmbeddingCachePublisher:
        options = PublisherOptions(connect_timeout=1.0, io_timeout=0.5, backoff_min=0.02, backoff_max=0.1)
        publisher = EmbeddingCachePublisher(url=url, event_plane=event_plane, heartbeat_interval=0.2, options=options)
        publishers.append(publisher)
        return publisher.start()

    yield make
    for publisher in publishers:
        await asyncio.to_thread(publisher.close)


@pytest.fixture
async def make_black_hole() -> AsyncIterator[Callable[[int], Awaitable[BlackHole]]]:
    holes: list[BlackHole] = []

    async def make(port: int) -> BlackHole:
        holes.append(await BlackHole(port).start())
        return holes[-1]

    yield make
    for hole in holes:
        await hole.close()


@pytest.fixture(name="eventually")
def _eventually() -> Callable[..., Awaitable[None]]:
    return eventually
