"""The intake with private lines beside the event plane: workers whose events come over a connection of their own.

A worker on a line follows the same rules as any other; only two things differ. Its snapshot requests go down its line
instead of over the plane, and the plane's absence says nothing about it. So a plane and any number of lines share one
`LinkedIngest`: whoever calls ``tick``, each request leaves by the way its worker can be reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fullhit_publisher.identity import worker_id_for

from .ingest import Address, Ingest
from .plane import OutgoingRequest

__all__ = ["LinkedIngest"]

Send = Callable[[OutgoingRequest], None]
"""Takes a snapshot request to its worker; must not block, and may drop it."""


class LinkedIngest(Ingest):
    """See the module text."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._links: dict[Address, Send] = {}

    def link(self, pool: str, worker_id: str, send: Send) -> None:
        """The worker is reached by ``send`` from now on. It must have been added."""
        address = (pool, worker_id_for(worker_id))
        self._links[address] = send
        self._lift(address)

    def unlink(self, pool: str, worker_id: str, send: Send) -> None:
        """The line is gone. Nothing happens when another one has taken its place."""
        address = (pool, worker_id_for(worker_id))
        if self._links.get(address) is not send:
            return
        del self._links[address]
        lane = self._lanes.get(address)
        if lane is not None and not self._plane_up:
            self._carry_out(lane, lane.stream.plane_down(self._clock()))

    def waiting(self, pool: str, worker_id: str) -> int:
        """Bytes of a worker's messages that are not worked off."""
        lane = self._lanes.get((pool, worker_id_for(worker_id)))
        return 0 if lane is None else lane.waiting_bytes

    def plane_lost(self) -> None:
        """No broker any more; linked workers do not need one."""
        super().plane_lost()
        for address in self._links:
            self._lift(address)

    def tick(self, now: float | None = None) -> list[OutgoingRequest]:
        """Act on the clock. Returns the snapshot requests that the plane must send; the others are under way."""
        return [request for request in super().tick(now) if not self._hand_over(request)]

    @property
    def links_deadline(self) -> float:
        """When `tick_links` should be called at the latest."""
        lanes = (self._lanes.get(address) for address in self._links)
        return min((min(lane.stream.deadline, lane.stream.request_due) for lane in lanes if lane), default=math.inf)

    def tick_links(self, now: float) -> None:
        """Act on the clock for the linked workers alone, so that no request of another one comes up."""
        for address, send in list(self._links.items()):
            lane = self._lanes.get(address)
            if lane is None:
                continue
            if now >= lane.stream.deadline:
                self._carry_out(lane, lane.stream.tick(now))
            if now >= lane.stream.request_due:
                request_id = lane.stream.poll(now)
                if request_id is not None:
                    send(self._request(lane, request_id))

    def _hand_over(self, request: OutgoingRequest) -> bool:
        send = self._links.get((request.pool, request.worker_id))
        if send is None:
            return False
        send(request)
        return True

    def _lift(self, address: Address) -> None:
        """The plane's absence is not this worker's."""
        lane = self._lanes.get(address)
        if lane is not None:
            self._carry_out(lane, lane.stream.plane_up(self._clock()))
