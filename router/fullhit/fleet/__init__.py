"""Which workers there are and which of them can be trusted with a request."""

from fullhit.fleet.breaker import Breaker, BreakerSettings, BreakerState
from fullhit.fleet.health import HealthSupervisor, HttpProber
from fullhit.fleet.member import Member, Source, State
from fullhit.fleet.registry import Fleet, PoolView
from fullhit.fleet.state_file import StateFile
from fullhit.fleet.types import FleetObserver, FleetSettings, Probe, ProbeResult, Turn, UnknownWorker

__all__ = [
    "Breaker",
    "BreakerSettings",
    "BreakerState",
    "Fleet",
    "FleetObserver",
    "FleetSettings",
    "HealthSupervisor",
    "HttpProber",
    "Member",
    "PoolView",
    "Probe",
    "ProbeResult",
    "Source",
    "State",
    "StateFile",
    "Turn",
    "UnknownWorker",
]
