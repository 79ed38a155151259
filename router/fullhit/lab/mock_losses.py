"""Mock encoder, the ways in which its word can be lost: deltas that never arrive, and more keys than one message takes.

The lossy transport stands between the publisher and the real one, so a delta that it drops is one that the publisher
believes to have sent: what a network does, and what no publisher can know. ``hidden`` takes away what lets a reader
notice: deltas are numbered anew, so that no gap shows, and heartbeats and snapshots do not pass. That is how a stream
without anti-entropy would be; benches compare with it.
"""

from __future__ import annotations

import asyncio
import random

import msgspec
from aiohttp import web

from fullhit_publisher.cache import EmbeddingCache
from fullhit_publisher.transports.base import Connection, RequestHandler, Transport
from fullhit_publisher.wire import Delta, WireError, decode_envelope, decode_message, encode

__all__ = ["LossyTransport", "filler"]

MAX_FILL = 1_000_000
"""Keys that one ``POST /mock/fill`` may make up."""


class LossyTransport:
    """``inner``, but each delta is dropped with the probability ``rate``. Heartbeats and snapshots pass, unless losses
    are ``hidden``."""

    def __init__(self, inner: Transport, rate: float, rng: random.Random, *, hidden: bool = False) -> None:
        self.dropped = 0
        self._inner = inner
        self._rate = rate
        self._rng = rng
        self._hidden = hidden

    @property
    def name(self) -> str:
        return self._inner.name

    async def connect(self, request_subject: str, on_request: RequestHandler, timeout: float) -> Connection:
        return _LossyConnection(self, await self._inner.connect(request_subject, on_request, timeout))

    def passes(self, data: bytes) -> bytes | None:
        """What of a message reaches the other side: all, nothing, or the message with another number."""
        try:
            envelope = decode_envelope(data)
            message = decode_message(envelope)
        except WireError:
            return data  # not ours to judge
        if not isinstance(message, Delta):
            return None if self._hidden else data
        if self._rng.random() < self._rate:
            self.dropped += 1
            return None
        if not self._hidden or message.seq is None:
            return data
        return encode(
            msgspec.structs.replace(message, seq=message.seq - self.dropped),
            publisher_id=envelope.publisher_id,
            sequence=envelope.sequence,
            published_at=envelope.published_at,
        )


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
        passed = self._owner.passes(data)
        if passed is not None:
            await self._inner.publish(subject, passed)

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
