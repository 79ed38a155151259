"""Random histories against the reference's rule: requests that arrive and finish, caches that change.

The rule is written down naively, with plain loops over plain sets, in the unit tests of parity. Here it is held against
a real frontend first, which shows that the model is right, then against ours with the same eyes, and against our pool
in memory in thousands of histories, where workers come and go as well.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from tests.core.test_parity import HISTORY, Reference, play_history

from fullhit_publisher.dynamo_keys import url_key

from .fleet import AT_ONCE, Door, Fleet, Held
from .stand import CaseFailed

__all__ = ["HISTORIES", "STEPS", "play_in_memory", "play_on_the_wire"]

STEPS = 250
HISTORIES = 2_000
PICTURES = tuple(f"https://pictures.invalid/history/{number}.png" for number in range(3))


def play_in_memory() -> str:
    """Raises what the first history raises that does not fit, shrunk by hypothesis."""
    settings(max_examples=HISTORIES, deadline=None, database=None)(given(*HISTORY)(play_history))()
    return "all fit"


async def play_on_the_wire(fleet: Fleet, door: Door, seed: int = 5) -> str:
    """One history at a door with ratio 1; the same for each door as long as they choose alike. Returns how many of its
    choices fit the rule."""
    rng = random.Random(seed)
    model = Reference(1)
    for letter in fleet.workers:
        if letter != "P":
            model.device[letter] = "cpu" if letter == "C" else "cuda"
            model.keys[letter] = set()
    held = Held()
    open_requests: list[tuple[str, int, bool, int]] = []
    choices = fitting = 0

    async def arrive(pictures: list[str]) -> None:
        nonlocal choices, fitting
        keys = {picture.encode() for picture in pictures}
        allowed, hit = model.allowed(keys, set())
        letter = await fleet.send(door, pictures, held)
        choices += 1
        fitting += letter in allowed
        if letter not in model.device:
            raise CaseFailed(f"{door.name}: a request went {letter}")
        model.load[letter] += not hit
        number = fleet.workers[letter].total - 1
        open_requests.append((letter, number, not hit, len(held.tasks) - 1))

    async def finish() -> None:
        letter, number, booked, place = open_requests.pop(rng.randrange(len(open_requests)))
        await fleet.workers[letter].say("finish", number)
        await held.tasks[place]
        model.load[letter] -= booked

    async def change() -> None:
        letter = rng.choice(list(model.device))
        if letter in model.allowed({b"nobody's"}, set())[0]:
            return  # then nobody could tell when the door has heard of it
        picture, mark = rng.choice(PICTURES), fleet.fresh()
        keys = model.keys[letter]
        gone = picture.encode() in keys
        keys ^= {picture.encode()}
        added = [mark] if gone else [picture, mark]
        await fleet.workers[letter].say("publish", [*map(url_key, added)], [url_key(picture)] if gone else [])
        for _ in range(2_000):
            probe = Held()
            way = await fleet.send(door, [mark], probe, wish=AT_ONCE)
            await probe.tasks[0]
            if way == letter:
                return
        raise CaseFailed(f"{door.name} never learnt what {letter} published")

    for _ in range(STEPS):
        kind = rng.choices((arrive, finish, change), (6, 5 if open_requests else 0, 2))[0]
        if kind is arrive:
            await arrive(rng.sample(PICTURES, rng.choice((1, 1, 1, 2))))
        elif kind is finish:
            await finish()
        else:
            await change()
    await fleet.finish(held)
    for letter, worker in fleet.workers.items():
        if letter in model.keys:
            await worker.say("publish", [], [*map(url_key, PICTURES)])
    await fleet.told(*fleet.audience)
    return f"all {choices} fit" if fitting == choices else f"{fitting} of {choices}"
