"""Settings of the fleet and the values that pass between it, its prober and its observers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from fullhit.fleet.breaker import BreakerSettings

__all__ = ["FleetObserver", "FleetSettings", "Heartbeat", "Probe", "ProbeResult", "Turn", "UnknownWorker"]


class UnknownWorker(LookupError):
    """No worker has this id."""


class FleetObserver(Protocol):
    """Where the fleet tells what happens (`telemetry.Telemetry` is one)."""

    def event(self, kind: str, /, level: str = "info", **fields: object) -> None: ...
    def count(self, name: str, /, **labels: object) -> None: ...


class Heartbeat(Protocol):
    """What discovery needs of a heartbeat."""

    @property
    def url(self) -> str | None: ...
    @property
    def device(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Times in seconds. ``interval`` between probes of a worker that shows no other sign of life; ``timeout`` of one.

    ``misses`` failed probes in a row make a worker unhealthy; ``stuck_after`` without a finished request while some
    are in flight does too. ``forget_after`` drops dead workers that no operator named. ``probe`` False trusts every
    worker from the start. ``max_inflight``: by pool, the cap of workers that name none. ``leased_pools``: whose workers
    have no URL and come by leases alone.
    """

    interval: float = 10.0
    timeout: float = 30.0
    misses: int = 3
    stuck_after: float = 300.0
    forget_after: float = 600.0
    first_retry: float = 1.0
    jitter: float = 0.1
    path: str = "/health"
    probe: bool = True
    discover: bool = True
    default_pool: str = "default"
    max_inflight: Mapping[str, int] = field(default_factory=dict)
    max_workers: int = 65_536
    leased_pools: frozenset[str] = frozenset()
    breaker: BreakerSettings = field(default_factory=BreakerSettings)


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe to send: ``GET url`` within ``timeout``. ``token`` tells one member from a later one of the same id."""

    id: str
    url: str
    timeout: float
    token: object


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """How it ended: ``ok``, ``status`` (not 2xx), ``timeout``, ``refused`` (nobody listens) or ``error``."""

    outcome: Literal["ok", "status", "timeout", "refused", "error"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """What `Fleet.tick` wants: these probes now, and to be called again at ``wake_at``."""

    probes: list[Probe]
    wake_at: float
