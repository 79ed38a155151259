"""What a mock worker answers: the HTTP of an SGLang or vLLM server as far as a front meets it.

The text it generates is ``token-0 token-1 ...``, so a client can see that nothing is missing. As a prefill or decode
worker it insists on the rendezvous, as a real one does: a decode joins the room of the prefill at the bootstrap address
that the body names, a prefill does not answer before its decode has joined, a room is good for one request, and who
waits in vain says so with a 500. ``POST /mock/faults`` makes it misbehave while it runs, ``GET /mock/stats`` shows what
it did, and ``GET /mock/last`` the last request as it arrived.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from fullhit.decision.media import chat_parts
from fullhit.lab.images import Undecodable
from fullhit.lab.mock_device import Encoded, MockDevice

__all__ = ["MockWorker", "WorkerFaults", "WorkerSettings"]


class WorkerFaults(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How it misbehaves; all off by default. ``fail_rate``: share of generations answered with ``status``.
    ``cut_after``: the connection is cut behind so many tokens. ``slow_first``: seconds before the first token.
    ``crash_after``: kill -9 of itself at that request. ``garbage``: bytes that are no HTTP. ``unhealthy``: ``/health``
    says 503."""

    fail_rate: float = 0.0
    status: int = 500
    cut_after: int = -1
    slow_first: float = 0.0
    crash_after: int = 0
    garbage: bool = False
    unhealthy: bool = False


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """``role``: aggregated, prefill or decode. Times in seconds."""

    role: str = "aggregated"
    models: tuple[str, ...] = ("mock",)
    tokens: int = 16
    token_seconds: float = 0.005
    bootstrap_port: int = 0
    rendezvous_seconds: float = 10.0
    seed: int = 0


@dataclass(slots=True)
class _Room:
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    taken: bool = False


