"""What encoders say about their caches: taken in, kept in order, and checked against what they say they hold."""

from .embedded import EmbeddedNats, EmbeddedNatsError, find_nats_server
from .ingest import Ingest, StreamStatus
from .memory_plane import MemoryPlane
from .nats_link import NatsSettings, PlaneError
from .nats_plane import NatsPlane
from .observer import EventLog, EventMetrics, NullMetrics
from .plane import EventPlane, OutgoingRequest, PlaneStatus
from .settings import IngestSettings, StreamSettings
from .stream import WorkerStream
from .transitions import TRANSITIONS, Input, State

__all__ = [
    "TRANSITIONS",
    "EmbeddedNats",
    "EmbeddedNatsError",
    "EventLog",
    "EventMetrics",
    "EventPlane",
    "Ingest",
    "IngestSettings",
    "Input",
    "MemoryPlane",
    "NatsPlane",
    "NatsSettings",
    "NullMetrics",
    "OutgoingRequest",
    "PlaneError",
    "PlaneStatus",
    "State",
    "StreamSettings",
    "StreamStatus",
    "WorkerStream",
    "find_nats_server",
]
