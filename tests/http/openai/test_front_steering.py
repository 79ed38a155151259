"""The front on sockets: what reaches the frontend, what reaches the client, and who is sent where."""

from __future__ import annotations

import asyncio
import json

import pytest

from fullhit.http.wire import ListenerLimits
from fullhit_publisher.dynamo_keys import scoped_key, url_key
from fullhit_publisher.identity import dynamo_name
from fullhit_publisher.keys import fold

URL = "https://pictures.invalid/cat.png"
PINNED = ("x-dynamo-worker-instance-id", "x-worker-instance-id")


def pins(request):
    return [value for name, value in request.headers if name.endswith(("instance-id", "rank"))]


async def test_a_request_goes_to_the_holder_of_its_picture_and_the_answer_comes_back_untouched(house, lab):
    house.pool.apply_delta(dynamo_name(2), [fold(url_key(URL))], [])
    body = json.dumps(lab.chat(URL.upper()[:5] + URL[5:]), indent=2).encode()
    house.frontend.answer = lab.says(200, b'{ "odd" :  1 }', extra="X-Odd: a  b\r\n")
    reply = await house.post(body, headers="X-Request-Id: abc\r\nAuthorization: Bearer k\r\n")
    assert (reply.status, reply.body, reply.get("x-odd")) == (200, b'{ "odd" :  1 }', "a  b")
    assert (reply.get("x-fullhit-worker"), reply.get("x-fullhit-reason")) == (dynamo_name(2), "full_hit")
    assert reply.get("x-request-id") == "abc"
    (seen,) = house.frontend.seen
    assert seen.body == body and seen.get("authorization") == "Bearer k" and seen.get("x-request-id") == "abc"
    assert [(name, seen.get(name)) for name in PINNED] == [(name, "2") for name in PINNED]
    assert house.fleet.good == [dynamo_name(2)] and house.telemetry.done == [("vision", "full_hit", 200)]
    assert [decision.request_id for decision in house.telemetry.kept] == ["abc"]
    await house.at_rest()


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/chat/completions?x=1", {"messages": [{"content": "x"}]}, "no_media"),
        ("/v1/completions", {"prompt": "x"}, "no_media"),
        ("/v1/embeddings", {"input": "x"}, "no_media"),
        ("/v1/responses", {"input": [{"content": [{"type": "input_image", "image_url": URL}]}]}, "full_hit"),
        ("/v1/messages", {"messages": [{"content": [{"type": "image", "source": {}}]}]}, "miss"),
    ],
)
async def test_every_generation_route_is_steered(house, path, body, reason):
    house.pool.apply_delta(dynamo_name(1), [fold(url_key(URL))], [])
    reply = await house.post({"model": "m", **body}, path)
    assert (reply.status, reply.get("x-fullhit-reason")) == (200, reason)
    (seen,) = house.frontend.seen
    assert seen.target == path and len(pins(seen)) == 2


async def test_a_session_finds_what_its_encoder_filed_under_it(house, lab):
    house.pool.apply_delta(dynamo_name(2), [fold(scoped_key("s 1", url_key(URL)))], [])
    found = await house.post(lab.chat(URL), headers="X-Dynamo-Session-Id: s 1\r\n")
    other = await house.post(lab.chat(URL))
    assert [reply.get("x-fullhit-reason") for reply in (found, other)] == ["full_hit", "miss"]
    assert house.frontend.seen[0].get("x-dynamo-session-id") == "s 1"


async def test_a_stream_passes_byte_for_byte_and_its_first_token_ends_the_encoding(house, lab):
    first, rest = asyncio.Event(), asyncio.Event()
    house.frontend.answer = lab.streams(b": hello\n\n", first, lab.TOKENS, rest, lab.TOKENS, lab.DONE)
    async with await house.connect() as client:
        client.send(house.message(lab.chat(URL, stream=True)))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"text/event-stream" in head
        got = await client.reader.readexactly(len(b"9\r\n: hello\n\n\r\n"))
        (worker,) = [worker for worker in house.pool.workers() if worker.inflight]
        assert (worker.inflight, worker.encoding) == (1, 1), "a comment is no token"
        first.set()
        await house.until(lambda: worker.encoding == 0)
        assert worker.inflight == 1, "the slot is held for the whole answer"
        rest.set()
        got += await client.reader.readuntil(b"0\r\n\r\n")
    chunks = [b": hello\n\n", lab.TOKENS, lab.TOKENS, lab.DONE]
    assert got == b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    await house.at_rest()


