"""The OpenAI front with workers right behind it: SGLang and vLLM servers, alone or as pairs of prefill and decode.

Bodies pass byte for byte, answers too, streams chunk by chunk. What a path means is in `routes`, who serves a model in
`catalog`, what is done with a request in `single` and `pairs`, and what a failure allows in `verdict`. A client that
leaves takes its request with it: the connections to the workers are closed at once, which cancels the generation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fullhit.http.common import Origins, request_id_line, request_id_of
from fullhit.http.openai.calls import Seats
from fullhit.http.openai.replies import Refusal, reply_refusal
from fullhit.http.wire import Request, Responder, UpstreamClient

from .asking import Asking
from .calls import Call
from .catalog import Catalog, Service
from .generation import BadBody, Generation, Shape, read_generation
from .house import House
from .info import Info
from .learning import Learner
from .pairs import Pairs
from .routes import Route, Use, is_paired, route_of
from .settings import FrontTelemetry, WorkerFrontSettings
from .single import Single

__all__ = ["WorkerFront"]

_PORT_LABELS = ("bootstrap_port", "sglang.ai/bootstrap-port")


class WorkerFront:
    """`handle` is a handler for `HttpListener`. Create it inside the running loop, `start` it, and `close` it after the
    listener. ``load_until``: by pool, ``first_token`` or ``end``."""

    def __init__(
        self,
        services: Sequence[Service],
        client: UpstreamClient,
        settings: WorkerFrontSettings,
        telemetry: FrontTelemetry,
        clock: Callable[[], float] = time.monotonic,
        *,
        load_until: Mapping[str, str] | None = None,
    ) -> None:
        self.catalog = Catalog(services)
        self.settings = settings
        self._telemetry = telemetry
        self._clock = clock
        origins = Origins()
        seats = {seat.pool.name: seat for seat in _seats(services)}
        self._pools = [seat.pool for seat in seats.values()]
        self.house = House(seats.values(), client, origins, settings, telemetry, dict(load_until or {}), clock)
        asking = Asking(client, origins)
        self.learner = Learner(self.catalog, asking, telemetry, settings.learn_interval)
        self._single = Single(self.house)
        self._pairs = Pairs(self.house, self._bootstrap_port)
        self._info = Info(self.catalog, asking)
        self._pass_through = [prefix.rstrip("/").encode() for prefix in settings.pass_through]
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="fullhit-keys")
        self._loop = asyncio.get_running_loop()
        self._open = 0

    def __repr__(self) -> str:
        return f"<WorkerFront {[service.name for service in self.catalog.services]} open={self._open}>"

    def start(self) -> None:
        """Begin to ask workers for their models."""
        self.learner.start()

    async def close(self) -> None:
        await self.learner.close()
        self.house.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def handle(self, request: Request, responder: Responder) -> None:
        """Serve one request."""
        self._open += 1
        request_id, given = request_id_of(request)
        try:
            route = route_of(request, self._pass_through)
            if route.use in (Use.GENERATE, Use.PLAIN):
                headers = request.forwarded_hostless()
                if not given:
                    headers = headers.with_line(request_id_line(request_id))
                await self._serve(route, request, responder, headers, request_id)
            else:
                await self._info.answer(route.use, request, responder, request_id)
        except Refusal as refusal:
            self._refuse(request, responder, refusal, request_id)
        finally:
            self._open -= 1

    def oldest_inflight(self) -> dict[str, float]:
        """Seconds since the oldest request under way at each worker was sent."""
        return self.house.in_flight.oldest()

    def status(self) -> dict[str, Any]:
        """Figures for gauges and status pages, JSON-ready."""
        rooms = self.house.rooms.values()
        return {
            "open_calls": self._open,
            "queued": sum(map(len, rooms)),
            "queued_bytes": sum(room.bytes for room in rooms),
            "retries_refused": self.house.budget.refused,
            "models": [card["id"] for card in self.catalog.cards()],
            "services": [
                {
                    "pool": service.name,
                    "prefill_pool": service.prefill.pool.name if service.prefill is not None else None,
                    "usable": service.usable,
                }
                for service in self.catalog.services
            ],
        }

    # --- within

    async def _serve(
        self, route: Route, request: Request, responder: Responder, headers: Any, request_id: bytes
    ) -> None:
        started = self._clock()
        wanted = Generation() if route.use is Use.PLAIN else await self._read(request, route.shape)
        model = wanted.model or (self._model_of(request) if route.use is Use.PLAIN else "")
        service = self.catalog.find(model)
        deadline = self._loop.time() + self.settings.queue_timeout
        call = Call(request, responder, headers, request_id, service, wanted, deadline)
        self.house.budget.earn()
        code = 499
        legs = None
        try:
            if service.prefill is not None and is_paired(request.path):
                code = await self._pairs.serve(call)
            else:
                code = await self._single.serve(call)
        except Refusal as refusal:
            code = refusal.status
            refusal.headers = [*refusal.headers, *call.marks()]
            raise
        finally:
            legs = (call.main, call.prefill)
            call.drop(self.house.in_flight)
            self.house.tell(call, legs, code, self._clock() - started)

    def _model_of(self, request: Request) -> str:
        """The model of a request that is only passed on, where its body names one."""
        if not request.body or len(self.catalog.services) == 1:
            return ""
        try:
            return read_generation(request.body, "text").model
        except BadBody:
            return ""

    async def _read(self, request: Request, shape: Shape) -> Generation:
        body = request.body
        try:
            if len(body) <= self.settings.thread_bytes:
                return read_generation(body, shape)
            return await self._loop.run_in_executor(self._threads, read_generation, body, shape)
        except BadBody as error:
            raise Refusal(400, "invalid_json", str(error)) from None

    def _bootstrap_port(self, worker: str) -> int | None:
        """Configured beside the worker, or as the worker says itself."""
        for pool in self._pools:
            found = pool.get(worker)
            for name in _PORT_LABELS if found is not None else ():
                text = found.labels.get(name, "") if found is not None else ""
                if text.isascii() and text.isdigit() and 0 < int(text) < 65_536:
                    return int(text)
        return self.learner.bootstrap_port(worker)

    def _refuse(self, request: Request, responder: Responder, refusal: Refusal, request_id: bytes) -> None:
        self._telemetry.count("rejected", cause=refusal.code)
        self._telemetry.limited(
            f"front {refusal.code}", "refused", every=10.0, cause=refusal.code, status=refusal.status,
            message=refusal.message, path=request.target[:200].decode("latin-1"),
        )  # fmt: skip
        if responder.started:
            responder.abort()
        else:
            reply_refusal(responder, refusal, request_id)


def _seats(services: Sequence[Service]) -> list[Seats]:
    return [seats for service in services for seats in (service.seats, service.prefill) if seats is not None]
