"""The listener against raw clients."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
from pathlib import Path

import pytest
from wire_rig import Rig, on_both_loops

from fullhit.http.wire import ClientFault, ListenerLimits, Request, Responder

MIB = 1024 * 1024


async def echo(request: Request, responder: Responder) -> None:
    """Answers what it understood."""
    body = bytes(request.body)
    seen = {
        "method": request.method.decode(),
        "target": request.target.decode(),
        "body": hashlib.sha256(body).hexdigest(),
        "size": len(body),
    }
    responder.reply(200, [(b"Content-Type", b"application/json")], json.dumps(seen).encode())


def post(size: int, extra: bytes = b"") -> bytes:
    return b"POST /x HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n" % (extra, size)


GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# --- framing


CORPUS = {
    "CL and TE": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nX",
    "two CL": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\nContent-Length: 7\r\n\r\nabcdefg",
    "space before colon": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length : 6\r\n\r\nabcdef",
    "folded": b"GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\n Y: 2\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\nHost: a\n\n",
    "bare LF in the last line": b"GET / HTTP/1.1\r\nHost: a\n\r\n",
    "LF only at the end": b"GET / HTTP/1.1\r\nHost: a\r\n\n",
    "bad chunk size": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "chunk with sign": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
    "chunk ends with LF": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\n0\r\n\r\n",
    "LF in extension": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;a\nb\r\nhello\r\n0\r\n\r\n",
    "NUL in value": b"GET / HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n",
    "control in value": b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x02\r\n\r\n",
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "TE on 1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no request": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "leading LF": b"\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("case", CORPUS)
@on_both_loops
async def test_case_f61_ambiguity_is_answered_400_and_the_connection_closed(rig: Rig, case: str):
    listener = await rig.listen(echo)
    client = await rig.connect()
    client.send(CORPUS[case] + GET % 1)
    reply = await client.reply()
    assert reply.status == 400
    assert json.loads(reply.body)["error"]["code"]
    assert reply.get("connection") == "close"
    assert await client.rest() == b"", "nothing may be answered after it"
    assert listener.stats["requests"] == 0


@on_both_loops
async def test_case_f62_f63_bodies_of_any_size_arrive_whole_in_both_framings(rig: Rig):
    await rig.listen(echo)
    client = await rig.connect()
    block = hashlib.sha512(b"seed").digest() * 4096  # 256 KiB that repeats with no short period
    for size in (0, 1, 65_535, 65_537, 262_144, 300_000, int(1.1 * MIB), 9 * MIB + 1, 12 * MIB):
        body = (block * (size // len(block) + 1))[:size]
        digest = hashlib.sha256(body).hexdigest()
        client.send(post(size) + body)
        seen = json.loads((await client.reply()).body)
        assert (seen["size"], seen["body"]) == (size, digest)
        client.send(b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        step = max(1, size // 7)
        for at in range(0, size, step):
            piece = body[at : at + step]
            client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        client.send(b"0\r\n\r\n")
        seen = json.loads((await client.reply()).body)
        assert (seen["size"], seen["body"]) == (size, digest)


@on_both_loops
async def test_case_f62_one_limit_for_both_framings_with_an_answer_that_names_it(rig: Rig):
    listener = await rig.listen(echo, ListenerLimits(max_body_bytes=100_000))
    for framing in (b"Content-Length: 100001", b"Transfer-Encoding: chunked"):
        client = await rig.connect()
        client.send(b"POST /x HTTP/1.1\r\nHost: a\r\n" + framing + b"\r\n\r\n")
        client.send(b"186a1\r\n" + b"x" * 5_000_000)  # goes on sending although it has been refused
        reply = await client.reply()
        assert reply.status == 413
        assert "max_body_bytes" in json.loads(reply.body)["error"]["message"]
        await client.rest()
    client = await rig.connect()
    client.send(post(100_000) + b"x" * 100_000)
    assert (await client.reply()).status == 200
    assert listener.stats["refused_body_too_large"] == 2


@on_both_loops
async def test_heads_above_the_limits_are_431(rig: Rig):
    await rig.listen(echo, ListenerLimits(max_head_bytes=2000, max_headers=20))
    for head in (
        b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 3000,
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 30 + b"\r\n",
    ):
        client = await rig.connect()
        client.send(head)
        assert (await client.reply()).status == 431
        await client.rest()


# --- the life of a connection


@on_both_loops
async def test_pipelined_requests_are_answered_one_at_a_time_and_in_order(rig: Rig):
    running = 0

    async def slow(request: Request, responder: Responder) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0.001)
        running -= 1
        responder.reply(200, [], request.target + b" " + bytes(request.body))

    await rig.listen(slow)
    client = await rig.connect()
    chunked = b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    client.send(b"".join(GET % n for n in range(50)) + post(5) + b"hello" + chunked + GET % 50)
    for n in range(50):
        assert (await client.reply()).body == b"/%d " % n
    assert (await client.reply()).body == b"/x hello"
    assert (await client.reply()).body == b"/c abc"
    assert (await client.reply()).body == b"/50 "


@on_both_loops
async def test_a_flood_of_pipelined_requests_is_not_kept_in_memory(rig: Rig):
    gate = asyncio.Event()

    async def held(request: Request, responder: Responder) -> None:
        await gate.wait()
        responder.reply(200, [], b"")

    listener = await rig.listen(held)
    client = await rig.connect()
    client.send((GET % 1) * 200_000)
    await rig.until(lambda: listener.connections and next(iter(listener.connections))._reading_paused)
    (connection,) = listener.connections
    assert len(connection._pending) < MIB
    gate.set()
    for _ in range(200):
        assert (await client.reply()).status == 200
    client.reset()


@on_both_loops
async def test_http_1_0_closes_unless_asked_to_stay(rig: Rig):
    await rig.listen(echo)
    client = await rig.connect()
    client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    reply = await client.reply()
    assert reply.get("connection") == "keep-alive"
    client.send(b"GET / HTTP/1.0\r\n\r\n")
    assert (await client.reply()).status == 200
    assert await client.rest() == b""
    client = await rig.connect()
    client.send(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" + GET % 1)
    assert (await client.reply()).get("connection") == "close"
    assert await client.rest() == b""


@on_both_loops
async def test_head_gets_the_length_but_no_body(rig: Rig):
    await rig.listen(echo)
    client = await rig.connect()
    client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n" + GET % 1)
    reply = await client.reply("HEAD")
    assert int(reply.get("content-length") or 0) > 50
    assert json.loads((await client.reply()).body)["target"] == "/1"


@on_both_loops
async def test_expect_100_continue_is_answered_before_the_body_and_not_when_it_is_refused(rig: Rig):
    await rig.listen(echo, ListenerLimits(max_body_bytes=1000))
    client = await rig.connect()
    client.send(post(3, b"Expect: 100-continue\r\n"))
    assert (await client.reply()).status == 100
    client.send(b"abc")
    assert json.loads((await client.reply()).body)["size"] == 3
    client.send(post(3, b"Expect: 100-continue\r\n") + b"abc")
    assert (await client.reply()).status == 200, "no interim answer when the body is there already"
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n")
    assert (await client.reply()).status == 100
    client.send(b"0\r\n\r\n")
    assert (await client.reply()).status == 200
    client.send(post(1001, b"Expect: 100-continue\r\n"))
    assert (await client.reply()).status == 413
    await client.rest()


@on_both_loops
async def test_streamed_answers_are_chunked_on_1_1_and_close_delimited_on_1_0(rig: Rig):
    async def stream(request: Request, responder: Responder) -> None:
        responder.start(200, [(b"Content-Type", b"text/plain")], 6 if request.target == b"/length" else None)
        for piece in (b"ab", b"", b"cd", b"ef"):
            await responder.write(piece)
        responder.finish()

    await rig.listen(stream)
    client = await rig.connect()
    client.send(GET % 1)
    reply = await client.reply()
    assert (reply.body, reply.chunks) == (b"abcdef", [2, 2, 2])
    client.send(b"GET /length HTTP/1.1\r\nHost: a\r\n\r\n")
    reply = await client.reply()
    assert (reply.body, reply.get("content-length")) == (b"abcdef", "6")
    client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n" + b"GET / HTTP/1.0\r\n\r\n")
    assert (await client.reply("HEAD")).status == 200
    reply = await client.reply()
    assert (reply.body, reply.get("transfer-encoding")) == (b"abcdef", None)


# --- those who are late, and those who leave


@on_both_loops
async def test_half_a_body_is_never_handed_over(rig: Rig):
    listener = await rig.listen(echo)
    for framing in (
        post(1000),
        post(1_000_000),
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n",
    ):
        client = await rig.connect()
        client.send(framing + b"half")
        await rig.until(lambda: any(c.busy for c in listener.connections))
        await client.close()
        await rig.until(lambda: not listener.connections)
    assert listener.stats["half_body"] == 3
    assert listener.stats["requests"] == 0


@on_both_loops
async def test_a_slow_head_and_a_stalled_body_are_408(rig: Rig):
    limits = ListenerLimits(head_timeout=0.15, body_idle_timeout=0.15)
    listener = await rig.listen(echo, limits)
    for start in (b"GET / HTTP/1.1\r\nHos", post(10) + b"abc", post(1_000_000) + b"abc"):
        client = await rig.connect()
        client.send(start)
        assert (await client.reply()).status == 408
        await client.rest()
    assert listener.stats["head_timeout"] == 1
    assert listener.stats["body_timeout"] == 2


@on_both_loops
async def test_a_client_that_sends_nothing_and_an_idle_one_are_closed(rig: Rig):
    await rig.listen(echo, ListenerLimits(head_timeout=0.1, keepalive_timeout=0.1))
    silent = await rig.connect()
    idle = await rig.connect()
    idle.send(GET % 1)
    assert (await idle.reply()).status == 200
    assert await idle.rest() == b""
    assert await silent.rest() == b""


@on_both_loops
async def test_a_slow_but_steady_client_is_served(rig: Rig):
    await rig.listen(echo, ListenerLimits(body_idle_timeout=2))
    client = await rig.connect()
    data = post(20) + b"x" * 20
    for at in range(len(data)):
        client.send(data[at : at + 1])
        await client.writer.drain()
        await asyncio.sleep(0)
    assert json.loads((await client.reply()).body)["size"] == 20


@pytest.mark.parametrize("how", ["close", "reset"])
@on_both_loops
async def test_case_b32_b33_f68_a_client_that_leaves_cancels_its_handler(rig: Rig, how: str):
    cancelled = asyncio.Event()
    running = asyncio.Event()

    async def endless(request: Request, responder: Responder) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert responder.peer_gone
            cancelled.set()
            raise

    listener = await rig.listen(endless)
    client = await rig.connect()
    client.send(post(100_000) + b"x" * 100_000)
    async with asyncio.timeout(10):
        await running.wait()
        client.reset() if how == "reset" else await client.close()
        await cancelled.wait()
    await rig.until(lambda: listener.budget.used == 0)
    assert listener.stats["client_gone"] == 1
    assert listener.stats["handler_errors"] == 0


@on_both_loops
async def test_a_detached_handler_runs_on_and_its_answer_is_thrown_away(rig: Rig):
    done = asyncio.Event()
    go = asyncio.Event()

    async def stubborn(request: Request, responder: Responder) -> None:
        responder.detach()
        await go.wait()
        assert responder.peer_gone
        responder.start(200, [], None)
        await responder.write(b"into the void")
        responder.finish()
        done.set()

    listener = await rig.listen(stubborn)
    client = await rig.connect()
    client.send(post(5) + b"hello")
    await rig.until(lambda: listener.budget.used)
    client.reset()
    await rig.until(lambda: not listener.connections)
    go.set()
    async with asyncio.timeout(10):
        await done.wait()


@on_both_loops
async def test_a_client_gone_before_the_handlers_first_step_leaks_nothing(rig: Rig):
    listener = await rig.listen(echo)
    for _ in range(50):
        client = await rig.connect()
        client.send(post(1000) + b"x" * 1000)
        client.reset()
    await rig.until(lambda: not listener.connections and listener.stats["connections"] == 50)
    assert listener.budget.used == 0


@on_both_loops
async def test_case_f65_a_reader_that_stops_reading_is_cut_off(rig: Rig):
    ended = asyncio.Event()

    async def stream(request: Request, responder: Responder) -> None:
        responder.start(200, [], None)
        try:
            while True:
                await responder.write(b"x" * MIB)
        finally:
            ended.set()

    listener = await rig.listen(stream, ListenerLimits(write_timeout=0.2))
    client = await rig.connect(receive_buffer=4096)
    client.send(GET % 1)
    async with asyncio.timeout(20):
        await ended.wait()
    assert listener.stats["write_timeout"] == 1
    await rig.until(lambda: not listener.connections)


@on_both_loops
async def test_case_f65_a_reader_that_vanishes_with_data_queued_ends_the_handler(rig: Rig):
    ended = asyncio.Event()

    async def stream(request: Request, responder: Responder) -> None:
        responder.start(200, [], None)
        try:
            while True:
                await responder.write(b"x" * MIB)
        finally:
            ended.set()

    listener = await rig.listen(stream)
    client = await rig.connect(receive_buffer=4096)
    client.send(GET % 1)
    await rig.until(lambda: any(c.paused for c in listener.connections))
    client.reset()
    async with asyncio.timeout(10):
        await ended.wait()
    await rig.until(lambda: not listener.connections)


@on_both_loops
async def test_answers_that_nobody_reads_do_not_pile_up(rig: Rig):
    async def big(request: Request, responder: Responder) -> None:
        responder.reply(200, [], b"x" * MIB)

    listener = await rig.listen(big)
    client = await rig.connect(receive_buffer=4096)
    client.send((GET % 1) * 25)
    await rig.until(lambda: any(c.paused for c in listener.connections))
    await asyncio.sleep(0.05)
    assert listener.stats["requests"] < 20
    for _ in range(25):
        assert len((await client.reply()).body) == MIB


# --- memory


@on_both_loops
async def test_bodies_wait_for_memory_and_all_get_through(rig: Rig):
    peak = 0

    async def hold(request: Request, responder: Responder) -> None:
        nonlocal peak
        peak = max(peak, listener.budget.used)
        await asyncio.sleep(0.01)
        responder.reply(200, [], b"%d" % len(request.body))

    size = 2 * MIB
    listener = await rig.listen(hold, ListenerLimits(max_buffered_bytes=5 * MIB))
    clients = [await rig.connect() for _ in range(12)]
    for n, client in enumerate(clients):
        if n % 3:
            client.send(post(size) + b"x" * size)
        else:
            client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            client.send((b"40000\r\n" + b"x" * 0x40000 + b"\r\n") * 8 + b"0\r\n\r\n")
    small = await rig.connect()
    small.send(post(10) + b"x" * 10)
    assert (await small.reply()).body == b"10", "small requests pass while large ones queue"
    for client in clients:
        assert (await client.reply()).body == b"%d" % size
    assert listener.stats["memory_wait"] > 0
    assert peak <= 5 * MIB + size + 12 * MIB


@on_both_loops
async def test_a_body_that_waits_too_long_for_memory_is_503_with_retry_after(rig: Rig):
    gate = asyncio.Event()

    async def hold(request: Request, responder: Responder) -> None:
        await gate.wait()
        responder.reply(200, [], b"")

    limits = ListenerLimits(max_buffered_bytes=300_000, buffer_wait_timeout=0.2, linger_timeout=0.5)
    listener = await rig.listen(hold, limits)
    first, second = await rig.connect(), await rig.connect()
    first.send(post(400_000) + b"x" * 400_000)
    await rig.until(lambda: listener.stats["requests"] == 1)
    second.send(post(400_000) + b"x" * 400_000)
    reply = await second.reply()
    assert (reply.status, reply.get("retry-after")) == (503, "1")
    assert "max_buffered_bytes" in json.loads(reply.body)["error"]["message"]
    gate.set()
    assert (await first.reply()).status == 200


@on_both_loops
async def test_announcing_much_and_sending_little_costs_little(rig: Rig):
    listener = await rig.listen(echo)
    clients = [await rig.connect() for _ in range(20)]
    for client in clients:
        client.send(post(500 * MIB) + b"x" * 1000)
    await rig.until(lambda: listener.budget.used == 20_000)
    assert all(len(c._body or b"") <= 256 * 1024 for c in listener.connections)
    before = resident()
    for client in clients:
        client.send(b"x" * 300_000)
    await rig.until(lambda: listener.budget.used == 20 * 301_000)
    assert all(len(c._body or b"") == 500 * MIB for c in listener.connections)
    assert resident() - before < 100 * MIB, "10 GB were announced"


# --- errors


@on_both_loops
async def test_an_exception_in_a_handler_is_500_with_a_request_id_and_the_connection_lives(
    rig: Rig,
):
    async def bad(request: Request, responder: Responder) -> None:
        if request.target == b"/1":
            raise ZeroDivisionError("secret")
        if request.target == b"/3":
            raise ClientFault(429, "slow_down", "later", retry_after=7)
        if request.target == b"/4":
            return
        responder.reply(200, [], b"fine")

    lines: list[logging.LogRecord] = []
    watcher = logging.Handler()
    watcher.emit = lines.append  # type: ignore[method-assign]
    logger = logging.getLogger("fullhit.http.wire")
    logger.addHandler(watcher)
    propagate, logger.propagate = logger.propagate, False
    try:
        listener = await rig.listen(bad)
        client = await rig.connect()
        client.send(b"".join(GET % n for n in range(1, 6)))
        reply = await client.reply()
        error = json.loads(reply.body)["error"]
        assert reply.status == 500 and error["type"] == "server_error"
        assert "secret" not in error["message"]
        assert reply.get("x-request-id") == error["request_id"]
        assert (await client.reply()).body == b"fine"
        reply = await client.reply()
        assert (reply.status, reply.get("retry-after")) == (429, "7")
        assert (await client.reply()).status == 500
        assert (await client.reply()).body == b"fine"
    finally:
        logger.removeHandler(watcher)
        logger.propagate = propagate
    assert listener.stats["handler_errors"] == 2
    assert error["request_id"] in lines[0].getMessage()


@on_both_loops
async def test_a_handler_that_fails_inside_a_streamed_answer_cuts_the_connection(rig: Rig):
    async def broken(request: Request, responder: Responder) -> None:
        responder.start(200, [], None)
        await responder.write(b"begun")
        if request.target == b"/2":
            raise asyncio.CancelledError
        responder.start(200, [], None)

    logging.getLogger("fullhit.http.wire").setLevel(logging.CRITICAL)
    try:
        await rig.listen(broken)
        for n in (1, 2):
            client = await rig.connect()
            client.send(GET % n)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.reply()
    finally:
        logging.getLogger("fullhit.http.wire").setLevel(logging.NOTSET)


@on_both_loops
async def test_error_bodies_take_the_shape_the_owner_wants(rig: Rig):
    def shape(status: int, code: str, message: str, request_id: str) -> tuple[str, bytes]:
        return "application/json", json.dumps({"status": "error", "message": message, "req_id": code}).encode()

    await rig.listen(echo, error_format=shape)
    client = await rig.connect()
    client.send(b"nonsense\r\n\r\n")
    assert json.loads((await client.reply()).body)["status"] == "error"


@on_both_loops
async def test_one_connection_too_many_is_503(rig: Rig):
    listener = await rig.listen(echo, ListenerLimits(max_connections=2))
    clients = [await rig.connect() for _ in range(2)]
    await rig.until(lambda: len(listener.connections) == 2)
    late = await rig.connect()
    assert (await late.reply()).status == 503
    await late.rest()
    clients[0].send(GET % 1)
    assert (await clients[0].reply()).status == 200


# --- the end


@on_both_loops
async def test_case_b35_a_drain_finishes_running_requests_and_reports_what_was_cut(rig: Rig):
    gate = asyncio.Event()

    async def handler(request: Request, responder: Responder) -> None:
        await (gate.wait() if request.target == b"/1" else asyncio.Event().wait())
        responder.reply(200, [], b"done")

    listener = await rig.listen(handler)
    idle, good, stuck = [await rig.connect() for _ in range(3)]
    good.send(GET % 1)
    stuck.send(GET % 2)
    await rig.until(lambda: listener.stats["requests"] == 2 and len(listener.connections) == 3)
    draining = asyncio.ensure_future(listener.drain(0.5))
    assert await idle.rest() == b""
    with pytest.raises(OSError):
        await rig.connect()
    gate.set()
    reply = await good.reply()
    assert (reply.body, reply.get("connection")) == (b"done", "close")
    report = await draining
    assert (report.running, report.finished, report.cut) == (2, 1, 1)
    await listener.close()
    assert await stuck.rest() == b""


@on_both_loops
async def test_nagle_is_off(rig: Rig):
    listener = await rig.listen(echo)
    await rig.connect()
    await rig.until(lambda: listener.connections)
    (connection,) = listener.connections
    sock = connection._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@on_both_loops
async def test_a_body_that_a_handler_keeps_is_never_overwritten_by_a_later_one(rig: Rig):
    kept: list[tuple[object, int]] = []

    async def keeper(request: Request, responder: Responder) -> None:
        first = request.body[0]
        if first % 3 == 0:
            kept.append((request.body, first))
        elif first % 3 == 1:
            kept.append((memoryview(request.body)[5:], first))
        responder.reply(200, [], b"")

    listener = await rig.listen(keeper)
    client = await rig.connect()
    for n in range(60):
        client.send(post(150_000) + bytes([n]) * 150_000)
        assert (await client.reply()).status == 200
    assert len(kept) == 40
    assert all(set(bytes(body)) == {n} for body, n in kept)
    assert 0 < listener.buffers.kept <= 1 << 20
