"""Discovery through etcd's JSON gateway, against a server that answers as the gateway is documented to.

The exchanges are made by hand: 64-bit numbers as text, keys and values in base64, a watch as one JSON object a line.
They run everywhere; `test_discovery_real_etcd` asks a real server the same things where there is one.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from fullhit.fleet.discovery_etcd import EtcdBackend

INSTANCE = "v1/instances/ns/encoder/generate/5"
CHANNEL = "v1/event_channels/namespace/ns/topic/t/9"


def b64(data: bytes | str) -> str:
    return base64.b64encode(data if isinstance(data, bytes) else data.encode()).decode()


def plain(text: str) -> str:
    return base64.b64decode(text).decode()


class Etcd:
    """A store with revisions behind the gateway's paths."""

    def __init__(self) -> None:
        self.store: dict[str, bytes] = {}
        self.revision = 7
        self.log: list[tuple[int, dict[str, Any]]] = []
        self.changed = asyncio.Event()
        self.cut = False
        self.compacted = 0
        self.password = ""
        self.calls: list[str] = []
        self.watches = 0
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v3/kv/range", self._range)
        app.router.add_post("/v3/watch", self._watch)
        app.router.add_post("/v3/auth/authenticate", self._authenticate)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        self.hang_up()
        if self._runner is not None:
            await self._runner.cleanup()

    def put(self, key: str, value: bytes) -> None:
        self.revision += 1
        self.store[key] = value
        # proto3's JSON leaves out what is zero, the type PUT among it
        self._note({"kv": {"key": b64(key), "value": b64(value), "mod_revision": str(self.revision)}})

    def delete(self, key: str) -> None:
        self.revision += 1
        del self.store[key]
        self._note({"type": "DELETE", "kv": {"key": b64(key), "mod_revision": str(self.revision)}})

    def hang_up(self) -> None:
        self.cut = True
        self._wake()

    def _note(self, event: dict[str, Any]) -> None:
        self.log.append((self.revision, event))
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _admitted(self, request: web.Request) -> bool:
        return not self.password or request.headers.get("Authorization") == "token-1"

    async def _authenticate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body != {"name": "router", "password": self.password}:
            return web.json_response({"error": "authentication failed", "code": 3}, status=400)
        return web.json_response({"token": "token-1"})

    async def _range(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(plain(body["key"]))
        if not self._admitted(request):
            return web.json_response({"error": "invalid auth token", "code": 16}, status=401)
        low, high = plain(body["key"]), plain(body["range_end"])
        answer: dict[str, Any] = {"header": {"revision": str(self.revision)}}
        kvs = [{"key": b64(key), "value": b64(value)} for key, value in self.store.items() if low <= key < high]
        if kvs:  # an empty answer has neither
            answer.update(kvs=kvs, count=str(len(kvs)))
        return web.json_response(answer)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        creates = [json.loads(line)["create_request"] for line in (await request.read()).splitlines() if line.strip()]
        response = web.StreamResponse()
        await response.prepare(request)
        self.watches += 1
        self.cut = False
        header = {"revision": str(self.revision)}
        for number, create in enumerate(creates):
            await self._send(response, {"result": {"header": header, "watch_id": str(number), "created": True}})
            if int(create["start_revision"]) <= self.compacted:
                canceled = {"canceled": True, "compact_revision": str(self.compacted), "cancel_reason": "compacted"}
                await self._send(response, {"result": {"header": header, **canceled}})
                return response
        sent = {number: int(create["start_revision"]) for number, create in enumerate(creates)}
        while not self.cut:
            changed = self.changed
            for number, create in enumerate(creates):
                low, high = plain(create["key"]), plain(create["range_end"])
                due = [(at, event) for at, event in self.log if at >= sent[number]]
                sent[number] = self.revision + 1
                events = [event for _, event in due if low <= plain(event["kv"]["key"]) < high]
                if events:
                    await self._send(response, {"result": {"header": header, "events": events}})
            await changed.wait()
        return response

    @staticmethod
    async def _send(response: web.StreamResponse, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        await response.write(data[: len(data) // 2])
        await response.write(data[len(data) // 2 :])


@pytest.fixture
async def etcd() -> AsyncIterator[Etcd]:
    server = Etcd()
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def follow() -> AsyncIterator[Any]:
    backends: list[EtcdBackend] = []

    async def make(urls: str) -> tuple[EtcdBackend, list[dict[str, bytes]]]:
        backend = EtcdBackend(urls)
        backends.append(backend)
        seen: list[dict[str, bytes]] = []
        await backend.start(lambda store: seen.append(dict(store)))
        return backend, seen

    yield make
    for backend in backends:
        await backend.close()


async def test_what_is_there_and_what_comes_and_goes_is_seen(etcd: Etcd, follow: Any, eventually: Any) -> None:
    etcd.put(INSTANCE, b"one")
    etcd.put("v1/mdc/x", b"not ours")
    backend, seen = await follow(f"http://{etcd.url}")
    await eventually(lambda: seen and seen[-1] == {INSTANCE: b"one"})
    etcd.put(CHANNEL, b"two")
    await eventually(lambda: seen[-1] == {INSTANCE: b"one", CHANNEL: b"two"})
    etcd.put(INSTANCE, b"three")
    etcd.delete(CHANNEL)
    await eventually(lambda: seen[-1] == {INSTANCE: b"three"})
    assert backend.error == "" and backend.connects == 1


async def test_nothing_is_missed_while_the_watch_is_down(etcd: Etcd, follow: Any, eventually: Any) -> None:
    backend, seen = await follow(etcd.url)
    await eventually(lambda: etcd.watches == 1)
    etcd.hang_up()
    etcd.put(INSTANCE, b"one")
    await eventually(lambda: seen[-1] == {INSTANCE: b"one"})
    etcd.compacted = etcd.revision + 100
    etcd.hang_up()
    await eventually(lambda: "compacted" in backend.error)
    assert seen[-1] == {INSTANCE: b"one"}, "what is not known has not changed"
    etcd.compacted = 0
    etcd.delete(INSTANCE)
    await eventually(lambda: seen[-1] == {})


async def test_a_server_that_is_away_is_an_error_and_the_next_one_is_tried(
    etcd: Etcd, follow: Any, eventually: Any
) -> None:
    etcd.put(INSTANCE, b"one")
    backend, seen = await follow(f"http://127.0.0.1:9,http://{etcd.url}")
    await eventually(lambda: seen and backend.error == "")
    alone, nothing = await follow("http://127.0.0.1:9")
    await eventually(lambda: "127.0.0.1:9" in alone.error)
    assert nothing == []


async def test_a_user_logs_in_and_a_wrong_password_is_an_error_that_does_not_show_it(
    etcd: Etcd, follow: Any, eventually: Any
) -> None:
    etcd.password = "p@ss"
    etcd.put(INSTANCE, b"one")
    _, seen = await follow(f"http://router:p%40ss@{etcd.url}")
    await eventually(lambda: seen and seen[-1] == {INSTANCE: b"one"})
    wrong, nothing = await follow(f"http://router:secret@{etcd.url}")
    await eventually(lambda: "400" in wrong.error)
    assert "secret" not in wrong.error and nothing == []
    nobody, nothing = await follow(f"http://{etcd.url}")
    await eventually(lambda: "401" in nobody.error)


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"<html>", b'{"header":{}}', b'{"header":{"revision":"1"},"kvs":[{"value":"%"}]}',
               b'{"header":{"revision":"1"},"kvs":7}']
)  # fmt: skip
async def test_answers_that_are_none_are_errors(answer: bytes, follow: Any, eventually: Any) -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(body=answer)

    app = web.Application()
    app.router.add_post("/v3/kv/range", reply)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        backend, seen = await follow(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await eventually(lambda: backend.error not in ("", "not started"))
        assert seen == []
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("text", ["", ",", "ftp://x", "http://", "http://x/path", "http://u:secret@x:port"])
def test_urls_that_lead_nowhere_are_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ValueError) as error:
        EtcdBackend(text)
    assert "secret" not in str(error.value)
