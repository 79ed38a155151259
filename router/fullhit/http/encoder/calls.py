"""Open ``/encode`` calls: a `Call` for each, and one `LivePart` for each part, shared by its copies.

The latter owns what must be given back exactly once: the in-flight slot (a ticket of the pool) and the tasks that
deliver registrations. Both follow the part: taken with the choice of an encoder, given back when the part moves to
another one or its last copy is closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from fullhit.core.decision import Decision
from fullhit.http.wire import Origin, Responder

from .media import EncodeInfo
from .parts import Part

__all__ = ["Call", "InFlight", "LivePart"]


@dataclass(slots=True, eq=False)
class LivePart:
    """What a part owns while its ``/encode`` is open. ``choosing`` is set while one of the copies chooses;
    ``withdraw`` (see `Deliveries`) is called when an encoder is done with it."""

    part: Part
    withdraw: Callable[[Part], None] = lambda _: None
    decision: Decision | None = None
    origin: Origin | None = None
    choosing: asyncio.Future[None] | None = None
    deliveries: set[asyncio.Task[None]] = field(default_factory=set)

    def take(self, decision: Decision, origin: Origin) -> None:
        self.give_back()
        self.decision = decision
        self.origin = origin

    def give_back(self) -> None:
        """Release the slot and stop deliveries to the encoder that held it. Idempotent."""
        if self.decision is not None and self.decision.ticket is not None:
            self.decision.ticket.release()
        for task in self.deliveries:
            task.cancel()
        self.deliveries.clear()
        self.withdraw(self.part)


class InFlight:
    """When the calls which each encoder is working on began: a stuck encoder shows by its oldest one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started: dict[str, dict[object, float]] = {}

    def begin(self, worker: str) -> Callable[[], None]:
        """A call to ``worker`` begins; call the result once when it ends."""
        token = object()
        self._started.setdefault(worker, {})[token] = self._clock()

        def end() -> None:
            calls = self._started.get(worker)
            if calls is not None:
                calls.pop(token, None)
                if not calls:
                    del self._started[worker]

        return end

    def oldest(self) -> dict[str, float]:
        """Age in seconds of the oldest call by worker; without those that have none."""
        now = self._clock()
        return {worker: now - next(iter(calls.values())) for worker, calls in self._started.items()}

    def __len__(self) -> int:
        return sum(map(len, self._started.values()))


@dataclass(slots=True, eq=False)
class Call:
    """One ``/encode`` as it goes through the gateway. ``wire_id`` is the ``req_id`` that ``body`` has, ``replaced``
    the places of pictures that were replaced, ``lost`` counts encoders that failed over it."""

    info: EncodeInfo
    body: bytes | bytearray | memoryview
    headers: list[tuple[bytes, bytes]]
    request_id: bytes
    peer: str
    alias: str
    started: float
    deadline: float
    responder: Responder
    live: LivePart
    tried: set[str] = field(default_factory=set)
    attempts: int = 0
    rounds: int = 0
    not_before: float = 0.0
    stuck: int = 0
    lost: int = 0
    wire_id: str = ""
    replaced: set[int] = field(default_factory=set)
    resends: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    pictures: tuple[str, ...] = ()
    decision: Decision | None = None

    @property
    def part(self) -> Part:
        return self.live.part
