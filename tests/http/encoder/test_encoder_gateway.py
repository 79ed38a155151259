"""The gateway on real sockets: every generation and backend, failover, waiting, and what bad callers are told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from fullhit_publisher.keys import item_key


async def encode_and_register(house: Any, body: dict[str, Any], port: int = 40001, **where: str) -> Any:
    alias = where.get("alias", "")
    call = await house.start(f"{alias}/encode", body)
    reply = await house.call(f"{alias}/scheduler_receive_url", house.registration(body["req_id"], port))
    assert (reply.status, reply.body) == (200, b"null")
    async with asyncio.timeout(20):
        return await call.answer()


# --- the three backends and generations


async def test_zmq_to_scheduler_an_encode_and_its_registration_meet_at_one_encoder(house: Any) -> None:
    encoders = [await house.encoder() for _ in range(3)]
    for _ in range(6):
        body = house.body()
        reply = await encode_and_register(house, body)
        assert (reply.status, reply.body) == (200, b"null")
        assert reply.headers["x-fullhit-reason"] == "miss"
        worker = next(e for e in encoders if e.url == reply.headers["x-fullhit-worker"])
        assert (body["req_id"], "127.0.0.1:40001") in worker.pushed
    assert sum(len(e.calls("/encode")) for e in encoders) == 6
    assert sum(len(e.calls("/scheduler_receive_url")) for e in encoders) == 6
    await house.at_rest()
    assert house.gateway.status()["deliveries"] == 0


async def test_zmq_to_scheduler_a_registration_before_its_encode_is_acknowledged_and_replayed(house: Any) -> None:
    encoder = await house.encoder(dp=True)
    body = house.body()
    first = await house.call("/scheduler_receive_url", house.registration(body["req_id"], 1, 2))
    second = await house.call("/scheduler_receive_url", house.registration(body["req_id"], 2, 2))
    assert (first.status, first.body, second.status) == (200, b"null", 200)
    assert encoder.seen == [], "nothing reaches an encoder before its /encode"
    reply = await house.call("/encode", body)
    assert reply.status == 200
    assert encoder.pushed == [(body["req_id"], "127.0.0.1:1"), (body["req_id"], "127.0.0.1:2")]
    assert encoder.seen[0].path == "/encode"
    await house.at_rest()


async def test_zmq_to_scheduler_a_registration_without_any_encode_is_acknowledged_and_forgotten(house: Any) -> None:
    encoder = await house.encoder()
    reply = await house.call("/scheduler_receive_url", house.registration("nobody"))
    assert (reply.status, reply.body) == (200, b"null")
    assert encoder.seen == []
    assert house.gateway.status()["parts"] == 1
    house.gateway.table._clock = lambda: 1e12
    house.gateway.table.expire()
    assert house.gateway.status()["parts"] == 0


async def test_zmq_to_tokenizer_the_embedding_port_is_passed_on(house: Any) -> None:
    encoder = await house.encoder("zmq_to_tokenizer")
    body = house.body(embedding_port=37801)
    reply = await house.call("/encode", body)
    assert (reply.status, reply.body) == (200, b"null")
    assert encoder.pushed == [(body["req_id"], "127.0.0.1:37801")]
    await house.at_rest()


async def test_mooncake_of_the_newest_generation_asks_for_sizes_and_sends_per_rank(house: Any) -> None:
    encoders = [await house.encoder("mooncake") for _ in range(3)]
    for encoder in encoders:
        encoder.gate.clear()
    body = house.body()
    req_id = body["req_id"]
    early = await house.start("/scheduler_receive_meta_data", {"req_id": req_id, "part_idx": 0})
    call = await house.start("/encode", body)
    late = await house.start("/scheduler_receive_meta_data", {"req_id": req_id, "part_idx": 0})
    await house.until(lambda: any(len(e.calls("/scheduler_receive_meta_data")) == 2 for e in encoders))
    for encoder in encoders:
        encoder.gate.set()
    encoded = await call.answer()
    assert encoded.status == 200
    assert encoded.json == {k: v for k, v in body.items() if k != "mm_items"} | {
        "embedding_size": 4096,
        "embedding_len": 4,
        "embedding_dim": 512,
    }
    sizes = [(await one.answer()).json for one in (early, late)]
    assert sizes[0] == sizes[1]
    assert sizes[0]["embedding_size"] == 4096
    for rank in range(2):
        send = sizes[0] | {
            "prefill_host": "127.0.0.1",
            "embedding_port": 5000 + rank,
            "session_id": "s",
            "buffer_address": 140_000_000_000_000 + rank,
            "receive_count": 2,
        }
        reply = await house.call("/send", send)
        assert (reply.status, reply.body) == (200, b"null")
        assert reply.headers["x-fullhit-worker"] == encoded.headers["x-fullhit-worker"]
    worker = next(e for e in encoders if e.url == encoded.headers["x-fullhit-worker"])
    assert [json.loads(s.body)["buffer_address"] for s in worker.calls("/send")] == [
        140_000_000_000_000,
        140_000_000_000_001,
    ]
    assert len(worker.pushed) == 2
    await house.at_rest()
    assert "done=1" in repr(house.gateway.table)


async def test_mooncake_of_the_middle_generation_posts_an_encode_per_rank_and_uses_one_slot(house: Any) -> None:
    encoders = [await house.encoder("mooncake") for _ in range(3)]
    for encoder in encoders:
        encoder.gate.clear()
    body = house.body()
    calls = [await house.start("/encode", body) for _ in range(4)]
    await house.until(lambda: sum(len(e.calls("/encode")) for e in encoders) == 4)
    used = [e for e in encoders if e.calls("/encode")]
    assert len(used) == 1, "all copies go to the same encoder"
    assert sum(worker.inflight for worker in house.pool.workers()) == 1
    used[0].gate.set()
    for call in calls:
        assert (await call.answer()).json["embedding_size"] == 4096
    assert sum(worker.inflight for worker in house.pool.workers()) == 0
    late = await house.call("/encode", body)
    assert late.headers["x-fullhit-worker"] == used[0].url
    reply = await house.call("/send", {"req_id": body["req_id"], "prefill_host": "127.0.0.1", "embedding_port": 1})
    assert reply.status == 200
    await house.at_rest()


async def test_the_first_generation_is_told_apart_by_alias_and_keeps_its_fields(house: Any) -> None:
    encoders = [await house.encoder("mooncake") for _ in range(2)]
    for encoder in encoders:
        encoder.gate.clear()
    bodies = [
        house.body("rid", modality=..., num_parts=2, part_idx=idx, encoder_idx=idx, encoder_url=...) for idx in (0, 1)
    ]
    calls = [await house.start(f"/v{idx}/encode", bodies[idx]) for idx in (0, 1)]
    await house.until(lambda: all(len(e.calls("/encode")) == 1 for e in encoders))
    for encoder in encoders:
        encoder.gate.set()
    replies = [await call.answer() for call in calls]
    assert [reply.json["encoder_idx"] for reply in replies] == [0, 1]
    for idx in (1, 0):
        send = replies[idx].json | {"session_id": "s", "buffer_address": 7, "embedding_port": 9}
        reply = await house.call(f"/v{idx}/send", send)
        assert reply.headers["x-fullhit-worker"] == replies[idx].headers["x-fullhit-worker"]
    await house.at_rest()


async def test_the_same_request_id_from_two_language_servers_is_served_twice(house: Any) -> None:
    encoders = [await house.encoder() for _ in range(2)]
    bodies = [house.body("mine_local_part_0", prefill_host=host) for host in ("10.0.0.1", "10.0.0.2")]
    calls = [await house.start("/encode", body) for body in bodies]
    await house.until(lambda: all(len(e.calls("/encode")) == 1 for e in encoders))
    for host in ("10.0.0.2", "10.0.0.1"):
        reply = await house.call("/scheduler_receive_url", house.registration("mine_local_part_0", 5, host=host))
        assert reply.status == 200
    for call, body in zip(calls, bodies, strict=True):
        reply = await call.answer()
        worker = next(e for e in encoders if e.url == reply.headers["x-fullhit-worker"])
        assert worker.pushed == [("mine_local_part_0", body["prefill_host"] + ":5")]
    await house.at_rest()


# --- what passes through


async def test_bodies_and_headers_pass_byte_for_byte_and_the_prefix_is_stripped(house: Any) -> None:
    encoder = await house.encoder("zmq_to_tokenizer")
    raw = (
        b'{ "req_id" : "r1",\n "mm_items":["http:\\/\\/h\\/a"], "unknown":[1e5,"\\u00e4"], '
        b'"num_parts":1,"embedding_port":1, "prefill_host":"127.0.0.1" }'
    )
    reply = await house.call("/v3/encode?trace=1", raw, **{"X-Trace": "abc", "Connection": "keep-alive", "TE": "x"})
    assert reply.status == 200
    seen = encoder.seen[0]
    assert (seen.path, seen.body) == ("/encode", raw)
    assert seen.headers["x-trace"] == "abc"
    assert seen.headers["host"] == f"127.0.0.1:{encoder.port}"
    assert "te" not in seen.headers
    assert seen.headers["x-request-id"] == reply.headers["x-request-id"]
    reply = await house.call("/encode", house.body(embedding_port=1), **{"x-request-id": "given-1"})
    assert reply.headers["x-request-id"] == "given-1"
    assert encoder.seen[1].headers["x-request-id"] == "given-1"


@pytest.mark.parametrize("status", [400, 409, 500, 502, 504])
async def test_errors_of_the_encoder_pass_unchanged_and_are_never_tried_elsewhere(
    house: Any, lab: Any, status: int
) -> None:
    encoders = [await house.encoder("zmq_to_tokenizer") for _ in range(2)]
    error = {"status": "error", "message": "as the encoder said it", "req_id": "r"}
    for encoder in encoders:
        encoder.on("/encode", lab.says(status, error), always=True)
    reply = await house.call("/encode", house.body(embedding_port=1))
    assert (reply.status, reply.json) == (status, error)
    assert sum(len(e.calls("/encode")) for e in encoders) == 1
    failures = sum(house.fleet.failures.values())
    assert failures == (1 if status >= 500 else 0), "a client's fault counts against nobody"
    assert ("duplicate_at_encoder" in house.telemetry.kinds()) == (status == 409)
    await house.at_rest()


async def test_health_is_answered_from_memory_under_every_alias(house: Any) -> None:
    encoder = await house.encoder()
    for path in ("/health", "/health_generate", "/v0/health", "/v15/health_generate", "/v0//health"):
        reply = await house.call(path, method="GET")
        assert (reply.status, reply.body) == (200, b"")
    assert encoder.seen == []
    for number in (16, 17):
        reply = await house.call(f"/v{number}/health", method="GET")
        assert reply.status == 404
        assert f"no alias /v{number}" in reply.json["message"]


async def test_the_registry_speaks_like_sglang(house: Any) -> None:
    encoder = await house.encoder(add=False)
    assert (await house.call("/list_encoder_urls", method="GET")).json == {"encoder_urls": []}
    for _ in range(2):
        reply = await house.call("/register_encoder_url", {"url": encoder.url + "/"})
        assert (reply.status, reply.body) == (200, b"OK")
    assert (await house.call("/v2/list_encoder_urls", method="GET")).json == {"encoder_urls": [encoder.url]}
    reply = await encode_and_register(house, house.body())
    assert reply.status == 200
    for _ in range(2):
        assert (await house.call("/unregister_encoder_url", {"url": encoder.url}, method="DELETE")).status == 200
    assert (await house.call("/list_encoder_urls", method="GET")).json == {"encoder_urls": []}
    for bad in (b"", b"nope", b"[]", {"url": 5}, {"url": "ftp://x"}, {"url": "http://u:p@h:1"}):
        reply = await house.call("/register_encoder_url", bad)
        assert reply.status == 400
        assert reply.json["status"] == "error"


async def test_registration_of_encoders_can_be_switched_off(open_house: Any) -> None:
    house = await open_house(registration=False)
    assert (await house.call("/register_encoder_url", {"url": "http://127.0.0.1:1"})).status == 403


# --- registrations are never slow


async def test_registrations_answer_while_200_large_encodes_are_in_flight(house: Any) -> None:
    encoders = [await house.encoder() for _ in range(2)]
    for encoder in encoders:
        encoder.gate.clear()
    picture = b"x" * (1 << 20)
    bodies = [house.body(items=[f"http://h.invalid/{n}?PICTURE"]) for n in range(200)]
    raw = [json.dumps(body).encode().replace(b"PICTURE", picture) for body in bodies]
    calls = [asyncio.create_task(house.call("/encode", one)) for one in raw]
    # Half of the registrations overtake the bodies, half come while all encodes are held at the encoders.
    order: list[str] = []
    for body in bodies[:100]:
        assert (await house.call("/scheduler_receive_url", house.registration(body["req_id"]))).status == 200
        order.append("registration")
    await house.until(lambda: sum(len(e.calls("/encode")) for e in encoders) == 200)
    for body in bodies[100:]:
        assert (await house.call("/scheduler_receive_url", house.registration(body["req_id"]))).status == 200
        order.append("registration")
    assert not any(call.done() for call in calls), "all registrations were answered while no encode was"
    for encoder in encoders:
        encoder.gate.set()
    replies = await asyncio.gather(*calls)
    assert {reply.status for reply in replies} == {200}
    assert sum(len(e.pushed) for e in encoders) == 200
    await house.at_rest()


async def test_a_registration_the_encoder_does_not_take_at_once_is_offered_again(house: Any, lab: Any) -> None:
    encoder = await house.encoder()
    unknown = {"status": "error", "message": "Unknown req_id"}
    encoder.on("/scheduler_receive_url", lab.says(404, unknown), lab.resets, lab.says(503, unknown))
    reply = await encode_and_register(house, house.body())
    assert reply.status == 200
    assert len(encoder.calls("/scheduler_receive_url")) == 4
    assert house.telemetry.counters["registrations:delivery_retried"] == 3
    assert house.telemetry.counters["registrations:delivered"] == 1


async def test_a_registration_that_can_never_be_delivered_is_logged(open_house: Any, lab: Any) -> None:
    house = await open_house(delivery_tries=2)
    encoder = await house.encoder()
    encoder.on("/scheduler_receive_url", lab.resets, always=True)
    call = await house.start("/encode", house.body("r"))
    await house.call("/scheduler_receive_url", house.registration("r"))
    await house.until(lambda: "registration_not_delivered" in house.telemetry.kinds())
    event = dict(house.telemetry.events)["registration_not_delivered"]
    assert event["worker"] == encoder.url
    assert event["req_id"] == "r"
    call.leave()


async def test_a_registration_after_the_end_is_acknowledged_and_not_passed_on(house: Any) -> None:
    encoder = await house.encoder()
    body = house.body()
    await encode_and_register(house, body)
    before = len(encoder.seen)
    reply = await house.call("/scheduler_receive_url", house.registration(body["req_id"], 40002))
    assert (reply.status, reply.body) == (200, b"null")
    await house.at_rest()
    assert len(encoder.seen) == before


async def test_registrations_that_disagree_are_refused_and_repeated_ones_are_not(house: Any) -> None:
    encoder = await house.encoder()
    body = house.body()
    req_id = body["req_id"]
    call = await house.start("/encode", body)
    for port, count, status in ((1, 2, 200), (1, 3, 400), (1, 2, 200), (2, 2, 200)):
        reply = await house.call("/scheduler_receive_url", house.registration(req_id, port, count))
        assert reply.status == status
        if status == 400:
            assert "Inconsistent receive_count" in reply.json["message"]
            assert reply.json["req_id"] == req_id
    assert (await call.answer()).status == 200
    assert len(encoder.calls("/scheduler_receive_url")) == 2


# --- failover


@pytest.mark.parametrize("num_parts", [1, 3])
async def test_refused_connections_fail_over(house: Any, num_parts: int) -> None:
    dead, alive = await house.encoder(), await house.encoder()
    await dead.kill()
    while not house.fleet.failures:
        reply = await encode_and_register(house, house.body(num_parts=num_parts))
        assert reply.status == 200
        assert reply.headers["x-fullhit-worker"] == alive.url
    assert house.fleet.failures[(dead.url, "connect")] >= 1
    assert house.telemetry.counters["retries:connect"] >= 1
    await house.at_rest()


@pytest.mark.parametrize("num_parts", [1, 3])
async def test_503_fails_over_and_is_no_failure(house: Any, lab: Any, num_parts: int) -> None:
    full, free = await house.encoder(), await house.encoder()
    full.on("/encode", lab.says(503, {"status": "error", "message": "full"}), always=True)
    while not full.seen:
        reply = await encode_and_register(house, house.body(num_parts=num_parts))
        assert (reply.status, reply.headers["x-fullhit-worker"]) == (200, free.url)
    assert {kind for _, kind in house.fleet.failures} == {"busy"}
    await house.at_rest()


@pytest.mark.parametrize("trouble", ["resets", "garbage", "half", "html", "no_route"])
async def test_an_encoder_lost_after_the_body_was_sent_fails_over_with_one_part(
    house: Any, lab: Any, trouble: str
) -> None:
    script = {
        "resets": lab.resets,
        "garbage": lab.says_raw(b"\x00\x01 I am no HTTP server \r\n\r\n"),
        "half": lab.says_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nnul"),
        "html": lab.says(200, b"<html>It works!</html>"),
        "no_route": lab.says(404, {"detail": "Not Found"}),
    }[trouble]
    bad, good = await house.encoder(), await house.encoder()
    bad.on("/encode", script, always=True)
    while not bad.seen:
        reply = await encode_and_register(house, house.body())
        assert (reply.status, reply.headers["x-fullhit-worker"]) == (200, good.url)
    assert sum(house.fleet.failures.values()) >= 1
    await house.at_rest()


async def test_an_encoder_that_may_still_be_working_is_not_followed_by_another_with_several_parts(
    house: Any, lab: Any
) -> None:
    encoders = [await house.encoder() for _ in range(2)]

    async def resets_once_registered(encoder: Any, seen: Any, writer: Any) -> None:
        encoder.started.add(seen.json["req_id"])
        await encoder._note(lambda: None)
        await encoder.until(lambda: seen.json["req_id"] in encoder.registered)
        await lab.resets(encoder, seen, writer)

    for encoder in encoders:
        encoder.on("/encode", resets_once_registered, always=True)
    body = house.body(num_parts=3)
    reply = await encode_and_register(house, body)
    assert reply.status == 502
    assert sum(len(e.calls("/encode")) for e in encoders) == 1
    used = next(e for e in encoders if e.calls("/encode"))
    assert used.url in reply.json["message"]
    assert reply.json["req_id"] == body["req_id"]
    assert reply.json["status"] == "error"
    assert reply.headers["x-fullhit-worker"] == used.url
    await house.at_rest()


@pytest.mark.parametrize("num_parts", [1, 3])
async def test_an_encoder_killed_in_the_middle_of_a_request_fails_over_with_its_registrations(
    house: Any, lab: Any, num_parts: int
) -> None:
    first = await house.encoder()
    first.gate.clear()
    body = house.body(num_parts=num_parts)
    call = await house.start("/encode", body)
    await house.call("/scheduler_receive_url", house.registration(body["req_id"], 1, 2))
    await first.until(lambda: len(first.seen) == 2)
    second = await house.encoder()
    await first.kill()
    await second.until(lambda: len(second.calls("/scheduler_receive_url")) == 1)
    await house.call("/scheduler_receive_url", house.registration(body["req_id"], 2, 2))
    reply = await call.answer()
    assert (reply.status, reply.headers["x-fullhit-worker"]) == (200, second.url)
    assert [url for _, url in second.pushed] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert second.seen[0].path == "/encode"
    await house.at_rest()


async def test_a_request_that_kills_every_encoder_is_stopped(house: Any, lab: Any) -> None:
    encoders = [await house.encoder() for _ in range(6)]
    for encoder in encoders:
        encoder.on("/encode", lab.resets, always=True)
    reply = await house.call("/encode", house.body())
    assert reply.status == 502
    assert "3 encoders were lost over this request" in reply.json["message"]
    assert sum(len(e.calls("/encode")) for e in encoders) == 3
    await house.at_rest()


async def test_a_connection_closed_while_the_body_is_uploaded_fails_over_even_with_several_parts(house: Any) -> None:
    """The encoder reads the head and dies: with Content-Length it cannot have taken half a body for a whole one."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.transport.abort()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0, limit=1000)
    bad = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    house.fleet.add(bad)
    call = await house.start("/encode", house.body("r", items=["http://h.invalid/?" + "x" * (24 << 20)], num_parts=3))
    await house.until(lambda: house.telemetry.counters["retries:not_accepted"] >= 1)
    good = await house.encoder()
    await house.call("/scheduler_receive_url", house.registration("r"))
    reply = await call.answer()
    assert (reply.status, reply.headers["x-fullhit-worker"]) == (200, good.url)
    server.close()
    await house.at_rest()


