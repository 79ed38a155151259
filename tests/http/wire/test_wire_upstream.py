"""The upstream client against raw servers."""

from __future__ import annotations

import asyncio
import hashlib
import socket

import pytest
from wire_rig import TIMEOUTS, Rig, on_both_loops

from fullhit.http.wire import (
    BadReply,
    ConnectFailed,
    LocalFault,
    LostAfterSend,
    NotAccepted,
    Origin,
    Timeouts,
    UpstreamClient,
    UpstreamError,
    UpstreamLimits,
    UpstreamResponse,
    UpstreamTimeout,
)
from fullhit.lab.raw_http import RawServer, read_request, reset

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
MIB = 1024 * 1024


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A well-behaved kept-alive server that answers with the digest of what it got."""
    while True:
        request = await read_request(reader)
        digest = hashlib.sha256(request.body).hexdigest().encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(digest), digest))
        await writer.drain()


async def post(
    client: UpstreamClient, server: RawServer, body: bytes = b"hello", timeouts: Timeouts = TIMEOUTS
) -> UpstreamResponse:
    return await client.send(Rig.origin(server), b"POST", b"/x", [(b"X-A", b"1")], body, timeouts=timeouts)


def answering(*pieces: bytes, then_close: bool = True):
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if not then_close:
            await reader.read()

    return script


# --- what arrives


@on_both_loops
async def test_case_f63_bodies_reach_the_server_byte_for_byte_and_sent_is_reported_once(rig: Rig):
    server = await rig.server(serve)
    client = rig.upstream()
    for size in (0, 1, 300_000, MIB, MIB + 1, 9 * MIB):
        body = (b"0123456789abcdef-" * (size // 17 + 1))[:size]
        for shape in (body, bytearray(body), memoryview(body)):
            sent: list[int] = []
            response = await client.send(
                rig.origin(server),
                b"POST",
                b"/x",
                [],
                shape,
                timeouts=TIMEOUTS,
                on_sent=lambda sent=sent: sent.append(1),
            )
            assert await response.read() == hashlib.sha256(body).hexdigest().encode()
            assert sent == [1]
    assert server.accepted == 1, "one connection served all of them"


@on_both_loops
async def test_replies_are_read_in_every_framing(rig: Rig):
    cases = [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nT: 1\r\n\r\n",
            b"hello",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", b"hello"),
        (b"HTTP/1.0 200 OK\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
    ]
    for raw, expected in cases:
        for pieces in ([raw], [raw[i : i + 1] for i in range(len(raw))]):
            server = await rig.server(answering(*pieces))
            client = rig.upstream()
            response = await post(client, server)
            assert await response.read() == expected, raw
    response = await client.send(
        rig.origin(await rig.server(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", then_close=False))),
        b"HEAD",
        b"/",
        [],
        timeouts=TIMEOUTS,
    )
    assert (await response.read(), response.get(b"content-length")) == (b"", b"9")


@on_both_loops
async def test_a_reply_above_the_callers_limit_is_refused(rig: Rig):
    for framing in (b"Content-Length: 2000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n7d0\r\n", b"\r\n"):
        server = await rig.server(answering(b"HTTP/1.1 200 OK\r\n" + framing + b"x" * 2000, then_close=False))
        client = rig.upstream()
        response = await post(client, server)
        with pytest.raises(BadReply, match="larger than 1000"):
            await response.read(1000)


# --- what goes wrong


@on_both_loops
async def test_nobody_listening_and_no_such_name_are_connect_failures(rig: Rig):
    server = await rig.server(serve)
    await server.close()
    client = rig.upstream()
    with pytest.raises(ConnectFailed) as caught:
        await post(client, server)
    assert caught.value.not_processed and str(server.port) in str(caught.value)
    with pytest.raises(ConnectFailed):
        await client.send(Origin("worker.invalid", 1), b"GET", b"/", [], timeouts=TIMEOUTS)


@on_both_loops
async def test_case_b37_a_connect_that_hangs_times_out(rig: Rig):
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    for one in waiting:  # fill the accept queue, so that further SYNs go unanswered
        one.setblocking(False)
        one.connect_ex(sock.getsockname())
    client = rig.upstream()
    try:
        with pytest.raises(UpstreamTimeout) as caught:
            await client.send(Origin(*sock.getsockname()), b"GET", b"/", [], timeouts=Timeouts(connect=0.15, total=20))
        assert caught.value.stage == "connect" and caught.value.not_processed
    finally:
        for one in (*waiting, sock):
            one.close()


@on_both_loops
async def test_a_death_with_part_of_the_body_still_here_is_not_accepted(rig: Rig):
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(100)
        reset(writer)

    server = await rig.server(dies, receive_buffer=4096)
    client = rig.upstream()
    with pytest.raises(NotAccepted) as caught:
        await post(client, server, b"x" * 40 * MIB)
    assert caught.value.not_processed


@on_both_loops
async def test_a_death_after_the_whole_request_left_is_lost_and_nothing_more_is_claimed(rig: Rig):
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        reset(writer)

    server = await rig.server(dies)
    client = rig.upstream()
    with pytest.raises(LostAfterSend) as caught:
        await post(client, server)
    assert not caught.value.not_processed and not caught.value.reused


@on_both_loops
async def test_case_f60_a_reused_connection_closed_under_a_post_is_lost_and_says_reused(rig: Rig):
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await reader.readexactly(1)  # the next request is on its way: close under it

    server = await rig.server(once)
    client = rig.upstream()
    assert await (await post(client, server)).read() == b"ok"
    with pytest.raises(LostAfterSend) as caught:
        await post(client, server)
    assert caught.value.reused and not caught.value.not_processed
    assert await (await post(client, server)).read() == b"ok", "the next one gets a fresh connection"


@on_both_loops
async def test_case_f60_connections_closed_while_idle_are_not_used_and_the_limit_is_learnt(rig: Rig):
    async def short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(0.4):
                await read_request(reader)
            writer.write(OK)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await short(reader, writer)
        except TimeoutError:
            pass

    server = await rig.server(script)
    client = rig.upstream()
    origin = rig.origin(server)
    assert await (await post(client, server)).read() == b"ok"
    assert client.idle_connections(origin) == 1
    await rig.until(lambda: client.open_connections == 0)
    assert client.stats["idle_closed_by_peer"] == 1
    assert 0.2 <= client.idle_timeout(origin) < 0.5
    for _ in range(3):
        assert await (await post(client, server)).read() == b"ok"
    assert server.accepted == 2


@on_both_loops
async def test_case_f60_idle_connections_are_closed_before_the_server_would(rig: Rig):
    server = await rig.server(serve)
    client = rig.upstream(UpstreamLimits(idle_timeout=0.1))
    await (await post(client, server)).read()
    await rig.until(lambda: server.live == 0)
    assert client.stats["idle_closed_by_peer"] == 0

    async def announces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=1\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    server = await rig.server(announces)
    client = rig.upstream()
    await (await post(client, server)).read()
    assert client.idle_timeout(rig.origin(server)) == pytest.approx(0.8)


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"\x00\x01\x02\x03\x04\x05\x06",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
        b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 300 + b"\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
@on_both_loops
async def test_garbage_is_a_bad_reply_and_never_reused(rig: Rig, reply: bytes):
    server = await rig.server(answering(reply))
    client = rig.upstream()
    with pytest.raises(BadReply):
        await post(client, server)
    await rig.until(lambda: client.open_connections == 0)


@on_both_loops
async def test_interim_replies_without_end_are_refused_and_cost_little(rig: Rig):
    """A server that said only "100 Continue" made the router collect and read again all of them at every read."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        while not writer.is_closing():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
            await writer.drain()

    server = await rig.server(script)
    client = rig.upstream()
    async with asyncio.timeout(10):
        with pytest.raises(BadReply, match="too many interim"):
            await post(client, server)
    await rig.until(lambda: client.open_connections == 0)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", LostAfterSend),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe", LostAfterSend),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", LostAfterSend),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", BadReply),
    ],
)
@on_both_loops
async def test_replies_that_end_early_are_errors_not_short_bodies(rig: Rig, reply: bytes, kind: type[UpstreamError]):
    server = await rig.server(answering(reply))
    client = rig.upstream()
    with pytest.raises(kind):
        await (await post(client, server)).read()


