"""A whole deployment out of real processes: router, NATS, mock encoders, and a client that does what SGLang does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fullhit.lab.images import PictureSize, data_uri, draw_jpeg
from fullhit.lab.processes import Child, Supervisor, fetch_json, free_port
from fullhit_publisher.identity import normalize_url

SMALL = PictureSize(96, 64)
LIMIT = 60.0


class Deployment:
    """Starts processes and asks them things. Everything is on 127.0.0.1."""

    def __init__(self, processes: Supervisor) -> None:
        self.processes = processes
        self.router: Child | None = None
        self.base = self.admin = self.plane = ""

    async def start_router(self, *options: str, plane: str = "embedded:0", base: str = "", admin: str = "") -> Child:
        """Start `fullhit serve` and wait until it listens; ``base`` and ``admin`` fix the addresses (for restarts)."""
        listen = base.removeprefix("http://") or "127.0.0.1:0"
        admin_listen = admin.removeprefix("http://") or "127.0.0.1:0"
        addresses = ["--listen", listen, "--admin-listen", admin_listen, "--event-plane", plane]
        router = self.processes.start("router", ["fullhit", "serve", "--log-format", "json", *addresses, *options])
        line = await self.log_line(router, "listening")
        self.router, self.base, self.admin, self.plane = router, line["data"], line["admin"], line["event_plane"]
        return router

    async def start_encoder(self, *options: str, port: int = 0, publish: bool = True) -> tuple[Child, str]:
        """Start a mock encoder that registers itself and, by default, publishes. Returns it and its URL."""
        wanted = ["--port", str(port), "--encoder-register-urls", self.base, *options]
        wanted += ["--multimodal-embedding-cache-capacity-gb", "0.1"]
        if publish:
            wanted += ["--multimodal-embedding-cache-publisher", "--event-plane", self.plane]
        child = self.processes.start("encoder", ["fullhit.lab.mock_encoder", "--vit-ms", "2", *wanted])
        url = normalize_url(str((await child.json_line())["url"]))
        return child, url

    async def ready(self, *urls: str, index: bool = True) -> None:
        """Until the router would route to each of these, trusting what they publish (``index``)."""

        async def all_ready() -> bool:
            found = {row["id"]: row for row in await self.workers()}
            return all(
                url in found
                and found[url]["state"] == "ready"
                and (not index or (found[url]["publishing"] and not found[url]["doubtful"]))
                for url in urls
            )

        await until(all_ready)

    async def workers(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = await fetch_json(f"{self.admin}/workers")
        return rows

    async def worker(self, url: str) -> dict[str, Any]:
        return next(row for row in await self.workers() if row["id"] == url)

    async def converged(self, *urls: str) -> None:
        """Until the index agrees with what the encoders themselves say they hold."""

        async def same() -> bool:
            for url in urls:
                row = await self.worker(url)
                held = (await fetch_json(f"{url}/mock/stats"))["cached_keys"]
                if row["doubtful"] or row["keys"] != held:
                    return False
            return True

        await until(same)

    @staticmethod
    async def until(condition: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a condition."""
        await until(condition)

    async def idle(self) -> None:
        """Until nothing is in flight anywhere."""

        async def calm() -> bool:
            return all(row["inflight_requests"] == 0 and row["encoding_requests"] == 0 for row in await self.workers())

        await until(calm)

    async def vit_runs(self, *urls: str) -> int:
        return sum([(await fetch_json(f"{url}/mock/stats"))["vit_runs"] for url in urls])

    async def log_line(self, child: Child, event: str, **fields: object) -> dict[str, Any]:
        """The first line of a router's log with this event (and these fields)."""
        found: list[dict[str, Any]] = []

        async def look() -> bool:
            for line in child.log.read_bytes().splitlines():
                if line.startswith(b"{"):
                    row = json.loads(line)
                    if row.get("event") == event and all(row.get(k) == v for k, v in fields.items()):
                        found.append(row)
                        return True
            return False

        await child.until(look, f"logging {event}")
        return found[0]


async def until(condition: Callable[[], Awaitable[bool]], limit: float = LIMIT) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + limit
    while not await condition():
        assert time.monotonic() < deadline, f"not true after {limit:g} s: {condition}"
        await asyncio.sleep(0.02)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with Supervisor(tmp_path / "processes") as processes:
        yield Deployment(processes)


@pytest.fixture(scope="session")
def pictures() -> list[str]:
    """Data URIs of forty small JPEGs, all different."""
    return [data_uri(draw_jpeg(number, SMALL)) for number in range(40)]


@pytest.fixture
def port() -> int:
    return free_port()
