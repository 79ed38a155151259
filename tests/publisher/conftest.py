"""A real NATS server that can be killed, and a naive reader of the event stream."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from fullhit_publisher import fold, wire
from fullhit_publisher.keys import digest

PATIENCE = 20.0


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Poll from a plain thread; fails after ``PATIENCE`` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true in {PATIENCE} s")
        time.sleep(0.005)


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true in {PATIENCE} s")
        await asyncio.sleep(0.005)


class NaiveReader:
    """Holds the keys of one worker as its messages say, and asks for a snapshot whenever in doubt.

    ``ask(request_bytes)`` sends a request; the parts of the answer go to ``on_part``.
    """

    def __init__(self, worker_id: int, pool: str, ask: Callable[[bytes], None]) -> None:
        self.worker_id = worker_id
        self.pool = pool
        self.keys: set[str] = set()
        self.epoch = 0
        self.seq = 0
        self.in_doubt = False
        self.deltas: list[wire.Delta] = []
        self.beats: list[wire.Heartbeat] = []
        self.snapshots: list[list[wire.Snapshot]] = []
        self.sequences: list[int] = []
        self._ask = ask
        self._request_id = 0
        self._asked_at = 0.0
        self._parts: list[wire.Snapshot] = []
        self._behind: list[wire.Delta] = []

    def on_event(self, subject: str, data: bytes) -> None:
        envelope = wire.decode_envelope(data)
        message = wire.decode_message(envelope)
        if isinstance(message, wire.Snapshot):
            self.on_part(data)
            return
        origin = wire.parse_events_subject(subject)
        assert origin == (self.pool, self.worker_id)
        wire.check_origin(message, *origin)
        self.sequences.append(envelope.sequence)
        if isinstance(message, wire.Delta):
            self.deltas.append(message)
            self._on_delta(message)
        elif isinstance(message, wire.Heartbeat):
            self.beats.append(message)
            if message.epoch != self.epoch and message.seq == 0:
                self._begin(message.epoch)
            wrong = (message.epoch, message.seq) != (self.epoch, self.seq) or message.digest != digest(
                map(fold, self.keys)
            )
            # A request or its answer may be lost; one that is under way is given its time.
            if wrong and (not self.in_doubt or time.monotonic() - self._asked_at > 1.0):
                self.doubt()

    def on_part(self, data: bytes) -> None:
        part = wire.decode_message(wire.decode_envelope(data))
        assert isinstance(part, wire.Snapshot)
        if not self.in_doubt or part.request_id != self._request_id:
            return
        assert part.part == len(self._parts)
        self._parts.append(part)
        self._asked_at = time.monotonic()
        if part.part + 1 < part.parts:
            return
        parts, self._parts = self._parts, []
        self.snapshots.append(parts)
        self.keys = {key for one in parts for key in one.keys}
        self.epoch, self.seq, self.in_doubt = part.epoch, part.seq, False
        behind, self._behind = self._behind, []
        for delta in behind:
            if delta.epoch == self.epoch and delta.seq is not None and delta.seq > self.seq:
                self._apply(delta)

    def doubt(self) -> None:
        if not self.in_doubt:
            self.in_doubt = True
            self._behind.clear()
        self._parts.clear()
        self._request_id += 1
        self._asked_at = time.monotonic()
        request = wire.SnapshotRequest(self.worker_id, self.pool, self._request_id)
        self._ask(wire.encode(request, publisher_id=1, sequence=0, published_at=0))

    def _on_delta(self, delta: wire.Delta) -> None:
        if delta.epoch != self.epoch and delta.seq == 1:
            assert delta.epoch is not None
            self._begin(delta.epoch)
        if self.in_doubt:
            self._behind.append(delta)
            return
        if delta.epoch == self.epoch and delta.seq == self.seq + 1 and not delta.resync:
            self._apply(delta)
            return
        self.doubt()
        self._behind.append(delta)

    def _begin(self, epoch: int) -> None:
        """A cache that has said nothing yet, or is about to say its first word, is empty."""
        self.epoch, self.seq, self.in_doubt = epoch, 0, False
        self.keys.clear()
        self._parts.clear()
        self._behind.clear()

    def _apply(self, delta: wire.Delta) -> None:
        assert delta.epoch is not None and delta.seq is not None
        self.epoch, self.seq = delta.epoch, delta.seq
        self.keys = (self.keys - set(delta.removed)) | set(delta.added)


class NatsServer:
    """``nats-server`` on a free port of 127.0.0.1; the port is kept over ``kill`` and ``start``."""

    def __init__(self, folder: Path) -> None:
        beside = Path(sys.executable).with_name("nats-server")
        binary = str(beside) if beside.exists() else shutil.which("nats-server")
        assert binary, "nats-server is neither beside the interpreter nor on PATH"
        self._binary = binary
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = -1
        self.config = ""

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        config = self._folder / "nats.conf"
        config.write_text(self.config)
        command = [self._binary, "-c", str(config), "-a", "127.0.0.1", "-p", str(self.port)]
        log = self._folder / "nats.log"
        self._process = subprocess.Popen(
            [*command, "--ports_file_dir", str(self._folder), "-l", str(log)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ports = self._folder / f"nats-server_{self._process.pid}.ports"

        def ready() -> bool:
            assert self._process is not None and self._process.poll() is None, log.read_text()
            return ports.exists() and ports.read_text().strip().endswith("}")

        wait_until(ready, "start of nats-server")
        address = json.loads(ports.read_text())["nats"][0]
        self.port = int(address.rpartition(":")[2])

    def kill(self) -> None:
        """SIGKILL; nothing is said to clients."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """The process stops, its sockets stay open: a network that swallows everything looks like this."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@pytest.fixture
def stopped_nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that the test configures and starts itself."""
    server = NatsServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def nats_server(stopped_nats: NatsServer) -> NatsServer:
    stopped_nats.start()
    return stopped_nats


ReaderFactory = Callable[..., "asyncio.Future[NaiveReader]"]


@pytest.fixture
async def follow() -> AsyncIterator[Callable[..., object]]:
    """``await follow(url, publisher)``: a reader of that publisher's stream which reconnects by itself."""
    clients: list[Client] = []
    tasks: set[asyncio.Task[None]] = set()

    async def make(url: str, publisher: object, **options: object) -> NaiveReader:
        async def quiet(error: Exception) -> None:
            pass

        client = await nats.connect(url, error_cb=quiet, max_reconnect_attempts=-1, reconnect_time_wait=0.05, **options)
        clients.append(client)
        worker_id, pool = publisher.worker_id, publisher.pool  # type: ignore[attr-defined]
        inbox = client.new_inbox()

        def ask(request: bytes) -> None:
            async def send() -> None:
                await client.publish(wire.snapshot_subject(pool, worker_id), request, reply=inbox)

            task = asyncio.ensure_future(send())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        reader = NaiveReader(worker_id, pool, ask)

        async def on_message(message: Msg) -> None:
            reader.on_event(message.subject, message.data)

        await client.subscribe(wire.events_subject(pool, worker_id), cb=on_message)
        await client.subscribe(inbox, cb=on_message)
        await client.flush()
        return reader

    yield make
    for client in clients:
        await client.close()


@pytest.fixture(name="until")
def until_fixture() -> object:
    return until


@pytest.fixture(name="wait_until")
def wait_until_fixture() -> object:
    return wait_until


@pytest.fixture
def naive_reader() -> type[NaiveReader]:
    return NaiveReader
