"""Encoders of a Dynamo deployment with our own publisher: followed in our protocol, once, warm after any restart."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client

from fullhit.app import Router
from fullhit.config import load_config
from fullhit.core import Pool, PoolSettings, WorkerSpec
from fullhit.events import EmbeddedNats, Ingest, IngestSettings
from fullhit.events.dynamo_feed import DynamoFeed
from fullhit.events.dynamo_scope import DynamoScope
from fullhit.telemetry import Log
from fullhit_publisher import DynamoTarget, EmbeddingCachePublisher, PublisherOptions, wire
from fullhit_publisher.identity import dynamo_name
from fullhit_publisher.keys import digest, fold

ID = 2**63 + 5
NAME = dynamo_name(ID)
TOPIC = "multimodal_embedding_cache"
KEYS = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(300)]
QUICK = PublisherOptions(backoff_min=0.02, backoff_max=0.1)


async def eventually(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came about"
        await asyncio.sleep(0.01)


def stock_message(sequence: int, *keys: str, worker: int = 7, publisher: int = 9) -> bytes:
    payload = msgspec.msgpack.encode({"worker_id": worker, "update": {"added_keys": keys, "removed_keys": []}})
    head = {"publisher_id": publisher, "sequence": sequence, "published_at": 1, "topic": TOPIC}
    return msgspec.msgpack.encode({**head, "payload": payload})


class Fleet:
    """A deployment on one NATS server, with file discovery."""

    def __init__(self, folder: Path, server: EmbeddedNats) -> None:
        self.store = folder / "store"
        self.file = folder / "fullhit.toml"
        self.server = server
        (self.store / "v1/instances").mkdir(parents=True)
        self.write("nats")

    def write(self, plane: str) -> None:
        ours = self.server.url if plane == "nats" else "none"
        self.file.write_text(
            f'[server]\nlisten = "127.0.0.1:0"\nadmin_listen = "127.0.0.1:0"\n[events]\nplane = "{ours}"\n'
            f'[pool.default]\n[pool.vision.dynamo]\nnamespace = "ns"\ncomponent = "encoder"\nlease = 600\n'
            f'discovery = "file:{self.store}"\nnats_url = "{self.server.url}"\n'
        )

    def instance(self, number: int) -> Path:
        path = self.store / "v1/instances" / f"ns%2Fencoder%2Fgenerate%2F{number:x}"
        record = {"type": "Endpoint", "namespace": "ns", "component": "encoder", "endpoint": "generate",
                  "instance_id": number, "device_type": "cuda"}  # fmt: skip
        path.write_text(json.dumps(record))
        return path

    def publisher(self, number: int = ID) -> EmbeddingCachePublisher:
        target = DynamoTarget("ns", "encoder", "generate", number)
        return EmbeddingCachePublisher(
            dynamo=target, pool="vision", event_plane=self.server.url, heartbeat_interval=0.1, options=QUICK
        )

    @asynccontextmanager
    async def router(self) -> AsyncIterator[Router]:
        router = Router(load_config(self.file, environ={}), Log(io.StringIO(), "info", "json"))
        try:
            await router.start()
            await eventually(lambda: router.dynamo["vision"].status()["plane"]["connected"])
            yield router
        finally:
            await router.stop(0.0)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    server = EmbeddedNats(0)
    await server.start()
    yield Fleet(tmp_path, server)
    await server.close()


def held(router: Router, name: str = NAME) -> int:
    worker = router.pools["vision"].get(name)
    return 0 if worker is None or worker.doubtful else worker.key_count


def row(router: Router, name: str = NAME) -> Any:
    return next(row for row in router.ingest.status() if row.worker == name)


async def test_it_is_followed_once_and_a_restarted_router_is_warm(fleet: Fleet) -> None:
    fleet.instance(ID)
    async with fleet.publisher() as publisher:
        publisher.publish_delta(KEYS[:100], [])
        async with fleet.router() as router:
            await eventually(lambda: held(router) == 100)  # published long before we listened: asked for
            assert row(router).protocol == "fullhit"
            publisher.publish_delta(KEYS[100:200], KEYS[:50])
            await eventually(lambda: held(router) == 150)
            await eventually(lambda: router.dynamo["vision"].feed.messages)
            assert row(router).state == "live"
            assert router.pools["vision"].digest(NAME) == digest(map(fold, KEYS[50:200]))
        publisher.publish_delta(KEYS[200:], [])
        async with fleet.router() as router:
            await eventually(lambda: held(router) == 250)
            assert [worker.id for worker in router.pools["vision"].workers()] == [NAME]


async def test_it_is_warm_again_when_it_returns_to_discovery_with_its_cache(fleet: Fleet) -> None:
    record = fleet.instance(ID)
    async with fleet.publisher() as publisher, fleet.router() as router:
        publisher.publish_delta(KEYS[:100], [])
        await eventually(lambda: held(router) == 100)
        record.unlink()
        await eventually(lambda: router.pools["vision"].get(NAME) is None)
        assert router.pools["vision"].holders(fold(KEYS[0])) == []
        fleet.instance(ID)
        await eventually(lambda: held(router) == 100)


async def test_beside_it_dynamos_own_publishers_are_followed_as_ever(fleet: Fleet) -> None:
    fleet.instance(ID)
    fleet.instance(7)
    client = Client()
    await client.connect(fleet.server.url)
    try:
        async with fleet.publisher() as publisher, fleet.router() as router:
            publisher.publish_delta(KEYS[:10], [])
            await eventually(lambda: held(router) == 10 and router.pools["vision"].get(dynamo_name(7)))
            await client.publish(f"namespace.ns.{TOPIC}", stock_message(0, *KEYS[:3]))
            await eventually(lambda: held(router, dynamo_name(7)) == 3)
            await eventually(lambda: row(router).protocol == "fullhit" and held(router) == 10)
            assert row(router, dynamo_name(7)).protocol == "dynamo"
    finally:
        await client.close()


async def test_without_our_plane_its_messages_on_dynamos_subject_are_enough(fleet: Fleet) -> None:
    fleet.write("none")
    fleet.instance(ID)
    async with fleet.publisher() as publisher, fleet.router() as router:
        await eventually(lambda: router.pools["vision"].get(NAME))
        publisher.publish_delta(KEYS[:100], [])
        await eventually(lambda: held(router) == 100)
        publisher.publish_delta([], KEYS[:10])
        await eventually(lambda: held(router) == 90)
        assert row(router).protocol == "dynamo"


async def test_a_publisher_that_discovery_does_not_know_adds_no_worker(fleet: Fleet) -> None:
    async with fleet.publisher() as publisher, fleet.router() as router:
        publisher.publish_delta(KEYS[:3], [])
        refused = "fullhit_events_rejected_total{cause=unknown_worker}"
        await eventually(lambda: router.ingest.counters.get(refused))
        assert router.pools["vision"].workers() == []


async def test_a_url_publisher_that_names_a_dynamo_pool_adds_no_worker(fleet: Fleet) -> None:
    publisher = EmbeddingCachePublisher(
        "http://127.0.0.1:9", pool="vision", event_plane=fleet.server.url, heartbeat_interval=0.1, options=QUICK
    )
    async with publisher, fleet.router() as router:
        refused = "fullhit_events_rejected_total{cause=unknown_worker}"
        await eventually(lambda: router.ingest.counters.get(refused, 0) >= 1)
        await eventually(lambda: publisher.counters.heartbeats >= 3)
        assert router.pools["vision"].workers() == []


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """An intake with one Dynamo instance, by hand."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.pool = Pool("vision", PoolSettings(), clock=self.clock, rng=random.Random(1))
        self.ingest = Ingest({"vision": self.pool}, IngestSettings(), clock=self.clock, rng=random.Random(2))
        self.feed = DynamoFeed("vision", DynamoScope("ns", "encoder", ""), self.ingest, clock=self.clock)
        self.worker = self.pool.add_worker(WorkerSpec(NAME, "", "cuda"))
        self.pool.set_ready(NAME, True)
        self.ingest.worker_added("vision", NAME)
        self.ingest.plane_up()
        self.ingest.dynamo_up("vision")

    def beat(self, seq: int, keys: list[str], worker: int = ID, url: str = NAME) -> None:
        beat = wire.Heartbeat(worker, 5, seq, "vision", len(keys), digest(map(fold, keys)), url=url, interval_ms=1000)
        self._say(beat, seq)

    def delta(self, seq: int, added: list[str]) -> None:
        self._say(wire.Delta(ID, wire.Update(added, []), 5, seq, "vision"), seq)

    def _say(self, message: Any, sequence: int) -> None:
        data = wire.encode(message, publisher_id=3, sequence=sequence, published_at=0)
        self.ingest.feed(wire.events_subject("vision", ID), data)

    def dynamo(self, sequence: int, *keys: str) -> None:
        self.feed.nats(f"namespace.ns.{TOPIC}", stock_message(sequence, *keys, worker=ID, publisher=8))

    @property
    def protocol(self) -> str:
        return self.ingest.status()[0].protocol


