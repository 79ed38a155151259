"""Looking at an answer before it is passed on, and while it is."""

from __future__ import annotations

import asyncio

import pytest
from wire_rig import TIMEOUTS, Rig, on_both_loops

from fullhit.http.wire import BadReply, LostAfterSend, Request, Responder, UpstreamError
from fullhit.lab.raw_http import read_request

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
ANSWERS = {
    "whole": (HEAD + b"Content-Length: 5\r\n\r\nhello",),
    "length": (HEAD + b"Content-Length: 10\r\n\r\n", b"hello", b"world"),
    "chunked": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nhello\r\n", b"5\r\nworld\r\n0\r\n\r\n"),
    "to the end": (HEAD + b"Connection: close\r\n\r\n", b"hello", b"world"),
    "empty": (HEAD + b"Content-Length: 0\r\n\r\n",),
}


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("shape", ANSWERS)
@on_both_loops
async def test_what_was_peeked_at_is_relayed_all_the_same_and_shown_on_its_way(rig: Rig, shape: str, version: str):
    head, *rest = ANSWERS[shape]
    shown: list[bytes] = []
    peeked: list[bytes] = []
    more = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(head)
        for piece in rest:
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(piece)
            await more.wait()

    server = await rig.server(script)
    client = rig.upstream()

    def on_body(piece: bytes) -> bool:
        shown.append(piece)
        return False

    async def handler(request: Request, responder: Responder) -> None:
        response = await client.send(rig.origin(server), b"GET", b"/", (), timeouts=TIMEOUTS)
        peeked.extend([await response.peek(), await response.peek()])
        more.set()
        await response.relay(responder, ((b"X-Mark", b"1"),), on_body)

    await rig.listen(handler)
    visitor = await rig.connect()
    visitor.send(f"GET / HTTP/{version}\r\nHost: a\r\n\r\n".encode())
    reply = await visitor.reply()
    assert reply.get("x-mark") == "1"
    body = {"whole": b"hello", "empty": b""}.get(shape, b"helloworld")
    assert reply.body == body
    assert peeked[0] == peeked[1]
    wire = b"".join(ANSWERS[shape]).partition(b"\r\n\r\n")[2]
    assert wire.startswith(peeked[0]) and bool(peeked[0]) == bool(body)
    assert b"".join(shown) == wire


@on_both_loops
async def test_the_hook_is_called_until_it_has_seen_enough(rig: Rig):
    shown: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"Content-Length: 40\r\n\r\n")
        for _ in range(40):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0)

    server = await rig.server(script)
    client = rig.upstream()

    def on_body(piece: bytes) -> bool:
        shown.append(piece)
        return True

    async def handler(request: Request, responder: Responder) -> None:
        response = await client.send(rig.origin(server), b"GET", b"/", (), timeouts=TIMEOUTS)
        await response.relay(responder, (), on_body)

    await rig.listen(handler)
    visitor = await rig.connect()
    visitor.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await visitor.reply()).body == b"x" * 40
    assert len(shown) == 1


@pytest.mark.parametrize(
    ("pieces", "error"),
    [((b"Content-Length: 5\r\n\r\n",), LostAfterSend), ((b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n"), BadReply)],
)
@on_both_loops
async def test_an_answer_that_ends_before_it_begins_is_told_by_the_peek(rig: Rig, pieces: tuple, error: type):
    caught: list[UpstreamError] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"".join(pieces))
        await writer.drain()

    server = await rig.server(script)
    client = rig.upstream()

    async def handler(request: Request, responder: Responder) -> None:
        response = await client.send(rig.origin(server), b"GET", b"/", (), timeouts=TIMEOUTS)
        try:
            await response.peek()
        except UpstreamError as failure:
            caught.append(failure)
        response.close()
        responder.reply(200, (), b"other")

    await rig.listen(handler)
    visitor = await rig.connect()
    visitor.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await visitor.reply()).body == b"other"
    assert [type(failure) for failure in caught] == [error]


@on_both_loops
async def test_a_peek_that_has_waited_long_enough_gives_nothing_and_spoils_nothing(rig: Rig):
    go = asyncio.Event()
    peeked: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"Content-Length: 5\r\n\r\n")
        await go.wait()
        writer.write(b"hello")
        await reader.read()

    server = await rig.server(script)
    client = rig.upstream()

    async def handler(request: Request, responder: Responder) -> None:
        response = await client.send(rig.origin(server), b"GET", b"/", (), timeouts=TIMEOUTS)
        peeked.append(await response.peek(0.02))
        go.set()
        peeked.append(await response.peek(20))
        await response.relay(responder)

    await rig.listen(handler)
    visitor = await rig.connect()
    visitor.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await visitor.reply()).body == b"hello"
    assert peeked == [b"", b"hello"]


@on_both_loops
async def test_a_visitor_who_leaves_during_a_peek_ends_the_request_at_the_server(rig: Rig):
    ended = asyncio.Event()
    begun = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"Content-Length: 5\r\n\r\n")
        begun.set()
        try:
            assert await reader.read() == b""
        except ConnectionError:
            pass
        ended.set()

    server = await rig.server(script)
    client = rig.upstream()

    async def handler(request: Request, responder: Responder) -> None:
        response = await client.send(rig.origin(server), b"GET", b"/", (), timeouts=TIMEOUTS)
        await response.peek()

    await rig.listen(handler)
    visitor = await rig.connect()
    visitor.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    await begun.wait()
    visitor.reset()
    async with asyncio.timeout(30):
        await ended.wait()


@on_both_loops
async def test_peeking_waits_until_there_is_enough_or_no_more(rig: Rig):
    peeked: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"Content-Length: 6\r\n\r\n")
        for piece in (b"a", b"b", b"c"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.write(b"def")

    server = await rig.server(script)
    client = rig.upstream()

    async def handler(request: Request, responder: Responder) -> None:
        response = await client.send(rig.origin(server), b"GET", b"/", (), timeouts=TIMEOUTS)
        peeked.append(await response.peek(20, lambda held: b"c" in held))
        peeked.append(await response.peek(20, lambda held: False))
        await response.relay(responder)

    await rig.listen(handler)
    visitor = await rig.connect()
    visitor.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await visitor.reply()).body == b"abcdef"
    assert peeked[0].startswith(b"abc")
    assert peeked[1] == b"abcdef", "the end is enough"


@on_both_loops
async def test_a_connection_lost_before_there_was_enough_is_an_error(rig: Rig):
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"Content-Length: 6\r\n\r\nab")
        await writer.drain()

    server = await rig.server(script)
    response = await rig.upstream().send(rig.origin(server), b"GET", b"/", (), timeouts=TIMEOUTS)
    with pytest.raises(UpstreamError):
        await response.peek(20, lambda held: b"c" in held)
