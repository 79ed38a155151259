"""Dynamo's event planes over real transports: a NATS server, ZMQ publishers with sockets of their own, ZMQ brokers."""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import zmq
import zmq.asyncio
from nats.aio.client import Client

from fullhit.core import Pool, Reason, SelectRequest, WorkerSpec
from fullhit.events import EmbeddedNats, Ingest, NatsSettings
from fullhit.events.dispatcher import Dispatcher
from fullhit.events.dynamo_feed import DynamoFeed
from fullhit.events.dynamo_nats import DynamoNats
from fullhit.events.dynamo_scope import DynamoScope
from fullhit.events.dynamo_zmq import DynamoZmq
from fullhit_publisher.identity import dynamo_name
from fullhit_publisher.keys import fold

TOPIC = "multimodal_embedding_cache"
SUBJECT = f"namespace.ns.component.encoder.endpoint.generate.{TOPIC}"
A, B, C = (hashlib.sha256(letter).hexdigest() for letter in (b"a", b"b", b"c"))
W = 2**63 + 5


async def eventually(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came about"
        await asyncio.sleep(0.01)


class Router:
    """A pool, an intake and its dispatcher; the event plane is the test's."""

    def __init__(self) -> None:
        self.pool = Pool("enc", clock=time.monotonic)
        self.ingest = Ingest({"enc": self.pool}, rng=random.Random(1))
        self.feed = DynamoFeed("enc", DynamoScope("ns"), self.ingest)
        self.log: list[str] = []
        self.plane: DynamoNats | DynamoZmq | None = None
        self._task = asyncio.create_task(Dispatcher(self.ingest, lambda request: None).run())

    def note(self, level: str, event: str, /, **fields: object) -> None:
        self.log.append(event)

    def add(self, number: int) -> None:
        self.pool.add_worker(WorkerSpec(id=dynamo_name(number), url=""))
        self.pool.set_ready(dynamo_name(number), True)
        self.ingest.worker_added("enc", dynamo_name(number))
        self.feed.worker_joined(number)

    def full_hit(self, *keys: str) -> bool:
        request = SelectRequest(keys=tuple(map(fold, keys)), items=len(keys), dry_run=True)
        return self.pool.select(request).reason is Reason.FULL_HIT

    def state(self, number: int = W) -> str:
        stream = self.ingest.stream("enc", dynamo_name(number))
        assert stream is not None
        return str(stream.state)

    async def close(self) -> None:
        if self.plane is not None:
            await self.plane.close()
        self._task.cancel()
        await asyncio.wait({self._task})


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    made = Router()
    yield made
    await made.close()


def envelope(sequence: int, added=(), removed=(), *, worker: int = W, publisher: int = 1) -> bytes:
    update = {"added_keys": list(added), "removed_keys": list(removed)}
    return msgspec.msgpack.encode(
        {
            "publisher_id": publisher,
            "sequence": sequence,
            "published_at": int(time.time() * 1000),
            "topic": TOPIC,
            "payload": msgspec.msgpack.encode({"worker_id": worker, "update": update}),
        }
    )


def frames(sequence: int, added=(), removed=(), *, topic: str = TOPIC, worker: int = W, publisher: int = 1):
    data = envelope(sequence, added, removed, worker=worker, publisher=publisher)
    return [
        topic.encode(),
        publisher.to_bytes(8, "big"),
        sequence.to_bytes(8, "big"),
        b"\x01" + len(data).to_bytes(4, "big") + data,
    ]


# NATS.


async def test_events_over_nats_reach_the_index_in_every_scope_and_survive_the_broker(router: Router) -> None:
    server = EmbeddedNats(0)
    await server.start()
    quick = NatsSettings(watchdog_interval=0.2, io_timeout=1.0, backoff_max=0.3)
    router.plane = DynamoNats(server.url, router.feed, router.ingest, quick, log=router.note)
    client = Client()
    try:
        await router.plane.start()
        await eventually(lambda: router.plane.status().connected)
        router.add(W)
        await client.connect(server.url)
        await client.publish(SUBJECT, envelope(0, [A]))
        await client.publish(f"namespace.ns.{TOPIC}", envelope(1, [B]))
        await client.publish(f"namespace.ns.component.encoder.{TOPIC}", envelope(2, [C], [A]))
        await client.publish(f"namespace.other.{TOPIC}", envelope(3, [A]))
        await client.publish("namespace.ns.component.encoder.endpoint.generate.kv_events", b"not ours")
        await client.publish(SUBJECT, b"nonsense")
        await client.flush()
        await eventually(lambda: router.feed.counters)
        assert router.full_hit(B, C) and not router.full_hit(A)
        assert router.feed.counters == {"envelope": 1} and router.feed.messages == 3
        await client.close()
        await server.close()
        await eventually(lambda: not router.plane.status().connected)
        assert router.plane.status().error
        assert router.full_hit(B, C), "a short failure costs nothing"
    finally:
        if client.is_connected:
            await client.close()
        await server.close()


async def test_a_nats_server_that_is_not_there_yet_holds_up_nothing(router: Router) -> None:
    router.plane = DynamoNats("nats://127.0.0.1:9", router.feed, router.ingest, NatsSettings(backoff_max=0.2))
    await router.plane.start()
    await eventually(lambda: "cannot connect" in router.plane.status().error)
    router.add(W)
    assert router.state() == "unknown"


# ZMQ.


@pytest.fixture
def sockets():
    """``sockets(kind)``: a ZMQ socket on a free port of the loopback, and its address."""
    context = zmq.asyncio.Context()
    made = []

    def make(kind: int, address: str = "tcp://127.0.0.1:0"):
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        made.append(socket)
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    yield make
    for socket in made:
        socket.close(0)
    context.destroy(0)


async def until_heard(router: Router, send: Callable[[int], object], first: int = 0) -> int:
    """Publish until the subscription has taken hold; returns the next sequence."""
    before = router.feed.messages
    sequence = first
    while router.feed.messages == before:
        await send(sequence)
        sequence += 1
        await asyncio.sleep(0.02)
        assert sequence < first + 1000
    return sequence


async def test_publishers_with_sockets_of_their_own_are_heard_from_discovery_on_and_no_longer(
    router: Router, sockets
) -> None:
    router.plane = plane = DynamoZmq((), router.feed, router.ingest, log=router.note)
    await plane.start()
    assert plane.status().connected and plane.status().kind == "zmq"
    router.add(W)
    router.add(7)
    one, one_at = sockets(zmq.PUB)
    two, two_at = sockets(zmq.PUB)
    plane.open(1, one_at)
    plane.open(2, two_at)
    mine = await until_heard(router, lambda n: one.send_multipart(frames(n, [A], publisher=1)))
    other = await until_heard(router, lambda n: two.send_multipart(frames(n, [B], publisher=2, worker=7)))
    await one.send_multipart(frames(mine, [C], publisher=1))
    await eventually(lambda: router.full_hit(A, C))
    assert router.state() == router.state(7) == "live"
    await two.send_multipart(frames(other, [A], publisher=99, worker=7))  # not in discovery
    await two.send_multipart([b"", b"x"])
    await two.send_multipart([TOPIC.encode(), b"x"])
    await eventually(lambda: router.feed.counters == {"identity": 1, "frame": 1})
    plane.shut(2)
    plane.shut(2)
    heard = router.feed.messages
    await two.send_multipart(frames(other, [C], publisher=2, worker=7))
    await one.send_multipart(frames(mine + 1, [B], publisher=1))
    await eventually(lambda: router.full_hit(A, B, C))
    assert router.feed.messages == heard + 1


async def test_addresses_that_lead_nowhere_are_refused(router: Router) -> None:
    router.plane = plane = DynamoZmq((), router.feed, router.ingest)
    plane.open(1, "tcp://127.0.0.1:1")  # before the start, and nobody listens
    await plane.start()
    for number, address in enumerate(["ipc:///tmp/x", "inproc://x", "", "tcp://", "tcp://127.0.0.1:notaport"], 2):
        plane.open(number, address)
    assert router.feed.counters == {"endpoint": 5}


async def test_a_lost_gap_shows_when_the_socket_was_full_or_the_subscription_late(router: Router, sockets) -> None:
    router.plane = plane = DynamoZmq((), router.feed, router.ingest)
    await plane.start()
    router.add(W)
    one, address = sockets(zmq.PUB)
    plane.open(1, address)
    mine = await until_heard(router, lambda n: one.send_multipart(frames(n, [A])))
    await one.send_multipart(frames(mine + 3, [B]))
    await eventually(lambda: router.state() == "doubtful")
    assert not router.full_hit(A)


async def test_several_brokers_give_each_message_once_and_the_loss_of_all_is_noticed(router: Router, sockets) -> None:
    brokers = [sockets(zmq.XPUB) for _ in range(2)]
    router.plane = plane = DynamoZmq([at for _, at in brokers], router.feed, router.ingest, log=router.note)
    assert not plane.status().connected
    await plane.start()
    router.add(W)
    await eventually(lambda: plane.status().connected)
    for broker, _ in brokers:
        for _ in range(2):
            await broker.recv()  # the two subscriptions

    async def send(parts: list[bytes], copies: int = 2) -> None:
        for broker, _ in brokers[:copies]:
            await broker.send_multipart(parts)

    await send(frames(0, [A], topic=SUBJECT))  # 1.4 and later
    await send(frames(0, [B], worker=8, publisher=2))  # 1.3: the bare topic
    await send(frames(0, [C], topic=SUBJECT.replace(".ns.", ".other."), publisher=3))
    await send(frames(1, [B], topic=SUBJECT), copies=1)
    await eventually(lambda: router.full_hit(A, B))
    assert router.feed.messages == 3 and router.feed.waiting == 1
    assert router.state() == "live" and router.feed.counters == {}
    for broker, _ in brokers:
        broker.close(0)
    await eventually(lambda: not plane.status().connected)
    assert router.log == ["dynamo_plane_up", "dynamo_plane_down"]


def test_without_pyzmq_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    ingest = Ingest({}, rng=random.Random(1))
    with pytest.raises(ImportError, match=r"fullhit\[dynamo\]"):
        DynamoZmq((), DynamoFeed("enc", DynamoScope("ns"), ingest), ingest)