async def test_a_stale_kept_alive_connection_does_not_cost_a_request(house: Any, lab: Any) -> None:
    encoder = await house.encoder("zmq_to_tokenizer")
    assert (await house.call("/encode", house.body(embedding_port=1))).status == 200
    encoder.on("/encode", lab.resets)
    reply = await house.call("/encode", house.body(embedding_port=1, num_parts=3))
    assert reply.status == 200
    assert house.fleet.failures == {}
    await house.at_rest()


async def test_copies_of_a_part_stay_together_when_one_of_them_fails(house: Any, lab: Any) -> None:
    first = await house.encoder("mooncake")
    first.gate.clear()
    body = house.body()
    held = await house.start("/encode", body)
    await first.until(lambda: len(first.calls("/encode")) == 1)
    await house.encoder("mooncake")
    first.on("/encode", lab.says(503))
    copy = await house.start("/encode", body)
    await first.until(lambda: len(first.calls("/encode")) == 3)
    first.gate.set()
    assert {(await one.answer()).headers["x-fullhit-worker"] for one in (held, copy)} == {first.url}
    await house.at_rest()


async def test_no_answer_in_time_is_a_504_that_names_the_encoder_and_nothing_is_tried_twice(house: Any) -> None:
    from dataclasses import replace

    encoders = [await house.encoder() for _ in range(2)]
    for encoder in encoders:
        encoder.gate.clear()
    route = house.gateway._encode
    route.timeouts = replace(route.timeouts, first_byte=0.05)
    reply = await house.call("/encode", house.body())
    assert reply.status == 504
    assert any(e.url in reply.json["message"] for e in encoders)
    assert sum(len(e.calls("/encode")) for e in encoders) == 1
    assert [kind for _, kind in house.fleet.failures] == ["timeout"]
    await house.at_rest()


