"""The scenarios of the decisions table: what is played, and what must come out.

Letters are the workers that got the requests, in order: G and H are GPU workers, C is a CPU worker. A, B are pictures.
"Held" requests stay open until all of a scenario are sent, so that load counts. Where the reference draws among
workers the outcome of one play says nothing; such scenarios have a rule instead of an equality.

Each scenario is played at three doors in turn over the same fleet: the reference (Dynamo's own frontend in mode
device-aware-weighted), Fullhit with `parity = "dynamo"`, Fullhit as it is by default.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fullhit_publisher.dynamo_keys import url_key

from .fleet import AT_ONCE, TOKEN_FIRST, Door, Fleet, Held

__all__ = ["SCENARIOS", "A", "B", "Scenario", "same"]

A = "https://pictures.invalid/a.png"
B = "https://pictures.invalid/b.png"
DATA = "data:image/png;base64,iVBORw0KGgo="
RAW, NORMAL = "https://PICTURES.invalid/Q.png?a=1", "https://pictures.invalid/Q.png?a=1"

Play = Callable[[Fleet, Door], Awaitable[str]]
Rule = Callable[[str, str, str], str]
"""From what came out at the reference, with parity, and by default: what is wrong with it, "" if nothing."""
Change = tuple[str, tuple[str, ...], tuple[str, ...]]
"""A worker, and the URLs whose keys it adds and removes."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """``before``: changes of caches, made and heard everywhere before the play."""

    name: str
    play: Play
    rule: Rule
    before: tuple[Change, ...] = ()


def same(reference: str, parity: str, default: str) -> str:
    """All three alike."""
    return "" if reference == parity == default else "all three should be alike"


def expect(reference: str, parity: str, default: str) -> Rule:
    """Exactly this."""

    def rule(*came: str) -> str:
        wanted = (reference, parity, default)
        wrong = [f"{who}: {want} expected" for who, want, got in zip(_WHO, wanted, came, strict=True) if want != got]
        return "; ".join(wrong)

    return rule


_WHO = ("reference", "parity", "default")


def _drawn_from(letters: str, default: str) -> Rule:
    """The reference and parity draw among these; the default is exactly as given."""

    def rule(reference: str, parity: str, came: str) -> str:
        wrong = [f"{who} left {letters}" for who, got in zip(_WHO, (reference, parity), strict=False)
                 if not got or set(got) - set(letters)]  # fmt: skip
        if came != default:
            wrong.append(f"default: {default} expected")
        return "; ".join(wrong)

    return rule


def _spread(reference: str, parity: str, default: str) -> str:
    """Two holders in turn by default; drawn among them elsewhere."""
    wrong = [] if default in ("GHGH", "HGHG") else ["default: the holders should take turns"]
    for who, came in (("reference", reference), ("parity", parity)):
        if len(came) != 4 or set(came) - set("GH"):
            wrong.append(f"{who}: only the holders should be chosen")
    return "; ".join(wrong)


def _hits_count(reference: str, parity: str, default: str) -> str:
    """After four hits on G: by default misses of the GPU class all go to H; for the others G and H look alike."""
    wrong = [f"{who}: the hits should stay on G" for who, came in zip(_WHO, (reference, parity, default), strict=True)
             if not came.startswith("GGGG ")]  # fmt: skip
    if "G" in default[4:]:
        wrong.append("default: a miss went to the worker with four hits")
    # Load 0 on both: the first miss is drawn, the second of the class goes to the other one.
    for who, came in (("reference", reference), ("parity", parity)):
        misses = came[5:].replace("C", "")
        if sorted(misses[:2]) != ["G", "H"]:
            wrong.append(f"{who}: hits should not count")
    return "; ".join(wrong)


def burst(*batch: tuple[str, ...], **how: object) -> Play:
    """Held requests with these pictures, one after another."""

    async def play(fleet: Fleet, door: Door) -> str:
        return await fleet.burst(door, batch, **how)

    return play


async def _hits_then_misses(fleet: Fleet, door: Door) -> str:
    held = Held()
    for _ in range(4):
        await fleet.send(door, [A], held)
    hits = str(held)
    for _ in range(4):
        await fleet.send(door, [fleet.fresh()], held)
    await fleet.finish(held)
    return f"{hits} {str(held)[4:]}"


def pinned(header: str, worker: str) -> Play:
    """A client that names a worker itself."""

    async def play(fleet: Fleet, door: Door) -> str:
        return await fleet.burst(door, [(A,), (A,)], headers={header: fleet.workers[worker].id})

    return play


async def _pinned_in_the_body(fleet: Fleet, door: Door) -> str:
    return await fleet.burst(door, [(A,)], extra={"nvext": {"backend_instance_id": int(fleet.workers["G"].id)}})


async def _after_the_first_token(fleet: Fleet, door: Door) -> str:
    held = Held()
    for _ in range(2):
        await fleet.send(door, [fleet.fresh()], held, wish=TOKEN_FIRST)
    await fleet.finish(held)
    return str(held)


async def _raw_and_normal(fleet: Fleet, door: Door) -> str:
    held = Held()
    ways = [await fleet.send(door, [RAW], held, wish=AT_ONCE)]
    await fleet.finish(held)
    await fleet.workers["C"].say("publish", [url_key(NORMAL)], [])
    await fleet.told(door)
    ways.append(await fleet.send(door, [RAW], held, wish=AT_ONCE))
    await fleet.finish(held)
    await fleet.workers["C"].say("publish", [], [url_key(NORMAL)])
    await fleet.told(*fleet.audience)
    return "/".join(ways)


SCENARIOS = (
    Scenario("S01 nothing cached, held A,B,A,B", burst((A,), (B,), (A,), (B,)), expect("GCGC", "GCGC", "GCGC")),
    Scenario(
        "S02 A on C alone, held 4x A", burst((A,), (A,), (A,), (A,)), expect("CCCC", "CCCC", "CCCC"),
        before=(("C", (A,), ()),),
    ),
    Scenario(
        "S03 then held 4x A, 4x B", burst((A,), (A,), (A,), (A,), (B,), (B,), (B,), (B,)),
        expect("CCCCGCGC", "CCCCGCGC", "CCCCGCGC"),
    ),
    Scenario("S04 A on C, held 3x [A,B]", burst((A, B), (A, B), (A, B)), expect("GCG", "GCG", "GCG")),
    Scenario(
        "S05 A on both, held 12x A", burst(*[(A,)] * 12), _drawn_from("GC", "G" * 12), before=(("G", (A,), ()),),
    ),
    Scenario(
        "S06 A on neither, held 3x A", burst((A,), (A,), (A,)), expect("GCG", "GCG", "GCG"),
        before=(("C", (), (A,)), ("G", (), (A,))),
    ),
    Scenario("S07 A on C, one [A,A]", burst((A, A)), expect("C", "C", "C"), before=(("C", (A,), ()),)),
    Scenario(
        "S08 A on C, client's x-worker-instance-id: G", pinned("x-worker-instance-id", "G"), expect("GG", "CC", "CC"),
    ),
    Scenario(
        "S08 the same, x-dynamo-worker-instance-id", pinned("X-Dynamo-Worker-Instance-Id", "G"),
        expect("GG", "CC", "CC"),
    ),
    Scenario("S09 client's nvext.backend_instance_id: G", _pinned_in_the_body, expect("G", "C", "C")),
    Scenario("S10 key of a data: URL", burst((DATA,)), expect("C", "C", "C"), before=(("C", (DATA,), ()),)),
    Scenario(
        "S11 key of the raw / normalised URL on C", _raw_and_normal, expect("G/C", "G/C", "G/C"),
        before=(("C", (RAW,), ()),),
    ),
    Scenario("S12 2nd while the 1st generates", _after_the_first_token, expect("GC", "GC", "GG")),
)  # fmt: skip

WITH_H = (
    Scenario(
        "S02b A on G and H, held 4x A", burst((A,), (A,), (A,), (A,)), _spread,
        before=(("C", (), (A,)), ("G", (A,), ()), ("H", (A,), ())),
    ),
    Scenario("S03b A on G, held 4x A, 4x misses", _hits_then_misses, _hits_count, before=(("H", (), (A,)),)),
    Scenario(
        "S05b A on G and C, held 2x A", burst((A,), (A,)), _drawn_from("GC", "GG"), before=(("C", (A,), ()),),
    ),
)  # fmt: skip
