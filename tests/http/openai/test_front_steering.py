"""The front on sockets: what reaches the frontend, what reaches the client, and who is sent where."""

from __future__ import annotations

import asyncio
import json

from fullhit_publisher.dynamo_keys import url_key
from fullhit_publisher.identity import dynamo_name
from fullhit_publisher.keys import fold

URL = "https://pictures.invalid/cat.png"


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
    assert [value for name, value in seen.headers if name.endswith("worker-instance-id")] == ["2", "2"]
    assert house.fleet.good == [dynamo_name(2)] and house.telemetry.done == [("vision", "full_hit", 200)]
    assert [decision.request_id for decision in house.telemetry.kept] == ["abc"]
    await house.at_rest()


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