@on_both_loops
async def test_bytes_after_the_reply_cost_the_connection(rig: Rig):
    server = await rig.server(answering(OK + b"HTTP/1.1 200 OK\r\n", then_close=False))
    client = rig.upstream()
    assert await (await post(client, server)).read() == b"ok"
    assert client.open_connections == 0

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await gate.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await reader.read()

    gate = asyncio.Event()
    server = await rig.server(late)
    assert await (await post(client, server)).read() == b"ok"
    gate.set()
    await rig.until(lambda: client.open_connections == 0)
    assert client.stats["unsolicited"] == 1


@on_both_loops
async def test_an_early_answer_is_delivered_and_the_connection_not_reused(rig: Rig):
    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await writer.drain()
        await gate.wait()

    gate = asyncio.Event()
    server = await rig.server(refuses, receive_buffer=4096)
    client = rig.upstream()
    response = await post(client, server, b"x" * 30 * MIB)
    assert (response.status, await response.read()) == (413, b"big")
    await rig.until(lambda: client.open_connections == 0)
    gate.set()


# --- time


@pytest.mark.parametrize(
    ("stage", "timeouts", "reply"),
    [
        ("first_byte", Timeouts(first_byte=0.1), b""),
        ("idle", Timeouts(idle=0.1), b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"),
        ("total", Timeouts(total=0.1), b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"),
        ("total", Timeouts(total=0.1), b""),
    ],
)
@on_both_loops
async def test_case_b37_every_stage_has_its_time_limit(rig: Rig, stage: str, timeouts: Timeouts, reply: bytes):
    server = await rig.server(answering(reply, then_close=False))
    client = rig.upstream()
    with pytest.raises(UpstreamTimeout) as caught:
        await (await post(client, server, timeouts=timeouts)).read()
    assert caught.value.stage == stage
    await rig.until(lambda: server.live == 0)


@on_both_loops
async def test_case_b37_a_server_that_stops_reading_times_out_as_not_processed(rig: Rig):
    async def stops(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await gate.wait()

    gate = asyncio.Event()
    server = await rig.server(stops, receive_buffer=4096)
    client = rig.upstream()
    with pytest.raises(UpstreamTimeout) as caught:
        await post(client, server, b"x" * 40 * MIB, Timeouts(send=0.2))
    assert caught.value.stage == "send" and caught.value.not_processed
    gate.set()


# --- the pool


@on_both_loops
async def test_case_b38_a_hundred_and_fifty_slow_requests_run_at_once(rig: Rig):
    gate = asyncio.Event()
    arrived = 0

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        await read_request(reader)
        arrived += 1
        if arrived == 150:
            gate.set()
        await gate.wait()
        writer.write(OK)
        await reader.read()

    server = await rig.server(slow)
    client = rig.upstream()

    async def one() -> bytes:
        return await (await post(client, server)).read()

    assert await asyncio.gather(*(one() for _ in range(150))) == [b"ok"] * 150


@on_both_loops
async def test_a_full_pool_waits_in_order_and_says_so_when_it_takes_too_long(rig: Rig):
    gate = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            await gate.wait()
            writer.write(OK)

    server = await rig.server(slow)
    client = rig.upstream(UpstreamLimits(max_connections=2))
    running = [asyncio.ensure_future(post(client, server)) for _ in range(2)]
    await rig.until(lambda: server.live == 2)
    with pytest.raises(UpstreamTimeout) as caught:
        await post(client, server, timeouts=Timeouts(pool=0.05))
    assert caught.value.stage == "pool" and caught.value.not_processed
    cancelled = asyncio.ensure_future(post(client, server))
    queued = [asyncio.ensure_future(post(client, server)) for _ in range(6)]
    await rig.until(lambda: client.stats["pool_wait"] == 8)
    cancelled.cancel()
    gate.set()
    for future in running + queued:
        assert await (await future).read() == b"ok"
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert server.accepted == 2


@on_both_loops
async def test_a_cancelled_request_closes_its_connection_and_nobody_gets_its_reply(rig: Rig):
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_request(reader)
            if request.body == b"slow":
                got.set()
                await reader.read()
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(request.body), request.body))

    got = asyncio.Event()
    server = await rig.server(slow)
    client = rig.upstream()
    await (await post(client, server)).read()
    task = asyncio.ensure_future(post(client, server, b"slow"))
    async with asyncio.timeout(10):
        await got.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.until(lambda: server.live == 0)
    for n in range(20):
        assert await (await post(client, server, b"%d" % n)).read() == b"%d" % n


@on_both_loops
async def test_an_answer_is_consumed_once_and_an_unread_one_can_be_dropped(rig: Rig):
    server = await rig.server(serve)
    client = rig.upstream()
    response = await post(client, server)
    await response.read()
    with pytest.raises(LocalFault):
        await response.read()
    big = await rig.server(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 50000000\r\n\r\n", b"x" * 20 * MIB))
    response = await post(client, big)
    response.release()
    await rig.until(lambda: big.live == 0)
    with pytest.raises(LocalFault):
        await response.read()


@on_both_loops
async def test_an_answer_nobody_consumes_is_not_read_ahead_without_bound(rig: Rig):
    server = await rig.server(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 60000000\r\n\r\n", b"x" * 60_000_000))
    client = rig.upstream(UpstreamLimits(read_ahead=100_000))
    response = await post(client, server)
    await rig.until(lambda: response._reading_paused)
    assert sum(map(len, response._held)) < 2 * MIB
    assert len(await response.read(60_000_000)) == 60_000_000


@on_both_loops
async def test_nagle_is_off_towards_the_server(rig: Rig):
    server = await rig.server(serve)
    client = rig.upstream()
    await (await post(client, server)).read()
    (connection,) = client._connections
    sock = connection._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