class MockWorker:
    """``app`` serves clients; a prefill's ``bootstrap_app`` is where decodes join."""

    def __init__(self, device: MockDevice, settings: WorkerSettings) -> None:
        self.device = device
        self.settings = settings
        self.faults = WorkerFaults()
        self.stats: dict[str, int] = dict.fromkeys(
            ("requests", "completed", "left", "failed", "flushes", "rendezvous"), 0
        )
        self.inflight = 0
        self._last: dict[str, Any] = {}
        self._rooms: dict[int, _Room] = {}
        self._rng = random.Random(settings.seed)
        self._session: aiohttp.ClientSession | None = None
        self.app = web.Application(client_max_size=1 << 30)
        self.app.add_routes(
            [
                *(web.post(path, self._generate) for path in (
                    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate")),
                *(web.post(path, self._plain) for path in ("/v1/embeddings", "/v1/rerank", "/tokenize", "/detokenize")),
                web.get("/health", self._health),
                web.get("/health_generate", self._health),
                web.get("/v1/models", self._models),
                web.get("/server_info", self._server_info),
                web.get("/model_info", self._model_info),
                web.post("/flush_cache", self._flush),
                web.get("/mock/stats", self._show_stats),
                web.get("/mock/cache", self._show_cache),
                web.get("/mock/last", self._show_last),
                web.post("/mock/faults", self._set_faults),
            ]
        )  # fmt: skip
        self.bootstrap_app = web.Application()
        self.bootstrap_app.add_routes([web.post("/room/{room}", self._join)])

    async def close(self) -> None:
        await self.device.close()
        if self._session is not None:
            await self._session.close()

    # -- generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.stats["requests"] += 1
        self._last = {
            "path": request.path_qs, "headers": [[k, v] for k, v in request.headers.items()],
            "body": raw.decode("utf-8", "replace"),
        }  # fmt: skip
        if self.faults.crash_after and self.stats["requests"] >= self.faults.crash_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.faults.garbage and request.transport is not None:
            request.transport.write(b"no HTTP at all\r\n\r\n")
            request.transport.close()
            return web.Response()
        try:
            body = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            return _error(400, f"the body is no JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "the body must be an object")
        if body.get("model") not in (None, *self.settings.models):
            return _error(404, f"The model {body.get('model')!r} does not exist")
        if self._rng.random() < self.faults.fail_rate:
            self.stats["failed"] += 1
            return _error(self.faults.status, f"mock fault: {self.faults.status} on purpose")
        self.inflight += 1
        try:
            return await self._answer(request, body)
        except _Failed as failed:
            self.stats["failed"] += 1
            return _error(failed.status, str(failed))
        except (asyncio.CancelledError, ConnectionError):
            self.stats["left"] += 1
            raise
        finally:
            self.inflight -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.settings.role == "prefill":
            await self._await_decode(body)
        elif self.settings.role == "decode":
            await self._join_prefill(body)
        try:
            encoded = await self._encoded(request.path, body)
        except Undecodable as problem:
            raise _Failed(400, str(problem)) from None
        headers = {"x-fullhit-cache": encoded.delivered} if encoded is not None and encoded.embeddings else {}
        headers["x-mock-worker"] = f"{self.settings.role}:{os.getpid()}"
        await asyncio.sleep(self.faults.slow_first)
        count = 1 if self.settings.role == "prefill" else _tokens(body, self.settings.tokens)
        if body.get("stream") is True:
            return await self._stream(request, body, count, headers)
        for _ in range(count):
            await asyncio.sleep(self.settings.token_seconds)
        self.stats["completed"] += 1
        text = " ".join(f"token-{n}" for n in range(count))
        return web.json_response(_whole(request.path, body, text, count, self.settings.role), headers=headers)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], count: int, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for n in self._ticks(count):
            if n == self.faults.cut_after and request.transport is not None:
                request.transport.abort()
                return response
            event = _chunk(request.path, body, n, count, self.settings.role)
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        self.stats["completed"] += 1
        return response

    async def _ticks(self, count: int) -> AsyncIterator[int]:
        for n in range(count):
            await asyncio.sleep(self.settings.token_seconds)
            yield n

    async def _encoded(self, path: str, body: dict[str, Any]) -> Encoded | None:
        if self.settings.role == "decode":
            return None
        if path == "/generate":
            data = body.get("image_data")
            items = [] if data is None else data if isinstance(data, list) else [data]
        else:
            messages = body.get("messages")
            items = [
                item for item, kind in chat_parts(messages if isinstance(messages, list) else []) if kind == "IMAGE"
            ]
        return await self.device.encode(items, "IMAGE")

    # -- the rendezvous

    async def _await_decode(self, body: dict[str, Any]) -> None:
        """A prefill: until a decode has joined each room."""
        rooms = _rooms(body)
        for number in rooms:
            if number in self._rooms and self._rooms[number].taken:
                raise _Failed(500, f"room {number} is taken by another request")
        opened = [self._rooms.setdefault(number, _Room()) for number in rooms]
        for room in opened:
            room.taken = True
        try:
            async with asyncio.timeout(self.settings.rendezvous_seconds):
                for room in opened:
                    await room.joined.wait()
        except TimeoutError:
            raise _Failed(500, "no decode has joined the room") from None
        finally:
            for number in rooms:
                self._rooms.pop(number, None)
        self.stats["rendezvous"] += 1

    async def _join(self, request: web.Request) -> web.Response:
        """A decode is at the door: wait until the prefill has the request too."""
        number = int(request.match_info["room"])
        room = self._rooms.setdefault(number, _Room())
        room.joined.set()
        for _ in range(int(self.settings.rendezvous_seconds / 0.01)):
            if room.taken:
                return web.Response()
            await asyncio.sleep(0.01)
        self._rooms.pop(number, None)
        return web.Response(status=504)

    async def _join_prefill(self, body: dict[str, Any]) -> None:
        rooms = _rooms(body)
        hosts, ports = body["bootstrap_host"], body["bootstrap_port"]
        hosts, ports = (one if isinstance(one, list) else [one] for one in (hosts, ports))
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        for host, port, number in zip(hosts, ports, rooms, strict=True):
            where = f"http://{f'[{host}]' if ':' in str(host) else host}:{port or 8998}/room/{number}"
            try:
                async with self._session.post(where) as reply:
                    if reply.status != 200:
                        raise _Failed(500, f"the prefill at {where} did not come: {reply.status}")
            except (aiohttp.ClientError, OSError, ValueError) as problem:
                raise _Failed(500, f"cannot join {where}: {problem}") from None
        self.stats["rendezvous"] += 1

    # -- the rest

    async def _plain(self, request: web.Request) -> web.Response:
        raw = await request.read()
        self.stats["requests"] += 1
        self._last = {"path": request.path_qs, "headers": [[k, v] for k, v in request.headers.items()],
                      "body": raw.decode("utf-8", "replace")}  # fmt: skip
        return web.json_response({"object": "list", "data": [], "path": request.path})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.faults.unhealthy else 200)

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"id": model, "object": "model", "created": 1, "owned_by": "mock", "max_model_len": 4096}
                 for model in self.settings.models]  # fmt: skip
        return web.json_response({"object": "list", "data": cards})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({
            "served_model_name": self.settings.models[0], "tp_size": 1, "dp_size": 1,
            "disaggregation_mode": {"aggregated": "null"}.get(self.settings.role, self.settings.role),
            "disaggregation_bootstrap_port": self.settings.bootstrap_port or 8998,
            "internal_states": [{"role": self.settings.role, "last_gen_throughput": 1.0}],
        })  # fmt: skip

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.settings.models[0], "is_generation": True})

    async def _flush(self, request: web.Request) -> web.Response:
        self.stats["flushes"] += 1
        self.device.cache.clear()
        return web.Response(text="Cache flushed.\n")

    async def _show_stats(self, request: web.Request) -> web.Response:
        device = self.device.stats
        return web.json_response({
            **self.stats, "inflight": self.inflight, "rooms": len(self._rooms), "vit_runs": device.vit_runs,
            "hits": device.hits, "images": device.images, "pid": os.getpid(),
        })  # fmt: skip

    async def _show_cache(self, request: web.Request) -> web.Response:
        return web.json_response(sorted(self.device.cache.keys()))

    async def _show_last(self, request: web.Request) -> web.Response:
        return web.json_response(self._last)

    async def _set_faults(self, request: web.Request) -> web.Response:
        try:
            self.faults = msgspec.convert(json.loads(await request.read() or b"{}"), WorkerFaults)
        except (msgspec.ValidationError, ValueError) as problem:
            return _error(400, str(problem))
        return web.json_response(msgspec.to_builtins(self.faults))


