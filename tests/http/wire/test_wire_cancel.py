"""A sender that is cancelled in the very moment of the answer: its connection must not be taken from anybody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from wire_rig import TIMEOUTS, Rig, on_both_loops

from fullhit.http.wire import UpstreamClient, UpstreamResponse
from fullhit.http.wire.exchange import UpstreamConnection
from fullhit.lab.raw_http import RawServer, read_request

SHORT = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"


def answering(reply: bytes) -> Callable[..., object]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(reply)
            await writer.drain()

    return serve


async def post(client: UpstreamClient, server: RawServer) -> UpstreamResponse:
    return await client.send(Rig.origin(server), b"POST", b"/x", [], b"hello", timeouts=TIMEOUTS)


@pytest.mark.parametrize("reply", [SHORT, CHUNKED])
@pytest.mark.parametrize("first", ["answer", "cancel"])
@on_both_loops
async def test_a_cancelled_sender_closes_no_connection_that_may_be_anothers(rig: Rig, reply: bytes, first: str) -> None:
    server = await rig.server(answering(reply))
    client = rig.upstream()
    whole = UpstreamConnection.buffer_updated
    sender: asyncio.Task[UpstreamResponse]

    def meddle(self: UpstreamConnection, nbytes: int) -> None:
        UpstreamConnection.buffer_updated = whole  # type: ignore[method-assign]
        if first == "cancel":
            sender.cancel()
        whole(self, nbytes)
        sender.cancel()

    UpstreamConnection.buffer_updated = meddle  # type: ignore[method-assign]
    sender = asyncio.create_task(post(client, server))
    with pytest.raises(asyncio.CancelledError):
        await sender
    kept = 1 if first == "answer" else 0
    assert client.open_connections == client.idle_connections(Rig.origin(server)) == kept
    assert await (await post(client, server)).read() == b"ok"
