"""Who holds what, who is how busy, and who gets the next request. Pure: no I/O, the clock is given."""

from .decision import Decision, DecisionLog
from .pool import Fill, Pool
from .types import (
    DEFAULT_RATIO,
    DeviceClass,
    Key,
    NoEligibleKind,
    NoEligibleWorker,
    PoolFull,
    PoolSettings,
    Reason,
    SelectRequest,
    WorkerSpec,
    device_class,
    parse_ratio,
)
from .worker import Ticket, Worker

__all__ = [
    "DEFAULT_RATIO",
    "Decision",
    "DecisionLog",
    "DeviceClass",
    "Fill",
    "Key",
    "NoEligibleKind",
    "NoEligibleWorker",
    "Pool",
    "PoolFull",
    "PoolSettings",
    "Reason",
    "SelectRequest",
    "Ticket",
    "Worker",
    "WorkerSpec",
    "device_class",
    "parse_ratio",
]
