"""What every event plane offers to the application, and what it needs of the intake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["EventPlane", "OutgoingRequest", "PlaneStatus"]


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A snapshot request to send now; the answer goes to the plane's own inbox."""

    pool: str
    worker_id: int
    request_id: int
    subject: str
    data: bytes


@dataclass(frozen=True, slots=True)
class PlaneStatus:
    """For ``/readyz``. ``url`` holds no secrets; ages are seconds, None = never."""

    kind: str
    url: str
    connected: bool
    last_message_age: float | None
    connects: int
    """Connections made so far; more than one means that some were lost or given up."""
    error: str
    """What is wrong now; empty when nothing is."""


class EventPlane(Protocol):
    """A way for events to reach ``Ingest``.

    ``start`` returns at once, whether or not there is a broker; the plane keeps trying until ``close``.
    """

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    def status(self) -> PlaneStatus: ...
