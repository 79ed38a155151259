"""What the front answers itself: models, health, how its workers are set up, and the clearing of their caches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from fullhit.core.pool import Pool
from fullhit.core.worker import Worker
from fullhit.http.openai.replies import Refusal
from fullhit.http.wire import Request, Responder, Timeouts

from .asking import Asking, Said
from .catalog import Catalog, Service
from .routes import Use

__all__ = ["Info"]

_JSON: Final = (b"Content-Type", b"application/json")
_MODEL: Final = b"/v1/models/"
_GENERATE_SECONDS: Final = 60.0
"""A health check that generates a token waits for the requests before it."""


class Info:
    """`answer` one of the reading routes."""

    def __init__(self, catalog: Catalog, asking: Asking) -> None:
        self._catalog = catalog
        self._asking = asking

    async def answer(self, use: Use, request: Request, responder: Responder, request_id: bytes) -> int:
        """Returns the status that was answered. Raises Refusal."""
        status, body = await self._made(use, request)
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        kind = (b"Content-Type", b"text/plain; charset=utf-8") if isinstance(body, bytes) else _JSON
        responder.reply(status, [kind, (b"x-request-id", request_id)], data)
        return status

    async def _made(self, use: Use, request: Request) -> tuple[int, Any]:
        match use:
            case Use.MODELS:
                return 200, self._models(request)
            case Use.HEALTH:
                return self._health()
            case Use.HEALTH_GENERATE:
                return await self._health_generate()
            case Use.SERVER_INFO:
                return 200, await self._server_info()
            case Use.MODEL_INFO:
                return 200, await self._model_info()
            case Use.FLUSH:
                return await self._flush()
            case _:
                raise Refusal(404, "not_found", "there is nothing here")

    def _models(self, request: Request) -> Any:
        cards = self._catalog.cards()
        if not request.path.startswith(_MODEL):
            return {"object": "list", "data": cards}
        wanted = request.path[len(_MODEL) :].decode("utf-8", "replace")
        for card in cards:
            if card["id"] == wanted:
                return card
        raise Refusal(404, "model_not_found", f"The model {wanted[:200]!r} does not exist", param="model")

    def _health(self) -> tuple[int, bytes]:
        """Whether anything can be served: unlike that of a worker it says nothing of a single one."""
        down = [service.name for service in self._catalog.services if not service.usable]
        if len(down) < len(self._catalog.services):
            return 200, b"OK"
        return 503, f"no worker is ready for {', '.join(down)}".encode()

    async def _health_generate(self) -> tuple[int, bytes]:
        limits = Timeouts(connect=2.0, send=5.0, first_byte=_GENERATE_SECONDS, idle=5.0, total=_GENERATE_SECONDS)
        said = await self._asking.all(self._workers(fit=True), b"GET", b"/health_generate", timeouts=limits)
        bad = [
            f"{one.worker.id}: {one.status or one.body[:100].decode('latin-1')}" for one in said if one.status != 200
        ]
        if not said:
            return 503, b"no worker is ready"
        return (503, "; ".join(bad).encode()) if bad else (200, b"OK")

    async def _server_info(self) -> dict[str, Any]:
        """The settings of all workers, in the shape that SGLang's benchmark script reads from its balancer: the
        workers' own dumps by role, and all their ``internal_states``. The first whole worker's also at the top."""
        prefill: list[Any] = []
        decode: list[Any] = []
        other: list[Any] = []
        for service in self._catalog.services:
            if service.prefill is not None:
                prefill += await self._dumps(service.prefill.pool)
                decode += await self._dumps(service.seats.pool)
            else:
                other += await self._dumps(service.seats.pool)
        rows = [*prefill, *decode, *other]
        states = [state for row in rows for state in row.get("internal_states") or () if isinstance(row, dict)]
        first = dict(other[0]) if other else {}
        return {**first, "internal_states": states, "prefill": prefill, "decode": decode, "workers": other}

    async def _dumps(self, pool: Pool) -> list[dict[str, Any]]:
        said = await self._asking.all(_fit(pool), b"GET", b"/server_info", b"/get_server_info")
        return [one.json for one in said if isinstance(one.json, dict)]

    async def _model_info(self) -> Any:
        """From one worker; a prefill where there are some, as SGLang's balancer does."""
        problems = []
        for worker in self._workers(fit=True):
            said = await self._asking.one(worker, b"GET", b"/model_info", b"/get_model_info")
            if isinstance(said.json, dict):
                return said.json
            problems.append(f"{worker.id}: {said.status or said.body[:100].decode('latin-1')}")
        raise Refusal(503, "no_workers", f"no worker tells: {'; '.join(problems) or 'none is ready'}", retry_after=1)

    async def _flush(self) -> tuple[int, dict[str, Any]]:
        said = await self._asking.all(self._workers(fit=False), b"POST", b"/flush_cache")
        for service in self._catalog.services:
            _forget_predictions(service)
        rows = {one.worker.id: _told(one) for one in said}
        good = all(one.status == 200 for one in said)
        return (200 if good and rows else 502), {"success": good and bool(rows), "workers": rows}

    def _workers(self, *, fit: bool) -> list[Worker]:
        """Each once, prefill workers first."""
        found: dict[str, Worker] = {}
        for service in self._catalog.services:
            for seats in (service.prefill, service.seats):
                if seats is not None:
                    for worker in _fit(seats.pool) if fit else seats.pool.workers():
                        found.setdefault(worker.id, worker)
        return list(found.values())


def _fit(pool: Pool) -> Iterable[Worker]:
    return [worker for worker in pool.workers() if worker.fit]


def _forget_predictions(service: Service) -> None:
    """What a worker that publishes holds it says itself; the rest was only our belief."""
    for seats in (service.seats, service.prefill):
        if seats is not None:
            for worker in seats.pool.workers():
                if not worker.publishing:
                    seats.pool.clear(worker.id)


def _told(said: Said) -> dict[str, Any]:
    return {"status": said.status or None, "message": said.body[:200].decode("utf-8", "replace")}
