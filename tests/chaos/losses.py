"""Things that do not fit or do not arrive: a full disk, a slow reader, messages too large, messages lost."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import nats

from fullhit_publisher.wire import events_subject

from .case import ENCODER_OPTIONS, Run, case
from .planes import NatsServer

FLOOD = 200
FLOOD_BYTES = 256 * 1024


@case("disk full")
async def disk_full(run: Run) -> None:
    """Every write of the router to a file fails, its log's and its state file's: a limit of the process (EFBIG) stands
    for a disk (ENOSPC). What was not written is written when there is room again."""
    router = run.stand.router
    state = run.stand.processes.directory / "workers.json"
    router.options += ["--state-file", str(state)]
    await run.begin(2)
    _, hard = resource.prlimit(router.pid, resource.RLIMIT_FSIZE)
    newcomer = run.stand.encoder(*ENCODER_OPTIONS, publishes=False)

    async def failing() -> bool:
        return await router.metric("fullhit_state_file_failing") == 1

    async def written() -> bool:
        return newcomer.url in await asyncio.to_thread(state.read_text) and not await failing()

    async with run.fault():
        resource.prlimit(router.pid, resource.RLIMIT_FSIZE, (0, hard))
        await newcomer.start()
        await run.until(failing, "the state file failing, by the metric")
        await run.load.more(40)
        resource.prlimit(router.pid, resource.RLIMIT_FSIZE, (hard, hard))
    await run.converge()
    await run.until(written, "the state file with the newcomer")
    left = await asyncio.to_thread(_beside, state)
    run.expect(not left, f"half written files left behind: {left}")


def _beside(state: Path) -> list[str]:
    return [path.name for path in state.parent.glob(f".{state.name}.*")]


@case("router reads too slowly", planes=("nats",))
async def slow_consumer(run: Run) -> None:
    """The broker closes on a reader that does not read, with all that waited for it; large rubbish fills its buffer."""
    plane = run.stand.plane
    assert isinstance(plane, NatsServer)
    plane.settings += ["max_pending: 1MB", 'write_deadline: "1s"']
    await run.begin(bad=["router-broker"], receive_buffer=4096)
    link = run.stand.router.broker
    assert link is not None
    client = await nats.connect(plane.url())

    async def given_up() -> bool:
        return plane.says("Slow Consumer")

    async with run.fault():
        link.freeze(up=False)
        for _ in range(FLOOD):
            await client.publish(events_subject("default", 1), b"\0" * FLOOD_BYTES)
            if await given_up():
                break
        await client.flush(30)
        await run.until(given_up, "the broker giving the slow reader up")
        await run.load.more(20)
        link.thaw()
    await client.close()
    run.expect(await run.stand.router.metric("fullhit_events_rejected_total") > 0, "the rubbish was not even counted")


@case("messages over max_payload", limit=60.0, planes=("nats",))
async def small_payload(run: Run) -> None:
    """The broker comes back with a limit far below what the encoder has to say by then."""
    plane = run.stand.plane
    assert isinstance(plane, NatsServer)
    await run.begin(2)
    large = run.stand.encoder(*ENCODER_OPTIONS, "--multimodal-embedding-cache-capacity-gb", "0.01")
    await large.start()
    await large.fill(3000, seed=1)
    await run.until(run.stand.all_ready, "the large encoder ready")
    async with run.fault():
        plane.kill()
        plane.settings.append("max_payload: 2048")
        await large.fill(3000, seed=2)
        await run.load.more(20)
        await plane.start()


@case("1 delta in 10 lost")
async def deltas_lost(run: Run) -> None:
    """All the time, also while it converges."""
    await run.begin(2, "--drop-deltas", "0.1")
    async with run.fault():
        await run.load.more(300)
    gaps = await run.stand.router.metric("fullhit_event_gaps_total")
    differing = await run.stand.router.metric("fullhit_digest_mismatch_total")
    run.expect(gaps + differing > 0, "nothing was lost, or nobody noticed")
    run.note = f"{gaps:.0f} gaps, {differing:.0f} digests that differed"


@case("every delta lost")
async def all_deltas_lost(run: Run) -> None:
    """Heartbeats are all that arrives, and what they make the router ask for."""
    await run.begin(2, "--drop-deltas", "1")
    async with run.fault():
        await run.load.more(200)
    taken = await run.stand.router.metric("fullhit_resyncs_total", outcome="completed")
    run.expect(taken > 2, "no snapshots were taken")
    run.note = f"{taken:.0f} snapshots"
