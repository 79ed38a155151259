"""Processes that are killed, and processes that stand still and go on as if nothing had been."""

from __future__ import annotations

import asyncio
import time

from .case import ENCODER_OPTIONS, Run, case


@case("encoder killed, restarted empty")
async def encoder_killed(run: Run) -> None:
    await run.begin(3)
    victim = run.stand.encoders[0]
    async with run.fault():
        victim.kill()
        await run.load.more(40)
        await victim.start()


@case("encoder stopped, goes on")
async def encoder_paused(run: Run) -> None:
    """Long enough for the router to doubt it; then it goes on with the cache it had."""
    await run.begin(3)
    victim = run.stand.encoders[0]
    async with run.fault():
        victim.pause()
        await run.until_doubted(victim)
        victim.resume()
    await run.converge()
    run.expect(await victim.held(), "a process that was stopped has its cache still")


@case("router killed, restarted", unavoidable="requests that were under way at the router, or came while it was away")
async def router_killed(run: Run) -> None:
    """What published comes back by its heartbeats, what only registered by the state file."""
    router = run.stand.router
    router.options += ["--state-file", str(run.stand.processes.directory / "workers.json")]
    await run.begin(2)
    silent = run.stand.encoder(*ENCODER_OPTIONS, publishes=False)
    await silent.start()
    await run.until(run.stand.all_ready, "the registered encoder ready")
    written = run.stand.processes.directory / "workers.json"

    async def remembered() -> bool:
        return silent.url in await asyncio.to_thread(written.read_text)

    await run.until(remembered, "the registered encoder in the state file")
    gone = time.monotonic()
    async with run.fault():
        router.kill()
        await asyncio.sleep(1.0)
        await router.start()
    back = time.monotonic()
    run.excuse(lambda failure: failure.began < back and failure.ended > gone)
    await run.converge()
    await run.until(run.stand.all_ready, "all three encoders ready again")


@case("router stopped, goes on")
async def router_paused(run: Run) -> None:
    await run.begin(2)
    async with run.fault():
        run.stand.router.pause()
        await asyncio.sleep(8.0)  # longer than any grace of the event plane
        run.stand.router.resume()


@case("broker killed, restarted")
async def broker_killed(run: Run) -> None:
    await run.begin(2)
    async with run.fault():
        run.stand.plane.kill()
        await run.until_plane_lost()
        await run.load.more(40)
        await run.stand.plane.start()


@case("broker stopped, goes on")
async def broker_paused(run: Run) -> None:
    await run.begin(2)
    async with run.fault():
        run.stand.plane.pause()
        await run.until_plane_lost()
        await run.load.more(20)
        run.stand.plane.resume()