async def test_max_attempts_ends_the_search(open_house: Any, lab: Any) -> None:
    house = await open_house(max_attempts=2)
    encoders = [await house.encoder() for _ in range(4)]
    for encoder in encoders:
        encoder.on("/encode", lab.says(503), always=True)
    reply = await house.call("/encode", house.body())
    assert reply.status == 503
    assert "2 attempts" in reply.json["message"]
    assert sum(len(e.calls("/encode")) for e in encoders) == 2
    await house.at_rest()


# --- waiting


async def test_a_request_waits_until_an_encoder_registers(house: Any) -> None:
    call = await house.start("/encode", house.body("r"))
    await house.call("/scheduler_receive_url", house.registration("r"))
    await house.until(lambda: house.gateway.status()["queued"] == 1)
    encoder = await house.encoder(add=False)
    assert (await house.call("/register_encoder_url", {"url": encoder.url})).status == 200
    assert (await call.answer()).status == 200
    await house.at_rest()


async def test_a_request_waits_while_the_only_encoder_restarts(house: Any) -> None:
    encoder = await house.encoder()
    port = encoder.port
    await encoder.kill()
    call = await house.start("/encode", house.body("r"))
    await house.call("/scheduler_receive_url", house.registration("r"))
    await house.until(lambda: house.telemetry.counters["retries:connect"] >= 2)
    reborn = type(encoder)("zmq_to_scheduler")
    await reborn.start(port)
    house.encoders.append(reborn)
    reply = await call.answer()
    assert (reply.status, reborn.pushed) == (200, [("r", "127.0.0.1:40001")])
    await house.at_rest()


