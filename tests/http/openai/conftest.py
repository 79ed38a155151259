"""A Dynamo frontend of our own making, and a front (or a whole router) before it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fullhit.core import Pool, PoolSettings, WorkerSpec
from fullhit.core.decision import Decision
from fullhit.core.parity import make_pool
from fullhit.http.openai import FrontSettings, OpenAIFront, Seats, openai_error
from fullhit.http.wire import HttpListener, ListenerLimits, UpstreamClient
from fullhit.lab.raw_http import RawClient, RawReply, RawRequest, RawServer, read_request
from fullhit_publisher.dynamo_keys import KeyRules
from fullhit_publisher.identity import dynamo_name

PATIENCE = 30.0
GONE = {"message": "Service temporarily unavailable", "type": "Service Unavailable", "code": 503}
INTERNAL = {"message": "Internal server error", "type": "Internal Server Error", "code": 500}
INVALID = {"message": "Invalid request", "type": "Bad Request", "code": 400}
TOKENS = b'data: {"choices":[{"delta":{"content":" ok"}}]}\n\n'
DONE = b"data: [DONE]\n\n"

Answer = Callable[["FakeFrontend", RawRequest, asyncio.StreamWriter], Awaitable[None]]


def says(status: int, body: Any, kind: str = "application/json", extra: str = "") -> Answer:
    """A complete answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def answer(frontend: FakeFrontend, request: RawRequest, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n{extra}content-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()

    return answer


def streams(*events: bytes | asyncio.Event, cut: bool = False) -> Answer:
    """Events, each as a chunk of its own; an `asyncio.Event` is waited for. ``cut``: the connection ends in between."""

    async def answer(frontend: FakeFrontend, request: RawRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in events:
            if isinstance(event, asyncio.Event):
                await event.wait()
            else:
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
        if cut:
            raise ConnectionError
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return answer


def error_event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"error": body}).encode() + b"\n\n"


@dataclass
class FakeFrontend:
    """Speaks for all workers. ``by_worker`` has an answer for an instance, else ``answer``."""

    answer: Answer = field(default_factory=lambda: says(200, {"choices": [{"message": {"content": "ok"}}]}))
    by_worker: dict[int, Answer] = field(default_factory=dict)
    instances: set[int] = field(default_factory=set)
    seen: list[RawRequest] = field(default_factory=list)
    left: int = 0
    server: RawServer = field(init=False)
    kept_alive: bool = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def calls(self) -> list[RawRequest]:
        return [request for request in self.seen if request.target != "/health"]

    async def start(self) -> FakeFrontend:
        self.server = await RawServer(self._serve).start()
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_request(reader)
            self.seen.append(request)
            if request.target == "/health":
                await says(200, {"instances": [{"instance_id": one} for one in self.instances]})(self, request, writer)
                continue
            pinned = request.get("x-dynamo-worker-instance-id")
            answer = self.by_worker.get(int(pinned), self.answer) if pinned else self.answer
            work = asyncio.ensure_future(answer(self, request, writer))
            gone = asyncio.ensure_future(reader.read(1))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    self.left += 1
                    return
                work.result()
                if not self.kept_alive or gone.done():
                    return
            finally:
                work.cancel()
                gone.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)


class RecordingFleet:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.good: list[str] = []
        self.bad: list[tuple[str, str]] = []

    def report_success(self, worker_id: str) -> None:
        self.good.append(worker_id)

    def report_promise(self, worker_id: str, kept: bool) -> None: ...

    def report_failure(self, worker_id: str, kind: str) -> None:
        self.bad.append((worker_id, kind))


class RecordingTelemetry:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, int]] = []
        self.counts: list[tuple[str, dict[str, object]]] = []
        self.events: list[str] = []
        self.kept: list[Decision] = []
        self.outcomes: list[dict[str, object]] = []

    def request_done(self, pool: str, reason: str, code: int, seconds: float) -> None:
        self.done.append((pool, reason, code))

    def observe_select(self, pool: str, seconds: float) -> None: ...

    def count(self, name: str, /, **labels: object) -> None:
        self.counts.append((name, labels))

    def event(self, kind: str, /, level: str = "info", **fields: object) -> None:
        self.events.append(kind)

    def limited(self, key: str, kind: str, /, every: float = 60.0, level: str = "warning", **fields: object) -> None:
        self.events.append(kind)

    def remember(self, decision: Decision, **outcome: object) -> None:
        assert outcome == {"api": "openai"}
        self.kept.append(decision)

    def decision(self, decision: Decision, **outcome: object) -> None:
        self.outcomes.append(outcome)


