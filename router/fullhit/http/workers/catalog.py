"""Which pool serves which model. Pure: facts about workers are handed in.

A *service* is a pool of workers that answer whole requests (roles ``aggregated`` and ``pd``), or a pool of decode
workers with the pool of prefill workers beside it. Its models are named in the configuration, or its workers say them.
A service that nobody has named models for, and whose workers have said nothing (yet, or ever), takes any model: it must
not turn requests away because an information route is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullhit.http.openai.calls import Seats
from fullhit.http.openai.replies import Refusal

__all__ = ["Catalog", "Facts", "Service"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker has said of itself: the cards of its ``/v1/models``, and its dump of settings (a prefill's)."""

    models: tuple[Mapping[str, Any], ...] = ()
    bootstrap_port: int | None = None


@dataclass(slots=True, eq=False)
class Service:
    """``seats``: the workers whose answer the client gets. ``models``: as configured; empty = as the workers say."""

    name: str
    seats: Seats
    prefill: Seats | None = None
    models: frozenset[str] = frozenset()
    learned: dict[str, Facts] = field(default_factory=dict)

    def knows(self, model: str) -> bool:
        """Whether the model is served here for certain."""
        if self.models:
            return model in self.models
        return any(card.get("id") == model for facts in self.learned.values() for card in facts.models)

    @property
    def silent(self) -> bool:
        """Nobody has said what is served here."""
        return not self.models and not any(facts.models for facts in self.learned.values())

    @property
    def usable(self) -> bool:
        """Whether a request could be served now."""
        pools = [self.seats.pool] if self.prefill is None else [self.seats.pool, self.prefill.pool]
        return all(any(worker.fit for worker in pool.workers()) for pool in pools)


class Catalog:
    """All services of the front, in order."""

    def __init__(self, services: Sequence[Service]) -> None:
        self.services = list(services)

    def find(self, model: str) -> Service:
        """The service for a request that names ``model`` (empty: none). Raises Refusal (400, 404)."""
        services = self.services
        if not model:
            if len(services) == 1:
                return services[0]
            raise Refusal(400, "model_required", "model: several are served here; name one", param="model")
        for service in services:
            if service.knows(model):
                return service
        for service in services:
            if service.silent:
                return service
        names = ", ".join(sorted({str(card["id"]) for card in self.cards()})[:20])
        raise Refusal(
            404, "model_not_found", f"The model {model[:200]!r} does not exist. Served here: {names}", param="model"
        )

    def learn(self, worker: str, facts: Facts) -> None:
        """A worker has told about itself."""
        for service in self._of(worker):
            service.learned[worker] = facts

    def forget(self, worker: str) -> None:
        """A worker is gone."""
        for service in self.services:
            service.learned.pop(worker, None)

    def cards(self) -> list[Mapping[str, Any]]:
        """Model cards as the workers have them, each model once; a bare one for a configured model none has told of."""
        found: dict[str, Mapping[str, Any]] = {}
        for service in self.services:
            for facts in service.learned.values():
                for card in facts.models:
                    id = card.get("id")
                    if isinstance(id, str) and (not service.models or id in service.models):
                        found.setdefault(id, card)
            for model in sorted(service.models):
                found.setdefault(model, {"id": model, "object": "model", "created": 0, "owned_by": "fullhit"})
        return list(found.values())

    def _of(self, worker: str) -> Iterable[Service]:
        for service in self.services:
            pools = [service.seats.pool] if service.prefill is None else [service.seats.pool, service.prefill.pool]
            if any(pool.get(worker) is not None for pool in pools):
                yield service
