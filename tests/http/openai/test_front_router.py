"""A whole router with a front: file discovery, events over ZMQ, steering, readiness, metrics, shutdown."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from fullhit.app import Router
from fullhit.config import ConfigError, effective, load_config
from fullhit.http.openai import OpenAIFront
from fullhit.telemetry import Log
from fullhit_publisher.dynamo_keys import url_key
from fullhit_publisher.identity import dynamo_name

TOPIC = "multimodal_embedding_cache"
BIG, CPU = 2**64 - 3, 7
URL = "https://pictures.invalid/cat.png"


def event(sequence, *keys, worker=BIG, publisher=9):
    payload = msgspec.msgpack.encode({"worker_id": worker, "update": {"added_keys": keys, "removed_keys": []}})
    head = {"publisher_id": publisher, "sequence": sequence, "published_at": 1, "topic": TOPIC}
    data = msgspec.msgpack.encode({**head, "payload": payload})
    numbers = [number.to_bytes(8, "big") for number in (publisher, sequence)]
    return [TOPIC.encode(), *numbers, b"\x01" + len(data).to_bytes(4, "big") + data]


def instance(root, number, device):
    record = {"type": "Endpoint", "namespace": "ns", "component": "encoder", "endpoint": "generate",
              "instance_id": number, "device_type": device}  # fmt: skip
    path = root / "v1/instances" / f"ns%2Fencoder%2Fgenerate%2F{number:x}"
    path.write_text(json.dumps(record))
    return path


def channel(root, publisher, address):
    record = {"type": "EventChannel", "namespace": "ns", "component": "", "topic": TOPIC, "instance_id": publisher,
              "transport": {"kind": "Zmq", "config": {"endpoint": address}}}  # fmt: skip
    (root / "v1/event_channels" / f"ns%2F%2F{publisher:x}").write_text(json.dumps(record))


def table(root, frontend, more=""):
    return (
        '[server]\nadmin_listen = "127.0.0.1:0"\n[events]\nplane = "none"\n[encoder_gateway]\nenabled = false\n'
        f'[pool.vision.dynamo]\nnamespace = "ns"\ncomponent = "encoder"\nplane = "zmq"\ndiscovery = "file:{root}"\n'
        f'lease = 600\n[openai_front]\nlisten = "127.0.0.1:0"\nfrontends = ["{frontend}"]\n{more}'
    )


@asynccontextmanager
async def running(tmp_path, frontend):
    root = tmp_path / "store"
    (root / "v1/instances").mkdir(parents=True)
    (root / "v1/event_channels").mkdir()
    file = tmp_path / "fullhit.toml"
    file.write_text(table(root, frontend))
    log = io.StringIO()
    router = Router(load_config(file, environ={}), Log(log, "info", "json"))
    try:
        await router.start()
        router.log.flush()
        (line,) = [row for row in map(json.loads, log.getvalue().splitlines()) if row["event"] == "listening"]
        yield router, root, line
    finally:
        await router.stop(5.0)


async def eventually(condition):
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_dynamo_deployment_is_found_steered_watched_and_told_of(tmp_path, lab):
    frontend = await lab.FakeFrontend(instances={BIG, CPU}).start()
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind("tcp://127.0.0.1:0")
    try:
        async with running(tmp_path, frontend.url) as (router, root, line), aiohttp.ClientSession() as session:
            assert "data" not in line and [seat.name for seat in router.seats] == ["openai_front"]
            front, admin = line["openai"], line["admin"]

            async def ask(*urls, **more):
                async with session.post(f"{front}/v1/chat/completions", json=lab.chat(*urls, **more)) as reply:
                    await reply.read()
                    return reply.status, reply.headers.get("x-fullhit-worker"), reply.headers.get("x-fullhit-reason")

            async def look(path):
                async with session.get(admin + path) as reply:
                    return reply.status, json.loads(await reply.read())

            assert (await ask())[0] == 503
            status, told = await look("/readyz")
            assert status == 503 and any("no worker of pool vision" in reason for reason in told["reasons"])
            instance(root, BIG, "cuda")
            second = instance(root, CPU, "cpu")
            channel(root, 9, socket.getsockopt_string(zmq.LAST_ENDPOINT))

            async def heard():
                heard.sequence += 1
                await socket.send_multipart(event(heard.sequence, url_key(URL), worker=CPU))
                return router.dynamo["vision"].feed.messages and len(router.pools["vision"]) == 2

            heard.sequence = -1
            await eventually(heard)
            assert await ask(URL) == (200, dynamo_name(CPU), "full_hit")
            assert await ask("https://pictures.invalid/dog.png") == (200, dynamo_name(BIG), "miss")
            assert [request.get("x-dynamo-worker-instance-id") for request in frontend.calls()] == [str(CPU), str(BIG)]
            status, told = await look("/readyz")
            assert status == 200 and told["status"] == "ready", told["reasons"]
            seat = told["seats"]["openai_front"]
            assert seat["pool_usable"] == 2 and seat["frontends"][0]["up"] and seat["open_calls"] == 0
            _, decisions = await look("/decisions")
            latest = decisions["decisions"][0]
            assert (latest["worker"], latest["outcome"]["api"], latest["outcome"]["code"]) == (
                dynamo_name(BIG), "openai", 200)  # fmt: skip
            # Said to be held, and encoded after all, again and again: removals must have been lost.
            taken = router.pools["vision"].get(dynamo_name(CPU))

            async def doubted():
                heard.sequence += 1
                await ask(URL)
                await socket.send_multipart(event(heard.sequence, url_key(URL), worker=CPU))
                return taken.doubtful

            await eventually(doubted)
            async with session.get(f"{admin}/metrics") as reply:
                text = await reply.text()
            assert "fullhit_front_open_calls 0.0" in text and "fullhit_front_frontends_up 1.0" in text
            assert 'fullhit_requests_total{code="200",pool="vision",reason="full_hit"}' in text
            second.unlink()

            async def alone():
                return len(router.pools["vision"]) == 1

            await eventually(alone)
            await frontend.server.close()
            assert (await ask(URL))[0] == 502
            _, told = await look("/readyz")
            assert any("does not answer" in reason for reason in told["reasons"]) and told["ready"]
            # The default pool of the decision API is the front's.
            async with session.post(f"{admin}/select", json={"dry_run": True}) as reply:
                assert json.loads(await reply.read())["worker"]["id"] == dynamo_name(BIG)
    finally:
        await frontend.server.close()
        socket.close(0)
        context.destroy(0)


async def test_a_router_may_have_both_seats(tmp_path, lab):
    root = tmp_path / "store"
    file = tmp_path / "fullhit.toml"
    text = table(root, "http://127.0.0.1:1").replace("enabled = false", "").replace(
        "[server]", '[pool.default]\n[server]\nlisten = "127.0.0.1:0"'
    )  # fmt: skip
    file.write_text(text)
    router = Router(load_config(file, environ={}), Log(io.StringIO(), "info", "json"))
    try:
        await router.start()
        assert [seat.name for seat in router.seats] == ["encoder_gateway", "openai_front"]
        assert router.config.default_pool == "default"
        assert len({id(seat.listener.budget) for seat in router.seats}) == 1
        assert isinstance(router.seats[1].front, OpenAIFront)
    finally:
        await router.stop(0.0)


POOL = '[pool.v.dynamo]\nnamespace = "n"\ndiscovery = "file:/x"\nplane = "zmq"\n'
OFF = "[encoder_gateway]\nenabled = false\n"


def load(tmp_path, text, **more):
    file = tmp_path / "fullhit.toml"
    file.write_text(text)
    return load_config(file, **{"environ": {}, **more})


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (POOL + OFF + '[openai_front]\nmode = "epd"', "openai_front.mode"),
        (POOL + OFF + '[openai_front]\nlisten = "8783"', "openai_front.listen"),
        (POOL + OFF + '[openai_front]\nlisten = "127.0.0.1:8781"', "openai_front.listen"),
        (POOL + '[pool.default]\n[openai_front]\nlisten = "127.0.0.1:8780"', "openai_front.listen"),
        (POOL + OFF + '[openai_front]\npool = "w"', "openai_front.pool"),
        ("[pool.default]\n[openai_front]\npool = 'default'", "openai_front.pool"),
        ("[pool.default]\n[openai_front]", "openai_front.pool"),
        (POOL + POOL.replace(".v.", ".w.") + OFF + "[openai_front]", "openai_front.pool"),
        (POOL + OFF + '[openai_front]\nprefill_pool = "w"', "openai_front.prefill_pool"),
        (POOL + OFF + '[openai_front]\nprefill_pool = "v"', "openai_front.prefill_pool"),
        (POOL + OFF + "[openai_front]\nfrontends = []", "openai_front.frontends"),
        (POOL + OFF + '[openai_front]\nfrontends = ["ftp://x"]', "openai_front.frontends.0"),
        (
            POOL + OFF + '[openai_front]\nfrontends = ["http://a.invalid", "http://A.invalid/"]',
            "openai_front.frontends",
        ),
        (POOL + OFF + "[openai_front]\nmax_attempts = 0", "openai_front.max_attempts"),
        (POOL + OFF + "[openai_front]\nqueue_timeout = 0", "openai_front.queue_timeout"),
        (POOL + OFF + "[openai_front]\nlisen = 1", "openai_front"),
        (POOL + OFF.replace("false", '"x"'), "encoder_gateway.enabled"),
        ('[pool.default]\nload_until = "never"', "pool.default.load_until"),
        (POOL, "encoder_gateway.pool"),
        ('[events]\nplane = "none"\n' + OFF, "encoder_gateway.enabled"),
    ],
)
def test_mistakes_are_named_by_their_place(tmp_path, text, key):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert error.value.key == key


def test_the_only_dynamo_pool_is_the_fronts_and_the_default(tmp_path):
    config = load(tmp_path, POOL + OFF + "[openai_front]\n")
    assert config.openai_front.pool == config.default_pool == "v"
    assert config.openai_front.frontends == ["http://127.0.0.1:8000"]
    assert effective(config)["openai_front"]["mode"] == "dynamo"
    assert load(tmp_path, POOL + OFF).default_pool == "v"
    assert load(tmp_path, POOL + POOL.replace(".v.", ".w.") + OFF).default_pool == ""
    assert load(tmp_path, "").openai_front is None


def test_flags_and_variables_switch_the_front_on(tmp_path):
    environ = {
        "FULLHIT_OPENAI_LISTEN": "127.0.0.1:1",
        "FULLHIT_DYNAMO_FRONTENDS": "http://a.invalid:1, http://b.invalid:2",
    }
    front = load(tmp_path, POOL + OFF, environ=environ).openai_front
    assert (front.listen, front.frontends) == ("127.0.0.1:1", ["http://a.invalid:1", "http://b.invalid:2"])
    warnings = []
    front = load(
        tmp_path, POOL + OFF, environ=environ, flags={"openai_front.listen": "127.0.0.1:2"},
        dynamo_frontends=["http://c.invalid"], warn=warnings,
    ).openai_front  # fmt: skip
    assert (front.listen, front.frontends, warnings) == ("127.0.0.1:2", ["http://c.invalid"], [])
