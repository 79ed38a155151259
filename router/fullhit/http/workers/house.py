"""What single workers and pairs share: choosing, taking and giving back, drawing consequences, telling, relaying."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any, Final

from fullhit.core.decision import Decision
from fullhit.core.pool import Pool
from fullhit.core.types import NoEligibleWorker, Reason, SelectRequest
from fullhit.http.common import InFlight, Origins
from fullhit.http.openai.calls import Seats
from fullhit.http.openai.replies import Refusal
from fullhit.http.openai.tokens import FirstToken
from fullhit.http.waiting import WaitedTooLong, WaitingRoom, WaitingRoomFull
from fullhit.http.wire import Timeouts, UpstreamClient, UpstreamError, UpstreamResponse

from .budget import RetryBudget
from .calls import Call, Leg
from .settings import FrontTelemetry, Reporter, WorkerFrontSettings
from .verdict import Failure, failure_of

__all__ = ["House", "is_stream"]

_MAX_LOST: Final = 2
_MAX_STALE: Final = 2
_PLAIN_EMBEDDING: Final = 4 << 20
"""What a picture's embedding is taken to need where its size is not known."""
_DELIVERED: Final = {b"hit": "hit", b"partial": "partial", b"miss": "miss"}
_WHY: Final = {
    "empty_pool": ("no_workers", "no worker is known"),
    "all_busy": ("workers_busy", "all workers are busy"),
    "all_down": ("workers_down", "no worker is ready"),
}