async def test_waiting_requests_are_served_first_come_first_served(house: Any) -> None:
    encoder = await house.encoder("zmq_to_tokenizer", max_inflight=1)
    encoder.gate.clear()
    calls = []
    for n in range(5):
        calls.append(await house.start("/encode", house.body(f"r{n}", embedding_port=1)))
        await house.until(lambda n=n: house.gateway.status()["open_calls"] == n + 1)
    assert house.gateway.status()["queued"] == 4
    encoder.gate.set()
    for call in calls:
        assert (await call.answer()).status == 200
    assert [seen.json["req_id"] for seen in encoder.calls("/encode")] == [f"r{n}" for n in range(5)]
    await house.at_rest()


async def test_a_request_that_waited_too_long_gets_503_with_retry_after(open_house: Any) -> None:
    house = await open_house(queue_timeout=0.1)
    body = house.body()
    reply = await house.call("/encode", body)
    assert reply.status == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.json["status"] == "error"
    assert reply.json["req_id"] == body["req_id"]
    assert "no workers" in reply.json["message"]
    assert house.telemetry.counters["rejected:queue_timeout"] == 1
    dead = await house.encoder()
    await dead.kill()
    reply = await house.call("/encode", house.body())
    assert reply.status == 503
    assert dead.url in reply.json["message"]
    await house.at_rest()


