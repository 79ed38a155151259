"""Keeps the catalog up to date: workers are asked for their models when they become ready, and now and then."""

from __future__ import annotations

import asyncio
from typing import Final

from fullhit.core.worker import Worker

from .asking import Asking, facts_of
from .catalog import Catalog
from .settings import FrontTelemetry

__all__ = ["Learner"]

_LOOK: Final = 0.5
"""Seconds between looks for workers that nothing is known of."""
_AGAIN: Final = 5.0
"""Seconds until a worker that did not answer is asked again."""


class Learner:
    """`start` and `close` it. Asking is the only thing that it does; who is there the pools know."""

    def __init__(self, catalog: Catalog, asking: Asking, telemetry: FrontTelemetry, interval: float) -> None:
        self._catalog = catalog
        self._asking = asking
        self._telemetry = telemetry
        self._interval = interval
        self._due: dict[str, float] = {}
        self._ports: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="fullhit-models")

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def bootstrap_port(self, worker: str) -> int | None:
        """That of a prefill worker, as it says itself."""
        return self._ports.get(worker)

    async def _run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_LOOK)

    async def look(self) -> None:
        """Ask whom it is time to ask; forget who is gone."""
        now = asyncio.get_running_loop().time()
        present: dict[str, tuple[Worker, bool]] = {}
        for service in self._catalog.services:
            for worker in service.seats.pool.workers():
                present[worker.id] = (worker, False)
            if service.prefill is not None:
                for worker in service.prefill.pool.workers():
                    present[worker.id] = (worker, True)
        for gone in self._due.keys() - present.keys():
            del self._due[gone]
            self._ports.pop(gone, None)
            self._catalog.forget(gone)
        asked = [row for id, row in present.items() if row[0].ready and self._due.get(id, 0.0) <= now]
        await asyncio.gather(*(self._ask(worker, prefill, now) for worker, prefill in asked))

    async def _ask(self, worker: Worker, prefill: bool, now: float) -> None:
        self._due[worker.id] = now + _AGAIN
        models = await self._asking.one(worker, b"GET", b"/v1/models")
        info = await self._asking.one(worker, b"GET", b"/server_info", b"/get_server_info") if prefill else None
        facts = facts_of(models, info)
        if facts is None:
            self._telemetry.limited(
                f"models {worker.id}", "models_unknown", worker=worker.id, cause=models.body[:200].decode("latin-1")
            )
            return
        self._due[worker.id] = now + self._interval
        if facts.bootstrap_port is not None:
            self._ports[worker.id] = facts.bootstrap_port
        self._catalog.learn(worker.id, facts)
