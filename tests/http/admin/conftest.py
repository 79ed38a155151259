"""A listener, what stands behind it, and a client."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from fullhit.core import Pool, PoolSettings
from fullhit.fleet import Fleet, FleetSettings, ProbeResult
from fullhit.http.admin import AdminContext, AdminSettings, build_admin_app
from fullhit.telemetry import Log, Metrics, Telemetry


class Desk:
    """An admin listener, a client of it, and what stands behind."""

    def __init__(self, policy: str = "device-aware-weighted", **settings: Any) -> None:
        self.log = io.StringIO()
        self.pool = Pool("default", PoolSettings(policy=policy), clock=time.monotonic)
        self.pools = {"default": self.pool}
        self.telemetry = Telemetry(Metrics(self.pools, strict=True), Log(self.log, format="json"), kept=100)
        self.fleet = Fleet(self.pools, FleetSettings(), clock=time.monotonic, observer=self.telemetry)
        self.plane: dict[str, Any] = {"connected": True, "kind": "memory", "error": ""}
        self.oldest: dict[str, float] = {}
        self.leaving = False
        self.context = AdminContext(
            pools=self.pools,
            fleet=self.fleet,
            telemetry=self.telemetry,
            clock=time.monotonic,
            settings=AdminSettings(**settings),
            plane_status=lambda: self.plane,
            streams=lambda: {("default", url): {"state": "in_order", "seq": 7} for url in self.fleet.urls()},
            oldest_inflight=lambda: self.oldest,
            draining=lambda: self.leaving,
        )
        self.client: TestClient[Any, Any]

    async def call(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        async with self.client.request(method, path, data=data, headers=headers) as reply:
            content = await reply.read()
            assert reply.content_type == "application/json", (reply.status, content)
            return reply.status, json.loads(content)

    async def refusal(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, str, str]:
        status, told = await self.call(method, path, body, **headers)
        assert set(told) == {"error"} and set(told["error"]) == {"code", "message"}
        return status, told["error"]["code"], told["error"]["message"]

    def add_ready(self, *urls: str) -> None:
        for url in urls:
            self.fleet.add(url)
        for probe in self.fleet.tick().probes:
            self.fleet.probe_done(probe, ProbeResult("ok"))


@contextlib.asynccontextmanager
async def open_desk(**settings: Any) -> AsyncIterator[Desk]:
    desk = Desk(**settings)
    async with TestClient(TestServer(build_admin_app(desk.context), host="127.0.0.1")) as client:
        desk.client = client
        yield desk


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    async with open_desk() as desk:
        yield desk


@pytest.fixture
def opening() -> Callable[..., contextlib.AbstractAsyncContextManager[Desk]]:
    """For a listener with other settings than the default ones."""
    return open_desk
