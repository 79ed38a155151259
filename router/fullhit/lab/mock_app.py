"""Mock encoder, the HTTP application: what an SGLang encoder answers, without a model or a GPU.

It keeps the contract of SGLang 0.5.23's encoder as far as a router and a language server can see it: ``/encode``,
``/scheduler_receive_url`` and their two orders, the ``null`` that comes only after the push, 400 at once for a broken
picture and an error part for those who have registered or do so later, ``/scheduler_receive_meta_data`` (for every
backend: 200 once the media are decoded, 500 if they cannot be), ``/send`` for mooncake (a completion without payload,
nothing does RDMA), 404 for a path with a prefix. Deliberate simplifications: a cache per item, no batching,
one device, ``/health`` costs nothing.

``GET /mock/stats`` and ``GET /mock/cache`` show what it did, ``POST /mock/faults`` makes it misbehave while it runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import msgspec
from aiohttp import web

from fullhit.lab.embedding import COLUMNS, ROW_BYTES, PartHeader
from fullhit.lab.images import Undecodable
from fullhit.lab.mock_delivery import CountMismatch, Destinations, NoEncode, Pusher, PushFailed, Rendezvous, TooManyHeld
from fullhit.lab.mock_device import MockDevice

__all__ = ["BACKENDS", "EncoderSettings", "Faults", "MockEncoder"]

log = logging.getLogger("mock-encoder")

MODALITIES = ("IMAGE", "VIDEO", "AUDIO")
BACKENDS = ("auto", "zmq_to_scheduler", "zmq_to_tokenizer", "mooncake")

# SGLang's: how long a DP encoder waits for the /encode of a registration.
DP_HOLD = 5.0
# Mooncake embeddings kept for /send.
MAX_STAGED = 4096


class Faults(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How it misbehaves; all off by default.

    ``fail_rate``: share of ``/encode`` answered with ``status`` (a 500 also pushes an error part, as SGLang's does;
    any other status pushes nothing). ``crash_after``: kill -9 of itself when that many ``/encode`` bodies have come
    in. ``slow_health``: seconds before ``/health`` answers. ``garbage``: ``/encode`` gets bytes that are no HTTP.
    ``forgetful``: pictures are encoded anew though they are in the cache, as if it did not hold what is published.
    """

    fail_rate: float = 0.0
    status: int = 500
    crash_after: int = 0
    slow_health: float = 0.0
    garbage: bool = False
    forgetful: bool = False


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Times in seconds. ``hold`` is how long an early registration waits, ``dp_404`` answers 404 as a DP encoder."""

    backend: str = "auto"
    hold: float = 180.0
    send_timeout: float = 180.0
    dp_404: bool = False
    seed: int = 0
    faults: Faults = field(default_factory=Faults)


@dataclass(slots=True)
class _Staged:
    """A part and, in ``ready``, its sizes or its failure. With mooncake it waits for ``/send``."""

    ready: asyncio.Future[dict[str, Any]]
    header: PartHeader | None = None
    taken: set[str] = field(default_factory=set)
    delivered: str = ""


class _Computed(NamedTuple):
    header: PartHeader
    payload: bytes
    delivered: str
    """What the cache had of it: ``hit``, ``partial`` or ``miss``."""


class _Refused(Exception):
    """Ends a request with ``status`` and SGLang's error body."""

    def __init__(self, status: int, message: str, req_id: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.req_id = req_id


class MockEncoder:
    """The HTTP application around a MockDevice; ``app`` is what aiohttp serves."""

    def __init__(self, device: MockDevice, settings: EncoderSettings) -> None:
        self.device = device
        self.settings = settings
        self.faults = settings.faults
        device.forgetful = settings.faults.forgetful
        self.inflight = 0
        self.on_inflight: Callable[[int], None] = lambda _: None
        self.counts = {"requests": 0, "failed": 0, "pushed_parts": 0, "pushed_bytes": 0, "error_parts": 0}
        self._rng = random.Random(settings.seed)
        self._rendezvous = Rendezvous()
        self._pusher = Pusher()
        self._staged: OrderedDict[str, _Staged] = OrderedDict()
        self._background: set[asyncio.Task[None]] = set()
        # 0 lifts the body limit: a turn with several pictures is many megabytes.
        self.app = web.Application(client_max_size=0)
        self.app.add_routes(
            [
                web.post("/encode", self._answer(self._encode)),
                web.post("/scheduler_receive_url", self._answer(self._register)),
                web.post("/scheduler_receive_meta_data", self._answer(self._meta_data)),
                web.post("/send", self._answer(self._send)),
                web.get("/health", self._health),
                web.get("/health_generate", self._health),
                web.get("/mock/stats", self._show_stats),
                web.get("/mock/cache", self._show_cache),
                web.post("/mock/faults", self._answer(self._set_faults)),
            ]
        )

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._pusher.close()
        await self.device.close()

    def stats(self) -> dict[str, Any]:
        """What ``GET /mock/stats`` answers."""
        done = self.device.stats
        return {
            "mock": True,
            **self.counts,
            "images": done.images,
            "vit_runs": done.vit_runs,
            "vit_seconds": round(done.vit_seconds, 6),
            "hits": done.hits,
            "cached_keys": len(self.device.cache),
            "cached_bytes": self.device.cache.used_bytes,
            "inflight": self.inflight,
            "held_registrations": self._rendezvous.held,
        }

    # -- /encode

    async def _encode(self, request: web.Request) -> web.StreamResponse:
        body = await _json_object(request)
        self.counts["requests"] += 1
        if self.faults.crash_after and self.counts["requests"] >= self.faults.crash_after:
            log.warning("mock fault: kill -9 of myself at /encode number %d", self.counts["requests"])
            os.kill(os.getpid(), signal.SIGKILL)
        if self.faults.garbage:
            return await _garbage(request)
        req_id = _text(body, "req_id")
        self._count_inflight(+1)
        try:
            if self.settings.backend == "mooncake":
                return await self._encode_mooncake(req_id, body)
            return await self._encode_zmq(req_id, body)
        except _Refused:
            self.counts["failed"] += 1
            raise
        finally:
            self._count_inflight(-1)

    async def _encode_zmq(self, req_id: str, body: Mapping[str, Any]) -> web.Response:
        state = self._rendezvous.begin(req_id)
        staged = self._staged.get(req_id)
        if staged is None or staged.ready.done():
            staged = self._stage(req_id)
        keep_state = False

        def loaded() -> None:
            if not staged.ready.done():
                length = len(body["mm_items"]) * self.device.settings.embedding_kb * 1024
                staged.ready.set_result(_sizes(length, length // ROW_BYTES, COLUMNS))

        try:
            try:
                header, payload, delivered = await self._compute(req_id, body, loaded)
            except _Refused as refusal:
                _fail(staged, refusal)
                if refusal.status in (400, 500) and "num_parts" in body:
                    keep_state = True
                    self._push_error(state, body, refusal, staged)
                raise
            await self._deliver(state, body, header.frames(payload))
            self.counts["pushed_parts"] += 1
            self.counts["pushed_bytes"] += len(payload)
            return web.json_response(None, headers={"x-fullhit-cache": delivered})
        finally:
            if not keep_state:
                self._rendezvous.end(state)
                self._forget(req_id, staged)

    async def _encode_mooncake(self, req_id: str, body: Mapping[str, Any]) -> web.Response:
        # Each rank of an older language server posts the same /encode: one of them encodes, all get the answer.
        staged = self._staged.get(req_id)
        if staged is None:
            staged = self._stage(req_id)
            try:
                header, payload, delivered = await self._compute(req_id, body)
            except BaseException as problem:
                _fail(staged, problem if isinstance(problem, _Refused) else _Refused(500, "cancelled", req_id))
                raise
            staged.header, staged.delivered = header, delivered
            staged.ready.set_result(_sizes(len(payload), *header.shape))
        sizes = await asyncio.shield(staged.ready)
        answer = {**{name: body[name] for name in body if name != "mm_items"}, **sizes}
        return web.json_response(answer, headers={"x-fullhit-cache": staged.delivered})

    async def _compute(
        self, req_id: str, body: Mapping[str, Any], on_loaded: Callable[[], None] = lambda: None
    ) -> _Computed:
        modality, items = body.get("modality"), body.get("mm_items")
        num_parts, part_idx = body.get("num_parts"), body.get("part_idx")
        if modality not in MODALITIES:
            raise _Refused(400, "missing or invalid modality", req_id)
        if not _is_int(num_parts) or not _is_int(part_idx) or not 0 <= part_idx < num_parts:
            raise _Refused(400, "missing or invalid num_parts or part_idx", req_id)
        if not isinstance(items, list) or not items:
            raise _Refused(400, "mm_items must be a list with at least one item", req_id)
        if self._rng.random() < self.faults.fail_rate:
            raise _Refused(self.faults.status, f"mock fault: {self.faults.status} on purpose", req_id)
        try:
            encoded = await self.device.encode(items, modality, on_loaded)
        except Undecodable as problem:
            raise _Refused(400, f"mock encoder: {problem}", req_id) from None
        rows = tuple(len(embedding) // ROW_BYTES for embedding in encoded.embeddings)
        shape = (sum(rows), COLUMNS)
        header = PartHeader(req_id, part_idx, num_parts, modality, shape, item_rows=rows)
        return _Computed(header, b"".join(encoded.embeddings), encoded.delivered)

    async def _deliver(self, state: Destinations, body: Mapping[str, Any], frames: list[bytes]) -> None:
        """To every destination at once; 504 when they never registered, 502 when one does not take it."""
        try:
            addresses, keep = _named_addresses(body), False
            if not addresses:
                addresses, keep = await state.all(self.settings.send_timeout), True
        except TimeoutError:
            message = f"only {len(state.addresses)} of {state.count or '?'} destinations registered in time"
            raise _Refused(504, message, state.req_id) from None
        sends = [self._pusher.push(address, frames, self.settings.send_timeout, keep=keep) for address in addresses]
        for outcome in await asyncio.gather(*sends, return_exceptions=True):
            if isinstance(outcome, PushFailed):
                raise _Refused(502, str(outcome), state.req_id)
            if isinstance(outcome, BaseException):
                raise outcome

    def _push_error(self, state: Destinations, body: Mapping[str, Any], refusal: _Refused, staged: _Staged) -> None:
        """In the background: who waits for the part is told over ZMQ too, once it has registered."""
        part_idx, num_parts = body.get("part_idx"), body.get("num_parts")
        if not _is_int(part_idx) or not _is_int(num_parts):
            self._rendezvous.end(state)
            self._forget(state.req_id, staged)
            return
        header = PartHeader(
            state.req_id,
            part_idx,
            num_parts,
            str(body.get("modality")),
            error_message=str(refusal),
            error_code=refusal.status,
        )

        async def push() -> None:
            try:
                await self._deliver(state, body, header.frames())
                self.counts["error_parts"] += 1
            except _Refused as problem:
                log.warning("mock: error part of %s not delivered: %s", state.req_id, problem)
            finally:
                self._rendezvous.end(state)
                self._forget(state.req_id, staged)

        task = asyncio.create_task(push())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _count_inflight(self, change: int) -> None:
        self.inflight += change
        self.on_inflight(self.inflight)

    # -- the calls that follow

    async def _register(self, request: web.Request) -> web.StreamResponse:
        body = await _json_object(request)
        req_id, address = _text(body, "req_id"), _text(body, "receive_url")
        count = body.get("receive_count")
        if not _is_int(count) or count < 1:
            raise _Refused(400, "receive_count must be a positive number", req_id)
        hold = self._hold()
        try:
            await self._rendezvous.register(req_id, address, count, hold)
        except CountMismatch as problem:
            raise _Refused(400, str(problem), req_id) from None
        except TooManyHeld as problem:
            raise _Refused(503, str(problem), req_id) from None
        except NoEncode:
            if self.settings.dp_404:
                raise _Refused(404, f"Unknown req_id: {req_id}", req_id) from None
            raise _Refused(504, f"no /encode for this registration in {hold:g} s", req_id) from None
        return web.json_response(None)

    async def _meta_data(self, request: web.Request) -> web.StreamResponse:
        body = await _json_object(request)
        req_id = _text(body, "req_id")
        staged = self._staged.get(req_id) or self._stage(req_id)
        try:
            async with asyncio.timeout(self._hold()):
                sizes = await asyncio.shield(staged.ready)
        except _Refused as refusal:
            raise _Refused(500, str(refusal), req_id) from None
        except TimeoutError:
            if self.settings.dp_404:
                raise _Refused(404, f"Unknown req_id: {req_id}", req_id) from None
            raise _Refused(504, "sizes were never published", req_id) from None
        return web.json_response({"req_id": req_id, "part_idx": body.get("part_idx"), **sizes})

    async def _send(self, request: web.Request) -> web.StreamResponse:
        body = await _json_object(request)
        req_id, host, port = _text(body, "req_id"), _text(body, "prefill_host"), body.get("embedding_port")
        staged = self._staged.get(req_id)
        if staged is None or staged.header is None:
            raise _Refused(500, f"no staged embedding for {req_id}", req_id)
        address = f"{host}:{port}"
        try:
            await self._pusher.push(address, staged.header.frames(), self.settings.send_timeout, keep=True)
        except PushFailed as problem:
            self._staged.pop(req_id, None)
            raise _Refused(500, str(problem), req_id) from None
        staged.taken.add(address)
        wanted = body.get("receive_count")
        if len(staged.taken) >= (wanted if _is_int(wanted) else 1):
            self._staged.pop(req_id, None)
            self.counts["pushed_parts"] += 1
        return web.json_response(None)

    def _hold(self) -> float:
        return min(DP_HOLD, self.settings.hold) if self.settings.dp_404 else self.settings.hold

    def _stage(self, req_id: str) -> _Staged:
        staged = self._staged[req_id] = _Staged(asyncio.get_running_loop().create_future())
        while len(self._staged) > MAX_STAGED:
            self._staged.popitem(last=False)[1].ready.cancel()
        return staged

    def _forget(self, req_id: str, staged: _Staged) -> None:
        if self._staged.get(req_id) is staged:
            del self._staged[req_id]

    # -- looking in and meddling

    async def _health(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.faults.slow_health)
        return web.Response()

    async def _show_stats(self, request: web.Request) -> web.Response:
        return web.json_response(self.stats())

    async def _show_cache(self, request: web.Request) -> web.Response:
        return web.json_response(sorted(self.device.cache.keys()))

    async def _set_faults(self, request: web.Request) -> web.StreamResponse:
        try:
            self.faults = msgspec.convert(await _json_object(request), Faults)
        except msgspec.ValidationError as problem:
            raise _Refused(400, str(problem)) from None
        self.device.forgetful = self.faults.forgetful
        return web.json_response(msgspec.to_builtins(self.faults))

    def _answer(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Turn a refusal into SGLang's error body."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except _Refused as refusal:
                body = {"status": "error", "message": str(refusal), "req_id": refusal.req_id}
                return web.json_response(body, status=refusal.status)

        return answer


def _sizes(size: int, length: int, columns: int) -> dict[str, Any]:
    return {"embedding_size": size, "embedding_len": length, "embedding_dim": columns}


def _fail(staged: _Staged, refusal: _Refused) -> None:
    if not staged.ready.done():
        staged.ready.set_exception(refusal)
        staged.ready.exception()  # nobody may be waiting


async def _json_object(request: web.Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await request.read())
    except msgspec.DecodeError as problem:
        raise _Refused(400, f"body is not JSON: {problem}") from None
    if not isinstance(body, dict):
        raise _Refused(400, "body must be a JSON object")
    return body


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise _Refused(400, f"{name} must be a text", str(body.get("req_id")))
    return value


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _named_addresses(body: Mapping[str, Any]) -> list[str]:
    """Where ``/encode`` itself says the embedding goes (zmq_to_tokenizer), else nothing."""
    ports = body.get("embedding_port")
    ports = ports if isinstance(ports, list) else [ports]
    return [f"{body.get('prefill_host')}:{port}" for port in ports if _is_int(port)]


async def _garbage(request: web.Request) -> web.StreamResponse:
    transport = request.transport
    if transport is not None:
        transport.write(b"\x16\x03 mock garbage, not HTTP\r\n\r\n\x00\xff")
        transport.close()
    return web.Response(status=500)
