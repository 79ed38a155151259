"""The front when workers, frontends or clients fail: who is tried next, who is blamed, and that nothing is lost."""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest

from fullhit.core import WorkerSpec
from fullhit.fleet import Fleet
from fullhit.fleet.types import FleetSettings
from fullhit.lab.raw_http import reset
from fullhit_publisher.identity import dynamo_name

ONE, TWO = dynamo_name(1), dynamo_name(2)


def worker_of(reply):
    return reply.get("x-fullhit-worker")


# --- workers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_that_cannot_be_reached_is_blamed_and_another_one_answers(house, lab, stream):
    gone = lab.streams(lab.error_event(lab.GONE), lab.DONE) if stream else lab.says(503, lab.GONE)
    house.frontend.by_worker = {1: gone}
    reply = await house.post(lab.chat(stream=stream))
    assert (reply.status, worker_of(reply)) == (200, TWO)
    assert house.fleet.bad == [(ONE, "5xx")] and house.fleet.good == [TWO]
    assert house.telemetry.outcomes[-1]["failures"] == [f"{ONE} (unavailable)"]
    assert ("retries", {"cause": "unavailable"}) in house.telemetry.counts
    await house.at_rest()


def in_pieces(answer: bytes, *ends: bytes):
    """The answer as it is, with a pause after each of the ``ends``."""

    async def say(frontend, request, writer):
        rest = answer
        for end in ends:
            piece, _, rest = rest.partition(end)
            writer.write(piece + end)
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.write(rest)
        await writer.drain()

    return say


@pytest.mark.parametrize(
    "ends", [(b"chunked\r\n\r\n",), (b"\r\n\r\n", b"\r\n"), (b"data: {",), (b'"code"',), (b"\r\n\r\n", b"data", b"503")]
)
async def test_an_error_event_is_understood_wherever_it_is_cut(house, lab, ends):
    event = lab.error_event(lab.GONE)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(event), event)
    house.frontend.by_worker = {1: in_pieces(answer, *ends)}
    reply = await house.post(lab.chat(stream=True))
    assert (reply.status, worker_of(reply)) == (200, TWO)
    assert house.fleet.bad == [(ONE, "5xx")]
    await house.at_rest()


@pytest.mark.parametrize(("status", "instances", "blamed"), [(503, True, "5xx"), (400, False, "busy")])
@pytest.mark.parametrize("ends", [(b"\r\n\r\n",), (b'"message"',), (b"\r\n\r\n", b"{", b'"code"')])
async def test_an_error_body_is_understood_wherever_it_is_cut(house, lab, status, instances, blamed, ends):
    body = json.dumps({"message": "Invalid request", "code": 400} if status == 400 else lab.GONE).encode()
    if not instances:
        house.frontend.instances.discard(1)
    answer = (
        b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body
    )
    house.frontend.by_worker = {1: in_pieces(answer, *ends)}
    reply = await house.post(lab.chat())
    assert (reply.status, worker_of(reply)) == (200, TWO)
    assert house.fleet.bad == [(ONE, blamed)]
    await house.at_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_exception_is_blamed_on_a_worker_only_when_another_one_can(house, lab, stream):
    def fails(body):
        return lab.streams(lab.error_event(body), lab.DONE) if stream else lab.says(body["code"], body)

    house.frontend.by_worker = {1: fails(lab.INTERNAL)}
    assert worker_of(await house.post(lab.chat(stream=stream))) == TWO
    assert house.fleet.bad == [(ONE, "5xx")]
    house.fleet.bad.clear()
    house.frontend.by_worker[2] = house.frontend.by_worker[1]
    reply = await house.post(lab.chat(stream=stream))
    assert (reply.status, house.fleet.bad) == (200 if stream else 500, []), "it may be the request's own doing"
    expected = lab.error_event(lab.INTERNAL) + lab.DONE if stream else json.dumps(lab.INTERNAL).encode()
    assert reply.body == expected, "the frontend's own answer"
    assert len(house.frontend.seen) == 4
    await house.at_rest()


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [(504, "Request deadline exceeded", "timeout"), (499, "Request cancelled", "5xx"), (502, "Bad gateway", "5xx")],
)
async def test_other_failures_of_workers_are_tried_elsewhere_and_suspected(house, lab, status, message, kind):
    house.frontend.by_worker = {1: lab.says(status, {"message": message, "code": status})}
    assert worker_of(await house.post(lab.chat())) == TWO
    assert house.fleet.bad == [(ONE, kind)]


@pytest.mark.parametrize("status", [503, 529])
async def test_an_overloaded_worker_gets_a_pause_and_keeps_its_record(house, lab, status):
    house.frontend.by_worker = {1: lab.says(status, {"message": "Service temporarily overloaded", "code": status})}
    assert worker_of(await house.post(lab.chat())) == TWO
    assert house.fleet.bad == [(ONE, "busy")]