async def test_the_queue_is_bounded_in_requests_and_bytes(open_house: Any) -> None:
    house = await open_house(queue_max=2, queue_max_bytes=100_000)
    waiting = [await house.start("/encode", house.body())]
    await house.until(lambda: house.gateway.status()["queued"] == 1)
    big = await house.call("/encode", house.body(items=["http://h.invalid/?" + "x" * 200_000]))
    assert (big.status, big.json["message"].startswith("no encoder")) == (503, True)
    waiting.append(await house.start("/encode", house.body()))
    await house.until(lambda: house.gateway.status()["queued"] == 2)
    assert (await house.call("/encode", house.body())).status == 503
    assert house.telemetry.counters["rejected:queue_full"] == 2
    for call in waiting:
        call.leave()
    await house.at_rest()


# --- callers who leave


async def test_a_caller_who_leaves_the_queue_is_forgotten(house: Any) -> None:
    call = await house.start("/encode", house.body())
    await house.until(lambda: house.gateway.status()["queued"] == 1)
    call.leave()
    await house.at_rest()
    assert house.gateway.status()["parts"] == 0
    encoder = await house.encoder()
    assert (await encode_and_register(house, house.body())).status == 200
    assert len(encoder.calls("/encode")) == 1


async def test_a_caller_who_leaves_during_an_encode_keeps_its_slot_until_the_encoder_answers(house: Any) -> None:
    encoder = await house.encoder()
    encoder.gate.clear()
    call = await house.start("/encode", house.body("r"))
    await encoder.until(lambda: len(encoder.calls("/encode")) == 1)
    call.leave()
    await house.call("/scheduler_receive_url", house.registration("r"))
    await house.until(lambda: encoder.registered.get("r") is not None)
    assert house.pool.workers()[0].inflight == 1, "there is no cancel: the encoder goes on"
    assert house.gateway.oldest_inflight().keys() == {encoder.url}
    encoder.gate.set()
    await house.at_rest()
    assert encoder.pushed == [("r", "127.0.0.1:40001")]
    assert house.fleet.failures == {}


