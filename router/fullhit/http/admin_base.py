"""What the admin routes share: their context, their errors, reading and writing JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from fullhit.core.pool import Pool
from fullhit.decision.leases import Leases
from fullhit.decision.service import DecisionService, DecisionSettings
from fullhit.fleet.registry import Fleet
from fullhit.json_limits import MAX_VALUES, too_many_values
from fullhit.telemetry.facade import Telemetry

__all__ = ["CONTEXT", "AdminContext", "AdminError", "AdminSettings", "json_reply", "read_json"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """``key``: the bearer token, empty = none asked. Sizes in bytes, times in seconds."""

    key: str = ""
    max_body_bytes: int = 64 << 20
    lease_seconds: float = 60.0
    max_leases: int = 10_000
    default_pool: str = "default"


@dataclass(slots=True)
class AdminContext:
    """What the admin application shows and changes.

    ``plane_status``: JSON-ready facts about the event plane; ``connected`` False makes the router degraded, ``error``
    says why. ``streams``: the same for each worker's stream, by (pool, worker id). ``oldest_inflight``: age in seconds
    of each worker's oldest request. ``draining``: whether the router is about to leave. ``seats``:
    JSON-ready facts about each seat, ``concerns``: what is amiss with them. ``service``: who chooses for
    callers outside; made from the rest unless one is shared with another listener.
    """

    pools: Mapping[str, Pool]
    fleet: Fleet
    telemetry: Telemetry
    clock: Callable[[], float]
    settings: AdminSettings = field(default_factory=AdminSettings)
    plane_status: Callable[[], Mapping[str, Any]] = dict
    streams: Callable[[], Mapping[tuple[str, str], object]] = dict
    oldest_inflight: Callable[[], Mapping[str, float]] = dict
    draining: Callable[[], bool] = lambda: False
    seats: Callable[[], Mapping[str, Any]] = dict
    concerns: Callable[[], Sequence[str]] = list
    service: DecisionService = None  # type: ignore[assignment]  # set below
    started_at: float = field(init=False)

    def __post_init__(self) -> None:
        if self.service is None:
            settings = self.settings
            self.service = DecisionService(
                self.pools,
                self.fleet,
                self.telemetry,
                DecisionSettings(settings.default_pool, settings.lease_seconds, max_leases=settings.max_leases),
                clock=self.clock,
            )
        self.started_at = self.clock()

    @property
    def leases(self) -> Leases:
        """The slots lent to callers outside."""
        return self.service.leases


CONTEXT = web.AppKey("context", AdminContext)


class AdminError(Exception):
    """The caller's mistake, or a state that does not allow what it asks. Becomes the JSON error of the answer."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers


async def read_json(request: web.Request, type: type[T]) -> T:
    """The body as ``type``; raises `AdminError` naming the field that is wrong."""
    body = await request.read()
    if too_many_values(body):
        raise AdminError(400, "invalid_request", f"the body holds more than {MAX_VALUES} values")
    try:
        return msgspec.json.decode(body or b"{}", type=type)
    except msgspec.ValidationError as error:
        raise AdminError(400, "invalid_request", f"{error}") from None
    except RecursionError:
        raise AdminError(400, "invalid_json", "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AdminError(400, "invalid_json", f"the body is not JSON: {error}") from None


def json_reply(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """``value`` as a JSON answer."""
    return web.Response(
        body=msgspec.json.encode(value, enc_hook=str) + b"\n",
        status=status,
        content_type="application/json",
        headers=headers,
    )
