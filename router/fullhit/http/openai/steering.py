"""Mode ``dynamo``: one request, steered to a worker of a Dynamo pool through a Dynamo frontend.

    read -> choose, or wait -> frontend -> judge the beginning of the answer -> relay
              ^-------------- another worker ------------+

Slots are taken with the choice and given back exactly once, whatever ends the request: `Call` owns them. A request is
sent again only while nothing has reached the client; what each failure allows is said in `verdict` (workers) and in
`_fault_of` (frontends).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from fullhit.core.decision import Decision
from fullhit.core.pool import Pool
from fullhit.core.types import NoEligibleKind, NoEligibleWorker, SelectRequest
from fullhit.http.encoder.calls import InFlight
from fullhit.http.waiting import WaitedTooLong, WaitingRoom, WaitingRoomFull
from fullhit.http.wire import (
    HeaderBlock,
    LostAfterSend,
    Request,
    Responder,
    Timeouts,
    UpstreamClient,
    UpstreamError,
    UpstreamResponse,
    UpstreamTimeout,
)
from fullhit_publisher.dynamo_keys import KeyRules
from fullhit_publisher.identity import dynamo_instance

from .bodies import BadBody, Body, Shape, read_body
from .frontends import Frontend, Frontends
from .headers import steering_lines
from .replies import Refusal
from .settings import FrontSettings, FrontTelemetry, Reporter
from .tokens import FirstToken, payload_of
from .verdict import Verdict, instances_in, judge

__all__ = ["Call", "Seats", "Steering"]

_EMBEDDING_BYTES: Final = 4 << 20
"""What one picture's embedding is taken to need in the cache of a worker that publishes nothing."""
_MAX_HEALTH: Final = 16 << 20
_SESSION: Final = b"x-dynamo-session-id"
_MAX_LOST: Final = 2
"""Frontends that may be lost over one request after they had all of it."""
_WHY: Final[dict[str, tuple[str, str]]] = {
    "empty_pool": ("no_workers", "no worker is known; Dynamo's discovery shows none"),
    "all_busy": ("workers_busy", "all workers are busy"),
    "all_down": ("workers_down", "no worker is ready"),
    "all_excluded": ("workers_failed", "no further worker could take the request"),
    "": ("workers_failed", "no further worker could take the request"),
}


class Seats(NamedTuple):
    """A pool, and who hears of its workers' failures."""

    pool: Pool
    reporter: Reporter