async def test_at_most_so_many_workers_are_tried(open_house, lab):
    house = await open_house(workers=tuple(range(1, 9)), max_attempts=3)
    house.frontend.answer = lab.says(503, lab.GONE)
    reply = await house.post(lab.chat())
    assert (reply.status, json.loads(reply.body)) == (503, lab.GONE)
    assert len({request.get("x-dynamo-worker-instance-id") for request in house.frontend.seen}) == 3
    await house.at_rest()


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422, 429])
async def test_what_is_the_clients_fault_is_passed_on_and_nobody_is_blamed(house, lab, status):
    body = {"message": "max_tokens is too large", "type": "Bad Request", "code": status}
    house.frontend.answer = lab.says(status, body)
    reply = await house.post(lab.chat())
    assert (reply.status, json.loads(reply.body)) == (status, body)
    house.frontend.answer = lab.streams(lab.error_event(body), lab.DONE)
    reply = await house.post(lab.chat(stream=True))
    assert reply.body == lab.error_event(body) + lab.DONE
    assert len(house.frontend.seen) == 2 and house.fleet.bad == []
    await house.at_rest()


async def test_an_instance_that_the_frontend_does_not_know_is_no_fault_of_the_client(house, lab):
    house.frontend.by_worker = {1: lab.says(400, lab.INVALID)}
    reply = await house.post(lab.chat())
    assert reply.status == 400 and house.fleet.bad == [], "it knows the instance, so the request was bad"
    house.frontend.instances.discard(1)
    for _ in range(2):
        reply = await house.post(lab.chat())
        assert (reply.status, worker_of(reply)) == (200, TWO)
    assert set(house.fleet.bad) <= {(ONE, "busy")}
    await house.at_rest()


async def test_a_worker_that_has_just_been_unreachable_is_unknown_even_where_health_lags(house, lab):
    house.frontend.by_worker = {1: lab.says(503, lab.GONE)}
    assert worker_of(await house.post(lab.chat())) == TWO
    house.frontend.by_worker = {1: lab.says(400, lab.INVALID), 2: lab.says(200, b"{}")}
    replies = [await house.post(lab.chat()) for _ in range(4)]
    assert {reply.status for reply in replies} == {200}


async def test_a_worker_that_leaves_while_it_is_asked_is_replaced(house, lab):
    async def leaves(frontend, request, writer):
        house.pool.remove_worker(ONE)
        await lab.says(400, lab.INVALID)(frontend, request, writer)

    house.frontend.by_worker = {1: leaves}
    assert worker_of(await house.post(lab.chat())) == TWO
    assert house.frontend.calls() == house.frontend.seen, "nobody had to be asked"
    await house.at_rest()


async def test_tokens_that_are_out_are_never_sent_again(house, lab):
    house.frontend.by_worker = {1: lab.streams(lab.TOKENS, lab.error_event(lab.GONE), lab.DONE)}
    reply = await house.post(lab.chat(stream=True))
    assert reply.body == lab.TOKENS + lab.error_event(lab.GONE) + lab.DONE
    assert len(house.frontend.seen) == 1


async def test_with_a_prefill_pool_the_fault_is_nobodys_and_both_are_avoided(open_house, lab):
    house = await open_house(workers=(1, 2), prefill=(11, 12))
    house.frontend.by_worker = {1: lab.says(503, lab.GONE)}
    reply = await house.post(lab.chat())
    assert worker_of(reply) == TWO
    first, second = house.frontend.seen
    assert first.get("x-prefill-instance-id") != second.get("x-prefill-instance-id")
    assert {kind for _, kind in house.fleet.bad} == {"busy"} and len(house.fleet.bad) == 2
    await house.at_rest()


async def test_a_failing_worker_rests_comes_back_and_no_client_can_send_it_away(open_house, lab):
    """With the real fleet: members whose life is a lease."""

    def leased(pool):
        fleet = Fleet({"vision": pool}, FleetSettings(default_pool="vision"), clock=time.monotonic)
        for id in (ONE, TWO):
            fleet.add_leased(id, pool="vision")
        return fleet

    house = await open_house(workers=(), fleet=leased)
    fleet, pool, frontend = house.fleet, house.pool, house.frontend

    def states():
        fleet.tick()
        return {member.id: str(member.state) for member in fleet}

    frontend.by_worker = {1: lab.says(503, lab.GONE)}
    for _ in range(12):
        pool.set_ready(ONE, True)  # its moments of rest are over
        assert (await house.post(lab.chat())).status == 200
    assert states() == {ONE: "unhealthy", TWO: "ready"}
    frontend.by_worker = {}
    deadline = time.monotonic() + 30
    while fleet.get(ONE).breaker.state != "closed":
        assert (await house.post(lab.chat())).status == 200
        states()
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    frontend.answer = lab.says(500, lab.INTERNAL)  # a picture that no worker can read
    for _ in range(20):
        assert (await house.post(lab.chat())).status == 500
    assert states() == {ONE: "ready", TWO: "ready"} and all(worker.eligible for worker in pool.workers())
    await house.at_rest()


