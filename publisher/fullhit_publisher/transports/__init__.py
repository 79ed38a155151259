"""How events travel: one small interface, one module for each broker."""

from .base import Connection, RequestHandler, Transport, TransportError
from .memory import MemoryBroker, MemoryTransport

__all__ = ["Connection", "MemoryBroker", "MemoryTransport", "RequestHandler", "Transport", "TransportError"]
