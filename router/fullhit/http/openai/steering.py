"""Mode ``dynamo``: one request, steered to a worker of a Dynamo pool through a Dynamo frontend.

    read -> choose, or wait -> frontend -> judge the beginning of the answer -> relay
              ^-------------- another worker ------------+

Slots are taken with the choice and given back exactly once, whatever ends the request. A request is sent again only
while nothing has reached the client; what each failure allows is said in `verdict` (workers) and in `forwarding`
(frontends). To judge it, a stream's head waits a while for the first event of its body, which the frontend sends with
the first token (or a comment, if it sends any); everything is then passed on as it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from fullhit.core.decision import Decision
from fullhit.http.wire import (
    HeaderBlock,
    Request,
    Responder,
    UpstreamClient,
    UpstreamError,
    UpstreamResponse,
    UpstreamTimeout,
)
from fullhit_publisher.dynamo_keys import KeyRules
from fullhit_publisher.identity import dynamo_instance

from .bodies import BadBody, Body, Shape, read_body
from .calls import Call, Seats
from .choice import Choice
from .forwarding import Behind, Broken, Forwarding
from .frontends import Frontends
from .headers import steering_lines
from .replies import Refusal
from .settings import FrontSettings, FrontTelemetry
from .tokens import FirstToken, payload_of
from .verdict import Verdict, judge, settled

__all__ = ["Steering"]

_EMBEDDING_BYTES: Final = 4 << 20
"""What one picture's embedding is taken to need in the cache of a worker that publishes nothing."""
_RECENTLY: Final = 30.0
"""Longer than a lease, after which a worker that cannot be reached is unknown to the frontends."""
_MAX_GONE: Final = 4_096
_SESSION: Final = b"x-dynamo-session-id"


