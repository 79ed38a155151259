"""The decisions table: the scenarios on a real Dynamo frontend and on ours, over the same workers."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from fullhit_publisher.dynamo_keys import url_key

from .environment import Environment
from .fleet import AT_ONCE, PUBLISHER, Door, Fleet, Held, forget_the_surroundings
from .histories import HISTORIES, STEPS, play_in_memory, play_on_the_wire
from .scenarios import SCENARIOS, WITH_H, A, B, Rule, Scenario, burst, expect, same
from .stand import CaseFailed

__all__ = ["Decided", "decide", "print_decisions"]


class Decided(NamedTuple):
    """One row: what came out at the reference, with parity, by default, and what is wrong with it."""

    scenario: str
    reference: str
    parity: str
    default: str
    wrong: str


class _Table:
    def __init__(self, fleet: Fleet) -> None:
        self.rows: list[Decided] = []
        self._fleet = fleet

    def add(self, name: str, outcome: tuple[str, str, str], rule: Rule) -> None:
        self.rows.append(Decided(name, *outcome, rule(*outcome)))
        row = self.rows[-1]
        verdict = f"FAILED: {row.wrong}" if row.wrong else "ok"
        print(f"  {name}: {' | '.join(outcome)}: {verdict}", file=sys.stderr, flush=True)

    async def play(self, scenario: Scenario, doors: tuple[Door, Door, Door]) -> None:
        for letter, added, removed in scenario.before:
            await self._fleet.workers[letter].say("publish", [*map(url_key, added)], [*map(url_key, removed)])
        if scenario.before:
            await self._fleet.told(*doors)
        outcome = [await scenario.play(self._fleet, door) for door in doors]
        self.add(scenario.name, (outcome[0], outcome[1], outcome[2]), scenario.rule)


async def decide(environment: Environment) -> list[Decided]:
    """Play everything. A scenario that cannot be played to its end is a row that failed."""
    forget_the_surroundings()
    with tempfile.TemporaryDirectory() as folder:
        async with Fleet(environment, Path(folder)) as fleet:
            table = _Table(fleet)
            try:
                await _play_all(fleet, table)
            except (CaseFailed, TimeoutError) as error:
                table.rows.append(Decided("the rest", "-", "-", "-", f"could not be played: {error}"))
            return table.rows


async def _play_all(fleet: Fleet, table: _Table) -> None:
    await asyncio.gather(fleet.worker("G"), fleet.worker("C", device="cpu"), fleet.worker("P", role="peer"))
    direct = await fleet.frontend("direct", "Direct")
    fleet.audience = doors = await _doors(fleet, direct)
    await fleet.hears(*doors)
    await fleet.told(*doors)
    for scenario in SCENARIOS:
        await table.play(scenario, doors)
    await _started_late(fleet, table, direct, doors, "S13 doors opened after A came to C", expect("GG", "GG", "GG"))
    await _left_and_back(fleet, table, doors, "S14 C left and came back, 3x A", expect("GGG", "GGG", "GGG"))
    await _direct(fleet, table, direct, doors)
    for ratio in (None, "0", "abc", "2.5", "2", "16"):
        await _ratio(fleet, table, direct, ratio)
    await _our_publisher(fleet, table, doors)
    await _started_late(fleet, table, direct, doors, "S13 the same, C with our publisher", expect("GG", "CC", "CC"))
    await _left_and_back(
        fleet, table, doors, "S14 the same, C with our publisher", expect("GGG", "CCC", "CCC"), warm=doors[1:]
    )
    await fleet.worker("H")
    for scenario in WITH_H:
        await table.play(scenario, doors)
    await _load_of_hits(fleet, table, doors)
    await _histories(fleet, table, doors)
    await fleet.workers["H"].say("leave")
    await fleet.workers.pop("H").kill()
    await _killed(fleet, table, doors)


async def _doors(fleet: Fleet, direct: Door, ratio: str | None = "1") -> tuple[Door, Door, Door]:
    reference, parity, default = await asyncio.gather(
        fleet.frontend("reference", ratio=ratio),
        fleet.router("parity", direct, parity=True, ratio=ratio),
        fleet.router("default", direct, parity=False, ratio=ratio),
    )
    return reference, parity, default


async def _each(doors: tuple[Door, Door, Door], play: Callable[[Door], Awaitable[str]]) -> tuple[str, str, str]:
    outcome = [await play(door) for door in doors]
    return outcome[0], outcome[1], outcome[2]


async def _publish(fleet: Fleet, letter: str, added: list[str], removed: list[str]) -> None:
    await fleet.workers[letter].say("publish", [*map(url_key, added)], [*map(url_key, removed)])


async def _one_by_one(fleet: Fleet, door: Door, times: int) -> str:
    held = Held()
    for _ in range(times):
        await fleet.send(door, [A], held, wish=AT_ONCE)
        await held.tasks[-1]
    return str(held)


async def _started_late(
    fleet: Fleet, table: _Table, direct: Door, doors: tuple[Door, Door, Door], name: str, rule: Rule
) -> None:
    await _publish(fleet, "C", [A], [])
    await fleet.told(*doors)
    late = await _doors(fleet, direct)
    if "our" in name:
        await _warm(fleet, late[1:])
    table.add(name, await _each(late, lambda door: _one_by_one(fleet, door, 2)), rule)


async def _left_and_back(
    fleet: Fleet, table: _Table, doors: tuple[Door, Door, Door], name: str, rule: Rule, warm: tuple[Door, ...] = ()
) -> None:
    worker = fleet.workers["C"]
    await worker.say("leave")
    for door in doors:
        await _until_gone(fleet, door)
    await worker.say("join")
    for door in doors:
        await _until_back(fleet, door)
    await _warm(fleet, warm)
    table.add(name, await _each(doors, lambda door: _one_by_one(fleet, door, 3)), rule)
    await _publish(fleet, "C", [], [A])
    await _publish(fleet, "C", [A], [])


async def _until_gone(fleet: Fleet, door: Door) -> None:
    """C gets no request any more, not even its share of held misses; our routers do not list it."""
    await _until_share(fleet, door, "GG")
    end = time.monotonic() + 60
    while door.admin and await _row_of_c(fleet, door) is not None:
        if time.monotonic() > end:
            raise CaseFailed(f"{door.name} still lists C")
        await asyncio.sleep(0.05)


async def _until_back(fleet: Fleet, door: Door) -> None:
    await _until_share(fleet, door, "GC")


async def _until_share(fleet: Fleet, door: Door, wanted: str) -> None:
    end = time.monotonic() + 60
    while (came := await fleet.burst(door, [(fleet.fresh(),), (fleet.fresh(),)])) != wanted:
        if time.monotonic() > end:
            raise CaseFailed(f"{door.name}: two held misses go {came}, {wanted} is waited for")
        await asyncio.sleep(0.05)


async def _warm(fleet: Fleet, routers: tuple[Door, ...]) -> None:
    """Our routers have asked C for what it holds. Until they have heard it, what they list is their own prediction."""
    for door in routers:
        end = time.monotonic() + 60
        while True:
            row = await _row_of_c(fleet, door)
            if row is not None and row["publishing"] and row["keys"] and not row["doubtful"]:
                break
            if time.monotonic() > end:
                raise CaseFailed(f"{door.name} has not got the keys of C: {row}")
            await asyncio.sleep(0.05)


async def _row_of_c(fleet: Fleet, door: Door) -> dict[str, Any] | None:
    """What our router lists of C."""
    name = f"dynamo:{fleet.workers['C'].id}"
    rows: list[dict[str, Any]] = await fleet.ask(door, "/workers")
    return next((row for row in rows if row["id"] == name), None)


async def _direct(fleet: Fleet, table: _Table, direct: Door, doors: tuple[Door, Door, Door]) -> None:
    """A frontend in direct mode knows nobody itself; through us every request has a worker."""
    named = await fleet.burst(direct, [(A,)], headers={"x-dynamo-worker-instance-id": fleet.workers["C"].id})
    nameless = await fleet.burst(direct, [(A,)])
    await fleet.told(*doors)
    through = [await fleet.burst(door, [(A,)]) for door in doors[1:]]
    outcome = (f"{named}/{nameless}", through[0], through[1])
    table.add("S15 direct mode: named / not; through us", outcome, expect("C/400", "C", "C"))


async def _ratio(fleet: Fleet, table: _Table, direct: Door, ratio: str | None) -> None:
    doors = await _doors(fleet, direct, ratio)
    for door in doors:
        await _knows_both(fleet, door)
    play = burst(*[(B,)] * 12)
    table.add(f"S16 ratio {ratio or 'not set'}, 12 held misses", await _each(doors, lambda d: play(fleet, d)), same)


async def _knows_both(fleet: Fleet, door: Door) -> None:
    """C gets a request when G is busy enough: with 20 held ones for any ratio up to 16."""
    end = time.monotonic() + 60
    while "C" not in await fleet.burst(door, [(fleet.fresh(),) for _ in range(20)]):
        if time.monotonic() > end:
            raise CaseFailed(f"{door.name} never uses C")


async def _our_publisher(fleet: Fleet, table: _Table, doors: tuple[Door, Door, Door]) -> None:
    """C speaks through our publisher from now on; Dynamo's own frontend routes by it."""
    await _publish(fleet, "C", [], [A])
    await fleet.workers["C"].say("speak", [url_key(B)], fleet.nats, str(PUBLISHER))
    await fleet.told(*doors)
    await _publish(fleet, "C", [A], [])
    await fleet.told(*doors)
    play = burst((A,), (B,))
    table.add("S19 A, B on C by our publisher", await _each(doors, lambda d: play(fleet, d)), expect("CC", "CC", "CC"))
    await _publish(fleet, "C", [], [B])
    await fleet.told(*doors)


