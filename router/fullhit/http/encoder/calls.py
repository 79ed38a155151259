"""Open ``/encode`` calls: a `Call` for each, and one `LivePart` for each part, shared by its copies.

The latter owns what must be given back exactly once: the in-flight slot (a ticket of the pool) and the tasks that
deliver registrations. Both follow the part: taken with the choice of an encoder, given back when the part moves to
another one or its last copy is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fullhit.core.decision import Decision
from fullhit.http.wire import HeaderBlock, Origin, Request, Responder

from .media import EncodeInfo
from .parts import Part

__all__ = ["Call", "LivePart"]


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
        if self.decision is not None:
            self.give_back()
        self.decision = decision
        self.origin = origin

    def give_back(self) -> None:
        """Release the slot and stop deliveries to the encoder that held it. Idempotent."""
        if self.decision is not None and self.decision.ticket is not None:
            self.decision.ticket.release()
        if self.deliveries:
            for task in self.deliveries:
                task.cancel()
            self.deliveries.clear()
        self.withdraw(self.part)


class Call:
    """One ``/encode`` as it goes through the gateway. ``wire_id`` is the ``req_id`` that ``body`` has, ``replaced``
    the places of pictures that were replaced, ``delivered`` what the encoder says its cache had, ``lost`` counts
    encoders that failed over it, ``causes`` counts what went wrong by its name."""

    # Most calls never leave these defaults; instances hold only what differs.
    tried: frozenset[str] = frozenset()
    attempts = 0
    rounds = 0
    not_before = 0.0
    stuck = 0
    lost = 0
    replaced: frozenset[int] = frozenset()
    resends = 0
    causes: Mapping[str, int] = MappingProxyType({})
    pictures: tuple[str, ...] = ()
    decision: Decision | None = None
    delivered = ""

    def __init__(
        self,
        info: EncodeInfo,
        request: Request,
        responder: Responder,
        headers: HeaderBlock,
        request_id: bytes,
        peer: str,
        live: LivePart,
        deadline: float,
    ) -> None:
        self.info = info
        self.body = request.body
        self.headers = headers
        self.request_id = request_id
        self.peer = peer
        self.responder = responder
        self.live = live
        self.part = live.part
        self.deadline = deadline
        self.wire_id = info.req_id

    def note(self, cause: str) -> int:
        """Something went wrong; how often this has happened by now."""
        times = self.causes.get(cause, 0) + 1
        self.causes = {**self.causes, cause: times}
        return times