def test_the_first_heartbeat_changes_the_protocol_and_voids_what_was_believed() -> None:
    desk = Desk()
    desk.dynamo(0, *KEYS[:3])
    assert (desk.worker.key_count, desk.protocol) == (3, "dynamo")
    desk.beat(0, [])
    assert (desk.worker.key_count, desk.protocol) == (0, "fullhit")
    desk.delta(1, KEYS[3:5])
    desk.dynamo(1, *KEYS[3:5])  # the same change on the other plane
    desk.beat(1, KEYS[3:5])
    assert (desk.worker.key_count, desk.worker.doubtful) == (2, False)


def test_our_protocol_silent_for_long_lets_the_other_plane_count_again() -> None:
    desk = Desk()
    desk.beat(0, [])
    desk.delta(1, KEYS[:2])
    desk.clock.now += 29
    desk.dynamo(5, *KEYS[5:6])
    assert (desk.worker.key_count, desk.protocol) == (2, "fullhit")
    desk.clock.now += 2
    desk.dynamo(6, *KEYS[6:9])
    assert (desk.worker.key_count, desk.protocol) == (3, "dynamo")
    assert desk.pool.holders(fold(KEYS[0])) == []
    desk.beat(1, KEYS[:2])
    assert desk.protocol == "fullhit"


def test_only_a_heartbeat_of_the_instance_itself_opens_our_protocol() -> None:
    desk = Desk()
    desk.delta(1, KEYS[:2])
    desk.beat(0, [], url="http://127.0.0.1:1")
    desk.beat(0, [], url=dynamo_name(ID + 1))
    desk.beat(0, [], worker=ID + 1)
    desk.ingest.feed(wire.events_subject("vision", ID), b"\x85garbage")
    assert (desk.worker.key_count, desk.protocol) == (0, "dynamo")
    desk.ingest.worker_removed("vision", NAME)
    desk.pool.remove_worker(NAME)
    desk.beat(0, [])
    assert desk.ingest.status() == []
