"""kill -9 of each process in the middle of traffic: what can be hidden is hidden, and belief mends itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable
from typing import Any

import pytest

from fullhit.lab.language_server import LanguageServerSettings, MockLanguageServer, RequestFailed
from fullhit.lab.processes import Child, fetch_json, free_port, start_nats

REQUESTS = 60


class Traffic:
    """Requests of three pictures, six at a time, over five aliases, until told to stop."""

    def __init__(self, base: str, pictures: list[str]) -> None:
        urls = tuple(f"{base}/v{index}" for index in range(5))
        self.server = MockLanguageServer(LanguageServerSettings(urls, receive_timeout=60, http_timeout=60), seed=3)
        self.pictures = pictures
        self.done = 0
        self.failures: list[RequestFailed] = []
        self.reasons: list[str] = []

    async def run(self, requests: int = REQUESTS, streams: int = 6) -> None:
        numbers = iter(range(requests))
        async with self.server, asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(self._stream(numbers))

    async def _stream(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            chosen = [self.pictures[(number + step) % len(self.pictures)] for step in range(3)]
            try:
                self.reasons += (await self.server.encode(chosen)).reasons
            except RequestFailed as failure:
                self.failures.append(failure)
            self.done += 1

    async def until(self, done: int) -> None:
        async with asyncio.timeout(60):
            while self.done < done:  # noqa: ASYNC110 - the counter is all there is to wait for
                await asyncio.sleep(0.01)


async def test_an_encoder_killed_in_mid_traffic_costs_no_request(deployment: Any, pictures: list[str]) -> None:
    await deployment.start_router()
    encoders = [await deployment.start_encoder("--vit-ms", "10") for _ in range(3)]
    urls = [url for _, url in encoders]
    await deployment.ready(*urls)
    traffic = Traffic(deployment.base, pictures)
    running = asyncio.create_task(traffic.run())
    await traffic.until(15)
    victim, url = encoders[0]
    victim.kill()
    await running
    assert traffic.failures == []
    assert traffic.done == REQUESTS
    await deployment.idle()

    async def out() -> bool:
        row = await deployment.worker(url)
        return (row["state"] == "unhealthy" and row["keys"] == 0) or row["doubtful"]

    await deployment.until(out)
    # The same address, a new process with an empty cache: nothing of the old one may be believed.
    port = int(url.rpartition(":")[2])
    _, again = await deployment.start_encoder("--vit-ms", "10", port=port)
    assert again == url
    await deployment.ready(*urls)
    await deployment.converged(*urls)


async def test_a_router_killed_in_mid_traffic_is_as_good_as_before_within_a_snapshot_round(
    deployment: Any, pictures: list[str]
) -> None:
    plane = f"embedded:{free_port()}"
    router = await deployment.start_router(plane=plane)
    encoders = [await deployment.start_encoder() for _ in range(2)]
    urls = [url for _, url in encoders]
    await deployment.ready(*urls)
    traffic = Traffic(deployment.base, pictures[:12])
    running = asyncio.create_task(traffic.run(30))
    await traffic.until(12)
    base, admin = deployment.base, deployment.admin
    router.kill()
    await running
    assert traffic.failures, "requests in flight on a killed router fail visibly"
    # Registered encoders do not announce themselves again: heartbeats bring them back, snapshots their keys.
    await deployment.start_router(plane=plane, base=base, admin=admin)
    await deployment.ready(*urls)
    await deployment.converged(*urls)
    before = await deployment.vit_runs(*urls)
    held: set[str] = set()
    for url in urls:
        held.update(await cached(url))
    assert held
    again = Traffic(base, pictures[:12])
    await again.run(12)
    assert again.failures == []
    assert await deployment.vit_runs(*urls) - before <= 12 - len(held), "a picture that is held is never encoded again"
    await deployment.idle()


@pytest.mark.parametrize("embedded", [False, True])
async def test_nats_killed_in_mid_traffic_costs_no_request_and_the_index_mends(
    deployment: Any, pictures: list[str], embedded: bool
) -> None:
    port = free_port()
    nats: Child | None = None
    if embedded:
        router = await deployment.start_router(plane=f"embedded:{port}")
    else:
        nats, url = await start_nats(deployment.processes, port=port)
        router = await deployment.start_router(plane=url)
    encoders = [await deployment.start_encoder() for _ in range(2)]
    urls = [url for _, url in encoders]
    await deployment.ready(*urls)
    traffic = Traffic(deployment.base, pictures)
    running = asyncio.create_task(traffic.run())
    await traffic.until(15)
    if nats is None:
        os.kill(child_named(router.pid, "nats-server"), signal.SIGKILL)
    else:
        nats.kill()
        await traffic.until(30)
        await start_nats(deployment.processes, port=port)
    await running
    assert traffic.failures == []
    await deployment.ready(*urls)
    await deployment.converged(*urls)
    await deployment.idle()


async def test_killing_the_router_takes_its_nats_server_along(deployment: Any) -> None:
    router = await deployment.start_router()
    child = child_named(router.pid, "nats-server")
    os.kill(router.pid, signal.SIGKILL)

    async def gone() -> bool:
        return not running(child)

    await deployment.until(gone)


async def test_an_event_plane_that_is_down_at_the_start_does_not_stop_the_router(
    deployment: Any, pictures: list[str]
) -> None:
    port = free_port()
    await deployment.start_router(plane=f"nats://127.0.0.1:{port}")
    _, url = await deployment.start_encoder()
    await deployment.ready(url, index=False)
    async with MockLanguageServer(LanguageServerSettings((deployment.base,)), seed=1) as server:
        await server.encode(pictures[:2])
    readiness = await fetch_json(f"{deployment.admin}/readyz")
    assert readiness["status"] == "degraded"
    assert any("event plane" in reason for reason in readiness["reasons"])
    await start_nats(deployment.processes, port=port)
    await deployment.ready(url)
    await deployment.converged(url)


async def cached(url: str) -> list[str]:
    """What an encoder itself says that it holds."""
    answer: list[str] = await fetch_json(f"{url}/mock/cache")
    return answer


def child_named(parent: int, name: str) -> int:
    """Pid of the child of ``parent`` whose command is ``name``."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                command, rest = stat.read().rpartition(")")[::2]
        except OSError:
            continue
        if int(rest.split()[1]) == parent and command.partition("(")[2].startswith(name):
            return pid
    raise AssertionError(f"process {parent} has no child {name}")


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
