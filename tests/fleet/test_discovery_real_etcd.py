"""Discovery over a real etcd, where one is on PATH; everywhere else only the one made by hand is played."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fullhit.fleet.discovery_etcd import EtcdBackend
from fullhit.lab.processes import Child, Supervisor, free_port

pytestmark = pytest.mark.skipif(not shutil.which("etcd"), reason="no etcd on PATH")

RECORD = "v1/instances/ns/encoder/generate/7b"
OTHER = "v1/instances/ns/encoder/generate/7c"
CHANNEL = "v1/event_channels/ns/encoder/multimodal_embedding_cache/9"


def text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()


class RealEtcd:
    """One server on loopback, driven through its own gateway. It can be killed and started again on the same data."""

    def __init__(self, processes: Supervisor, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._peer = f"http://127.0.0.1:{free_port()}"
        self._processes = processes
        self._folder = folder
        self._child: Child | None = None
        self.token = ""

    async def start(self) -> None:
        self._child = self._processes.run(
            "etcd",
            [
                "etcd", "--data-dir", str(self._folder / "etcd"), "--listen-client-urls", self.url,
                "--advertise-client-urls", self.url, "--listen-peer-urls", self._peer,
                "--initial-advertise-peer-urls", self._peer, "--initial-cluster", f"default={self._peer}",
            ],
        )  # fmt: skip
        await self._child.answers(self.url + "/health")

    def kill(self) -> None:
        assert self._child is not None
        self._child.kill()

    async def call(self, path: str, call: Mapping[str, Any]) -> Any:
        headers = {"Authorization": self.token} if self.token else {}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, json=call, headers=headers) as reply,
        ):
            answer = await reply.json(content_type=None)
            assert reply.status == 200, answer
            return answer

    async def put(self, key: str, value: Mapping[str, Any], lease: str = "0") -> int:
        data = {"key": text(key), "value": text(json.dumps(value)), "lease": lease}
        return int((await self.call("/v3/kv/put", data))["header"]["revision"])

    async def delete(self, key: str) -> None:
        await self.call("/v3/kv/deleterange", {"key": text(key)})


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[RealEtcd]:
    with Supervisor(tmp_path / "logs") as processes:
        server = RealEtcd(processes, tmp_path)
        await server.start()
        yield server


@pytest.fixture
async def follow() -> AsyncIterator[Callable[[str], Any]]:
    """Follow a server; gives the backend and what it has shown last."""
    backends: list[EtcdBackend] = []

    async def begin(url: str) -> tuple[EtcdBackend, dict[str, bytes]]:
        backend, shown = EtcdBackend(url), {}
        backends.append(backend)

        def show(store: Mapping[str, bytes]) -> None:
            shown.clear()
            shown.update(store)

        await backend.start(show)
        return backend, shown

    yield begin
    for backend in backends:
        await backend.close()


async def test_records_come_change_and_go(etcd: RealEtcd, follow: Any, eventually: Any) -> None:
    await etcd.put(RECORD, {"a": 1})
    await etcd.put("v1/mdc/other", {"not": "ours"})
    backend, shown = await follow(etcd.url)
    await eventually(lambda: set(shown) == {RECORD})
    assert not backend.error
    await etcd.put(CHANNEL, {"b": 2})
    await etcd.put(RECORD, {"a": 3})
    await eventually(lambda: set(shown) == {RECORD, CHANNEL} and json.loads(shown[RECORD]) == {"a": 3})
    await etcd.delete(RECORD)
    await eventually(lambda: set(shown) == {CHANNEL})
    assert backend.connects == 1


async def test_a_record_goes_with_its_lease(etcd: RealEtcd, follow: Any, eventually: Any) -> None:
    _, shown = await follow(etcd.url)
    lease = (await etcd.call("/v3/lease/grant", {"TTL": "1"}))["ID"]
    await etcd.put(RECORD, {"a": 1}, lease)
    await eventually(lambda: RECORD in shown)
    await eventually(lambda: not shown)


async def test_nothing_is_missed_over_a_restart_of_the_server(etcd: RealEtcd, follow: Any, eventually: Any) -> None:
    backend, shown = await follow(etcd.url)
    await etcd.put(RECORD, {"a": 1})
    await eventually(lambda: RECORD in shown)
    etcd.kill()
    await eventually(lambda: backend.error)
    assert RECORD in shown, "what cannot be asked for stays"
    await etcd.start()
    await etcd.delete(RECORD)
    await etcd.put(OTHER, {"a": 2})
    await eventually(lambda: set(shown) == {OTHER} and not backend.error)


async def test_a_revision_that_was_compacted_begins_anew(etcd: RealEtcd, follow: Any, eventually: Any) -> None:
    backend, shown = await follow(etcd.url)
    await etcd.put(RECORD, {"a": 1})
    await eventually(lambda: RECORD in shown)
    etcd.kill()
    await eventually(lambda: backend.error)
    await etcd.start()
    revision = 0
    for turn in range(20):
        revision = await etcd.put(OTHER, {"a": turn})
    await etcd.call("/v3/kv/compaction", {"revision": str(revision), "physical": True})
    await eventually(lambda: set(shown) == {RECORD, OTHER} and json.loads(shown[OTHER]) == {"a": 19})


async def test_with_authentication_a_user_is_let_in_and_a_stranger_is_not(
    etcd: RealEtcd, follow: Any, eventually: Any
) -> None:
    for path, call in (
        ("user/add", {"name": "root", "password": "s3cret"}), ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}), ("enable", {}),
    ):  # fmt: skip
        await etcd.call(f"/v3/auth/{path}", call)
    etcd.token = (await etcd.call("/v3/auth/authenticate", {"name": "root", "password": "s3cret"}))["token"]
    await etcd.put(RECORD, {"a": 1})
    host = etcd.url.removeprefix("http://")
    backend, shown = await follow(f"http://root:s3cret@{host}")
    await eventually(lambda: RECORD in shown)
    await etcd.put(OTHER, {"a": 1})
    await eventually(lambda: OTHER in shown)
    for url in (etcd.url, f"http://root:wr0ng@{host}"):
        stranger, nothing = await follow(url)
        await eventually(lambda stranger=stranger: stranger.error not in ("", "not started"))
        assert not nothing and "wr0ng" not in stranger.error
    assert not backend.error