async def test_half_a_body_is_nobodys_request(house: Any) -> None:
    encoder = await house.encoder()
    connection = await house.connect()
    raw = json.dumps(house.body()).encode()
    connection.writer.write(b"POST /encode HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw[:50])
    await connection.writer.drain()
    connection.leave()
    assert (await encode_and_register(house, house.body())).status == 200
    assert len(encoder.calls("/encode")) == 1
    await house.at_rest()


# --- follow-ups


async def test_a_question_for_sizes_follows_its_part_to_the_next_encoder(house: Any) -> None:
    first = await house.encoder("mooncake")
    first.gate.clear()
    body = house.body()
    call = await house.start("/encode", body)
    await first.until(lambda: len(first.calls("/encode")) == 1)
    asked = await house.start("/scheduler_receive_meta_data", {"req_id": body["req_id"], "part_idx": 0})
    await first.until(lambda: len(first.calls("/scheduler_receive_meta_data")) == 1)
    second = await house.encoder("mooncake")
    await first.kill()
    assert (await call.answer()).status == 200
    reply = await asked.answer()
    assert (reply.status, reply.headers["x-fullhit-worker"]) == (200, second.url)
    await house.at_rest()


async def test_a_question_about_a_failed_part_is_answered_with_its_failure(house: Any, lab: Any) -> None:
    encoder = await house.encoder("mooncake")
    encoder.on("/encode", lab.says(500, {"status": "error", "message": "out of memory", "req_id": "r"}))
    assert (await house.call("/encode", house.body("r"))).status == 500
    reply = await house.call("/scheduler_receive_meta_data", {"req_id": "r", "part_idx": 0})
    assert encoder.calls("/scheduler_receive_meta_data") == []
    assert (reply.status, reply.json["message"], reply.json["req_id"]) == (500, "out of memory", "r")
    await house.at_rest()


async def test_a_question_that_waited_for_a_refused_encode_is_answered_with_the_refusal(open_house: Any) -> None:
    house = await open_house(queue_timeout=0.1)
    asked = await house.start("/scheduler_receive_meta_data", {"req_id": "r", "part_idx": 0})
    await house.until(lambda: house.gateway.status()["held_follow_ups"] == 1)
    assert (await house.call("/encode", house.body("r"))).status == 503
    reply = await asked.answer()
    assert (reply.status, reply.json["req_id"]) == (503, "r")
    assert "no encoder could take the request" in reply.json["message"]
    await house.at_rest()


async def test_a_question_about_an_unknown_part_ends_with_504(open_house: Any) -> None:
    house = await open_house(follow_timeout=0.1, unknown_send_timeout=0.05)
    await house.encoder("mooncake")
    for path in ("/scheduler_receive_meta_data", "/send"):
        reply = await house.call(path, {"req_id": "nobody", "part_idx": 0})
        assert reply.status == 504
        assert "Unknown req_id: nobody" in reply.json["message"]
    await house.at_rest()


async def test_a_question_that_fits_two_language_servers_is_ambiguous(house: Any) -> None:
    encoders = [await house.encoder("mooncake") for _ in range(2)]
    for host in ("10.0.0.1", "10.0.0.2"):
        assert (await house.call("/encode", house.body("r", prefill_host=host))).status == 200
    reply = await house.call("/scheduler_receive_meta_data", {"req_id": "r", "part_idx": 0})
    assert reply.status == 409
    assert "in use by 2 language servers" in reply.json["message"]
    reply = await house.call("/send", {"req_id": "r", "prefill_host": "10.0.0.2", "embedding_port": 1})
    assert reply.status == 200
    assert [len(e.pushed) for e in encoders if e.pushed] == [1]


# --- keys, load, prediction


async def test_the_second_request_for_a_picture_goes_where_the_first_one_went(house: Any) -> None:
    for _ in range(3):
        await house.encoder("zmq_to_tokenizer")
    seen = set()
    for n in range(4):
        reply = await house.call("/encode", house.body(items=["http://h.invalid/cat.png"], embedding_port=1))
        assert reply.headers["x-fullhit-reason"] == ("miss" if n == 0 else "predicted")
        seen.add(reply.headers["x-fullhit-worker"])
    assert len(seen) == 1
    assert house.telemetry.requests[-1] == ("default", "predicted", 200)


# --- bad pictures

BAD = "data:image/png;base64,aGVsbG8gd29ybGQsIHRoaXMgaXMgbm8gcGljdHVyZQ=="


async def test_a_bad_picture_is_refused_where_the_language_server_survives_it(house: Any) -> None:
    encoder = await house.encoder("zmq_to_tokenizer")
    body = house.body(items=["http://h.invalid/a.png", BAD], embedding_port=5000)
    reply = await house.call("/encode", body)
    assert reply.status == 400
    assert "item 1 of 2: the data is no known picture format" in reply.json["message"]
    assert reply.json["req_id"] == body["req_id"]
    assert encoder.seen == []
    assert house.telemetry.counters["bad_images:rejected"] == 1
    assert sum(house.fleet.failures.values()) == 0
    await house.at_rest()


async def test_a_bad_picture_is_replaced_where_the_language_server_would_die_of_it(house: Any) -> None:
    from fullhit.http.encoder.substitute import unreadable_uri

    encoder = await house.encoder()
    good = "http://h.invalid/a.png"
    body = house.body(items=[good, BAD, {"url": BAD, "detail": "high", "content_hash": "sha256:0"}])
    reply = await encode_and_register(house, body)
    assert reply.status == 200
    sent = encoder.calls("/encode")[0]
    expected = dict(body, mm_items=[good, unreadable_uri(), {"url": unreadable_uri(), "detail": "high"}])
    assert sent.json == expected
    raw = msgspec.json.encode(body)
    assert sent.body.startswith(raw[: raw.index(b'"data:')])
    assert sent.body.endswith(raw[raw.index(b'"num_parts"') :])
    assert house.telemetry.counters["bad_images:substituted"] == 2
    event = dict(house.telemetry.events)["bad_image"]
    assert event["action"] == "substituted"
    assert len(house.telemetry.decisions[-1][1]["bad_images"]) == 2
    await house.at_rest()


async def test_a_language_server_that_was_seen_to_use_mooncake_gets_the_refusal(house: Any) -> None:
    encoder = await house.encoder("mooncake")
    assert (await house.call("/encode", house.body("r"))).status == 200
    await house.call("/scheduler_receive_meta_data", {"req_id": "r", "part_idx": 0})
    assert (await house.call("/encode", house.body(items=[BAD]))).status == 400
    assert len(encoder.calls("/encode")) == 1


@pytest.mark.parametrize(
    ("setting", "status", "forwarded"), [("reject", 400, 0), ("substitute", 200, 1), ("pass", 200, 1)]
)
async def test_what_happens_to_a_bad_picture_can_be_set(
    open_house: Any, setting: str, status: int, forwarded: int
) -> None:
    house = await open_house(bad_image=setting)
    encoder = await house.encoder("zmq_to_tokenizer")
    body = house.body(items=[BAD], embedding_port=1)
    assert (await house.call("/encode", body)).status == status
    assert len(encoder.seen) == forwarded
    if setting == "pass":
        assert encoder.seen[0].json == body


async def test_a_refused_picture_takes_its_waiting_registrations_along(open_house: Any) -> None:
    house = await open_house(bad_image="reject")
    await house.encoder()
    await house.call("/scheduler_receive_url", house.registration("r"))
    assert (await house.call("/encode", house.body("r", items=[BAD]))).status == 400
    assert "early" not in repr(house.gateway.table)


# --- bad callers


async def test_bad_bodies_are_told_what_is_wrong_and_hurt_nobody(house: Any) -> None:
    encoder = await house.encoder("zmq_to_tokenizer")
    good = await house.start("/encode", house.body(embedding_port=1))
    for body, words in (
        (b"", "body: not valid JSON"),
        (b'{"req_id": "r", "mm_items": [', "body: not valid JSON"),
        (b"\xff\x00", "body: not valid JSON"),
        (b"[1]", "body: must be a JSON object"),
        ({"mm_items": []}, "req_id: is missing"),
        ({"req_id": 7, "mm_items": []}, "req_id: must be text"),
        ({"req_id": "r"}, "mm_items: is missing"),
        (house.body("r", modality="SMELL"), "modality: expected one of IMAGE, VIDEO, AUDIO, got 'SMELL'"),
        (house.body("r", num_parts="two"), "num_parts: must be a whole number"),
    ):
        reply = await house.call("/encode", body)
        assert reply.status == 400
        assert reply.json["status"] == "error"
        assert words in reply.json["message"]
        assert reply.json["req_id"] in ("", "r")
        assert "x-request-id" in reply.headers
    assert (await good.answer()).status == 200
    assert house.telemetry.counters["rejected:bad_body"] == 9
    assert house.telemetry.kinds().count("refused") == 1, "logged once, not once for each"
    for path in ("/scheduler_receive_url", "/scheduler_receive_meta_data", "/send"):
        for raw in (b"", b"{", b"[]", b'{"req_id":5}'):
            assert (await house.call(path, raw)).status == 400
    assert (await house.call("/scheduler_receive_url", {"req_id": "r", "pad": "x" * 70_000})).status == 413
    assert len(encoder.calls("/encode")) == 1
    assert sum(house.fleet.failures.values()) == 0
    await house.at_rest()


async def test_unknown_paths_and_methods_are_named(house: Any) -> None:
    reply = await house.call("/v1/chat/completions", {})
    assert reply.status == 404
    assert "/chat/completions" in reply.json["message"]
    reply = await house.call("/encode", method="GET")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert (await house.call("/health", {})).headers["allow"] == "GET, HEAD"
    assert (await house.call("/v0", method="GET")).status == 404
    assert (await house.call("/", method="GET")).status == 404


async def test_a_body_over_the_limit_is_refused_in_sglangs_shape(open_house: Any) -> None:
    from fullhit.http.wire import ListenerLimits

    house = await open_house(limits=ListenerLimits(max_body_bytes=10_000))
    encoder = await house.encoder()
    reply = await house.call("/encode", house.body(items=["http://h.invalid/?" + "x" * 20_000]))
    assert reply.status == 413
    assert reply.json["status"] == "error"
    assert (await encode_and_register(house, house.body())).status == 200
    assert len(encoder.calls("/encode")) == 1


async def test_a_slow_caller_holds_up_nobody(house: Any) -> None:
    await house.encoder()
    slow = await house.connect()
    raw = json.dumps(house.body("slow")).encode()
    slow.writer.write(b"POST /encode HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw[:10])
    for _ in range(3):
        assert (await encode_and_register(house, house.body())).status == 200
    slow.writer.write(raw[10:])
    await house.call("/scheduler_receive_url", house.registration("slow"))
    assert (await slow.answer()).status == 200
    await house.at_rest()


async def test_an_https_encoder_gets_a_tls_origin() -> None:
    from fullhit.http.encoder import Origins

    origins = Origins()
    secure, plain = origins.of("https://encoder.invalid"), origins.of("http://[::1]:8000")
    assert (secure.host, secure.port, secure.ssl is not None) == ("encoder.invalid", 443, True)
    assert (plain.host, plain.port, plain.ssl) == ("::1", 8000, None)
    assert origins.of("https://encoder.invalid") is secure


async def test_drain_waits_for_detached_calls_and_ends_deliveries(house: Any) -> None:
    encoder = await house.encoder()
    encoder.gate.clear()
    call = await house.start("/encode", house.body("r"))
    await encoder.until(lambda: len(encoder.calls("/encode")) == 1)
    call.leave()
    draining = asyncio.create_task(house.gateway.drain(20))
    await house.call("/scheduler_receive_url", house.registration("r"))
    assert not draining.done()
    encoder.gate.set()
    assert await draining is True
    assert await house.gateway.drain(1) is True


def test_settings_which_cannot_work_are_refused() -> None:
    from fullhit.http.encoder import GatewaySettings

    for fields in ({"encode_timeout": 60}, {"bad_image": "eat"}, {"aliases": -1}, {"queue_max": 0}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            GatewaySettings(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "delivered", "mispredicted"),
    [("hit", "hit", 0), ("miss", "miss", 1), ("partial", "partial", 1), ("HIT", "", 0), ("x" * 5000, "", 0)],
)
async def test_what_an_encoder_says_of_its_cache_is_held_against_the_choice(
    house: Any, lab: Any, told: str, delivered: str, mispredicted: int
) -> None:
    encoder = await house.encoder("zmq_to_tokenizer")
    body = house.body(embedding_port=37801)
    house.pool.set_publishing(encoder.url, True)
    house.pool.apply_delta(encoder.url, [key for item in body["mm_items"] if (key := item_key(item)) is not None], ())
    encoder.on("/encode", lab.says(200, None, f"x-fullhit-cache: {told}\r\n"))
    reply = await house.call("/encode", body)
    assert (reply.status, reply.headers["x-fullhit-reason"]) == (200, "full_hit")
    counters = house.telemetry.counters
    assert counters["hit_mispredictions"] == mispredicted
    reports = {name: number for name, number in counters.items() if name.startswith("cache_reports")}
    assert reports == ({f"cache_reports:{encoder.url}:full_hit:{delivered}": 1} if delivered else {})
    assert house.telemetry.decisions[-1][1].get("delivered", "") == delivered
    assert house.fleet.promises == ([(encoder.url, delivered == "hit")] if delivered else [])
    await house.at_rest()


async def test_an_encoder_that_says_nothing_of_its_cache_is_not_judged(house: Any) -> None:
    await house.encoder("zmq_to_tokenizer")
    assert (await house.call("/encode", house.body(embedding_port=37801))).status == 200
    assert not [name for name in house.telemetry.counters if name.startswith(("cache_reports", "hit_"))]
    assert "delivered" not in house.telemetry.decisions[-1][1]