# --- frontends


async def test_a_dead_frontend_is_passed_over_with_the_same_worker(open_house, lab):
    house = await open_house(workers=(1,), frontends=2)
    await house.frontends[0].server.close()
    replies = [await house.post(lab.chat()) for _ in range(4)]
    assert [reply.status for reply in replies] == [200] * 4
    assert len(house.frontends[1].seen) == 4 and house.fleet.bad == []
    rows = house.front.status()["frontends"]
    assert [row["up"] for row in rows] == [False, True] and "connect" in rows[0]["error"]
    assert house.telemetry.events.count("frontend_down") == 1
    await house.at_rest()


async def test_when_no_frontend_can_be_reached_the_client_is_told_and_a_restarted_one_is_used_at_once(open_house, lab):
    house = await open_house(workers=(1,))
    port = house.frontend.server.port
    await house.frontend.server.close()
    for _ in range(3):
        reply = await house.post(lab.chat())
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["code"]) == (502, "frontend_unavailable") and str(port) in error["message"]
    models = await house.call(house.message(b"", "/v1/models", method="GET"))
    assert models.status == 502 and house.fleet.bad == []
    house.front.frontends._all[0].origin = house.front.frontends._all[0].origin._replace(
        port=(await house.frontend.start()).server.port
    )
    assert (await house.post(lab.chat())).status == 200
    assert house.front.frontends.up == 1 and "frontend_up" in house.telemetry.events
    await house.at_rest()


def raw(*pieces, end="close"):
    """Bytes that no honest frontend would send."""

    async def answer(frontend, request, writer):
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
        if end == "reset":
            reset(writer)
        raise ConnectionError

    return answer


