"""Everything at once: encoders die and return, callers leave, registrations come early and late. No slot is lost."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_no_request_and_no_slot_is_lost_while_encoders_die_and_callers_leave(open_house: Any, seed: int) -> None:
    house = await open_house(max_lost=50)
    rng = random.Random(seed)
    encoders = [await house.encoder(max_inflight=5) for _ in range(3)]
    outcomes: dict[str, int] = {}
    over = asyncio.Event()

    async def request(number: int) -> None:
        req_id = f"{seed}-{number}_local_part_0"
        alias = rng.choice(["", "/v0", "/v7"])
        body = house.body(req_id, items=[f"http://h.invalid/{number % 20}"])
        registration = house.registration(req_id, 40000 + number)
        early, leaves = rng.random() < 0.3, rng.random() < 0.15
        if early:
            assert (await house.call(f"{alias}/scheduler_receive_url", registration)).status == 200
        call = await house.start(f"{alias}/encode", body)
        if leaves:
            await asyncio.sleep(rng.random() * 0.05)
            call.leave()
        if not early:
            assert (await house.call(f"{alias}/scheduler_receive_url", registration)).status == 200
        if not leaves:
            async with asyncio.timeout(60):
                outcomes[req_id] = (await call.answer()).status

    async def reaper() -> None:
        while not over.is_set():
            place = rng.randrange(len(encoders))
            port = encoders[place].port
            await encoders[place].kill()
            await asyncio.sleep(0.02)
            encoders[place] = type(encoders[place])("zmq_to_scheduler")
            await encoders[place].start(port)
            house.encoders.append(encoders[place])
            await asyncio.sleep(0.05)

    reaping = asyncio.create_task(reaper())
    for start in range(0, 300, 30):
        await asyncio.gather(*(request(number) for number in range(start, start + 30)))
    over.set()
    await reaping
    assert set(outcomes.values()) == {200}
    pushed = {req_id for encoder in house.encoders for req_id, _ in encoder.pushed}
    assert set(outcomes) <= pushed
    await house.at_rest()
    assert "choosing" not in repr(house.gateway.table)
    assert "sent" not in repr(house.gateway.table)
    assert house.gateway._encode._lives == {}
    assert house.gateway._encode.open_calls == 0


async def test_parts_of_several_fail_visibly_or_succeed_but_never_twice_at_one_encoder(house: Any) -> None:
    """With several parts a copy that may be under way is not repeated: each encoder sees a part at most once."""
    encoders = [await house.encoder() for _ in range(3)]
    rng = random.Random(5)

    async def request(number: int) -> int:
        req_id = f"r{number}_local_part_0"
        call = await house.start("/encode", house.body(req_id, num_parts=2))
        await house.call("/scheduler_receive_url", house.registration(req_id, 40000 + number))
        async with asyncio.timeout(60):
            return int((await call.answer()).status)

    async def reaper() -> None:
        for place in (0, 1):
            await asyncio.sleep(rng.random() * 0.05)
            await encoders[place].kill()

    results = (await asyncio.gather(reaper(), *(request(number) for number in range(60))))[1:]
    assert set(results) <= {200, 502}
    assert 200 in results
    for encoder in encoders:
        ids = [seen.json["req_id"] for seen in encoder.calls("/encode")]
        assert len(ids) == len(set(ids))
    await house.at_rest()


async def test_a_router_listed_as_its_own_encoder_takes_another_one_instead_of_4096_connections(house: Any) -> None:
    """Its /health answers like an encoder's, so it was ready, and one request went round until connections ran out."""
    own = f"http://127.0.0.1:{house.port}"
    house.fleet.add(own)
    call = asyncio.create_task(house.call("/encode", house.body(embedding_port=1)))
    async with asyncio.timeout(60):
        while not house.telemetry.counters["rejected:loop"]:  # noqa: ASYNC110 - a counter is all there is to see
            await asyncio.sleep(0.01)
    encoder = await house.encoder("zmq_to_tokenizer")
    assert (await call).status == 200
    assert len(encoder.calls("/encode")) == 1
    assert len(house.listener.connections) < 16
    house.pool.remove_worker(own)
    await house.at_rest()
