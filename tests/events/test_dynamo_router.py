"""A whole router with a pool of Dynamo workers: file discovery, event plane, readiness, choices."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from nats.aio.client import Client

from fullhit.app import Router
from fullhit.config import ConfigError, load_config
from fullhit.core import SelectRequest
from fullhit.events import EmbeddedNats
from fullhit.telemetry import Log
from fullhit_publisher.dynamo_keys import from_chat, url_key
from fullhit_publisher.identity import dynamo_name
from fullhit_publisher.keys import fold

TOPIC = "multimodal_embedding_cache"
BIG = 2**64 - 3
URL = "https://pictures.invalid/cat.png"


async def eventually(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came about"
        await asyncio.sleep(0.01)


def envelope(sequence: int, *keys: str, worker: int = BIG, publisher: int = 9) -> bytes:
    payload = msgspec.msgpack.encode({"worker_id": worker, "update": {"added_keys": keys, "removed_keys": []}})
    head = {"publisher_id": publisher, "sequence": sequence, "published_at": 1, "topic": TOPIC}
    return msgspec.msgpack.encode({**head, "payload": payload})


class Store:
    """A folder of Dynamo's file discovery."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "v1/instances").mkdir(parents=True)
        (root / "v1/event_channels").mkdir()

    def instance(self, number: int, device: str = "cuda", component: str = "encoder") -> Path:
        path = self.root / "v1/instances" / f"ns%2F{component}%2Fgenerate%2F{number:x}"
        record = {"type": "Endpoint", "namespace": "ns", "component": component, "endpoint": "generate",
                  "instance_id": number, "device_type": device}  # fmt: skip
        path.write_text(json.dumps(record))
        return path

    def channel(self, publisher: int, address: str) -> Path:
        path = self.root / "v1/event_channels" / f"ns%2F%2F{publisher:x}"
        record = {"type": "EventChannel", "namespace": "ns", "component": "", "topic": TOPIC,
                  "instance_id": publisher, "transport": {"kind": "Zmq", "config": {"endpoint": address}}}  # fmt: skip
        path.write_text(json.dumps(record))
        return path


@asynccontextmanager
async def running(tmp_path: Path, table: str) -> AsyncIterator[tuple[Router, Store]]:
    store = Store(tmp_path / "store")
    file = tmp_path / "fullhit.toml"
    file.write_text(
        '[server]\nadmin_listen = "127.0.0.1:0"\n[events]\nplane = "none"\n[encoder_gateway]\nenabled = false\n'
        f'[pool.vision.dynamo]\nnamespace = "ns"\ncomponent = "encoder"\ndiscovery = "file:{store.root}"\n'
        f"lease = 600\n{table}\n"
    )
    router = Router(load_config(file, environ={}), Log(io.StringIO(), "info", "json"))
    try:
        await router.start()
        yield router, store
    finally:
        await router.stop(0.0)


async def test_a_fleet_over_nats_is_discovered_followed_chosen_from_and_forgotten(tmp_path: Path) -> None:
    server = EmbeddedNats(0)
    await server.start()
    client = Client()
    await client.connect(server.url)
    try:
        async with running(tmp_path, f'nats_url = "{server.url}"') as (router, store):
            pool, dynamo = router.pools["vision"], router.dynamo["vision"]
            big = store.instance(BIG)
            store.instance(7, device="cpu")
            store.instance(8, component="backend")
            await eventually(lambda: len(pool) == 2 and dynamo.status()["plane"]["connected"])
            assert [(w.id, w.device_class, w.ready) for w in sorted(pool.workers(), key=lambda w: w.device)] == [
                (dynamo_name(7), "cpu", True), (dynamo_name(BIG), "gpu", True)]  # fmt: skip
            await client.publish(f"namespace.ns.component.encoder.endpoint.generate.{TOPIC}", envelope(0, url_key(URL)))
            await eventually(lambda: dynamo.feed.messages)
            body = {"messages": [{"content": [{"type": "image_url", "image_url": {"url": URL.upper()[:8] + URL[8:]}}]}]}
            ((key,),) = from_chat(body).distinct
            decision = pool.select(SelectRequest(keys=(fold(key),), items=1, dry_run=True))
            assert (decision.worker.id, decision.reason) == (dynamo_name(BIG), "full_hit")
            async with aiohttp.ClientSession() as session:
                host, port = router._admin.addresses[0][:2]  # type: ignore[union-attr]
                async with session.get(f"http://{host}:{port}/readyz") as response:
                    ready = await response.json()
                assert ready["ready"] and ready["event_plane"]["dynamo"]["vision"]["workers"] == 2
                async with session.get(f"http://{host}:{port}/workers") as response:
                    text = await response.text()
            assert f'"{BIG}"' in text and f":{BIG}" not in text.replace(f"dynamo:{BIG}", ""), "64 bits are text in JSON"
            taken = pool.select(SelectRequest(keys=(fold(key),), items=1))
            router.telemetry.decision(taken)
            for sequence in (1, 2, 3):  # encoded after all, and again
                await client.publish(f"namespace.ns.{TOPIC}", envelope(sequence, url_key(URL)))
            await eventually(lambda: taken.worker.doubtful)
            big.unlink()
            await eventually(lambda: len(pool) == 1)
            assert pool.holders(fold(key)) == []
    finally:
        await client.close()
        await server.close()


