"""Networks that are cut, that swallow what is sent, and that are slow: each link by itself."""

from __future__ import annotations

import asyncio

from .case import Run, case
from .proxy import Proxy
from .traffic import Failure

# A cut link between router and encoder, and the encoder lives: what it was encoding still reaches the language server.
SECOND_COPY = "requests of several pictures that the encoder had when it was cut off: a second copy would fail them"


def _proxy(proxy: Proxy | None) -> Proxy:
    assert proxy is not None
    return proxy


@case("encoder-broker cut")
async def encoder_broker_cut(run: Run) -> None:
    await run.begin(bad=["encoder-broker"])
    lonely = run.stand.encoders[0]
    link = _proxy(lonely.broker)
    async with run.fault():
        await link.cut()
        await run.until_doubted(lonely)
        await run.load.more(20)
        await link.mend()


@case("encoder-broker swallows all")
async def encoder_broker_frozen(run: Run) -> None:
    await run.begin(bad=["encoder-broker"])
    lonely = run.stand.encoders[0]
    link = _proxy(lonely.broker)
    async with run.fault():
        link.freeze()
        await run.until_doubted(lonely)
        await run.load.more(20)
        link.thaw()


@case("encoder-broker slow")
async def encoder_broker_slow(run: Run) -> None:
    """Its events arrive seconds late: what the router believes of it is old all the time."""
    await run.begin(bad=["encoder-broker"])
    link = _proxy(run.stand.encoders[0].broker)
    async with run.fault():
        link.rate = 400.0
        await run.load.more(200)
        link.rate = 0.0


@case("router-broker cut")
async def router_broker_cut(run: Run) -> None:
    await run.begin(bad=["router-broker"])
    link = _proxy(run.stand.router.broker)
    async with run.fault():
        await link.cut()
        await run.until_plane_lost()
        await run.load.more(40)
        await link.mend()


@case("router-broker swallows all")
async def router_broker_frozen(run: Run) -> None:
    await run.begin(bad=["router-broker"])
    link = _proxy(run.stand.router.broker)
    async with run.fault():
        link.freeze()
        await run.until_plane_lost()
        await run.load.more(20)
        link.thaw()


@case("router-broker slow")
async def router_broker_slow(run: Run) -> None:
    await run.begin(bad=["router-broker"])
    link = _proxy(run.stand.router.broker)
    async with run.fault():
        link.rate = 800.0
        await run.load.more(200)
        link.rate = 0.0


@case("router-encoder cut", unavoidable=SECOND_COPY)
async def router_encoder_cut(run: Run) -> None:
    await run.begin(3, bad=["router-encoder"])
    cut_off = run.stand.encoders[0]
    link = _proxy(cut_off.front)
    began = asyncio.get_running_loop().time()  # the same clock as time.monotonic

    def under_way(failure: Failure) -> bool:
        return failure.pictures > 1 and failure.began <= began

    run.excuse(under_way)
    async with run.fault():
        await link.cut()
        began = asyncio.get_running_loop().time()
        await run.load.more(60)
        await link.mend()


@case("router-encoder swallows all")
async def router_encoder_frozen(run: Run) -> None:
    """Requests that are on their way wait for the network, as they would without a router."""
    await run.begin(3, bad=["router-encoder"])
    link = _proxy(run.stand.encoders[0].front)
    async with run.fault():
        link.freeze()
        await asyncio.sleep(6.0)
        link.thaw()