@dataclass(slots=True, eq=False)
class Call:
    """One request on its way. `release` gives everything back; harmless when there is nothing."""

    request: Request
    responder: Responder
    headers: HeaderBlock
    request_id: str
    body: Body
    deadline: float
    decision: Decision | None = None
    prefill: Decision | None = None
    frontend: Frontend | None = None
    tried: frozenset[str] = frozenset()
    suspects: list[tuple[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    attempts: int = 0
    lost: int = 0
    failed: bool = False

    def release(self) -> None:
        """Give the slots back."""
        for decision in (self.decision, self.prefill):
            if decision is not None and decision.ticket is not None:
                decision.ticket.release()


class _Broken(Exception):
    """A frontend broke its answer off before it had said anything."""


class Steering:
    """`serve` one request. Create it inside the loop; `close` it."""

    def __init__(
        self,
        decode: Seats,
        prefill: Seats | None,
        rules: KeyRules,
        client: UpstreamClient,
        frontends: Frontends,
        settings: FrontSettings,
        telemetry: FrontTelemetry,
        clock: Callable[[], float],
    ) -> None:
        self._pool, self._reporter = decode
        self._prefill = prefill
        self._rules = rules
        self._client = client
        self._frontends = frontends
        self._settings = settings
        self._telemetry = telemetry
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        rooms = (settings.queue_max, settings.queue_max_bytes, telemetry.observe_select)
        self.room = WaitingRoom(self._pool, *rooms)
        self._prefill_room = WaitingRoom(prefill.pool, *rooms) if prefill is not None else None
        self.in_flight = InFlight(clock)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="fullhit-keys")
        self.timeouts = Timeouts(
            connect=settings.connect_timeout,
            send=settings.send_timeout,
            first_byte=settings.first_byte_timeout,
            idle=settings.idle_timeout,
        )

    def close(self) -> None:
        self.room.close()
        if self._prefill_room is not None:
            self._prefill_room.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, request: Request, shape: Shape) -> Body:
        """Model, media and pins of a request; a large body is read beside the loop. Raises Refusal."""
        scope = request.get(_SESSION)
        session = None if scope is None else scope.decode("utf-8", "replace")
        arguments = (request.body, shape, self._rules, session, self._settings.max_items)
        try:
            if len(request.body) <= self._settings.thread_bytes:
                return read_body(*arguments)
            return await self._loop.run_in_executor(self._threads, read_body, *arguments)
        except BadBody as error:
            raise Refusal(400, "invalid_json", str(error)) from None

    async def serve(
        self, request: Request, responder: Responder, headers: HeaderBlock, request_id: bytes, body: Body
    ) -> None:
        """Steer one request and answer it. Raises Refusal when there was no answer to pass on."""
        started = self._clock()
        deadline = self._loop.time() + self._settings.queue_timeout
        call = Call(request, responder, headers, request_id.decode(), body, deadline)
        code = 499
        try:
            response = await self._until_answered(call)
            code = response.status
            if not await self._relay(call, response, request_id):
                code = 502
        except Refusal as refusal:
            code = refusal.status
            refusal.headers = [*refusal.headers, *self._marks(call)]
            raise
        finally:
            self._drop(call)
            self._tell(call, code, self._clock() - started)

    async def pass_on(self, call: Call, request_id: bytes) -> None:
        """Pass a request on as it is, to whatever worker the frontend likes. Raises Refusal."""
        try:
            await self._relay(call, await self._send(call, call.headers), request_id)
        finally:
            self._leave(call)

    # --- choosing

    async def _choose(self, call: Call) -> None:
        """Take the slots. Raises Refusal."""
        media = call.body.media
        request = SelectRequest(
            media.keys, media.items, call.request_id, call.tried, False, media.unkeyed, media.alternatives
        )
        call.decision = None
        decision = await self._select(self.room, request, call)
        call.decision = decision
        self.in_flight.begin(decision.worker.id, call)
        self._telemetry.remember(decision, api="openai")
        if self._prefill_room is not None:
            call.prefill = None
            wanted = SelectRequest(request_id=call.request_id, exclude=call.tried)
            call.prefill = await self._select(self._prefill_room, wanted, call)

    async def _select(self, room: WaitingRoom, request: SelectRequest, call: Call) -> Decision:
        found = room.at_once(request)
        if isinstance(found, Decision):
            return found
        if isinstance(found, NoEligibleWorker) and found.kind in ("empty_pool", "all_excluded"):
            raise self._nobody(call, found.kind, str(found))
        try:
            return await room.admit(request, len(call.body.body), call.deadline)
        except WaitingRoomFull as error:
            self._telemetry.count("rejected", cause="queue_full")
            raise Refusal(503, "queue_full", f"all workers are busy: {error}", retry_after=1) from error
        except WaitedTooLong as error:
            raise self._nobody(call, error.kind, str(error)) from error

    def _nobody(self, call: Call, kind: NoEligibleKind | str, detail: str) -> Refusal:
        code, why = _WHY.get(kind, _WHY[""])
        self._telemetry.count("rejected", cause=code)
        tried = f"; tried: {', '.join(call.failures)}" if call.failures else ""
        return Refusal(503, code, f"{why} ({detail}){tried}"[:2_000], retry_after=5 if kind == "empty_pool" else 1)

    # --- sending

    async def _until_answered(self, call: Call) -> UpstreamResponse:
        """An answer that is for the client, its worker's slots held. Raises Refusal."""
        while True:
            await self._choose(call)
            call.attempts += 1
            sent_at = self._clock()
            response = await self._send(call, self._steered(call))
            try:
                verdict = await self._judge(call, response)
                if verdict is None:
                    self._good(call, response)
                    return response
                if not self._mind(call, verdict, self._clock() - sent_at):
                    call.failed = True
                    return response
            except _Broken as error:
                response.close()
                self._lose(call, str(error))
            except BaseException:
                response.close()
                raise
            response.close()
            self._drop(call)

    @staticmethod
    def _steered(call: Call) -> HeaderBlock:
        assert call.decision is not None
        instance = dynamo_instance(call.decision.worker.id)
        assert instance is not None  # the pool is one of Dynamo workers
        prefill = dynamo_instance(call.prefill.worker.id) if call.prefill is not None else None
        return call.headers.with_line(steering_lines(instance, prefill))

    async def _send(self, call: Call, headers: HeaderBlock) -> UpstreamResponse:
        """The head of a frontend's answer; from another one when that is safe. Raises Refusal when there is none."""
        tried: set[Frontend] = set()
        stale = 0
        problem = "none is configured"
        status = 502
        while True:
            frontend = call.frontend = self._frontends.enter(tried)
            if frontend is None:
                raise Refusal(status, "frontend_unavailable", f"no Dynamo frontend could take the request: {problem}",
                              retry_after=1)  # fmt: skip
            request = call.request
            try:
                response = await self._client.send(
                    frontend.origin, request.method, request.target, headers, call.body.body, timeouts=self.timeouts
                )
            except UpstreamError as error:
                self._leave(call)
                problem = str(error)
                fault = _fault_of(error)
                if fault == "stale" and stale < 2:
                    stale += 1
                    continue
                tried.add(frontend)
                if fault == "timeout":
                    raise Refusal(504, "frontend_timeout", f"a Dynamo frontend did not answer: {problem}") from error
                if fault == "full":
                    status = 503
                    continue
                self._failed(frontend, error)
                if fault == "lost":
                    self._lose(call, problem)
                continue
            if self._frontends.answered(frontend):
                self._telemetry.event("frontend_up", frontend=frontend.url)
            return response

    def _lose(self, call: Call, problem: str) -> None:
        """A frontend was lost over a request that it had in full. Raises Refusal when it is not the first."""
        call.lost += 1
        if call.lost >= _MAX_LOST:
            raise Refusal(502, "frontend_lost", f"Dynamo frontends broke the connection: {problem}")

    def _failed(self, frontend: Frontend, error: UpstreamError) -> None:
        self._telemetry.count("retries", cause=f"frontend_{error.kind}")
        if self._frontends.failed(frontend, str(error)):
            self._telemetry.event("frontend_down", level="warning", frontend=frontend.url, cause=str(error))

    def _drop(self, call: Call) -> None:
        """Give everything back that the call holds."""
        call.release()
        if call.decision is not None:
            self.in_flight.end(call.decision.worker.id, call)
        self._leave(call)

    def _leave(self, call: Call) -> None:
        frontend, call.frontend = call.frontend, None
        if frontend is not None:
            self._frontends.leave(frontend)

    # --- judging

    async def _judge(self, call: Call, response: UpstreamResponse) -> Verdict | None:
        """None when the answer is for the client. Raises _Broken, and Refusal for a time-out."""
        sse = is_stream(response)
        if response.status < 400 and not sse:
            return None
        try:
            beginning = await response.peek()
        except UpstreamError as error:
            if isinstance(error, UpstreamTimeout):
                raise Refusal(504, "frontend_timeout", f"a Dynamo frontend fell silent: {error}") from error
            if call.frontend is not None:
                self._failed(call.frontend, error)
            raise _Broken(str(error)) from error
        verdict = judge(response.status, payload_of(beginning, response.head.chunked), sse=sse)
        if verdict is not None and verdict.blame == "ask":
            return replace(verdict, blame="pause") if await self._is_unknown(call) else None
        return verdict

    async def _is_unknown(self, call: Call) -> bool:
        """Whether the frontend does not know the instance it was told to use."""
        decision, frontend = call.decision, call.frontend
        if decision is None or frontend is None:
            return False
        if not decision.worker.present:
            return True
        limit = self._settings.connect_timeout
        timeouts = Timeouts(connect=limit, first_byte=limit, total=2 * limit)
        try:
            response = await self._client.send(frontend.origin, b"GET", b"/health", (), timeouts=timeouts)
            known = instances_in(await response.read(_MAX_HEALTH))
        except UpstreamError:
            return False
        return known is not None and dynamo_instance(decision.worker.id) not in known

    def _mind(self, call: Call, verdict: Verdict, seconds: float) -> bool:
        """Draw the consequences; True when another worker is to be tried."""
        decision = call.decision
        assert decision is not None
        worker = decision.worker.id
        call.failures.append(f"{worker} ({verdict.cause})")
        if call.prefill is not None:
            # Whose fault it is cannot be seen: a pause for both, and nobody's record is stained.
            self._reporter.report_failure(worker, "busy")
            assert self._prefill is not None
            self._prefill.reporter.report_failure(call.prefill.worker.id, "busy")
            call.tried |= {call.prefill.worker.id}
        elif verdict.blame == "suspect":
            call.suspects.append((worker, verdict.kind))
        else:
            self._reporter.report_failure(worker, verdict.kind)
        call.tried |= {worker}
        if verdict.kind == "timeout" and seconds > self._settings.retry_within:
            return False
        if call.attempts >= self._settings.max_attempts or not self._somebody_left(call):
            return False
        self._telemetry.count("retries", cause=verdict.cause)
        self._telemetry.decision(decision, error=verdict.cause, attempt=call.attempts)
        return True

    def _somebody_left(self, call: Call) -> bool:
        return any(worker.fit and worker.id not in call.tried for worker in self._pool.workers())

    def _good(self, call: Call, response: UpstreamResponse) -> None:
        if response.status >= 400 or call.decision is None:
            return  # the client's fault, which says nothing about the worker
        self._reporter.report_success(call.decision.worker.id)
        if call.prefill is not None and self._prefill is not None:
            self._prefill.reporter.report_success(call.prefill.worker.id)
        for worker, kind in call.suspects:
            self._reporter.report_failure(worker, kind)
        call.suspects.clear()

    # --- answering

    async def _relay(self, call: Call, response: UpstreamResponse, request_id: bytes) -> bool:
        """Pass the answer on. False when it was cut short."""
        watch = FirstToken(sse=is_stream(response), chunked=response.head.chunked)
        good = response.status < 400 and not call.failed

        def on_body(piece: bytes) -> bool:
            if not watch.feed(piece):
                return False
            self._first_token(call, good)
            return True

        marks = self._marks(call)
        if response.get(b"x-request-id") is None:
            marks.append((b"x-request-id", request_id))
        try:
            await response.relay(call.responder, marks, on_body)
        except UpstreamError as error:
            if call.frontend is not None and not isinstance(error, UpstreamTimeout):
                self._failed(call.frontend, error)
            self._telemetry.limited("front-cut", "answer_cut", request_id=call.request_id, cause=str(error))
            if call.responder.started:
                return False
            raise Refusal(502, "frontend_lost", f"a Dynamo frontend broke its answer off: {error}") from error
        return True

    def _first_token(self, call: Call, good: bool) -> None:
        decision = call.decision
        if decision is not None:
            if self._settings.load_until == "first_token" and decision.ticket is not None:
                decision.ticket.encoded()
            if good:
                keys = call.body.media.keys
                self._pool.record_encoded(decision.worker.id, [(key, _EMBEDDING_BYTES) for key in keys])
        if call.prefill is not None and call.prefill.ticket is not None:
            call.prefill.ticket.release()

    @staticmethod
    def _marks(call: Call) -> list[tuple[bytes, bytes]]:
        """Where the call went and why, as headers."""
        decision = call.decision
        if decision is None or not call.attempts:
            return []
        return [
            (b"x-fullhit-worker", decision.worker.id.encode("ascii", "replace")),
            (b"x-fullhit-reason", str(decision.reason).encode()),
        ]

    def _tell(self, call: Call, code: int, seconds: float) -> None:
        decision = call.decision
        reason = str(decision.reason) if decision is not None else "none"
        self._telemetry.request_done(self._pool.name, reason, code, seconds)
        outcome: dict[str, object] = {"api": "openai", "code": code, "ms": round(seconds * 1e3, 3)}
        if call.failures:
            outcome["failures"] = list(call.failures)
        if decision is not None:
            self._telemetry.decision(decision, **outcome)
        elif code != 499:
            self._telemetry.limited(
                "not-routed", "not_routed", every=10.0, request_id=call.request_id, pool=self._pool.name, code=code
            )


def is_stream(response: UpstreamResponse) -> bool:
    """Whether the body is server-sent events that can be read as they pass."""
    kind = response.get(b"content-type") or b""
    return kind[:17].lower() == b"text/event-stream" and response.get(b"content-encoding") is None


def _fault_of(error: UpstreamError) -> str:
    """``full``: no connection free; ``down``: nothing was processed; ``stale``: a kept-alive connection had ended, as
    far as one can see; ``lost``: gone or garbage after all was sent, which costs compute at most; ``timeout``."""
    if isinstance(error, UpstreamTimeout):
        return "full" if error.stage == "pool" else "down" if error.not_processed else "timeout"
    if error.not_processed:
        return "stale" if error.reused else "down"
    if isinstance(error, LostAfterSend) and error.reused and not error.received:
        return "stale"
    return "lost"
