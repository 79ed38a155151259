"""A gateway on a real socket between scripted encoders and a bare HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from fullhit.core.pool import Pool
from fullhit.core.types import PoolSettings, WorkerSpec
from fullhit.http.encoder import EncoderGateway, GatewaySettings, sglang_error
from fullhit.http.wire import HttpListener, ListenerLimits, UpstreamClient
from fullhit.telemetry.metrics import Metrics
from fullhit_publisher.identity import normalize_url

PATIENCE = 20.0
"""Seconds after which a condition is given up; nothing is expected to take so long."""


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


@dataclass
class Seen:
    """One request as a server got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


async def read_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head[:-4].split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return first, headers


class Connection:
    """A client connection; `call` for a whole exchange, `start` and `answer` for its halves."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def start(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        lines = {"Host": "router", "Content-Length": str(len(body)), "Content-Type": "application/json"}
        lines.update(headers or {})
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{n}: {v}\r\n" for n, v in lines.items()) + "\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def answer(self) -> Reply:
        first, headers = await read_head(self.reader)
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Reply(int(first.split()[1]), headers, body)

    def leave(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[["ScriptedEncoder", Seen, asyncio.StreamWriter], Awaitable[None]]


def reply_bytes(status: int, body: bytes, headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def says(status: int, body: object = None, headers: str = "") -> Behaviour:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)

    async def behave(encoder: ScriptedEncoder, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(reply_bytes(status, raw, headers))

    return behave


def says_raw(data: bytes) -> Behaviour:
    async def behave(encoder: ScriptedEncoder, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    return behave


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a RST, as the kernel does for a killed process with unread input."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def resets(encoder: ScriptedEncoder, seen: Seen, writer: asyncio.StreamWriter) -> None:
    reset(writer)


async def dies(encoder: ScriptedEncoder, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """The process is killed while it works on the request."""
    await encoder.kill()


def url_of(item: Any) -> Any:
    return item["url"] if isinstance(item, dict) else item


class ScriptedEncoder:
    """Behaves like an encoder of the given backend unless told otherwise with `on`.

    `gate` holds back all answers to ``/encode`` while it is not set.
    """

    def __init__(self, backend: str = "zmq_to_scheduler", *, dp: bool = False) -> None:
        self.backend, self.dp = backend, dp
        self.seen: list[Seen] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.scripts: dict[str, list[Behaviour]] = {}
        self.always: dict[str, Behaviour] = {}
        self.pushed: list[tuple[str, str]] = []  # (req_id, receive_url or host:port)
        self.unreadable: set[str] = set()  # items refused with 400
        self.errors_pushed: list[tuple[str, str]] = []
        self.refused: dict[str, str] = {}  # req_id -> message, as long as somebody may register
        self.registered: dict[str, set[str]] = {}
        self.counts: dict[str, int] = {}
        self.started: set[str] = set()
        self.encoded: dict[str, dict[str, Any]] = {}
        self.changed = asyncio.Condition()
        self.connections: set[asyncio.StreamWriter] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.server: asyncio.Server | None = None
        self.port = 0
        self.requests_on: Counter[asyncio.StreamWriter] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def calls(self, path: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.path == path]

    def on(self, path: str, *behaviours: Behaviour, always: bool = False) -> None:
        """The next calls to ``path`` are treated so; ``always``: all of them from now on."""
        if always:
            self.always[path] = behaviours[0]
        else:
            self.scripts.setdefault(path, []).extend(behaviours)

    async def start(self, port: int = 0) -> ScriptedEncoder:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=1 << 26)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def kill(self) -> None:
        """As kill -9: the port refuses, open connections are reset."""
        if self.server is not None:
            self.server.close()
            self.server = None
        for writer in list(self.connections):
            reset(writer)
        current = asyncio.current_task()
        for task in list(self.tasks):
            if task is not current:
                task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self.server is None:
            reset(writer)  # Accepted in the moment of the kill.
            return
        self.tasks.add(task)
        self.connections.add(writer)
        try:
            while not writer.is_closing():
                first, headers = await read_head(reader)
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                method, path, _ = first.split()
                seen = Seen(method, path, headers, body)
                self.requests_on[writer] += 1
                await self._note(lambda seen=seen: self.seen.append(seen))  # type: ignore[misc]
                script = self.scripts.get(path)
                behave = script.pop(0) if script else self.always.get(path, ScriptedEncoder._proper)
                await behave(self, seen, writer)
                if not writer.is_closing():
                    await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.tasks.discard(task)
            self.connections.discard(writer)
            writer.transport.abort()

    async def _note(self, change: Callable[[], object]) -> None:
        async with self.changed:
            change()
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE), self.changed:
            await self.changed.wait_for(condition)

    # --- proper behaviour, as recorded or read

    async def _proper(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        handler = {
            "/encode": self._encode,
            "/scheduler_receive_url": self._register,
            "/scheduler_receive_meta_data": self._meta,
            "/send": self._send,
        }.get(seen.path)
        if handler is None:
            writer.write(reply_bytes(404, b'{"detail":"Not Found"}'))
            return
        writer.write(await handler(seen.json))

    async def _encode(self, body: dict[str, Any]) -> bytes:
        req_id = body["req_id"]
        bad = [url for url in map(url_of, body["mm_items"]) if url in self.unreadable]
        if bad:
            message = f"Bad request error: Failed to process mm items: Error while loading data {bad[0]}: no picture"
            self.refused[req_id] = message
            await self._note(lambda: self.started.add(req_id))
            error = {"status": "error", "message": message, "req_id": req_id}
            return reply_bytes(400, json.dumps(error).encode())
        await self._note(lambda: self.started.add(req_id))
        await self.gate.wait()
        if self.backend == "zmq_to_scheduler":
            await self.until(
                lambda: req_id in self.counts and len(self.registered.get(req_id, ())) >= self.counts[req_id]
            )
            for url in sorted(self.registered[req_id]):
                await self._note(lambda url=url: self.pushed.append((req_id, url)))  # type: ignore[misc]
        elif self.backend == "zmq_to_tokenizer":
            await self._note(lambda: self.pushed.append((req_id, f"{body['prefill_host']}:{body['embedding_port']}")))
        else:
            sizes = {"embedding_size": 4096, "embedding_len": 4, "embedding_dim": 512}
            await self._note(lambda: self.encoded.__setitem__(req_id, sizes))
            echo = {name: value for name, value in body.items() if name != "mm_items"} | sizes
            return reply_bytes(200, json.dumps(echo).encode())
        return reply_bytes(200, b"null")

    async def _register(self, body: dict[str, Any]) -> bytes:
        req_id, count = body["req_id"], body["receive_count"]
        if self.dp and req_id not in self.started:
            return reply_bytes(404, json.dumps({"status": "error", "message": "Unknown req_id"}).encode())
        await self.until(lambda: req_id in self.started)
        if self.counts.setdefault(req_id, count) != count:
            return reply_bytes(400, json.dumps({"status": "error", "message": "Inconsistent receive_count"}).encode())
        if req_id in self.refused:
            await self._note(lambda: self.errors_pushed.append((req_id, body["receive_url"])))
            return reply_bytes(200, b"null")
        await self._note(lambda: self.registered.setdefault(req_id, set()).add(body["receive_url"]))
        return reply_bytes(200, b"null")

    async def _meta(self, body: dict[str, Any]) -> bytes:
        req_id = body["req_id"]
        if self.backend != "mooncake":
            await self.until(lambda: req_id in self.started)
            if req_id in self.refused:
                error = {"status": "error", "message": self.refused[req_id], "req_id": req_id}
                return reply_bytes(500, json.dumps(error).encode())
            self.encoded[req_id] = {"embedding_size": 4096, "embedding_len": 4, "embedding_dim": 512}
        await self.until(lambda: req_id in self.encoded)
        answer = {"req_id": req_id, "part_idx": body["part_idx"], **self.encoded[req_id]}
        return reply_bytes(200, json.dumps(answer).encode())

    async def _send(self, body: dict[str, Any]) -> bytes:
        if body["req_id"] not in self.encoded:
            message = {"status": "error", "message": "no staged embedding", "req_id": body["req_id"]}
            return reply_bytes(500, json.dumps(message).encode())
        await self._note(
            lambda: self.pushed.append((body["req_id"], f"{body['prefill_host']}:{body['embedding_port']}"))
        )
        return reply_bytes(200, b"null")


class RecordingTelemetry:
    """Remembers everything and checks each metric against the real definitions."""

    def __init__(self, pool: Pool) -> None:
        self.metrics = Metrics({pool.name: pool}, strict=True)
        self.counters: Counter[str] = Counter()
        self.events: list[tuple[str, dict[str, object]]] = []
        self.decisions: list[tuple[Any, dict[str, object]]] = []
        self.requests: list[tuple[str, str, int]] = []
        self.observe_select = self.metrics.observe_select

    def request_done(self, pool: str, reason: str, code: int, seconds: float) -> None:
        self.metrics.request_done(pool, reason, code, seconds)
        self.requests.append((pool, reason, code))

    def count(self, name: str, /, **labels: object) -> None:
        self.metrics.count(name, **labels)
        self.counters[name + "".join(f":{value}" for value in labels.values())] += 1

    def event(self, kind: str, /, level: str = "info", **fields: object) -> None:
        json.dumps(fields)
        self.events.append((kind, {"level": level, **fields}))

    def decision(self, decision: Any, **outcome: object) -> None:
        json.dumps(outcome)
        self.decisions.append((decision, outcome))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


class RecordingFleet:
    """A fleet that believes everything: registered workers are ready at once, failures are only noted."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.successes: Counter[str] = Counter()
        self.failures: Counter[tuple[str, str]] = Counter()
        self.promises: list[tuple[str, bool]] = []

    def report_success(self, worker_id: str) -> None:
        self.successes[worker_id] += 1

    def report_failure(self, worker_id: str, kind: str) -> None:
        self.failures[(worker_id, kind)] += 1

    def report_promise(self, worker_id: str, kept: bool) -> None:
        self.promises.append((worker_id, kept))

    def register_url(self, url: str) -> None:
        self.add(normalize_url(url))

    def unregister_url(self, url: str) -> bool:
        return self.pool.remove_worker(normalize_url(url))

    def urls(self) -> list[str]:
        return [worker.url for worker in self.pool.workers()]

    def add(self, url: str, device: str = "cuda", max_inflight: int | None = None) -> None:
        self.pool.add_worker(WorkerSpec(url, url, device=device, max_inflight=max_inflight))
        self.pool.set_ready(url, True)


