"""The ``/encode`` call: from the body to the answer, over as many encoders as it takes.

    parse -> (bad picture?) -> part -> choose, or wait -> forward -> answer
                                        ^---- turned away, dead ----+
                                        ^---- failed unheard, mended

Two promises hold on every path. The in-flight slot is given back exactly once (`LivePart` owns it). And once a
body is on its way to an encoder, a caller who leaves changes nothing: there is no cancel in the protocol, the
encoder goes on encoding, so the call stays open and its slot taken until the encoder has answered.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace

from fullhit.core.decision import Decision
from fullhit.core.types import Reason, SelectRequest
from fullhit.http.common import InFlight, request_id_line, request_id_of
from fullhit.http.waiting import WaitedTooLong, WaitingRoom, WaitingRoomFull
from fullhit.http.wire import Request, Responder, Timeouts, UpstreamError, header_block

from .calls import Call, LivePart
from .imagecheck import inspect_image
from .media import BadBody, parse_encode
from .mending import Mender
from .parts import Part, PartState
from .peers import address_of, is_loopback, is_wildcard
from .replies import Refusal, message_in
from .shared import Shared
from .upstream import Answer, Failure, answer_of, failure_of, is_listening, refusal_of, with_id

__all__ = ["EncodeRoute"]

_SAME_ENCODER_TRIES = 3
"""How often a copy that must stay with its encoder is offered to it."""
_MAX_MARKS = 4_096
_CHOOSING = PartState.CHOOSING  # an enumeration's members cost a look-up each time


class EncodeRoute:
    """Handles ``POST /encode``. ``on_part(alias, req_id)`` is called when a part has got on."""

    def __init__(self, shared: Shared, on_part: Callable[[str, str], None]) -> None:
        self._pool = shared.pool
        self._client = shared.client
        self._fleet = shared.fleet
        self._settings = settings = shared.settings
        self._telemetry = telemetry = shared.telemetry
        self._table = shared.table
        self._peers = shared.peers
        self._origins = shared.origins
        self._deliveries = shared.deliveries
        self._seldom = shared.seldom
        self._mender = Mender(shared)
        self._clock = shared.clock
        self._on_part = on_part
        self._loop = asyncio.get_running_loop()
        self._mark = secrets.token_hex(8).encode()  # travels with what is forwarded: a loop is known by it
        self._mark_line = b"x-fullhit-via: %b\r\n" % self._mark
        self._lives: dict[Part, LivePart] = {}
        self._inspect = None if settings.bad_image == "pass" else inspect_image
        self._mark_lines: dict[tuple[str, str], bytes] = {}
        self.room = WaitingRoom(shared.pool, settings.queue_max, settings.queue_max_bytes, telemetry.observe_select)
        self.in_flight = InFlight(shared.clock)
        self.timeouts = Timeouts(
            connect=settings.connect_timeout,
            send=settings.send_timeout,
            first_byte=settings.encode_timeout,
            idle=settings.send_timeout,
        )

    @property
    def open_calls(self) -> int:
        """``/encode`` calls in the house, waiting ones included."""
        return sum(live.part.copies for live in self._lives.values())

    async def handle(self, request: Request, responder: Responder, alias: str) -> None:
        """Serve one call. Raises Refusal."""
        started = self._clock()
        request_id, given = request_id_of(request)
        if b"x-fullhit-via" in request.names and any(
            value == self._mark and name.lower() == b"x-fullhit-via" for name, value in request.headers
        ):
            # 503, so that whoever forwarded it here (this router) takes another encoder.
            self._telemetry.count("rejected", cause="loop")
            why = "this router is listed as its own encoder, itself or through others; remove that worker"
            raise Refusal(503, why, "loop", retry_after=1)
        try:
            info = parse_encode(request.body, self._inspect)
        except BadBody as error:
            self._telemetry.count("rejected", cause="bad_body")
            self._telemetry.request_done(self._pool.name, "none", 400, self._clock() - started)
            raise Refusal(400, str(error), "bad_body", req_id=error.req_id) from error
        peer = address_of(request.peer)
        headers = request.forwarded_hostless()
        if not given:
            headers = headers.with_line(request_id_line(request_id))
        headers = headers.with_line(self._mark_line)
        part = self._table.open_encode(alias, info.req_id, info.prefill_host, peer)
        live = self._lives.get(part)
        if live is None:
            live = self._lives[part] = LivePart(part, self._deliveries.withdraw)
        deadline = self._loop.time() + self._settings.queue_timeout
        call = Call(info, request, responder, headers, request_id, peer, live, deadline)
        part.part_idx = info.part_idx or 0
        code = 499
        closed = False
        try:
            if info.bad:
                self._mender.mind_pictures(call)
            answer = await self._until_answered(call)
            code = answer.status
            self._close(call, answer)
            closed = True
            self._pass_on(call, answer)
        except Refusal as refusal:
            code = refusal.status
            refusal.req_id = info.req_id
            refusal.request_id = request_id
            refusal.headers = [*refusal.headers, *self._marks(call)]
            call.note(refusal.cause)
            self._table.close_failed(part, refusal.status, refusal.message)
            raise
        except BaseException:
            if not closed:
                self._table.abandon(part)  # The caller left while it waited, or the router stops.
            raise
        finally:
            if part.copies == 0:
                self._lives.pop(part, None)
                live.give_back()
            self._on_part(alias, info.req_id)
            self._tell(call, code, self._clock() - started)

    def close(self) -> None:
        self.room.close()

    # --- choosing and forwarding

    async def _until_answered(self, call: Call) -> Answer:
        """Try encoders until one has answered. Raises Refusal."""
        while True:
            attempt = self._choose_now(call) or await self._choose(call)
            if call.responder.peer_gone and call.attempts and call.part.copies == 1:
                raise Refusal(499, "the caller left while no encoder had taken the request", "caller_left")
            call.responder.detach()
            result = await self._forward(call, attempt)
            if isinstance(result, Answer):
                return result
            await self._after(call, attempt, result)

    def _choose_now(self, call: Call) -> int:
        """As `_choose`, if it can be done without waiting; 0 if not."""
        if call.part.state is not _CHOOSING or call.live.choosing is not None:
            return 0
        decision = self.room.at_once(_selection(call), call.not_before)
        return self._take(call, decision) if isinstance(decision, Decision) else 0

    async def _choose(self, call: Call) -> int:
        """The number of an attempt that is under way or just chosen: by this copy or by another one."""
        live, part = call.live, call.part
        while part.state is _CHOOSING:
            if live.choosing is not None:
                await asyncio.wait((live.choosing,))
                continue
            live.choosing = self._loop.create_future()
            try:
                self._take(call, await self._select(call))
            finally:
                live.choosing.set_result(None)
                live.choosing = None
        call.decision = live.decision
        return part.attempt

    def _take(self, call: Call, decision: Decision) -> int:
        call.decision = decision
        worker = decision.worker
        call.live.take(decision, self._origins.of(worker.url))
        if call.info.prefill_host:
            self._warn_of_unreachable(call, decision)
        return self._table.chosen(call.part, worker.id)

    async def _select(self, call: Call) -> Decision:
        request = _selection(call)
        try:
            return await self.room.admit(request, len(call.body), call.deadline, call.not_before)
        except WaitingRoomFull as error:
            raise self._no_encoder(call, str(error), "queue_full") from error
        except WaitedTooLong as error:
            raise self._no_encoder(call, str(error), "queue_timeout") from error

    def _no_encoder(self, call: Call, why: str, cause: str) -> Refusal:
        self._telemetry.count("rejected", cause=cause)
        tried = "; tried " + ", ".join(f"{what} x{n}" for what, n in call.causes.items()) if call.causes else ""
        return Refusal(503, f"no encoder could take the request: {why}{tried}"[:2_000], cause, retry_after=1)

    async def _forward(self, call: Call, attempt: int) -> Answer | Failure:
        """One copy to the chosen encoder."""
        live, part = call.live, call.part
        worker = part.worker
        origin = live.origin or self._origins.of(worker)
        call.attempts += 1
        if call.wire_id != part.wire_id:
            self._mender.dress(call)
        sent = False

        def on_sent() -> None:
            nonlocal sent
            sent = True
            for registered in self._table.sent(part, attempt):
                live.deliveries.add(self._deliveries.start(part, registered, origin, live.deliveries.discard))
            self._on_part(part.alias, part.req_id)

        self.in_flight.begin(worker, call)
        try:
            response = await self._client.send(
                origin, b"POST", b"/encode", call.headers, call.body, timeouts=self.timeouts, on_sent=on_sent
            )
            body = await response.read(self._settings.max_reply_bytes)
        except UpstreamError as error:
            failure = failure_of(error)
        else:
            answer = answer_of(response, body)
            refusal = refusal_of(answer) or self._mender.remedy(call, attempt, answer)
            if refusal is None:
                self._judge(worker, answer)
                return answer
            failure = refusal
        finally:
            self.in_flight.end(worker, call)
        if failure.report is not None:
            self._fleet.report_failure(worker, failure.report)
        if failure.retry == "if_harmless" and (
            not sent
            or call.info.num_parts == 1
            or (self._mender.is_unheard(call, attempt) and self._mender.rename(call))
            or not await is_listening(origin)
        ):
            failure = replace(failure, retry="yes")
            call.lost += sent
        call.note(f"{worker} ({failure.cause})")
        if failure.retry == "yes":
            if not self._table.back(part, attempt, sent=sent):
                call.stuck += 1
            else:
                call.stuck = 0
                if part.state is _CHOOSING and part.attempt == attempt:
                    live.give_back()
        return failure

    async def _after(self, call: Call, attempt: int, failure: Failure) -> None:
        """Go on after a failure: pause, exclude, or give up (Refusal)."""
        settings = self._settings
        if failure.retry != "yes":
            raise Refusal(failure.status, self._lost(call, failure), failure.cause)
        if call.lost >= settings.max_lost:
            message = f"{call.lost} encoders were lost over this request; the last: {failure.message}"
            raise Refusal(failure.status, message, "max_lost")
        self._telemetry.count("retries", cause=failure.cause)
        if call.decision is not None and call.causes[f"{call.part.worker} ({failure.cause})"] == 1:
            self._telemetry.decision(call.decision, error=failure.cause, detail=failure.message, attempt=attempt)
        if call.stuck:
            # Another copy of this part is being worked on there: this one must not go anywhere else.
            if call.stuck >= _SAME_ENCODER_TRIES:
                raise Refusal(failure.status, self._lost(call, failure), failure.cause)
            await asyncio.sleep(settings.retry_pause)
            return
        if settings.max_attempts and call.attempts >= settings.max_attempts:
            raise self._no_encoder(call, f"{call.attempts} attempts (max_attempts)", "max_attempts")
        if failure.blame or call.attempts > _SAME_ENCODER_TRIES:
            call.tried |= {call.part.worker}
        if not self._somebody_left(call):
            # All have turned it away. Waiting for them is better than refusing: another round, after a pause.
            call.rounds += 1
            call.tried = frozenset()
            pause = min(settings.retry_pause * 2 ** min(call.rounds - 1, 10), settings.retry_pause_max)
            call.not_before = self._loop.time() + pause

    def _somebody_left(self, call: Call) -> bool:
        return any(worker.fit and worker.id not in call.tried for worker in self._pool.workers())

    def _lost(self, call: Call, failure: Failure) -> str:
        why = "; it may be working on it still, so it was not sent elsewhere" if failure.retry == "if_harmless" else ""
        return f"encoder {call.part.worker} failed: {failure.message}{why}"[:2_000]

    def _judge(self, worker: str, answer: Answer) -> None:
        """Tell the fleet about an answer that is passed on. A 400 says nothing about the encoder."""
        if answer.status < 300:
            self._fleet.report_success(worker)
        elif answer.status >= 500:
            self._fleet.report_failure(worker, "5xx")
        elif answer.status == 409:
            self._telemetry.event("duplicate_at_encoder", level="error", worker=worker)

    # --- the end

    def _close(self, call: Call, answer: Answer) -> None:
        part, info = call.part, call.info
        if answer.status == 200:
            self._pool.record_encoded(part.worker, info.sizes)
            if answer.delivered:
                self._compare(call, answer.delivered)
            # With mooncake a /send follows. Registrations and a port of its own are for the zmq backends.
            self._table.close_ok(part, keep=info.embedding_port is None and not part.registrations)
        else:
            text = answer.body[:2_000].decode("utf-8", "replace")
            if part.offered != part.attempt and answer.status in (400, 500):
                self._deliveries.hand_over(part, self._origins.of(part.worker))
            self._table.close_failed(part, answer.status, message_in(answer.body) or text)

    def _compare(self, call: Call, delivered: str) -> None:
        """Hold what the encoder found in its cache against what it was chosen for."""
        decision = call.decision
        if decision is None or decision.worker.id != call.part.worker:
            return
        call.delivered = delivered
        self._telemetry.count(
            "cache_reports", worker=call.part.worker, predicted=str(decision.reason), delivered=delivered
        )
        if decision.reason is Reason.FULL_HIT:
            if delivered != "hit":
                self._telemetry.count("hit_mispredictions")
            self._fleet.report_promise(call.part.worker, delivered == "hit")

    def _pass_on(self, call: Call, answer: Answer) -> None:
        worker, reason = call.part.worker, str(call.decision.reason) if call.decision is not None else ""
        marks = self._mark_lines.get((worker, reason))
        if marks is None:
            if len(self._mark_lines) >= _MAX_MARKS:
                self._mark_lines.clear()
            marks = self._mark_lines[worker, reason] = header_block(self._marks(call))
        lines = answer.lines + marks
        if not answer.tagged:
            lines += request_id_line(call.request_id)
        answer = with_id(answer, call.wire_id, call.part.req_id)
        call.responder.reply_lines(answer.status, lines, answer.body)

    def _marks(self, call: Call) -> list[tuple[bytes, bytes]]:
        """Where the call went and why, as headers."""
        marks = []
        if call.attempts:
            marks.append((b"x-fullhit-worker", call.part.worker.encode("ascii", "replace")))
        if call.decision is not None:
            marks.append((b"x-fullhit-reason", str(call.decision.reason).encode()))
        return marks

    def _tell(self, call: Call, code: int, seconds: float) -> None:
        decision = call.decision
        reason = str(decision.reason) if decision is not None else "none"
        self._telemetry.request_done(self._pool.name, reason, code, seconds)
        outcome: dict[str, object] = {"code": code, "ms": round(seconds * 1e3, 3), "req_id": call.info.req_id}
        if call.part.alias:
            outcome["alias"] = call.part.alias
        if call.causes:
            outcome["failures"] = dict(call.causes)
        if call.delivered:
            outcome["delivered"] = call.delivered
        if call.pictures:
            outcome["bad_images"] = list(call.pictures)
        if decision is not None:
            self._telemetry.decision(decision, **outcome)
        elif code != 499:
            self._telemetry.event("not_routed", level="warning", request_id=call.request_id.decode(), **outcome)

    def _warn_of_unreachable(self, call: Call, decision: Decision) -> None:
        """An encoder on another machine cannot push to a wildcard or loopback address. It is passed on as it is."""
        host = call.info.prefill_host
        if not (is_wildcard(host) or is_loopback(host)):
            return
        if is_loopback(self._origins.of(decision.worker.url).host) or not self._peers.warn_once(call.peer):
            return
        self._telemetry.event(
            "prefill_host_unreachable",
            level="warning",
            peer=call.peer,
            prefill_host=host,
            worker=decision.worker.id,
            advice="the encoder cannot push embeddings to this address; start the language server with "
            "SGLANG_HOST_IP or --host set to an address that the encoder can dial",
        )


def _selection(call: Call) -> SelectRequest:
    info = call.info
    return SelectRequest(
        keys=info.keys,
        items=info.items,
        request_id=call.request_id.decode(),
        exclude=call.tried,
        unkeyed=info.unkeyed,
    )
