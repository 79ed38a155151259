"""Reports of others about encoders behind a router, one test each, and recorded calls of a real language server.

The numbers are those of our list of cases (encoder hop). Not here: e3, e6, e7 and e8 are about probes and eviction
and live with the fleet; e22 asks for no behaviour.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

RECORDED = json.loads((Path(__file__).parent / "data" / "sglang_0_5_23.json").read_text())["exchanges"]
BROKEN = "data:image/png;base64,AAAA"  # As recorded.


def picture(seed: int) -> str:
    out = io.BytesIO()
    Image.frombytes("RGB", (64, 64), random.Random(seed).randbytes(64 * 64 * 3)).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


@pytest.mark.parametrize("name", sorted(RECORDED))
async def test_recorded_calls_of_a_real_language_server_get_their_recorded_answers(name: str, house: Any) -> None:
    backend = name.partition(":")[0]
    encoders = [await house.encoder(backend) for _ in range(2)]
    calls = []
    pictures = {}
    for exchange in sorted(RECORDED[name], key=lambda one: one["t_ms"]):
        body = dict(exchange["body"])
        if "mm_items" in body:
            items = [
                BROKEN if item == "broken" else picture(len(pictures) + n) for n, item in enumerate(body["mm_items"])
            ]
            pictures.update(dict.fromkeys(items))
            body["mm_items"] = items
        raw = json.dumps(body).encode()
        calls.append(
            (
                exchange,
                raw,
                await house.start(exchange["path"], raw, exchange.get("method", "POST"), **exchange["headers"]),
            )
        )
    for exchange, raw, call in calls:
        async with asyncio.timeout(20):
            reply = await call.answer()
        if b"broken" in json.dumps(exchange["body"]).encode():
            # What ended the recorded server is taken away; where it survives, it hears of it.
            assert reply.status == (200 if backend == "zmq_to_scheduler" else 400)
            continue
        assert (reply.status, reply.body.decode()) == (exchange["status"], exchange["reply"])
        seen = [s for e in encoders for s in e.calls("/" + exchange["path"].rpartition("/")[2])]
        assert raw in [s.body for s in seen] or "receive_url" in exchange["path"]
    await house.at_rest()
    for encoder in encoders:
        for seen in encoder.seen:
            if seen.path == "/scheduler_receive_meta_data":
                continue  # The router's own question.
            assert seen.headers["user-agent"] == "Python/3.11 aiohttp/3.14.5"
            assert seen.path in ("/encode", "/scheduler_receive_url")
    parts = {exchange["body"]["req_id"] for exchange, _, _ in calls}
    if "bad_image" not in name or backend == "zmq_to_scheduler":
        assert {req_id for e in encoders for req_id, _ in e.pushed} == parts


async def test_case_e1_registrations_pass_200_queued_pictures_and_each_encoder_gets_only_its_cap(house: Any) -> None:
    encoders = [await house.encoder(max_inflight=4) for _ in range(2)]
    for encoder in encoders:
        encoder.gate.clear()
    bodies = [house.body(items=[f"http://h.invalid/{n}?" + "x" * 50_000]) for n in range(200)]
    calls = [await house.start("/encode", body) for body in bodies]
    await house.until(lambda: house.gateway.status()["queued"] == 192)
    for body in bodies:
        reply = await house.call("/scheduler_receive_url", house.registration(body["req_id"]))
        assert (reply.status, reply.body) == (200, b"null")
    assert [len(e.calls("/encode")) for e in encoders] == [4, 4]
    for encoder in encoders:
        encoder.gate.set()
    for call in calls:
        async with asyncio.timeout(30):
            assert (await call.answer()).status == 200
    assert sum(len(e.pushed) for e in encoders) == 200, "no request was lost"
    await house.at_rest()


async def test_case_e2_a_stuck_encoder_shows_by_the_age_of_its_oldest_call_and_ends_in_an_error(house: Any) -> None:
    from dataclasses import replace

    encoder = await house.encoder()
    encoder.gate.clear()
    now = [100.0]
    house.gateway._encode.in_flight._clock = lambda: now[0]
    route = house.gateway._encode
    route.timeouts = replace(route.timeouts, first_byte=0.5)
    first = await house.start("/encode", house.body())
    await encoder.until(lambda: len(encoder.seen) == 1)
    now[0] += 290.0
    second = await house.start("/encode", house.body())
    await encoder.until(lambda: len(encoder.seen) == 2)
    assert house.gateway.oldest_inflight() == {encoder.url: 290.0}
    for call in (first, second):
        reply = await call.answer()
        assert reply.status == 504
        assert encoder.url in reply.json["message"]
    await house.at_rest()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1", "localhost"])
async def test_case_e4_a_push_address_that_no_other_machine_can_dial_is_warned_of_and_left_alone(
    open_house: Any, host: str
) -> None:
    house = await open_house(queue_timeout=0.3, connect_timeout=0.1)
    house.fleet.add("http://encoder.invalid:30000")
    body = house.body(prefill_host=host)
    for _ in range(2):
        await house.call("/encode", body)
    warnings = [fields for kind, fields in house.telemetry.events if kind == "prefill_host_unreachable"]
    assert len(warnings) == 1, "once per language server"
    assert warnings[0]["prefill_host"] == host
    assert warnings[0]["worker"] == "http://encoder.invalid:30000"
    local = await open_house()
    encoder = await local.encoder("zmq_to_tokenizer")
    await local.call("/encode", local.body(prefill_host=host, embedding_port=1))
    assert encoder.seen[0].json["prefill_host"] == host
    assert "prefill_host_unreachable" not in local.telemetry.kinds()


async def test_case_e5_health_is_answered_while_every_encoder_hangs(house: Any) -> None:
    encoder = await house.encoder()
    encoder.gate.clear()
    encoder.on("/health", lambda *_: asyncio.Event().wait(), always=True)
    await house.start("/encode", house.body("r"))
    await encoder.until(lambda: len(encoder.seen) == 1)
    for path in ("/health", "/v0/health", "/health_generate"):
        assert (await house.call(path, method="GET")).status == 200
    assert encoder.calls("/health") == []
    await house.call("/scheduler_receive_url", house.registration("r"))
    encoder.gate.set()
    await house.at_rest()


async def test_case_e9_the_first_terminal_event_of_a_part_drops_everything_about_it(house: Any, lab: Any) -> None:
    encoder = await house.encoder()
    other = await house.start("/encode", house.body("other"))
    await encoder.until(lambda: len(encoder.seen) == 1)
    encoder.on("/encode", lab.says(400, {"status": "error", "message": "bad media", "req_id": "r"}))
    for port in (1, 2):
        await house.call("/scheduler_receive_url", house.registration("r", port, 3))
    assert (await house.call("/encode", house.body("r"))).status == 400
    await house.until(lambda: house.gateway.status()["deliveries"] == 0)
    part = next(part for part in house.gateway.table.parts() if part.req_id == "r")
    assert (str(part.state), part.registrations) == ("failed", {})
    await house.call("/scheduler_receive_url", house.registration("other"))
    assert (await other.answer()).status == 200
    await house.at_rest()


async def test_case_e10_registrations_are_answered_although_no_encoder_can_be_reached(house: Any) -> None:
    dead = await house.encoder()
    await dead.kill()
    call = await house.start("/encode", house.body("r"))
    await house.until(lambda: house.telemetry.counters["retries:connect"] >= 1)
    for port in range(1, 5):
        reply = await house.call("/scheduler_receive_url", house.registration("r", port, 4))
        assert (reply.status, reply.body) == (200, b"null")
    call.leave()
    await house.at_rest()


async def test_case_e11_errors_of_send_pass_at_once_and_a_caller_who_leaves_does_not_swallow_it(
    house: Any, lab: Any
) -> None:
    encoder = await house.encoder("mooncake")
    assert (await house.call("/encode", house.body("r"))).status == 200
    send = {"req_id": "r", "prefill_host": "127.0.0.1", "embedding_port": 1, "receive_count": 3}
    encoder.on("/send", lab.says(500, {"status": "error", "message": "transfer failed", "req_id": "r"}))
    reply = await house.call("/send", send)
    assert (reply.status, reply.json["message"]) == (500, "transfer failed")
    assert len(encoder.calls("/send")) == 1, "a transfer may count twice: never repeated"
    encoder.on("/send", lab.resets)
    fresh = await house.call("/send", send | {"embedding_port": 2})
    assert fresh.status in (200, 502)

    release = asyncio.Event()

    async def slow(one: Any, seen: Any, writer: Any) -> None:
        await release.wait()
        await one._proper(seen, writer)

    encoder.on("/send", slow, always=True)
    before = len(encoder.calls("/send"))
    call = await house.start("/send", send | {"embedding_port": 3})
    await encoder.until(lambda: len(encoder.calls("/send")) == before + 1)
    call.leave()
    release.set()
    await encoder.until(lambda: ("r", "127.0.0.1:3") in encoder.pushed)
    await house.at_rest()


async def test_case_e13_every_rank_is_passed_on_by_itself_with_its_receive_count(house: Any) -> None:
    encoder = await house.encoder()
    call = await house.start("/encode", house.body("r"))
    bodies = [house.registration("r", port, 3) | {"extra": port} for port in (1, 2, 3)]
    for body in bodies:
        await house.call("/scheduler_receive_url", body)
    assert (await call.answer()).status == 200
    assert sorted((s.json for s in encoder.calls("/scheduler_receive_url")), key=lambda b: b["extra"]) == bodies
    mooncake = await house.encoder("mooncake", add=False)
    house.pool.set_draining(encoder.url, True)
    house.fleet.add(mooncake.url)
    assert (await house.call("/encode", house.body("m"))).status == 200
    sends = [{"req_id": "m", "prefill_host": "h", "embedding_port": p, "receive_count": 2} for p in (1, 2)]
    for send in sends:
        assert (await house.call("/send", send)).status == 200
    assert [seen.json for seen in mooncake.calls("/send")] == sends


async def test_case_e14_a_full_encoder_is_passed_over_and_a_409_is_never_tried_again(house: Any, lab: Any) -> None:
    full = await house.encoder("zmq_to_tokenizer")
    free = await house.encoder("zmq_to_tokenizer", max_inflight=2)
    full.on("/encode", lab.says(503, {"status": "error", "message": "at capacity", "req_id": "r"}), always=True)
    for _ in range(6):
        assert (await house.call("/encode", house.body(embedding_port=1))).status == 200
    free.gate.clear()
    calls = [await house.start("/encode", house.body(embedding_port=1)) for _ in range(4)]
    already = len(free.calls("/encode"))
    await house.until(lambda: house.gateway.status()["queued"] == 2)
    assert len(free.calls("/encode")) <= already + 2
    free.gate.set()
    for call in calls:
        assert (await call.answer()).status == 200
    house.pool.remove_worker(full.url)
    free.on("/encode", lab.says(409, {"status": "error", "message": "duplicate", "req_id": "r"}))
    count = len(free.calls("/encode"))
    assert (await house.call("/encode", house.body(embedding_port=1))).status == 409
    assert len(free.calls("/encode")) == count + 1
    assert "duplicate_at_encoder" in house.telemetry.kinds()
    await house.at_rest()


async def test_case_e15_encoders_come_and_go_by_registration_also_repeatedly(house: Any) -> None:
    first, second = (
        await house.encoder("zmq_to_tokenizer", add=False),
        await house.encoder("zmq_to_tokenizer", add=False),
    )
    for encoder in (first, second, first):
        assert (await house.call("/register_encoder_url", {"url": encoder.url})).body == b"OK"
    assert (await house.call("/list_encoder_urls", method="GET")).json == {"encoder_urls": [first.url, second.url]}
    await house.call("/unregister_encoder_url", {"url": first.url}, method="DELETE")
    for _ in range(3):
        reply = await house.call("/encode", house.body(embedding_port=1))
        assert reply.headers["x-fullhit-worker"] == second.url


async def test_case_e16_all_generations_of_the_wire_are_served_side_by_side(house: Any) -> None:
    encoder = await house.encoder("mooncake")
    oldest = house.body("rid", modality=..., encoder_url=...)
    middle = house.body("rid_local_part_0")
    newest = house.body("rid2_local_part_0")
    replies = [await house.call("/encode", body) for body in (oldest, middle, newest)]
    assert [reply.status for reply in replies] == [200, 200, 200]
    sizes = await house.call("/scheduler_receive_meta_data", {"req_id": "rid2_local_part_0", "part_idx": 0})
    assert sizes.json["embedding_len"] == 4
    for req_id in ("rid", "rid_local_part_0", "rid2_local_part_0"):
        assert (
            await house.call("/send", {"req_id": req_id, "prefill_host": "127.0.0.1", "embedding_port": 1})
        ).status == 200
    assert len(encoder.pushed) == 3


async def test_case_e18_parts_keep_their_numbers_and_their_order(house: Any) -> None:
    encoders = [await house.encoder("zmq_to_tokenizer") for _ in range(3)]
    bodies = [
        house.body(
            f"r_local_part_{n}",
            num_parts=4,
            part_idx=n,
            modality="IMAGE" if n < 3 else "VIDEO",
            embedding_port=1,
            items=[f"http://h.invalid/{n}-{k}" for k in range(3)],
        )
        for n in range(4)
    ]
    calls = [await house.start(f"/v{n}/encode", body) for n, body in enumerate(bodies)]
    for call in calls:
        assert (await call.answer()).status == 200
    seen = {s.json["part_idx"]: s.json for e in encoders for s in e.calls("/encode")}
    assert [seen[n] for n in range(4)] == bodies


async def test_case_e20_the_gateway_balances_by_itself_whatever_split_the_language_server_makes(house: Any) -> None:
    encoders = [await house.encoder() for _ in range(4)]
    for encoder in encoders:
        encoder.gate.clear()
    bodies = [house.body() for _ in range(20)]
    calls = [await house.start("/v0/encode", body) for body in bodies]
    await house.until(lambda: sum(len(e.calls("/encode")) for e in encoders) == 20)
    assert [len(e.calls("/encode")) for e in encoders] == [5, 5, 5, 5]
    for body in bodies:
        await house.call("/v0/scheduler_receive_url", house.registration(body["req_id"]))
    for encoder in encoders:
        encoder.gate.set()
    for call in calls:
        assert (await call.answer()).status == 200
    await house.at_rest()


async def test_case_e21_a_busy_encoder_is_not_given_more_while_another_one_is_idle(house: Any) -> None:
    busy = await house.encoder("zmq_to_tokenizer")
    busy.gate.clear()
    held = await house.start("/encode", house.body(embedding_port=1))
    await busy.until(lambda: len(busy.seen) == 1)
    idle = await house.encoder("zmq_to_tokenizer")
    for _ in range(5):
        reply = await house.call("/encode", house.body(embedding_port=1))
        assert reply.headers["x-fullhit-worker"] == idle.url
    busy.gate.set()
    assert (await held.answer()).status == 200
    await house.at_rest()
