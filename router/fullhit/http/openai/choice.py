"""Choosing the worker of a call, and a prefill worker where there is a pool of them: now, or after a wait.

A pool without any worker is told at once: Dynamo's discovery shows none, and waiting would only delay the news. Where
workers are there but busy or resting, the call waits, bounded in number, bytes and time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fullhit.core.decision import Decision
from fullhit.core.types import NoEligibleWorker, SelectRequest
from fullhit.http.common import InFlight
from fullhit.http.waiting import WaitedTooLong, WaitingRoom, WaitingRoomFull

from .calls import Call, Seats
from .replies import Refusal
from .settings import FrontSettings, FrontTelemetry

__all__ = ["Choice"]

_FAILED: Final = ("workers_failed", "no further worker could take the request")
_WHY: Final[dict[str, tuple[str, str]]] = {
    "empty_pool": ("no_workers", "no worker is known: Dynamo's discovery shows none"),
    "all_busy": ("workers_busy", "all workers are busy"),
    "all_down": ("workers_down", "no worker is ready"),
}


class Choice:
    """`take` the slots of a call; `drop` them once. Create it inside the loop; `close` it."""

    def __init__(
        self,
        decode: Seats,
        prefill: Seats | None,
        settings: FrontSettings,
        telemetry: FrontTelemetry,
        clock: Callable[[], float],
    ) -> None:
        self._telemetry = telemetry
        limits = (settings.queue_max, settings.queue_max_bytes, telemetry.observe_select)
        self.room = WaitingRoom(decode.pool, *limits)
        self.prefill_room = WaitingRoom(prefill.pool, *limits) if prefill is not None else None
        self.in_flight = InFlight(clock)

    def close(self) -> None:
        self.room.close()
        if self.prefill_room is not None:
            self.prefill_room.close()

    async def take(self, call: Call) -> None:
        """Choose and take the slots. Raises Refusal."""
        media = call.body.media
        request = SelectRequest(
            media.keys, media.items, call.request_id, call.tried, False, media.unkeyed, media.alternatives
        )
        decision = await self._select(self.room, request, call)
        call.decision = decision
        self.in_flight.begin(decision.worker.id, call)
        self._telemetry.remember(decision, api="openai")
        if self.prefill_room is not None:
            wanted = SelectRequest(request_id=call.request_id, exclude=call.tried)
            call.prefill = await self._select(self.prefill_room, wanted, call)

    def drop(self, call: Call) -> None:
        """Give back what `take` took, whether all of it or nothing. Idempotent."""
        call.release()
        if call.decision is not None:
            self.in_flight.end(call.decision.worker.id, call)
        call.decision = call.prefill = None

    async def _select(self, room: WaitingRoom, request: SelectRequest, call: Call) -> Decision:
        found = room.at_once(request)
        if isinstance(found, Decision):
            return found
        if isinstance(found, NoEligibleWorker) and found.kind in ("empty_pool", "all_excluded"):
            raise self._nobody(call, found.kind, str(found)) from found
        try:
            return await room.admit(request, len(call.body.body), call.deadline)
        except WaitingRoomFull as error:
            self._telemetry.count("rejected", cause="queue_full")
            raise Refusal(503, "queue_full", f"all workers are busy: {error}", retry_after=1) from error
        except WaitedTooLong as error:
            raise self._nobody(call, error.kind, str(error)) from error

    def _nobody(self, call: Call, kind: str, detail: str) -> Refusal:
        code, why = _WHY.get(kind, _FAILED)
        self._telemetry.count("rejected", cause=code)
        tried = f"; tried: {', '.join(call.failures)}" if call.failures else ""
        return Refusal(503, code, f"{why} ({detail}){tried}"[:2_000], retry_after=5 if kind == "empty_pool" else 1)
