"""Listener and upstream client together, as the gateways use them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import ssl
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire_rig import LOOPS, TIMEOUTS, Rig, on_both_loops

from fullhit.http.wire import ListenerLimits, Origin, Request, Responder, Timeouts, UpstreamError
from fullhit.lab.raw_http import RawClient, RawRequest, read_request, reset

MIB = 1024 * 1024
GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"


def replying(reply: bytes, then_close: bool = False):
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(reply)
            await writer.drain()
            if then_close:
                return

    return script


@on_both_loops
async def test_case_f62_f63_large_bodies_cross_the_relay_byte_for_byte(rig: Rig):
    async def digest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_request(reader)
            seen = hashlib.sha256(request.body).hexdigest().encode()
            assert request.get("transfer-encoding") is None and request.get("content-length")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(seen), seen))

    await rig.relay(await rig.server(digest))
    client = await rig.connect()
    block = random.Random(1).randbytes(MIB)
    for size in (int(1.1 * MIB), 12 * MIB, 60 * MIB):
        body = (block * (size // MIB + 1))[:size]
        expected = hashlib.sha256(body).hexdigest().encode()
        client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size)
        client.send(body)
        assert (await client.reply()).body == expected
        client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        for at in range(0, size, 3_000_001):
            piece = body[at : at + 3_000_001]
            client.send(b"%x\r\n" % len(piece))
            client.send(piece)
            client.send(b"\r\n")
        client.send(b"0\r\n\r\n")
        assert (await client.reply()).body == expected


@on_both_loops
async def test_headers_cross_untouched_but_for_the_hop_by_hop_ones(rig: Rig):
    seen: list[RawRequest] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await read_request(reader))
            writer.write(
                b"HTTP/1.1 418 Tea  pot\r\nX-Two: a\r\nx-two: b\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n"
                b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"
            )

    await rig.relay(await rig.server(script))
    client = await rig.connect()
    client.send(
        b"PUT /%7Euser/%2e%2e?q=%41&%zz HTTP/1.1\r\nHost: public.invalid\r\nX-Odd-CASE: \xe9 \r\nTE: trailers\r\n"
        b"Connection: X-Gone\r\nX-Gone: 1\r\nContent-Length: 1\r\n\r\n!"
    )
    reply = await client.reply()
    assert reply.status == 418
    assert reply.headers == [("x-two", "a"), ("x-two", "b"), ("content-encoding", "gzip"), ("content-length", "3")]
    (request,) = seen
    assert request.target == "/%7Euser/%2e%2e?q=%41&%zz"
    assert b"X-Odd-CASE: \xe9" in request.head
    assert [name for name, _ in request.headers] == ["host", "x-odd-case", "content-length"]


@on_both_loops
async def test_case_f71_every_reply_framing_reaches_both_http_versions(rig: Rig):
    replies = {
        "length": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        "until close": b"HTTP/1.1 200 OK\r\n\r\nhello",
        "old": b"HTTP/1.0 200 OK\r\n\r\nhello",
    }
    for name, raw in replies.items():
        await rig.relay(await rig.server(replying(raw, then_close="HTTP/1.0" in repr(raw) or name == "until close")))
        modern = await rig.connect()
        for n in range(2):
            modern.send(GET % n)
            reply = await modern.reply()
            assert reply.body == b"hello", name
            assert (reply.chunks == [2, 3]) == (name == "chunked"), "chunks pass as they came"
            assert reply.get("content-length") or reply.get("transfer-encoding"), "never close-delimited on 1.1"
        old = await rig.connect()
        old.send(b"GET / HTTP/1.0\r\n\r\n")
        reply = await old.reply()
        assert (reply.body, reply.get("transfer-encoding")) == (b"hello", None), name
        head = await rig.connect()
        head.send(b"HEAD / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        if name == "length":
            assert (await head.reply("HEAD")).get("content-length") == "5"


@on_both_loops
async def test_statuses_without_body_keep_the_connection_in_step(rig: Rig):
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_request(reader)
            if request.target == "/1":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n")
            elif request.target == "/2":
                writer.write(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 77\r\n\r\n")
            elif request.method == "HEAD":
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    server = await rig.server(script)
    await rig.relay(server)
    client = await rig.connect()
    client.send(GET % 1 + GET % 2 + b"HEAD /3 HTTP/1.1\r\nHost: a\r\n\r\n" + GET % 4)
    assert (await client.reply()).status == 204
    assert (await client.reply()).status == 304
    assert (await client.reply("HEAD")).status == 200
    assert (await client.reply()).body == b"ok"
    assert server.accepted == 1


@on_both_loops
async def test_case_f69_each_event_of_a_stream_is_passed_on_at_once(rig: Rig):
    go = asyncio.Queue[bytes]()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        while event := await go.get():
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        writer.write(b"0\r\n\r\n")
        await reader.read()

    await rig.relay(await rig.server(script))
    client = await rig.connect()
    client.send(GET % 1)
    go.put_nowait(b"data: 0\n\n")
    assert b"text/event-stream" in await client.reader.readuntil(b"\r\n\r\n")
    for n in range(20):
        assert await client.reader.readuntil(b"\n\n\r\n") == b"9\r\ndata: 0\n\n\r\n"
        go.put_nowait(b"data: 0\n\n" if n < 19 else b"")
    assert await client.reader.readuntil(b"\r\n\r\n") == b"0\r\n\r\n"


# --- departures


@pytest.mark.parametrize("when", ["before the answer", "inside the answer"])
@on_both_loops
async def test_case_b32_b33_the_server_sees_the_clients_departure(rig: Rig, when: str):
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        if when == "inside the answer":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        arrived.set()
        try:
            await reader.read()
        except ConnectionError:
            pass
        gone.set()

    arrived = asyncio.Event()
    await rig.relay(await rig.server(script))
    client = await rig.connect()
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi")
    async with asyncio.timeout(10):
        await arrived.wait()
        if when == "inside the answer":
            await client.reader.readuntil(b"hello")
        started = asyncio.get_running_loop().time()
        await client.close()
        await gone.wait()
    assert asyncio.get_running_loop().time() - started < 1


@on_both_loops
async def test_a_server_that_dies_inside_an_answer_cuts_the_client_off_visibly(rig: Rig):
    for reply in (
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nnonsense\r\n",
    ):
        errors: list[BaseException] = []
        listener = await rig.relay(await rig.server(replying(reply, then_close=True)), errors=errors)
        client = await rig.connect()
        client.send(GET % 1)
        try:  # a cut, or a 502 when the end was known before the answer began
            assert (await client.reply()).status == 502
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            pass
        await rig.until(lambda errors=errors: errors)
        assert isinstance(errors[0], UpstreamError)
        assert listener.stats["handler_errors"] == 0


@on_both_loops
async def test_case_b37_a_hung_server_does_not_hold_up_the_others(rig: Rig):
    async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    hung, good = await rig.server(hangs), await rig.server(replying(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"))
    client = rig.upstream()

    async def handler(request: Request, responder: Responder) -> None:
        origin = rig.origin(hung if request.target == b"/0" else good)
        response = await client.send(origin, b"GET", request.target, [], timeouts=TIMEOUTS)
        await response.relay(responder)

    listener = await rig.listen(handler)
    stuck = [await rig.connect() for _ in range(200)]
    for one in stuck:
        one.send(GET % 0)
    await rig.until(lambda: listener.stats["requests"] == 200)
    quick = await rig.connect()
    for _ in range(50):
        quick.send(GET % 1)
        assert (await quick.reply(timeout=5)).status == 200
    for one in stuck:
        one.reset()


@on_both_loops
async def test_case_f65_a_slow_client_pauses_the_server_and_a_stuck_one_is_cut(rig: Rig):
    written = 0

    async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            written += 65536

    server = await rig.server(floods)
    listener = await rig.relay(server, ListenerLimits(write_timeout=0.4))
    client = await rig.connect(receive_buffer=4096)
    client.send(GET % 1)
    await rig.until(lambda: listener.stats["write_timeout"] == 1)
    assert written < 100 * MIB
    await rig.until(lambda: server.live == 0 and not listener.connections)


@on_both_loops
async def test_a_slow_client_gets_everything_in_the_end(rig: Rig):
    body = random.Random(2).randbytes(8 * MIB)
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    await rig.relay(await rig.server(replying(reply)), timeouts=Timeouts(idle=5))
    client = await rig.connect(receive_buffer=16384)
    client.send(GET % 1)
    assert hashlib.sha256((await client.reply()).body).digest() == hashlib.sha256(body).digest()
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    await rig.relay(await rig.server(replying(chunked)))
    for version in (b"1.1", b"1.0"):
        client = await rig.connect(receive_buffer=16384)
        client.send(b"GET / HTTP/%b\r\nHost: a\r\n\r\n" % version)
        assert hashlib.sha256((await client.reply()).body).digest() == hashlib.sha256(body).digest()


@on_both_loops
async def test_a_hundred_random_departures_leave_nothing_behind(rig: Rig):
    chance = random.Random(3)

    async def moody(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            mood = chance.random()
            if mood < 0.15:
                reset(writer)
                return
            if mood < 0.3:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
                return
            await asyncio.sleep(mood / 50)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    errors: list[BaseException] = []
    server = await rig.server(moody)
    client = rig.upstream()

    async def handler(request: Request, responder: Responder) -> None:
        try:
            response = await client.send(
                rig.origin(server), b"POST", b"/", request.headers, request.body, timeouts=TIMEOUTS
            )
            await response.relay(responder)
        except UpstreamError as error:
            errors.append(error)
            if not responder.started:
                responder.reply(502, [], b"")

    listener = await rig.listen(handler)

    async def one(n: int) -> None:
        async with await RawClient.open(rig.host, rig.port) as raw:
            size = chance.choice((10, 100_000, 3_000_000))
            raw.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size)
            raw.send(b"x" * size)
            await asyncio.sleep(chance.random() / 50)
            if n % 2:
                raw.reset()
            else:
                try:
                    await raw.reply()
                except (asyncio.IncompleteReadError, ConnectionError):
                    pass

    await asyncio.gather(*(one(n) for n in range(100)))
    await rig.until(lambda: not listener.connections and listener.budget.used == 0)
    assert listener.stats["handler_errors"] == 0


# --- TLS


@on_both_loops
async def test_tls_on_both_sides(rig: Rig, tmp_path: Path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = subprocess.run(  # noqa: ASYNC221
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        capture_output=True,
        check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("no usable openssl command")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(cert, key)
    trusting = ssl.create_default_context(cafile=str(cert))

    async def size(request: Request, responder: Responder) -> None:
        responder.reply(200, [], hashlib.sha256(bytes(request.body)).digest())

    worker = await rig.listen(size)
    await worker.close()
    host, port = await worker.start("127.0.0.1", 0, serving)
    client = rig.upstream()

    async def handler(request: Request, responder: Responder) -> None:
        origin = Origin(host, port, trusting)
        response = await client.send(origin, b"POST", b"/", [], request.body, timeouts=TIMEOUTS)
        await response.relay(responder)

    front = await rig.listen(handler)
    await front.close()
    rig.host, rig.port = await front.start("127.0.0.1", 0, serving)
    async with await RawClient.open(rig.host, rig.port, ssl=trusting) as raw:
        for count in (0, 10, 300_000, 5_000_000):
            body = b"z" * count
            raw.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % count + body)
            assert (await raw.reply()).body == hashlib.sha256(body).digest()
    assert client.stats["connects"] == 1
    await front.close()
    await worker.close()


# --- any segmentation

REQUESTS = st.lists(
    st.tuples(st.sampled_from(["get", "length", "chunked"]), st.binary(max_size=400)), min_size=1, max_size=5
)


def encode(kind: str, body: bytes, n: int) -> bytes:
    if kind == "get":
        return GET % n
    if kind == "length":
        return b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (n, len(body), body)
    cut = len(body) // 2
    parts = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (body[:cut], body[cut:]) if p)
    return b"POST /%d HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % (n, parts)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests=REQUESTS, cuts=st.lists(st.integers(0, 5000), max_size=12), uv=st.booleans())
def test_any_segmentation_of_a_request_stream_gives_the_same_requests(
    requests: list[tuple[str, bytes]], cuts: list[int], uv: bool
):
    async def scenario() -> None:
        rig = Rig()
        seen: list[tuple[bytes, bytes]] = []

        async def handler(request: Request, responder: Responder) -> None:
            seen.append((request.target, bytes(request.body)))
            responder.reply(200, [], b"")

        await rig.listen(handler)
        client = await rig.connect()
        data = b"".join(encode(kind, body, n) for n, (kind, body) in enumerate(requests))
        for piece in pieces(data, cuts):
            client.send(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        for _ in requests:
            assert (await client.reply()).status == 200
        await rig.close()
        assert seen == [(b"/%d" % n, b"" if k == "get" else b) for n, (k, b) in enumerate(requests)]

    with asyncio.Runner(loop_factory=LOOPS["uvloop" if uv else "asyncio"]) as runner:
        runner.run(scenario())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    bodies=st.lists(st.tuples(st.booleans(), st.binary(max_size=400)), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 5000), max_size=12),
    uv=st.booleans(),
)
def test_any_segmentation_of_a_reply_gives_the_same_reply(bodies: list[tuple[bool, bytes]], cuts: list[int], uv: bool):
    async def scenario() -> None:
        rig = Rig()
        replies = iter(bodies)

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await read_request(reader)
                chunked, body = next(replies)
                if chunked:
                    parts = b"".join(b"%x\r\n%b\r\n" % (1, body[i : i + 1]) for i in range(len(body)))
                    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                    data += parts + b"0\r\n\r\n"
                else:
                    data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
                for piece in pieces(data, cuts):
                    writer.write(piece)
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)

        server = await rig.server(script)
        await rig.relay(server)
        client = await rig.connect()
        for chunked, body in bodies:
            client.send(GET % 1)
            reply = await client.reply()
            assert reply.body == body
            assert not chunked or reply.chunks == [1] * len(body)
        assert server.accepted == 1
        await rig.close()

    with asyncio.Runner(loop_factory=LOOPS["uvloop" if uv else "asyncio"]) as runner:
        runner.run(scenario())
