"""Real processes for the tests of the lab; logs stay in the test's temporary directory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from fullhit.lab.images import PictureSize, draw_jpeg
from fullhit.lab.processes import Child, Supervisor

SMALL = PictureSize(96, 64)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path / "processes") as supervisor:
        yield supervisor


StartEncoder = Callable[..., Awaitable[tuple[Child, str]]]


@pytest.fixture
def start_encoder(processes: Supervisor) -> StartEncoder:
    """``child, url = await start_encoder("--vit-ms", "5")``: a mock encoder that is ready."""

    async def start(*options: str) -> tuple[Child, str]:
        child = processes.start("mock-encoder", ["fullhit.lab.mock_encoder", "--vit-ms", "1", *options])
        return child, str((await child.json_line())["url"])

    return start


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


@pytest.fixture(scope="session")
def pictures() -> list[bytes]:
    """Six small JPEGs, all different."""
    return [draw_jpeg(number, SMALL) for number in range(6)]


Until = Callable[..., Awaitable[None]]


@pytest.fixture
def until() -> Until:
    """``await until(condition)``: wait for a condition (plain or async) with a generous limit."""

    async def wait(condition: Callable[[], bool | Awaitable[bool]], limit: float = 60.0) -> None:
        deadline = time.monotonic() + limit
        while True:
            outcome = condition()
            if await outcome if isinstance(outcome, Awaitable) else outcome:
                return
            assert time.monotonic() < deadline, f"not true after {limit} s: {condition}"
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture(scope="module")
def module_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a mock encoder that the tests of a module share; they leave no state there."""
    with Supervisor(tmp_path_factory.mktemp("shared")) as supervisor:
        child = supervisor.start("mock-encoder", ["fullhit.lab.mock_encoder", "--vit-ms", "1"])
        yield str(asyncio.run(child.json_line())["url"])


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[web.Application], Awaitable[str]]]:
    """``base = await serve(app)``: an aiohttp application served on a free loopback port."""
    runners: list[web.AppRunner] = []

    async def start(app: web.Application) -> str:
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    yield start
    for runner in runners:
        await runner.cleanup()
