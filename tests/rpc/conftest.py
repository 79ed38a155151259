"""A router's core behind both doors, on sockets of 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from aiohttp import web

from fullhit.core import Pool, PoolSettings
from fullhit.decision import DecisionService, DecisionSettings
from fullhit.events.linked import LinkedIngest
from fullhit.events.no_plane import NoPlane
from fullhit.fleet import Fleet, FleetSettings, ProbeResult
from fullhit.http.admin import AdminContext, AdminSettings, build_admin_app, readiness
from fullhit.rpc.plane import LinePlane
from fullhit.rpc.server import RpcServer
from fullhit.rpc.settings import RpcSettings
from fullhit.rpc.v1 import router_pb2_grpc
from fullhit.telemetry import Log, Metrics, Telemetry

A, B = "http://127.0.0.1:1001", "http://127.0.0.1:1002"


class House:
    """Everything that stands behind the two doors, and the doors."""

    def __init__(
        self, *, decision: DecisionSettings | None = None, rpc: RpcSettings | None = None, policy: str | None = None
    ) -> None:
        clock = time.monotonic
        self.log = io.StringIO()
        self.pool = Pool("default", PoolSettings(policy=policy or "device-aware-weighted"), clock=clock)
        self.pools = {"default": self.pool}
        self.telemetry = Telemetry(Metrics(self.pools, strict=True), Log(self.log, format="json"), kept=5000)
        self.fleet = Fleet(self.pools, FleetSettings(), clock=clock, observer=self.telemetry)
        self.ingest = LinkedIngest(self.pools, clock=clock)
        self.fleet.on_added.append(self.ingest.worker_added)
        self.fleet.on_removed.append(self.ingest.worker_removed)
        self.service = DecisionService(self.pools, self.fleet, self.telemetry, decision, clock=clock)
        self.context = AdminContext(
            self.pools, self.fleet, self.telemetry, clock, AdminSettings(key=(rpc or RpcSettings()).key),
            service=self.service,
        )  # fmt: skip
        self.settings = rpc or RpcSettings()
        self.lines = LinePlane(self.ingest, self.fleet)
        self.server = RpcServer(self.service, self.lines, self.settings, ready=lambda: readiness(self.context)["ready"])
        self.port = 0
        self.admin_port = 0
        self._channels: list[grpc.aio.Channel] = []

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def channel(self, credentials: Any = None) -> grpc.aio.Channel:
        """One of its own, closed at the end."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        if credentials is None:
            channel = grpc.aio.insecure_channel(self.target, options=options)
        else:
            channel = grpc.aio.secure_channel(self.target, credentials, options=options)
        self._channels.append(channel)
        return channel

    def stub(self, credentials: Any = None) -> Any:
        return router_pb2_grpc.RouterStub(self.channel(credentials))

    def add_ready(self, *urls: str, device: str | None = None) -> None:
        for url in urls:
            self.fleet.add(url, device=device)
        for probe in self.fleet.tick().probes:
            self.fleet.probe_done(probe, ProbeResult("ok"))

    def inflight(self) -> int:
        return sum(worker.inflight for worker in self.pool.workers())


@contextlib.asynccontextmanager
async def open_house(**settings: Any) -> AsyncIterator[House]:
    house = House(**settings)
    plane = NoPlane(house.ingest)
    runner = web.AppRunner(build_admin_app(house.context), access_log=None, handle_signals=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    house.admin_port = runner.addresses[0][1]
    await plane.start()
    _, house.port = await house.server.start("127.0.0.1", 0)
    try:
        yield house
    finally:
        for channel in house._channels:
            await channel.close()
        await house.server.stop(0.5)
        await plane.close()
        await runner.cleanup()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with open_house() as house:
        yield house


@pytest.fixture
def opening() -> Callable[..., contextlib.AbstractAsyncContextManager[House]]:
    """For a house with other settings than the default ones."""
    return open_house


async def _until(condition: Callable[[], object], what: str = "it never came true", limit: float = 20.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


@pytest.fixture
def until() -> Callable[..., Any]:
    return _until
