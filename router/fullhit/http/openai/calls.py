"""One request on its way through the front, with everything that must be given back exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fullhit.core.decision import Decision
from fullhit.core.pool import Pool
from fullhit.http.wire import HeaderBlock, Request, Responder

from .bodies import Body
from .frontends import Frontend
from .settings import Reporter

__all__ = ["Call", "Seats"]


class Seats(NamedTuple):
    """A pool, and who hears of its workers' failures."""

    pool: Pool
    reporter: Reporter


@dataclass(slots=True, eq=False)
class Call:
    """``headers`` go to the frontend, ``deadline`` (the loop's clock) ends its waits for workers.

    ``tried`` are workers that failed it; ``suspects`` those among them whose failure may have been the request's own
    doing, with what the fleet would be told. ``behind`` are frontends that do not know model or workers (yet).
    ``attempts`` counts choices, ``lost`` frontends that broke off.
    ``failed``: the answer that is passed on is the failure of a worker.
    """

    request: Request
    responder: Responder
    headers: HeaderBlock
    request_id: str
    body: Body
    deadline: float
    decision: Decision | None = None
    prefill: Decision | None = None
    frontend: Frontend | None = None
    tried: frozenset[str] = frozenset()
    suspects: list[tuple[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    behind: list[Frontend] = field(default_factory=list)
    attempts: int = 0
    lost: int = 0
    failed: bool = False

    def release(self) -> None:
        """Give the slots back. Idempotent."""
        for decision in (self.decision, self.prefill):
            if decision is not None and decision.ticket is not None:
                decision.ticket.release()

    def marks(self) -> list[tuple[bytes, bytes]]:
        """Where the call went and why, as headers of its answer."""
        decision = self.decision
        if decision is None:
            return []
        return [
            (b"x-fullhit-worker", decision.worker.id.encode("ascii", "replace")),
            (b"x-fullhit-reason", str(decision.reason).encode()),
        ]
