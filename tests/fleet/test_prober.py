"""The prober against real sockets on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from fullhit.core import Pool
from fullhit.fleet import Fleet, FleetSettings, HealthSupervisor, HttpProber, Probe, ProbeResult, State

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def server(handler: Handler, port: int = 0) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/health", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def prober(**options: float) -> AsyncIterator[HttpProber]:
    made = HttpProber(**options)
    try:
        yield made
    finally:
        await made.close()


async def until(condition: Callable[[], object], what: str, limit: float = 20.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


def free_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def ask(url: str, timeout: float = 5.0) -> Probe:
    return Probe(url, url + "/health", timeout, None)


async def fine(request: web.Request) -> web.Response:
    return web.Response(text="OK")


async def never(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


async def test_a_2xx_answer_is_ok():
    async with server(fine) as url, prober() as send:
        assert await send(ask(url)) == ProbeResult("ok")


@pytest.mark.parametrize(
    ("status", "detail"), [(503, "HTTP 503"), (404, "HTTP 404: is the probe path right?"), (302, "HTTP 302")]
)
async def test_any_other_status_is_a_miss_that_says_which(status, detail):
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/"} if status == 302 else None)

    async with server(handler) as url, prober() as send:
        assert await send(ask(url)) == ProbeResult("status", detail)


async def test_silence_is_a_timeout():
    async with server(never) as url, prober() as send:
        assert (await send(ask(url, timeout=0.1))).outcome == "timeout"


async def test_nobody_listening_is_refused():
    async with prober() as send:
        assert (await send(ask(free_url()))).outcome == "refused"


async def test_an_address_that_takes_no_connection_is_given_up_early():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        host, port = deaf.getsockname()
        with contextlib.ExitStack() as full:
            for _ in range(4):  # fill the backlog; further SYNs are dropped
                filler = full.enter_context(socket.socket())
                filler.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    filler.connect((host, port))
            async with prober(connect_timeout=0.2) as send:
                started = time.monotonic()
                result = await send(ask(f"http://{host}:{port}", timeout=30))
                assert result.outcome == "refused" and time.monotonic() - started < 10


async def test_garbage_and_a_cut_connection_are_errors():
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"220 smtp ready\r\n")
        writer.close()

    listener = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with listener, prober() as send:
        port = listener.sockets[0].getsockname()[1]
        assert (await send(ask(f"http://127.0.0.1:{port}"))).outcome == "error"


async def test_each_probe_asks_for_a_connection_of_its_own():
    peers = []

    async def handler(request: web.Request) -> web.Response:
        peers.append(request.transport.get_extra_info("peername"))
        return web.Response()

    async with server(handler) as url, prober() as send:
        for _ in range(3):
            await send(ask(url))
    assert len(set(peers)) == 3


# -- the supervisor --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def supervised(**settings: object) -> AsyncIterator[tuple[Fleet, HealthSupervisor]]:
    pool = Pool("default", clock=time.monotonic)
    fleet = Fleet({"default": pool}, FleetSettings(**settings), clock=time.monotonic)  # type: ignore[arg-type]
    supervisor = HealthSupervisor(fleet, clock=time.monotonic)
    await supervisor.start()
    try:
        yield fleet, supervisor
    finally:
        await supervisor.stop()


def health_tasks() -> list[str]:
    return sorted(task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("fullhit-"))


async def test_a_worker_becomes_ready_when_it_answers_and_is_readmitted_after_its_death():
    async with supervised(first_retry=0.02, interval=0.05) as (fleet, _):
        async with server(fine) as url:
            member = fleet.add(url)
            await until(lambda: member.state is State.READY, "first answer")
        await until(lambda: member.state is State.UNHEALTHY, "three refused probes")
        async with server(fine, int(url.rsplit(":", 1)[1])):
            await until(lambda: member.state is State.READY, "readmitted")


async def test_case_b39_a_silent_worker_does_not_hold_up_the_others():
    async with server(never) as silent, server(fine) as well, supervised() as (fleet, supervisor):
        fleet.add(silent)
        await until(lambda: supervisor.outstanding == 1, "probe of the silent one is out")
        member = fleet.add(well)
        await until(lambda: member.state is State.READY, "the other one is ready")
        assert fleet.get(silent).state is State.PROBING


async def test_case_e8_a_probe_is_not_repeated_while_one_is_out():
    asked = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return await never(request)

    async with server(handler) as url, supervised(interval=0.01, first_retry=0.01) as (fleet, supervisor):
        fleet.add(url)
        await until(lambda: asked == 1, "asked once")
        for _ in range(20):
            fleet.get(url).probe_due = 0.0
            fleet.wake()
            await asyncio.sleep(0.005)
        assert asked == 1 and supervisor.outstanding == 1


async def test_case_b41_the_number_of_tasks_stays_the_same_however_often_workers_change():
    async with server(never) as url, supervised(interval=0.01) as (fleet, supervisor):
        for _ in range(5):
            fleet.add(url)
            await until(lambda: supervisor.outstanding == 1, "one probe")
            await supervisor.start()
            assert health_tasks() == ["fullhit-health", f"fullhit-probe {url}"]
            fleet.remove(url, cause="reload")
            fleet.wake()
            await until(lambda: supervisor.outstanding == 0, "the probe of a removed worker is cancelled")
            assert health_tasks() == ["fullhit-health"]
    assert health_tasks() == []


async def test_stopping_cancels_probes_and_starting_again_works():
    async with server(never) as url, supervised() as (fleet, supervisor):
        member = fleet.add(url)
        await until(lambda: supervisor.outstanding == 1, "one probe")
        await supervisor.stop()
        assert health_tasks() == [] and member.probe_started is None
        member.probe_due = 0.0
        await supervisor.start()
        await until(lambda: supervisor.outstanding == 1, "probing again")


@pytest.mark.parametrize("turns", range(8))
async def test_a_stop_that_meets_a_wake_up_is_not_lost(turns: int):
    """`wait_for` of Python 3.11 swallowed the cancellation; SIGTERM then hung for ever in a fleet with many probes."""
    async with supervised() as (fleet, supervisor):
        await asyncio.sleep(0.01)
        fleet.wake()
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await supervisor.stop()
    assert health_tasks() == []


async def test_the_supervisor_survives_a_prober_that_raises():
    async def broken(probe: Probe) -> ProbeResult:
        raise RuntimeError("bug")

    pool = Pool("default", clock=time.monotonic)
    fleet = Fleet({"default": pool}, FleetSettings(first_retry=0.01), clock=time.monotonic)
    supervisor = HealthSupervisor(fleet, clock=time.monotonic, prober=broken)
    await supervisor.start()
    member = fleet.add("http://127.0.0.1:9")
    await until(lambda: member.misses >= 2, "misses are counted")
    assert member.last_probe_error == "error: RuntimeError: bug"
    await supervisor.stop()


async def test_the_supervisor_survives_a_fleet_that_raises(monkeypatch):
    async with server(fine) as url, supervised() as (fleet, supervisor):
        tick = fleet.tick
        monkeypatch.setattr(fleet, "tick", lambda room: (_ for _ in ()).throw(RuntimeError("bug")))
        fleet.wake()
        await until(lambda: supervisor.failures == 1, "one failed turn")
        monkeypatch.setattr(fleet, "tick", tick)
        member = fleet.add(url)
        await until(lambda: member.state is State.READY, "and on it goes")