class House:
    """Create it inside the loop; `close` it."""

    def __init__(
        self,
        seats: Iterable[Seats],
        client: UpstreamClient,
        origins: Origins,
        settings: WorkerFrontSettings,
        telemetry: FrontTelemetry,
        load_until: dict[str, str],
        clock: Callable[[], float],
    ) -> None:
        self.client = client
        self.origins = origins
        self.settings = settings
        self.telemetry = telemetry
        self.clock = clock
        self.rng = random.Random()
        self.loop = asyncio.get_running_loop()
        self.budget = RetryBudget(settings.retry_share)
        self.in_flight = InFlight(clock)
        self.reporters: dict[str, Reporter] = {}
        self.rooms: dict[str, WaitingRoom] = {}
        for pool, reporter in seats:
            self.reporters[pool.name] = reporter
            limits = (settings.queue_max, settings.queue_max_bytes, telemetry.observe_select)
            self.rooms[pool.name] = WaitingRoom(pool, *limits)
        self._load_until = load_until
        self.timeouts = Timeouts(
            connect=settings.connect_timeout,
            send=settings.send_timeout,
            first_byte=settings.first_byte_timeout,
            idle=settings.idle_timeout,
            total=settings.total_timeout,
        )

    def close(self) -> None:
        for room in self.rooms.values():
            room.close()

    # --- choosing

    async def choose(self, call: Call, pool: Pool, *, media: bool) -> Leg:
        """A worker of the pool, its slot taken, now or after a wait. ``media``: its cache counts. Raises Refusal."""
        wanted = call.wanted
        keys, items, unkeyed = (wanted.keys, wanted.items, wanted.unkeyed) if media else ((), 0, 0)
        request = SelectRequest(keys, items, call.request_id.decode(), call.tried, False, unkeyed)
        decision = await self._select(call, self.rooms[pool.name], request)
        leg = Leg(pool, decision)
        self.in_flight.begin(leg.worker, (call, leg))
        self.telemetry.remember(decision, api="openai")
        return leg

    async def _select(self, call: Call, room: WaitingRoom, request: SelectRequest) -> Decision:
        found = room.at_once(request)
        if isinstance(found, Decision):
            return found
        if isinstance(found, NoEligibleWorker) and found.kind in ("empty_pool", "all_excluded"):
            raise self._nobody(call, found.kind, str(found)) from found
        try:
            return await room.admit(request, len(call.request.body), call.deadline)
        except WaitingRoomFull as error:
            raise Refusal(503, "queue_full", f"all workers are busy: {error}", retry_after=1) from error
        except WaitedTooLong as error:
            raise self._nobody(call, error.kind, str(error)) from error

    def _nobody(self, call: Call, kind: str, detail: str) -> Refusal:
        code, why = _WHY.get(kind, ("workers_failed", "no further worker could take the request"))
        tried = f"; tried: {', '.join(call.failures)}" if call.failures else ""
        return Refusal(503, code, f"{why} ({detail}){tried}"[:2_000], retry_after=5 if kind == "empty_pool" else 1)

    # --- sending

    async def send(self, call: Call, leg: Leg, body: bytes | bytearray | memoryview) -> UpstreamResponse | Failure:
        """One leg to its worker; the head of its answer, or why there is none."""
        stale = 0
        origin = self.origins.of(leg.decision.worker.url)
        request = call.request
        while True:
            try:
                return await self.client.send(
                    origin, request.method, request.target, call.headers, body, timeouts=self.timeouts
                )
            except UpstreamError as error:
                failure = failure_of(error)
                if failure.retry != "stale":
                    return failure
                stale += 1
                if stale > _MAX_STALE:
                    return failure

    def mind(self, call: Call, leg: Leg, failure: Failure) -> bool:
        """Draw the consequences of a leg's failure; True when another attempt may be made."""
        call.failures.append(f"{leg.worker} ({failure.cause})")
        call.tried |= {leg.worker}
        if failure.blame == "now":
            self.reporters[leg.pool.name].report_failure(leg.worker, failure.kind)
        elif failure.blame == "suspect":
            call.suspects.append((leg.worker, failure.kind))
        call.lost += failure.retry == "once"
        allowed = (
            failure.retry != "no"
            and call.lost < _MAX_LOST
            and call.attempts < self.settings.max_attempts
            and any(worker.fit and worker.id not in call.tried for worker in leg.pool.workers())
            and self.budget.spend()
        )
        if allowed:
            self.telemetry.count("retries", cause=failure.cause)
            self.telemetry.decision(leg.decision, error=failure.cause, attempt=call.attempts)
        return allowed

    def good(self, call: Call, leg: Leg) -> None:
        """The worker has answered; who failed before on the same request is to blame after all."""
        reporter = self.reporters[leg.pool.name]
        reporter.report_success(leg.worker)
        for worker, kind in call.suspects:
            reporter.report_failure(worker, kind)
        call.suspects.clear()

    # --- answering

    async def relay(self, call: Call, response: UpstreamResponse) -> int:
        """Pass the answer on; returns the status for the books. Raises Refusal when nothing has reached the client."""
        watch = FirstToken(sse=is_stream(response), chunked=response.head.chunked)
        good = response.status < 400

        def on_body(piece: bytes) -> bool:
            if watch.feed(piece):
                self._first_token(call, good)
            return watch.seen

        marks = call.marks()
        if response.get(b"x-request-id") is None:
            marks.append((b"x-request-id", call.request_id))
        assert call.main is not None
        self._compare(call, response)
        try:
            await response.relay(call.responder, marks, on_body)
        except UpstreamError as error:
            self.reporters[call.main.pool.name].report_failure(call.main.worker, failure_of(error).kind)
            self.telemetry.limited("worker-cut", "answer_cut", request_id=call.request_id.decode(), cause=str(error))
            if call.responder.started:
                return 502
            raise Refusal(502, "worker_lost", f"worker {call.main.worker} broke its answer off: {error}") from error
        return response.status

    def _first_token(self, call: Call, good: bool) -> None:
        leg = call.main
        if leg is None:
            return
        if leg.decision.ticket is not None and self._load_until.get(leg.pool.name) == "first_token":
            leg.decision.ticket.encoded()
        if good:
            cached = call.prefill or leg
            sizes = [(key, size or _PLAIN_EMBEDDING) for key, size in call.wanted.sizes]
            cached.pool.record_encoded(cached.worker, sizes)

    def _compare(self, call: Call, response: UpstreamResponse) -> None:
        """Hold what the worker says its cache had against what it was chosen for."""
        leg = call.main
        delivered = _DELIVERED.get(response.get(b"x-fullhit-cache") or b"", "")
        if not delivered or leg is None or call.prefill is not None:
            return
        call.delivered = delivered
        reason = leg.decision.reason
        self.telemetry.count("cache_reports", worker=leg.worker, predicted=str(reason), delivered=delivered)
        if reason is Reason.FULL_HIT:
            if delivered != "hit":
                self.telemetry.count("hit_mispredictions")
            self.reporters[leg.pool.name].report_promise(leg.worker, delivered == "hit")

    def tell(self, call: Call, legs: tuple[Leg | None, Leg | None], code: int, seconds: float) -> None:
        """One line and one record for a finished call."""
        main, prefill = legs
        shown = prefill or main
        reason = str(shown.decision.reason) if shown is not None else "none"
        self.telemetry.request_done(call.service.name, reason, code, seconds)
        outcome: dict[str, Any] = {"api": "openai", "code": code, "ms": round(seconds * 1e3, 3)}
        if call.failures:
            outcome["failures"] = list(call.failures)
        if call.delivered:
            outcome["delivered"] = call.delivered
        if main is not None:
            if prefill is not None:
                outcome["prefill"] = prefill.worker
                self.telemetry.decision(prefill.decision, **outcome | {"decode": main.worker})
            self.telemetry.decision(main.decision, **outcome)
        elif code != 499:
            self.telemetry.limited(
                "not-routed", "not_routed", every=10.0, request_id=call.request_id.decode(), pool=call.service.name,
                code=code,
            )  # fmt: skip


def is_stream(response: UpstreamResponse) -> bool:
    """Whether the body is server-sent events that can be read as they pass."""
    kind = response.get(b"content-type") or b""
    return kind[:17].lower() == b"text/event-stream" and response.get(b"content-encoding") is None
