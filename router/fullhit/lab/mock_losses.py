"""Mock encoder, the ways in which its word can be lost: deltas that never arrive, and more keys than one message takes.

The lossy transport stands between the publisher and the real one, so a delta that it drops is one that the publisher
believes to have sent: what a network does, and what no publisher can know.
"""

from __future__ import annotations

import asyncio
import random

import msgspec
from aiohttp import web

from fullhit_publisher.cache import EmbeddingCache
from fullhit_publisher.transports.base import Connection, RequestHandler, Transport
from fullhit_publisher.wire import Delta, WireError, decode_envelope, decode_message

__all__ = ["LossyTransport", "filler"]

MAX_FILL = 1_000_000
"""Keys that one ``POST /mock/fill`` may make up."""


class LossyTransport:
    """``inner``, but each delta is dropped with the probability ``rate``. Heartbeats and snapshots pass."""

    def __init__(self, inner: Transport, rate: float, rng: random.Random) -> None:
        self.dropped = 0
        self._inner = inner
        self._rate = rate
        self._rng = rng

    @property
    def name(self) -> str:
        return self._inner.name

    async def connect(self, request_subject: str, on_request: RequestHandler, timeout: float) -> Connection:
        return _LossyConnection(self, await self._inner.connect(request_subject, on_request, timeout))

    def drops(self, data: bytes) -> bool:
        """Whether this message is to be dropped; counts it then."""
        try:
            is_delta = isinstance(decode_message(decode_envelope(data)), Delta)
        except WireError:
            is_delta = False  # not ours to judge
        if not is_delta or self._rng.random() >= self._rate:
            return False
        self.dropped += 1
        return True


class _LossyConnection:
    def __init__(self, owner: LossyTransport, inner: Connection) -> None:
        self._owner = owner
        self._inner = inner

    @property
    def max_payload(self) -> int:
        return self._inner.max_payload

    @property
    def lost(self) -> asyncio.Event:
        return self._inner.lost

    async def publish(self, subject: str, data: bytes) -> None:
        if not self._owner.drops(data):
            await self._inner.publish(subject, data)

    async def confirm(self, timeout: float) -> None:
        await self._inner.confirm(timeout)

    async def close(self, timeout: float) -> None:
        await self._inner.close(timeout)


class Fill(msgspec.Struct, forbid_unknown_fields=True):
    """``POST /mock/fill``: how many keys of pictures that nobody has sent, of one byte each; ``seed`` names them."""

    keys: int
    seed: int = 0


def filler(cache: EmbeddingCache[bytes]) -> web.RouteDef:
    """The route that fills ``cache`` at once, without an ``/encode`` for each key."""

    async def fill(request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read(), type=Fill)
        except (msgspec.DecodeError, msgspec.ValidationError) as problem:
            return web.json_response({"message": str(problem)}, status=400)
        if not 0 <= wanted.keys <= MAX_FILL:
            return web.json_response({"message": f"keys must be between 0 and {MAX_FILL}"}, status=400)
        rng = random.Random(wanted.seed)
        for _ in range(wanted.keys):
            cache.put(rng.randbytes(16).hex(), b"\0")
        return web.json_response({"cached_keys": len(cache)})

    return web.post("/mock/fill", fill)