@dataclass
class House:
    pool: Pool
    prefill: Pool | None
    front: OpenAIFront
    listener: HttpListener
    client: UpstreamClient
    fleet: Any
    telemetry: RecordingTelemetry
    frontends: list[FakeFrontend]
    port: int = 0

    @property
    def frontend(self) -> FakeFrontend:
        return self.frontends[0]

    async def connect(self) -> RawClient:
        return await RawClient.open("127.0.0.1", self.port)

    @staticmethod
    def message(body: Any, path: str = "/v1/chat/completions", headers: str = "", method: str = "POST") -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: front.invalid\r\n{headers}"
        if data:
            head += f"Content-Length: {len(data)}\r\n"
        return head.encode("latin-1") + b"\r\n" + data

    async def post(self, body: Any, path: str = "/v1/chat/completions", headers: str = "") -> RawReply:
        return await self.call(self.message(body, path, headers))

    async def call(self, message: bytes, method: str = "POST") -> RawReply:
        async with await self.connect() as client:
            client.send(message)
            return await client.reply(method, timeout=PATIENCE)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def at_rest(self) -> None:
        """Nothing is open any more, and no slot was lost."""
        await self.until(lambda: self.front.status()["open_calls"] == 0)
        workers = [*self.pool.workers(), *(self.prefill.workers() if self.prefill is not None else ())]
        assert all((worker.inflight, worker.encoding) == (0, 0) for worker in workers)
        assert self.front.oldest_inflight() == {}
        assert self.front.frontends.outstanding == 0
        assert self.front.status()["queued"] == self.front.status()["queued_bytes"] == 0

    async def close(self) -> None:
        await self.listener.close()
        self.front.close()
        await self.client.close()
        for frontend in self.frontends:
            await frontend.server.close()


def chat(*urls: str, **more: Any) -> dict[str, Any]:
    """An OpenAI chat body with pictures."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "describe"}]
    content += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "fake", "messages": [{"role": "user", "content": content}], **more}


OpenHouse = Callable[..., Awaitable[House]]


@pytest.fixture
async def open_house() -> AsyncIterator[OpenHouse]:
    """`await open_house(workers=(1, 2), ...settings)`: a front before fake frontends that know these instances.

    ``fleet`` makes one for the pool; without it what is told to it is only remembered.
    """
    houses: list[House] = []

    async def make(
        *,
        workers: tuple[int, ...] = (1, 2),
        prefill: tuple[int, ...] = (),
        frontends: int = 1,
        cap: int | None = None,
        parity: Any = "none",
        fleet: Any = None,
        limits: ListenerLimits | None = None,
        **fields: Any,
    ) -> House:
        rng = random.Random(1)
        made = make_pool("vision", PoolSettings(parity=parity), clock=time.monotonic, rng=rng)
        second = Pool("prefill", PoolSettings(), clock=time.monotonic, rng=rng) if prefill else None
        for home, numbers in ((made, workers), (second, prefill)):
            for number in numbers:
                assert home is not None
                home.add_worker(WorkerSpec(dynamo_name(number), "", max_inflight=cap))
                home.set_ready(dynamo_name(number), True)
        fakes = [await FakeFrontend(instances={*workers, *prefill}).start() for _ in range(frontends)]
        fleet = fleet(made) if fleet is not None else RecordingFleet()
        telemetry, client = RecordingTelemetry(), UpstreamClient()
        front = OpenAIFront(
            Seats(made, fleet),
            Seats(second, fleet) if second is not None else None,
            KeyRules(),
            client,
            FrontSettings(frontends=fields.pop("urls", None) or [fake.url for fake in fakes], **fields),
            telemetry,
        )
        listener = HttpListener(front.handle, limits, error_format=openai_error)
        house = House(made, second, front, listener, client, fleet, telemetry, fakes)
        _, house.port = await listener.start("127.0.0.1", 0)
        houses.append(house)
        return house

    yield make
    for house in houses:
        await house.close()


@pytest.fixture
async def house(open_house: OpenHouse) -> House:
    return await open_house()


@pytest.fixture
def lab() -> Any:
    """What tests need besides, by name."""
    return SimpleNamespace(
        says=says, streams=streams, error_event=error_event, chat=chat, House=House, FakeFrontend=FakeFrontend,
        GONE=GONE, INTERNAL=INTERNAL, INVALID=INVALID, TOKENS=TOKENS, DONE=DONE,
    )  # fmt: skip