class Steering:
    """`read` a request, then `serve` it. Create it inside the loop; `close` it."""

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
        self._settings = settings
        self._telemetry = telemetry
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.choice = Choice(decode, prefill, settings, telemetry, clock)
        self._forwarding = Forwarding(client, frontends, settings, telemetry)
        self._gone: dict[str, float] = {}  # workers that could not be reached, and when that was
        # One, for most of the work needs the interpreter: more of them would only crowd out the loop.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="fullhit-keys")

    def close(self) -> None:
        self.choice.close()
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
            code = "invalid_json" if error.param is None else "invalid_request"
            raise Refusal(400, code, str(error), param=error.param) from None

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
            refusal.headers = [*refusal.headers, *call.marks()]
            raise
        except asyncio.CancelledError:
            code = 499
            raise
        finally:
            decision = call.decision
            self._drop(call)
            self._tell(call, decision, code, self._clock() - started)

    async def pass_on(self, call: Call, request_id: bytes) -> None:
        """Pass a request on as it is, to whatever worker the frontend likes. Raises Refusal."""
        try:
            await self._relay(call, await self._forwarding.send(call, call.headers), request_id)
        finally:
            self._forwarding.leave(call)

    # --- until there is an answer

    async def _until_answered(self, call: Call) -> UpstreamResponse:
        """An answer that is for the client, its worker's slots held. Raises Refusal."""
        while True:
            await self.choice.take(call)
            headers = _steered(call)
            if headers is None:
                self._avoid(call)
                continue
            call.attempts += 1
            response = await self._answer_of(call, headers)
            if response is not None:
                return response
            self._drop(call)

    async def _answer_of(self, call: Call, headers: HeaderBlock) -> UpstreamResponse | None:
        """The worker's answer, through whichever frontend; None when another worker is to be tried. Raises Refusal."""
        while True:
            sent_at = self._clock()
            response = await self._forwarding.send(call, headers)
            try:
                verdict = await self._judge(call, response)
                if verdict is None:
                    self._good(call, response)
                    return response
                if not self._mind(call, verdict, self._clock() - sent_at):
                    call.failed = True
                    return response
                response.close()
                return None
            except Broken as error:
                self._forwarding.lose(call, str(error))
            except Behind:
                response.close()
            except BaseException:
                response.close()
                raise
            self._forwarding.leave(call)

    async def _judge(self, call: Call, response: UpstreamResponse) -> Verdict | None:
        """None when the answer is for the client. Raises Broken, Behind, and Refusal for a time-out."""
        sse = is_stream(response)
        if response.status < 400 and not sse:
            return None
        status, chunked = response.status, response.head.chunked

        def enough(beginning: bytes) -> bool:
            return settled(status, payload_of(beginning, chunked), sse=sse)

        beginning = await self._forwarding.peek(call, response, enough)
        verdict = judge(status, payload_of(beginning, chunked), sse=sse)
        if verdict is not None and verdict.blame == "ask":
            return replace(verdict, blame="pause") if await self._is_unknown(call) else None
        if verdict is not None and verdict.blame == "frontend":
            if self._forwarding.behind(call):
                raise Behind
            return None
        return verdict

    async def _is_unknown(self, call: Call) -> bool:
        """Whether the frontend does not know the instance that it was told to use. Raises Behind, and Refusal when no
        frontend knows any."""
        decision, frontend = call.decision, call.frontend
        assert decision is not None and frontend is not None
        instance = dynamo_instance(decision.worker.id)
        assert instance is not None
        if not decision.worker.present:
            return True
        # A frontend's list of instances lags behind its routing for a moment.
        if self._clock() - self._gone.get(decision.worker.id, float("-inf")) < _RECENTLY:
            return True
        known = await self._forwarding.instances(frontend)
        if known is None or instance in known:
            return False
        if any(dynamo_instance(worker.id) in known for worker in self._pool.workers()):
            return True
        self._forwarding.rest(frontend, "behind", "it knows no worker of the pool")
        if self._forwarding.behind(call):
            raise Behind
        raise Refusal(503, "frontend_behind", "no Dynamo frontend knows a worker of the pool yet", retry_after=1)

    def _mind(self, call: Call, verdict: Verdict, seconds: float) -> bool:
        """Draw the consequences; True when another worker is to be tried."""
        decision = call.decision
        assert decision is not None
        worker = decision.worker.id
        call.failures.append(f"{worker} ({verdict.cause})")
        call.tried |= {worker}
        if verdict.cause == "unavailable":
            if len(self._gone) >= _MAX_GONE:
                self._gone.clear()
            self._gone[worker] = self._clock()
        if call.prefill is not None and self._prefill is not None:
            # Whose fault it is cannot be seen: a pause for both, and nobody's record is stained.
            call.tried |= {call.prefill.worker.id}
            self._prefill.reporter.report_failure(call.prefill.worker.id, "busy")
            self._reporter.report_failure(worker, "busy")
        elif verdict.blame == "suspect":
            call.suspects.append((worker, verdict.kind))
        else:
            self._reporter.report_failure(worker, verdict.kind)
        if verdict.kind == "timeout" and seconds > self._settings.retry_within:
            return False
        if call.attempts >= self._settings.max_attempts or not self._somebody_left(call):
            return False
        self._telemetry.count("retries", cause=verdict.cause)
        self._telemetry.decision(decision, error=verdict.cause, attempt=call.attempts)
        return True

    def _somebody_left(self, call: Call) -> bool:
        pools = [self._pool] if self._prefill is None else [self._pool, self._prefill.pool]
        return all(any(worker.fit and worker.id not in call.tried for worker in pool.workers()) for pool in pools)

    def _good(self, call: Call, response: UpstreamResponse) -> None:
        if response.status >= 400 or call.decision is None:
            return  # the client's fault, which says nothing about the worker
        self._reporter.report_success(call.decision.worker.id)
        self._gone.pop(call.decision.worker.id, None)
        if call.prefill is not None and self._prefill is not None:
            self._prefill.reporter.report_success(call.prefill.worker.id)
        for frontend in call.behind:
            self._forwarding.rest(frontend, "behind", "it does not know the model or the workers yet")
        call.behind.clear()
        for worker, kind in call.suspects:
            self._reporter.report_failure(worker, kind)
        call.suspects.clear()

    def _avoid(self, call: Call) -> None:
        """Somebody has put a worker into the pool that is no instance of Dynamo: it cannot be named to a frontend."""
        assert call.decision is not None
        worker = call.decision.worker.id
        self._telemetry.limited(f"foreign {worker}", "not_a_dynamo_worker", worker=worker, pool=self._pool.name)
        call.failures.append(f"{worker} (no Dynamo instance)")
        call.tried |= {worker}
        self._drop(call)

    def _drop(self, call: Call) -> None:
        """Give everything back that the call holds."""
        self.choice.drop(call)
        self._forwarding.leave(call)

    # --- answering

    async def _relay(self, call: Call, response: UpstreamResponse, request_id: bytes) -> bool:
        """Pass the answer on. False when it was cut short. Raises Refusal when that was before its first byte."""
        watch = FirstToken(sse=is_stream(response), chunked=response.head.chunked)
        good = response.status < 400 and not call.failed

        def on_body(piece: bytes) -> bool:
            if watch.feed(piece):
                self._first_token(call, good)
            return watch.seen

        marks = call.marks()
        if response.get(b"x-request-id") is None:
            marks.append((b"x-request-id", request_id))
        try:
            await response.relay(call.responder, marks, on_body)
        except UpstreamError as error:
            if call.frontend is not None and not isinstance(error, UpstreamTimeout):
                self._forwarding.rest(call.frontend, error.kind, str(error))
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

    def _tell(self, call: Call, decision: Decision | None, code: int, seconds: float) -> None:
        name = self._pool.name
        self._telemetry.request_done(name, str(decision.reason) if decision is not None else "none", code, seconds)
        if decision is not None:
            outcome: dict[str, object] = {"api": "openai", "code": code, "ms": round(seconds * 1e3, 3)}
            if call.failures:
                outcome["failures"] = list(call.failures)
            self._telemetry.decision(decision, **outcome)
        elif code != 499:
            self._telemetry.limited(
                "not-routed", "not_routed", every=10.0, request_id=call.request_id, pool=name, code=code
            )


def _steered(call: Call) -> HeaderBlock | None:
    """The headers of a call with the instances it is pinned to; None when the worker is no instance."""
    assert call.decision is not None
    instance = dynamo_instance(call.decision.worker.id)
    if instance is None:
        return None
    prefill = dynamo_instance(call.prefill.worker.id) if call.prefill is not None else None
    return call.headers.with_line(steering_lines(instance, prefill))


def is_stream(response: UpstreamResponse) -> bool:
    """Whether the body is server-sent events that can be read as they pass."""
    kind = response.get(b"content-type") or b""
    return kind[:17].lower() == b"text/event-stream" and response.get(b"content-encoding") is None