async def _load_of_hits(fleet: Fleet, table: _Table, doors: tuple[Door, Door, Door]) -> None:
    """What our routers show of C while it has four full hits; a frontend shows nothing."""
    await _publish(fleet, "G", [], [A])
    await _publish(fleet, "C", [A], [])
    await fleet.told(*doors)
    shown = ["-"]
    for door in doors[1:]:
        held = Held()
        for _ in range(4):
            await fleet.send(door, [A], held)
        row = await _row_of_c(fleet, door)
        shown.append(f"{held} {row['inflight_requests'] if row else None}")
        await fleet.finish(held)
    rule = expect("-", "CCCC 0", "CCCC 4")
    table.add("S02c C's load during four held hits", (shown[0], shown[1], shown[2]), rule)


async def _histories(fleet: Fleet, table: _Table, doors: tuple[Door, Door, Door]) -> None:
    """Random histories against the rule, written down as a model: on the wire, and many in memory."""
    await _publish(fleet, "C", [], [A, B])
    await _publish(fleet, "G", [], [A, B])
    await fleet.told(*doors)
    came = [await play_on_the_wire(fleet, door) for door in doors[:2]]
    fits: Rule = lambda reference, parity, _: (  # noqa: E731
        "" if reference.endswith("fit") and parity.endswith("fit") else "a choice that the rule does not allow"
    )
    table.add(f"random history of {STEPS} steps, choices", (came[0], came[1], "-"), fits)
    table.add(f"{HISTORIES:,} random histories in memory", ("-", play_in_memory(), "-"), lambda *_: "")


