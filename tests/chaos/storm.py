"""Several faults at once, in an order that nobody thought of."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from .case import Run, case

SEED = 7
LASTS = 25.0
"""Seconds."""


@case("a storm of them", limit=60.0)
async def storm(run: Run) -> None:
    """For a while, every broker, link and encoder is now well and now not; nothing here may cost a request."""
    await run.begin(3, "--drop-deltas", "0.1", bad=["router-broker", "encoder-broker"])
    stand = run.stand
    router_link, encoder_link = stand.router.broker, stand.encoders[0].broker
    assert router_link is not None and encoder_link is not None
    rng = random.Random(SEED)

    async def now_and_then(harm: Callable[[], Awaitable[None]], heal: Callable[[], Awaitable[None]]) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + LASTS
        while (left := end - clock()) > 0:
            await asyncio.sleep(min(rng.uniform(1.0, 6.0), left))
            await harm()
            await asyncio.sleep(rng.uniform(0.2, 5.0))
            await heal()

    async def at_once(action: Callable[[], None]) -> None:
        action()

    async with run.fault(), asyncio.TaskGroup() as group:
        for harm, heal in (
            (router_link.cut, router_link.mend),
            (lambda: at_once(encoder_link.freeze), lambda: at_once(encoder_link.thaw)),
            (lambda: at_once(stand.plane.kill), stand.plane.start),
            (lambda: at_once(stand.encoders[1].pause), lambda: at_once(stand.encoders[1].resume)),
            (lambda: at_once(stand.encoders[2].kill), stand.encoders[2].start),
        ):
            group.create_task(now_and_then(harm, heal))