async def test_a_stream_that_takes_its_time_has_its_head_passed_on(open_house, lab):
    house = await open_house(head_patience=0.05)
    late = asyncio.Event()
    house.frontend.answer = lab.streams(late, lab.TOKENS, lab.DONE)
    async with await house.connect() as client:
        client.send(house.message(lab.chat(stream=True)))
        assert b"text/event-stream" in await client.reader.readuntil(b"\r\n\r\n")
        (worker,) = [worker for worker in house.pool.workers() if worker.inflight]
        assert worker.encoding == 1
        late.set()
        assert lab.DONE in await client.reader.readuntil(b"0\r\n\r\n")
    await house.at_rest()


@pytest.mark.parametrize(("load_until", "parity"), [("end", "none"), ("first_token", "dynamo")])
async def test_where_load_lasts_to_the_end_a_request_encodes_for_as_long(open_house, lab, load_until, parity):
    house = await open_house(load_until=load_until, parity=parity)
    rest = asyncio.Event()
    house.frontend.answer = lab.streams(lab.TOKENS, rest, lab.DONE)
    async with await house.connect() as client:
        client.send(house.message(lab.chat(URL, stream=True)))
        await client.reader.readuntil(lab.TOKENS)
        (worker,) = [worker for worker in house.pool.workers() if worker.inflight]
        assert (worker.inflight, worker.encoding) == (1, 1)
        rest.set()
        await client.reader.readuntil(b"0\r\n\r\n")
    await house.at_rest()


async def test_what_a_silent_worker_has_served_is_predicted_to_be_there_again(house, lab):
    replies = [await house.post(lab.chat(URL)) for _ in range(3)]
    assert [reply.get("x-fullhit-reason") for reply in replies] == ["miss", "predicted", "predicted"]
    assert len({reply.get("x-fullhit-worker") for reply in replies}) == 1


async def test_a_client_cannot_choose_workers_by_any_spelling(house, lab):
    odd = "".join(
        f"{name}: {value}\r\n"
        for name, value in [
            ("X-DYNAMO-Worker-Instance-ID", 9), ("x-worker-instance-id", 9), ("X-Worker-Instance-Id", 8),
            ("x-Dynamo-Prefill-Instance-Id", 7), ("x-prefill-INSTANCE-id", 7), ("x-dynamo-dp-rank", 1),
            ("X-Dp-Rank", 1), ("x-data-parallel-rank", 1), ("X-Dynamo-Prefill-Dp-Rank", 1), ("x-prefill-dp-rank", 1),
            ("Connection", "x-dynamo-worker-instance-id"),
        ]
    )  # fmt: skip
    nvext = {"backend_instance_id": 9, "decode_worker_id": 9, "prefill_worker_id": 9, "dp_rank": 1, "annotations": []}
    await house.post(lab.chat(nvext=nvext), headers=odd)
    (seen,) = house.frontend.seen
    assert pins(seen) == ["1", "1"] and json.loads(seen.body)["nvext"] == {"annotations": []}
    assert json.loads(seen.body) | {"nvext": 0} == lab.chat(nvext=0)


async def test_requests_for_other_models_pass_unsteered_and_unpinned(open_house, lab):
    house = await open_house(models=frozenset({"fake"}))
    assert (await house.post(lab.chat())).get("x-fullhit-worker") is not None
    reply = await house.post(
        lab.chat(nvext={"backend_instance_id": 3}) | {"model": "other"}, headers="x-worker-instance-id: 3\r\n"
    )
    assert reply.status == 200 and reply.get("x-fullhit-worker") is None
    seen = house.frontend.seen[-1]
    assert pins(seen) == [] and json.loads(seen.body)["nvext"] == {}
    assert house.telemetry.done == [("vision", "no_media", 200)]
    await house.at_rest()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/Qwen/Qwen2-VL?x=1", "/health", "/live"])