@dataclass
class House:
    """Everything of one test."""

    pool: Pool
    gateway: EncoderGateway
    listener: HttpListener
    client: UpstreamClient
    fleet: RecordingFleet
    telemetry: RecordingTelemetry
    port: int = 0
    encoders: list[ScriptedEncoder] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    ids: int = 0

    async def encoder(self, backend: str = "zmq_to_scheduler", *, add: bool = True, **options: Any) -> ScriptedEncoder:
        """A started encoder, in the pool unless ``add`` is False. Further options go to `RecordingFleet.add`."""
        encoder = await ScriptedEncoder(backend, dp=options.pop("dp", False)).start()
        self.encoders.append(encoder)
        if add:
            self.fleet.add(encoder.url, **options)
        return encoder

    async def connect(self) -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        connection = Connection(reader, writer)
        self.connections.append(connection)
        return connection

    async def start(self, path: str, body: object, method: str = "POST", **headers: str) -> Connection:
        """Send a request; read its answer later with `answer`."""
        connection = await self.connect()
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        await connection.start(method, path, raw, headers)
        return connection

    async def call(self, path: str, body: object = b"", method: str = "POST", **headers: str) -> Reply:
        async with asyncio.timeout(PATIENCE):
            connection = await self.start(path, body, method, **headers)
            reply = await connection.answer()
        connection.leave()
        return reply

    def body(self, req_id: str | None = None, items: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
        """An ``/encode`` body of the newest generation for zmq_to_scheduler; ``...`` removes a field."""
        self.ids += 1
        base: dict[str, Any] = {
            "encoder_idx": 0,
            "encoder_url": "http://router",
            "mm_items": items if items is not None else [f"http://pictures.invalid/{self.ids}.png"],
            "num_parts": 1,
            "part_idx": 0,
            "req_id": req_id or f"{self.ids:032x}_local_part_0",
            "modality": "IMAGE",
            "prefill_host": "127.0.0.1",
            "embedding_port": None,
            "time_stats_json": None,
        }
        base.update(fields)
        return {name: value for name, value in base.items() if value is not ...}

    @staticmethod
    def registration(req_id: str, port: int = 40001, count: int = 1, host: str = "127.0.0.1") -> dict[str, Any]:
        return {"req_id": req_id, "receive_count": count, "receive_url": f"{host}:{port}", "modality": "IMAGE"}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def at_rest(self) -> None:
        """Nothing is open any more, and no slot was lost."""
        await self.until(lambda: self.gateway.status()["open_calls"] == 0)
        await self.until(lambda: all(worker.inflight == 0 for worker in self.pool.workers()))
        assert all(worker.encoding == 0 for worker in self.pool.workers())
        assert self.gateway.oldest_inflight() == {}
        assert self.gateway.status()["queued"] == 0
        assert self.gateway.status()["queued_bytes"] == 0

    async def close(self) -> None:
        for connection in self.connections:
            connection.leave()
        await self.listener.close()
        await self.gateway.drain(1.0)
        await self.client.close()
        for encoder in self.encoders:
            await encoder.kill()
        await asyncio.sleep(0)


OpenHouse = Callable[..., Awaitable[House]]


@pytest.fixture
async def open_house() -> AsyncIterator[OpenHouse]:
    """`await open_house(settings fields...)`: a gateway without encoders."""
    houses: list[House] = []

    async def make(*, limits: ListenerLimits | None = None, pool: PoolSettings | None = None, **fields: Any) -> House:
        made = Pool("default", pool or PoolSettings(), clock=time.monotonic, rng=random.Random(1))
        fleet = RecordingFleet(made)
        telemetry = RecordingTelemetry(made)
        client = UpstreamClient()
        fields = {"retry_pause": 0.02, "delivery_pause": 0.01} | fields
        gateway = EncoderGateway(made, client, fleet, GatewaySettings(**fields), telemetry, time.monotonic)
        listener = HttpListener(gateway.handle, limits, error_format=sglang_error)
        house = House(made, gateway, listener, client, fleet, telemetry)
        _, house.port = await listener.start("127.0.0.1", 0)
        houses.append(house)
        return house

    yield make
    for house in houses:
        with contextlib.suppress(asyncio.CancelledError):
            await house.close()


@pytest.fixture
async def house(open_house: OpenHouse) -> House:
    return await open_house()


@pytest.fixture
def lab() -> Any:
    """The scripts for encoders, by name."""
    from types import SimpleNamespace

    return SimpleNamespace(says=says, says_raw=says_raw, resets=resets, dies=dies, Encoder=ScriptedEncoder)