LIES = {
    "garbage": raw(b"SSH-2.0-OpenSSH\r\n\r\n"),
    "nothing": raw(),
    "reset": raw(end="reset"),
    "half a head": raw(b"HTTP/1.1 200 OK\r\ncontent-ty"),
    "both framings": raw(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n1"),
    "no event": raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"),
    "bad chunks": raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\nzz"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_frontend_that_lies_before_its_answer_begins_is_left_for_another(open_house, lab, lie):
    house = await open_house(workers=(1,), frontends=2)
    house.frontends[0].answer = LIES[lie]
    reply = await house.post(lab.chat())
    assert reply.status == 200 and house.fleet.bad == []
    house.frontends[1].answer = LIES[lie]
    reply = await house.post(lab.chat())
    assert reply.status == 502 and json.loads(reply.body)["error"]["code"] == "frontend_lost"
    assert house.fleet.bad == []
    await house.at_rest()


async def test_a_frontend_that_breaks_off_inside_its_answer_cuts_the_client_visibly(house, lab):
    house.frontend.answer = lab.streams(lab.TOKENS, cut=True)
    async with await house.connect() as client:
        client.send(house.message(lab.chat(stream=True)))
        got = await client.rest()
    assert lab.TOKENS in got and b"0\r\n\r\n" not in got
    assert house.telemetry.done == [("vision", "no_media", 502)] and house.front.frontends.up == 0
    await house.at_rest()


async def test_a_frontend_that_stays_silent_ends_in_a_timeout(open_house, lab):
    house = await open_house(first_byte_timeout=0.2, idle_timeout=0.2)
    never = asyncio.Event()

    async def mute(frontend, request, writer):
        await never.wait()

    for answer in (mute, lab.streams(never)):
        house.frontend.answer = answer
        reply = await house.post(lab.chat(stream=True))
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (504, "frontend_timeout")
    house.frontend.answer = lab.streams(lab.TOKENS, never)
    async with await house.connect() as client:
        client.send(house.message(lab.chat(stream=True)))
        assert b"0\r\n\r\n" not in await client.rest()
    assert house.fleet.bad == [] and len(house.frontend.seen) == 3
    await house.at_rest()


NO_MODEL = {"message": "Model not found", "type": "Not Found", "code": 404}


async def test_a_frontend_that_has_just_started_does_not_answer_for_the_others(open_house, lab):
    house = await open_house(frontends=3)
    house.frontends[0].answer = house.frontends[1].answer = lab.says(404, NO_MODEL)
    replies = [await house.post(lab.chat()) for _ in range(6)]
    assert {reply.status for reply in replies} == {200} and house.front.frontends.up == 1
    house.frontends[2].answer = lab.says(404, NO_MODEL)
    for fake in house.frontends:
        fake.seen.clear()
    reply = await house.post(lab.chat())
    assert (reply.status, json.loads(reply.body)) == (404, NO_MODEL), "nobody knows it: the client's fault"
    assert [len(fake.seen) for fake in house.frontends] == [1, 1, 1] and house.fleet.bad == []
    await house.at_rest()


async def test_a_frontend_that_knows_no_worker_yet_is_left_for_another_with_the_same_worker(open_house, lab):
    house = await open_house(frontends=2)
    house.frontends[0].answer = lab.says(400, lab.INVALID)
    house.frontends[0].instances = {77}
    reply = await house.post(lab.chat())
    assert (reply.status, worker_of(reply)) == (200, ONE) and house.fleet.bad == []
    house.frontends[1].answer, house.frontends[1].instances = lab.says(400, lab.INVALID), set()
    reply = await house.post(lab.chat())
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (503, "frontend_behind")
    await house.at_rest()


async def test_a_worker_that_is_no_dynamo_instance_is_avoided_and_named(open_house, lab):
    house = await open_house()
    house.pool.add_worker(WorkerSpec("http://stray.invalid", "http://stray.invalid"))
    house.pool.set_ready("http://stray.invalid", True)
    replies = [await house.post(lab.chat()) for _ in range(6)]
    assert {reply.status for reply in replies} == {200} and "not_a_dynamo_worker" in house.telemetry.events
    for id in (ONE, TWO):
        house.pool.remove_worker(id)
    reply = await house.post(lab.chat())
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (503, "workers_failed")
    await house.at_rest()


async def test_a_connection_that_the_frontend_has_closed_is_no_failure(house, lab):
    house.frontend.kept_alive = False
    for _ in range(20):
        assert (await house.post(lab.chat())).status == 200
    assert house.front.frontends.up == 1


# --- clients


@pytest.mark.parametrize("when", ["before the head", "before a token", "after a token"])
async def test_a_client_that_leaves_takes_its_request_along(house, lab, when):
    never = asyncio.Event()

    async def mute(frontend, request, writer):
        await never.wait()

    house.frontend.answer = {
        "before the head": mute,
        "before a token": lab.streams(never),
        "after a token": lab.streams(lab.TOKENS, never),
    }[when]
    client = await house.connect()
    client.send(house.message(lab.chat(stream=True)))
    await house.until(lambda: house.frontend.seen)
    if when == "after a token":
        await client.reader.readuntil(lab.TOKENS)
    client.reset()
    await house.until(lambda: house.frontend.left == 1)
    await house.at_rest()
    assert house.fleet.bad == [] and house.front.frontends.up == 1
    assert house.telemetry.done == [("vision", "no_media", 499)]


async def test_two_hundred_random_departures_and_deaths_leave_nothing_behind(open_house, lab):
    house = await open_house(workers=(1, 2, 3), frontends=2, cap=20, max_attempts=2)
    rng = random.Random(4)

    async def moody(frontend, request, writer):
        mood = rng.randrange(8)
        if mood == 0:
            reset(writer)
            raise ConnectionError
        if mood == 1:
            await lab.says(503, lab.GONE)(frontend, request, writer)
            return
        if mood == 2:
            await lab.streams(lab.error_event(lab.INTERNAL), lab.DONE)(frontend, request, writer)
            return
        if mood == 3:
            await asyncio.sleep(rng.random() * 0.02)
        gate = asyncio.Event()
        asyncio.get_running_loop().call_later(rng.random() * 0.02, gate.set)
        await lab.streams(lab.TOKENS, gate, lab.TOKENS, lab.DONE, cut=mood == 4)(frontend, request, writer)

    for fake in house.frontends:
        fake.answer = moody

    async def visit(number):
        client = await house.connect()
        try:
            body = lab.chat(f"data:image/png;base64,{'A' * rng.choice([10, 70_000])}", stream=True)
            client.send(house.message(body))
            if number % 2:
                await asyncio.sleep(rng.random() * 0.03)
                client.reset()
            else:
                await client.reader.read(65536)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            client.reset()

    for start in range(0, 200, 25):
        await asyncio.gather(*(visit(number) for number in range(start, start + 25)))
    await house.at_rest()
    assert sum(len(fake.seen) for fake in house.frontends) > 100
    codes = {code for _, _, code in house.telemetry.done}
    assert {200, 499} <= codes <= {200, 499, 502, 503}
