"""What the publisher asks of a broker.

A transport makes connections; a connection lives once. When it is in doubt it is thrown away and another is
made, so nothing here reconnects, resends or keeps messages back: the publisher knows what a reader may have
missed, a client library does not. All methods belong to the event loop of the publisher's thread. Exceptions
of client libraries do not pass this interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

__all__ = ["Connection", "RequestHandler", "Transport", "TransportError"]

RequestHandler = Callable[[bytes, str], None]
"""Called with the bytes of a snapshot request and the subject to which the answer goes; must not block."""


class TransportError(Exception):
    """The broker cannot be reached, or a connection to it is not to be trusted any more."""


class Connection(Protocol):
    """One connection to a broker."""

    @property
    def max_payload(self) -> int:
        """Largest message that the broker carries, in bytes."""

    @property
    def lost(self) -> asyncio.Event:
        """Set when the connection has ended."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Hand over a message; it may still be lost. Messages keep their order. Raises TransportError."""

    async def confirm(self, timeout: float) -> None:
        """Return when the broker has everything published so far; TransportError after ``timeout`` seconds."""

    async def close(self, timeout: float) -> None:
        """Give the connection up within ``timeout`` seconds, whatever state it is in. Never raises."""


class Transport(Protocol):
    """A way to one broker."""

    @property
    def name(self) -> str:
        """For logs: where the broker is, without secrets."""

    async def connect(self, request_subject: str, on_request: RequestHandler, timeout: float) -> Connection:
        """Connect and listen for requests on ``request_subject``. Raises TransportError, at the latest after
        ``timeout`` seconds."""
