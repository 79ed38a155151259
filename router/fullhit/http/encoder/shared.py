"""What the routes of one gateway share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fullhit.core.pool import Pool
from fullhit.http.common import Origins
from fullhit.http.wire import UpstreamClient

from .delivery import Deliveries
from .parts import PartTable
from .peers import PeerMemory
from .settings import FleetView, GatewaySettings, GatewayTelemetry

__all__ = ["Seldom", "Shared"]

_MAX_KEYS: Final = 1_024


class Seldom:
    """Keeps repeated log lines apart: `due` is True at most once in ``every`` seconds for each key."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: OrderedDict[str, float] = OrderedDict()

    def due(self, key: str, every: float = 10.0) -> bool:
        now = self._clock()
        last = self._last.get(key)
        if last is not None and now - last < every:
            return False
        self._last[key] = now
        self._last.move_to_end(key)
        if len(self._last) > _MAX_KEYS:
            self._last.popitem(last=False)
        return True


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts of the house that every route may use."""

    pool: Pool
    client: UpstreamClient
    fleet: FleetView
    settings: GatewaySettings
    telemetry: GatewayTelemetry
    table: PartTable
    peers: PeerMemory
    origins: Origins
    deliveries: Deliveries
    seldom: Seldom
    clock: Callable[[], float]