async def _killed(fleet: Fleet, table: _Table, doors: tuple[Door, Door, Door]) -> None:
    retrying = await fleet.frontend("reference that migrates", migration=3)
    await fleet.hears(retrying)
    await _publish(fleet, "G", [], [A])
    await _publish(fleet, "C", [], [A])
    await _publish(fleet, "C", [A], [])
    await fleet.told(*doors, retrying)
    one = burst((A,))
    table.add(
        "S17 A on C, before it is killed", await _each(doors, lambda door: one(fleet, door)), expect("C", "C", "C")
    )
    await fleet.workers.pop("C").kill()
    began = time.monotonic()
    seen: dict[str, list[int]] = {door.name: [] for door in (*doors, retrying)}
    while time.monotonic() - began < 14:  # discovery by files drops a dead worker after about 10 s
        for door in (*doors, retrying):
            seen[door.name].append(await fleet.status(door, [A]))
        await asyncio.sleep(0.3)
    failed = [sum(status != 200 for status in seen[door.name]) for door in (*doors, retrying)]
    asked = len(seen["reference"])
    rule: Rule = lambda reference, parity, default: (  # noqa: E731
        "" if default.startswith("0 of") and parity.startswith("0 of") else "clients saw failures that were avoidable"
    )
    counts = [f"{number} of {asked} failed" for number in failed]
    table.add("S18 C killed hard, A asked for 14 s", (counts[0], counts[1], counts[2]), rule)
    table.add("S18 the reference with migration_limit 3", (counts[3], "", ""), lambda *_: "")


def print_decisions(rows: list[Decided]) -> None:
    """The second table."""
    print(f"{'scenario':<46}{'reference':<17}{'parity':<17}{'default':<17}verdict")
    for row in rows:
        verdict = f"FAILED: {row.wrong}" if row.wrong else "ok"
        print(f"{row.scenario:<46}{row.reference:<17}{row.parity:<17}{row.default:<17}{verdict}")
