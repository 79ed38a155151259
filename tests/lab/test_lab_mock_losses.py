"""Deltas that a mock encoder loses on purpose, and what else it does for `make chaos`."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from fullhit.lab.mock_losses import LossyTransport
from fullhit.lab.processes import Child, fetch_json
from fullhit_publisher.keys import digest, fold
from fullhit_publisher.transports.base import Connection, RequestHandler
from fullhit_publisher.wire import (
    Delta,
    Heartbeat,
    Snapshot,
    Update,
    decode_envelope,
    decode_message,
    encode,
)

KEY = "ab" * 16


class Line:
    """A transport that remembers what came through."""

    name = "line"

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.max_payload = 4711
        self.lost = asyncio.Event()
        self.closed = False

    async def connect(self, request_subject: str, on_request: RequestHandler, timeout: float) -> Connection:
        return self

    async def publish(self, subject: str, data: bytes) -> None:
        self.messages.append(decode_message(decode_envelope(data)))

    async def confirm(self, timeout: float) -> None:
        pass

    async def close(self, timeout: float) -> None:
        self.closed = True


def written(message: Delta | Heartbeat | Snapshot, sequence: int) -> bytes:
    return encode(message, publisher_id=1, sequence=sequence, published_at=0)


async def speak(line: Line, rate: float, *, hidden: bool) -> LossyTransport:
    """A thousand deltas, a heartbeat behind each, and a snapshot."""
    lossy = LossyTransport(line, rate, random.Random(3), hidden=hidden)
    connection = await lossy.connect("subject", lambda data, reply: None, 1.0)
    assert connection.max_payload == 4711 and connection.lost is line.lost
    for seq in range(1, 1001):
        await connection.publish("events", written(Delta(1, Update([KEY], []), 1, seq, "default"), 2 * seq))
        beat = Heartbeat(1, 1, seq, "default", 1, digest([fold(KEY)]), url="http://encoder.invalid:1")
        await connection.publish("events", written(beat, 2 * seq + 1))
    await connection.publish("inbox", written(Snapshot(1, 1, 1000, "default", 5, 0, 1, [KEY]), 0))
    await connection.close(1.0)
    assert line.closed
    return lossy


async def test_about_a_tenth_of_the_deltas_is_lost_and_nothing_else() -> None:
    line = Line()
    lossy = await speak(line, 0.1, hidden=False)
    numbers = [message.seq for message in line.messages if isinstance(message, Delta)]
    assert 50 < lossy.dropped < 150
    assert len(numbers) == 1000 - lossy.dropped
    assert set(numbers) < set(range(1, 1001)), "what arrives has its own number"
    assert sum(isinstance(message, Heartbeat) for message in line.messages) == 1000
    assert sum(isinstance(message, Snapshot) for message in line.messages) == 1


async def test_hidden_losses_leave_no_gap_and_nothing_that_could_show_them() -> None:
    line = Line()
    lossy = await speak(line, 0.1, hidden=True)
    numbers = [message.seq for message in line.messages if isinstance(message, Delta)]
    assert lossy.dropped > 50
    assert numbers == list(range(1, 1001 - lossy.dropped))[: len(numbers)]
    assert len(numbers) == len(line.messages) == 1000 - lossy.dropped


async def test_what_is_no_message_passes() -> None:
    lossy = LossyTransport(Line(), 1.0, random.Random(1))
    assert lossy.passes(b"\xff") == b"\xff"


@pytest.fixture
async def filled(
    start_encoder: Callable[..., Awaitable[tuple[Child, str]]], http: aiohttp.ClientSession
) -> tuple[str, Callable[[object], Awaitable[int]]]:
    _, url = await start_encoder()

    async def fill(body: object) -> int:
        async with http.post(f"{url}/mock/fill", data=io.BytesIO(json.dumps(body).encode())) as reply:
            return reply.status

    return url, fill


async def test_a_mock_encoder_is_filled_with_keys_of_pictures_nobody_sent(
    filled: tuple[str, Callable[[object], Awaitable[int]]],
) -> None:
    url, fill = filled
    assert await fill({"keys": 700, "seed": 1}) == 200
    assert await fill({"keys": 300, "seed": 2}) == 200
    keys = await fetch_json(f"{url}/mock/cache")
    assert len({fold(key) for key in keys}) == 1000
    for wrong in ({"keys": -1}, {"keys": 10**9}, {"keys": "many"}, {"kees": 1}, []):
        assert await fill(wrong) == 400