class _Failed(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _error(status: int, message: str) -> web.Response:
    body = {"object": "error", "message": message, "type": "mock", "code": status}
    return web.json_response(body, status=status)


def _rooms(body: dict[str, Any]) -> list[int]:
    rooms = body.get("bootstrap_room")
    rooms = rooms if isinstance(rooms, list) else [rooms]
    if not all(type(number) is int and 0 <= number < 2**63 for number in rooms) or "bootstrap_host" not in body:
        raise _Failed(400, "no rendezvous in the body")
    return rooms


def _tokens(body: dict[str, Any], most: int) -> int:
    params = body.get("sampling_params")
    wanted = body.get("max_tokens") or body.get("max_completion_tokens") or (
        params.get("max_new_tokens") if isinstance(params, dict) else None)  # fmt: skip
    return min(most, wanted) if type(wanted) is int and wanted > 0 else most


def _logprobs(body: dict[str, Any], role: str) -> dict[str, Any]:
    if not body.get("return_logprob"):
        return {}
    return {"input_token_logprobs": [[-0.5, 7, role]], "output_token_logprobs": [[-0.1, 8, role]]}


def _whole(path: str, body: dict[str, Any], text: str, count: int, role: str) -> Any:
    if path == "/generate":
        row = {"text": text, "meta_info": {"id": "m", "completion_tokens": count, **_logprobs(body, role)}}
        batch = body.get("text")
        return [{**row, "index": n} for n in range(len(batch))] if isinstance(batch, list) else row
    if path == "/v1/responses":
        return {"id": "resp-m", "object": "response", "status": "completed", "output": [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]}  # fmt: skip
    usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": count + 3}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if path == "/v1/completions":
        choice["text"] = text
    elif body.get("tools"):
        call = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}}
        choice |= {
            "message": {"role": "assistant", "content": None, "tool_calls": [call]},
            "finish_reason": "tool_calls",
        }
    else:
        choice["message"] = {"role": "assistant", "content": text}
    kind = "text_completion" if path == "/v1/completions" else "chat.completion"
    return {
        "id": "m",
        "object": kind,
        "created": 1,
        "model": body.get("model") or "mock",
        "choices": [choice],
        "usage": usage,
    }


def _chunk(path: str, body: dict[str, Any], n: int, count: int, role: str) -> dict[str, Any]:
    text = f"token-{n}" if n == 0 else f" token-{n}"
    last = n == count - 1
    if path == "/generate":
        return {"text": text, "meta_info": {"id": "m", "completion_tokens": n + 1, **_logprobs(body, role)}}
    if path == "/v1/responses":
        return {"type": "response.output_text.delta", "delta": text}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if last else None}
    if path == "/v1/completions":
        choice["text"] = text
        return {"id": "m", "object": "text_completion", "created": 1, "model": "mock", "choices": [choice]}
    choice["delta"] = {"role": "assistant", "content": text} if n == 0 else {"content": text}
    return {
        "id": "m",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": body.get("model") or "mock",
        "choices": [choice],
    }
