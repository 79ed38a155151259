"""The decision API as one object, without any transport: what to choose, what to give back, who the workers are."""

from .leases import Lease, Leases, TooManyLeases
from .media import Media, MediaError, read_media
from .service import DecisionError, DecisionService, DecisionSettings, Released, SelectCall, Selected, keep_leases
from .workers import WorkerFeed, WorkerRow, WorkersChange, WorkerWatch

__all__ = [
    "DecisionError",
    "DecisionService",
    "DecisionSettings",
    "Lease",
    "Leases",
    "Media",
    "MediaError",
    "Released",
    "SelectCall",
    "Selected",
    "TooManyLeases",
    "WorkerFeed",
    "WorkerRow",
    "WorkerWatch",
    "WorkersChange",
    "keep_leases",
    "read_media",
]
