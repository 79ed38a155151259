"""Encoders that say what is not so."""

from __future__ import annotations

from .case import ENCODER_OPTIONS, Run, case


@case("two encoders with one id", limit=120.0)
async def one_id(run: Run) -> None:
    """A second encoder calls itself by the first one's URL. Neither is believed, requests go on, and when the second
    one is gone the first is believed again: a quarantine (60 s) later."""
    await run.begin(2)
    first = run.stand.encoders[0]
    impostor = run.stand.encoder(*ENCODER_OPTIONS)
    impostor.call_yourself(first.url)
    run.stand.encoders.remove(impostor)  # its word is not one that the index should agree with

    async def quarantined() -> bool:
        row = await run.stand.router.worker(first)
        return bool(row["stream"]["quarantine"]) and row["keys"] == 0

    async with run.fault():
        await impostor.start()
        await impostor.fill(10)
        await run.until(quarantined, "the id that two claim in quarantine, without keys")
        await run.load.more(40)
        impostor.kill()