async def test_reading_routes_pass_without_a_choice(house, lab, path):
    house.frontend.answer = lab.says(200, b"[1]")
    reply = await house.call(house.message(b"", path, "x-worker-instance-id: 5\r\n", "GET"))
    assert reply.status == 200
    seen = house.frontend.seen[-1]
    assert (seen.method, seen.target, pins(seen)) == ("GET", path, [])
    head = await house.call(house.message(b"", path, method="HEAD"), "HEAD")
    assert (head.status, head.body) == (200, b"")
    await house.at_rest()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/metrics", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "//v1/chat/completions", 404),
        ("POST", "/clear_kv_blocks", 404),
        ("GET", "/v1/models/../../metrics", 404),
        ("GET", "/v1/models/%2e%2e/%2E./metrics", 404),
        ("GET", "/v1/models/..%2f..%5cmetrics", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "http://front.invalid/metrics", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health", 405),
        ("OPTIONS", "/v1/embeddings", 405),
    ],
)
async def test_everything_else_ends_here_in_openais_shape(house, method, path, status):
    reply = await house.call(house.message(b"", path, method=method))
    assert reply.status == status and (reply.get("allow") is not None) == (status == 405)
    error = json.loads(reply.body)["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert reply.get("x-request-id") and house.frontend.seen == []


@pytest.mark.parametrize("body", [b"{", b"[]", b"", b"\xff", b'{"model": "m"'])
async def test_a_body_that_is_no_object_is_the_clients_fault(house, body):
    reply = await house.post(body)
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (400, "invalid_json")
    assert house.frontend.seen == [] and house.fleet.bad == []
    await house.at_rest()


async def test_the_listeners_own_errors_have_the_shape_too(open_house, lab):
    house = await open_house(limits=ListenerLimits(max_body_bytes=1000))
    large = await house.post(b"{" + b" " * 2000)
    header = await house.call(b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000 + b"\r\n\r\n")
    async with await house.connect() as client:
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n")
        twice = await client.reply()
    assert [reply.status for reply in (large, header, twice)] == [413, 431, 400]
    for reply in (large, header, twice):
        assert json.loads(reply.body)["error"].keys() == {"message", "type", "param", "code"}
    async with await house.connect() as client:  # a body that never ends
        client.send(house.message(lab.chat())[:-5])
    await house.at_rest()
    assert house.frontend.seen == []


async def test_a_large_body_is_read_beside_the_loop_and_passed_on_as_it_is(house, lab):
    picture = "data:image/png;base64," + "A" * 3_000_000
    house.pool.apply_delta(dynamo_name(2), [fold(url_key(picture))], [])
    body = json.dumps(lab.chat(picture)).encode()
    threads = []
    original = house.front._steering._threads.submit
    house.front._steering._threads.submit = lambda *a, **k: threads.append(1) or original(*a, **k)
    reply = await house.post(body)
    assert (reply.get("x-fullhit-reason"), threads) == ("full_hit", [1])
    assert house.frontend.seen[0].body == body
    assert (await house.post(b"[" + b"1," * 100_000)).status == 400
    await house.at_rest()


async def test_a_client_that_leaves_while_its_body_is_read_leaves_nothing(house, lab):
    gate = asyncio.Event()

    async def slow(request, shape):
        await gate.wait()

    house.front._steering.read = slow
    client = await house.connect()
    client.send(house.message(lab.chat()))
    await house.until(lambda: house.front.status()["open_calls"] == 1)
    client.reset()
    await house.at_rest()
    assert house.frontend.seen == []


async def test_a_prefill_worker_is_chosen_too_and_let_go_at_the_first_token(open_house, lab):
    house = await open_house(workers=(1,), prefill=(2**64 - 3,))
    rest = asyncio.Event()
    house.frontend.answer = lab.streams(rest, lab.TOKENS, rest, lab.DONE)
    (decode,), (prefill,) = house.pool.workers(), house.prefill.workers()
    gate, house.frontend.answer = asyncio.Event(), lab.streams(lab.TOKENS, rest, lab.DONE)
    answer = house.frontend.answer

    async def later(*arguments):
        await gate.wait()
        await answer(*arguments)

    house.frontend.answer = later
    async with await house.connect() as client:
        client.send(house.message(lab.chat(stream=True)))
        await house.until(lambda: house.frontend.seen)
        assert (decode.inflight, prefill.inflight) == (1, 1)
        gate.set()
        await house.until(lambda: prefill.inflight == 0)
        assert decode.inflight == 1
        rest.set()
        await client.reader.readuntil(b"0\r\n\r\n")
    assert pins(house.frontend.seen[0]) == ["1", "1", "18446744073709551613", "18446744073709551613"]
    await house.at_rest()


# --- waiting


async def test_when_all_are_busy_a_request_waits_and_is_served_next(open_house, lab):
    house = await open_house(workers=(1,), cap=1)
    gate = asyncio.Event()
    house.frontend.answer = lab.streams(gate, lab.TOKENS)
    first = asyncio.create_task(house.post(lab.chat(stream=True)))
    await house.until(lambda: house.frontend.seen)
    second = asyncio.create_task(house.post(lab.chat(stream=True)))
    await house.until(lambda: house.front.status()["queued"] == 1)
    assert house.front.status()["queued_bytes"] > 0
    gate.set()
    assert [(await task).status for task in (first, second)] == [200, 200]
    await house.at_rest()


async def test_waiting_is_bounded_in_number_and_time(open_house, lab):
    house = await open_house(workers=(1,), cap=1, queue_max=1, queue_timeout=0.3)
    gate = asyncio.Event()
    house.frontend.answer = lab.streams(gate, lab.TOKENS)
    first = asyncio.create_task(house.post(lab.chat(stream=True)))
    await house.until(lambda: house.frontend.seen)
    second = asyncio.create_task(house.post(lab.chat(stream=True)))
    await house.until(lambda: house.front.status()["queued"] == 1)
    full, late = await house.post(lab.chat()), await second
    for reply, code in ((full, "queue_full"), (late, "workers_busy")):
        assert (reply.status, reply.get("retry-after")) == (503, "1")
        assert json.loads(reply.body)["error"]["code"] == code
    gate.set()
    assert (await first).status == 200
    await house.at_rest()


async def test_a_client_that_leaves_the_queue_takes_its_place_along(open_house, lab):
    house = await open_house(workers=(1,), cap=1)
    gate = asyncio.Event()
    house.frontend.answer = lab.streams(gate, lab.TOKENS)
    first = asyncio.create_task(house.post(lab.chat(stream=True)))
    await house.until(lambda: house.frontend.seen)
    second = await house.connect()
    second.send(house.message(lab.chat()))
    await house.until(lambda: house.front.status()["queued"] == 1)
    second.reset()
    await house.until(lambda: house.front.status()["queued"] == 0)
    gate.set()
    assert (await first).status == 200
    await house.at_rest()
    assert len(house.frontend.seen) == 1


async def test_an_empty_pool_is_told_at_once_and_apart_from_a_busy_one(open_house, lab):
    house = await open_house(workers=())
    reply = await house.post(lab.chat())
    assert (reply.status, reply.get("retry-after")) == (503, "5")
    error = json.loads(reply.body)["error"]
    assert (error["code"], error["type"]) == ("no_workers", "server_error")
    assert house.telemetry.done == [("vision", "none", 503)]


async def test_draining_lets_a_stream_end_and_closing_cuts_what_is_left(house, lab):
    gate, never = asyncio.Event(), asyncio.Event()
    house.frontend.by_worker = {
        1: lab.streams(lab.TOKENS, gate, lab.DONE),
        2: lab.streams(lab.TOKENS, never, lab.DONE),
    }
    async with await house.connect() as first, await house.connect() as second:
        for one in (first, second):
            one.send(house.message(lab.chat(stream=True)))
            await one.reader.readuntil(lab.TOKENS)
        draining = asyncio.create_task(house.listener.drain(0.5))
        gate.set()
        await first.reader.readuntil(b"0\r\n\r\n")
        report = await draining
        assert (report.running, report.finished, report.cut) == (2, 1, 1)
        await house.listener.close()
        assert b"[DONE]" not in await second.rest()
    await house.at_rest()
    await house.until(lambda: house.frontend.left == 1)