async def test_a_fleet_over_zmq_is_found_where_discovery_says(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind("tcp://127.0.0.1:0")
    try:
        async with running(tmp_path, 'plane = "zmq"') as (router, store):
            store.instance(BIG)
            store.channel(9, socket.getsockopt_string(zmq.LAST_ENDPOINT))
            dynamo = router.dynamo["vision"]
            for sequence in range(2000):
                data = envelope(sequence, url_key(URL))
                frame = b"\x01" + len(data).to_bytes(4, "big") + data
                await socket.send_multipart([TOPIC.encode(), bytes(7) + b"\x09", sequence.to_bytes(8, "big"), frame])
                if dynamo.feed.messages:
                    break
                await asyncio.sleep(0.01)
            pool = router.pools["vision"]
            await eventually(lambda: pool.holders(fold(url_key(URL))))
            assert [worker.id for worker in pool.holders(fold(url_key(URL)))] == [dynamo_name(BIG)]
    finally:
        socket.close(0)
        context.destroy(0)


BAD = {
    "pool.v.dynamo.discovery": 'namespace = "n"\ndiscovery = "consul:x"\nnats_url = "nats://127.0.0.1:1"',
    "pool.v.dynamo.nats_url": 'namespace = "n"\ndiscovery = "file:/x"',
    "pool.v.dynamo.plane": 'namespace = "n"\ndiscovery = "file:/x"\nplane = "tcp"',
    "pool.v.dynamo.brokers": 'namespace = "n"\ndiscovery = "file:/x"\nplane = "zmq"\nbrokers = ["ipc://x"]',
    "pool.v.dynamo.namespace": 'namespace = ""\ndiscovery = "file:/x"',
    "pool.v.dynamo.lease": 'namespace = "n"\ndiscovery = "file:/x"\nplane = "zmq"\nlease = 0',
    "pool.*.dynamo": 'discovery = "file:/x"',
}


@pytest.mark.parametrize("key", BAD)
def test_mistakes_in_the_table_are_named_by_their_place(key: str, tmp_path: Path) -> None:
    file = tmp_path / "fullhit.toml"
    file.write_text(f"[pool.default]\n[pool.v.dynamo]\n{BAD[key]}\n")
    with pytest.raises(ConfigError) as error:
        load_config(file, environ={})
    assert error.value.key == key


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[pool.default.dynamo]\nnamespace = "n"\ndiscovery = "file:/x"\nplane = "zmq"', "encoder_gateway.pool"),
        ('[pool.default]\n[pool.v]\nworkers = ["http://a.invalid"]\n[pool.v.dynamo]\nnamespace = "n"\n'
         'discovery = "file:/x"\nplane = "zmq"', "pool.v.workers"),
        ('[pool.default]\nparity = "sglang"', "pool.default.parity"),
        ('[pool.default]\nparity = "dynamo"\ndevice_ratios = { xpu = 4 }', "pool.default.device_ratios"),
    ],
)  # fmt: skip
def test_settings_that_cannot_both_hold_are_refused(text: str, key: str, tmp_path: Path) -> None:
    file = tmp_path / "fullhit.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(file, environ={})
    assert error.value.key == key


def test_every_setting_of_the_table_is_documented() -> None:
    from fullhit.config import DynamoConfig

    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    section = text.partition("## `[pool.NAME.dynamo]`")[2].partition("\n## ")[0]
    for field in msgspec.structs.fields(DynamoConfig):
        assert f"| `{field.name}` |" in section, field.name


def test_secrets_in_addresses_are_masked(tmp_path: Path) -> None:
    from fullhit.config import effective

    file = tmp_path / "fullhit.toml"
    file.write_text(
        '[pool.default]\n[pool.v.dynamo]\nnamespace = "n"\ndiscovery = "etcd:http://u:secret@h:1"\n'
        'nats_url = "nats://u:secret@h:1"\n'
    )
    assert "secret" not in json.dumps(effective(load_config(file, environ={})))
