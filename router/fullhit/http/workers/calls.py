"""One request on its way to a worker or a pair of them, with everything that must be given back exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field

from fullhit.core.decision import Decision
from fullhit.core.pool import Pool
from fullhit.http.common import InFlight
from fullhit.http.wire import HeaderBlock, Request, Responder

from .catalog import Service
from .generation import Generation

__all__ = ["Call", "Leg"]


@dataclass(slots=True, eq=False)
class Leg:
    """One worker that was chosen for a call, its slot held."""

    pool: Pool
    decision: Decision

    @property
    def worker(self) -> str:
        return self.decision.worker.id

    def drop(self, in_flight: InFlight, call: object) -> None:
        """Give the slot back. Once."""
        if self.decision.ticket is not None:
            self.decision.ticket.release()
        in_flight.end(self.worker, (call, self))


@dataclass(slots=True, eq=False)
class Call:
    """``headers`` go to workers; ``deadline`` (the loop's clock) ends its waits. ``tried``: workers that failed it,
    ``suspects`` those whose failure may be the request's own doing. ``main`` is the leg whose answer the client
    gets, ``prefill`` the other one of a pair."""

    request: Request
    responder: Responder
    headers: HeaderBlock
    request_id: bytes
    service: Service
    wanted: Generation
    deadline: float
    main: Leg | None = None
    prefill: Leg | None = None
    tried: frozenset[str] = frozenset()
    suspects: list[tuple[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    attempts: int = 0
    lost: int = 0
    delivered: str = ""
    failed: bool = False

    def drop(self, in_flight: InFlight) -> None:
        """Give everything back. Idempotent."""
        for leg in (self.main, self.prefill):
            if leg is not None:
                leg.drop(in_flight, self)
        self.main = self.prefill = None

    def marks(self) -> list[tuple[bytes, bytes]]:
        """Where it went and why, as headers of the answer."""
        if self.main is None:
            return []
        decision = self.main.decision if self.prefill is None else self.prefill.decision
        found = [
            (b"x-fullhit-worker", self.main.worker.encode("ascii", "replace")),
            (b"x-fullhit-reason", str(decision.reason).encode()),
        ]
        if self.prefill is not None:
            found.append((b"x-fullhit-prefill-worker", self.prefill.worker.encode("ascii", "replace")))
        return found
