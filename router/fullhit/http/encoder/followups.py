"""The calls that follow an ``/encode``: registrations, questions for sizes (mooncake), transfers (mooncake).

``/scheduler_receive_url`` is answered at once, always, from memory. In SGLang before 0.5.23 the scheduler posts it
from inside its own loop, so that every millisecond of waiting stalls all requests of that rank, and behind the
bodies of pictures it used to wait long enough for requests to be lost. The encoder gets it once it has the body
and could read the media in it (`delivery`).

``/scheduler_receive_meta_data`` waits for its part and follows it when it moves to another encoder: asking twice
does no harm. ``/send`` does not: a transfer may count twice at older encoders, so it is repeated only when nothing
of it was processed, and its errors are passed on at once, since the encoder keeps GPU memory until it knows.
"""

from __future__ import annotations

import asyncio

from fullhit.http.common import request_id_line, request_id_of
from fullhit.http.wire import Request, Responder, Timeouts, UpstreamError, end_to_end, header_block

from .media import BadBody, FollowUp, parse_follow_up, parse_registration
from .parts import AmbiguousPart, InconsistentCount, Part, PartState, TooManyRegistrations
from .peers import address_of
from .replies import Refusal, reply_json
from .rewrite import CannotRewrite, renamed
from .shared import Shared
from .upstream import Answer, Failure, answer_of, failure_of, with_id

__all__ = ["FollowUpRoutes"]

_SERVED = (PartState.SENT, PartState.ENCODED, PartState.DONE)
_PAUSE = 0.1
"""Before a question is asked again after its encoder was lost: the ``/encode`` notices at the same moment."""


class FollowUpRoutes:
    """Handlers of the three routes. Tell `part_moved` when a part has got on."""

    def __init__(self, shared: Shared) -> None:
        self._client = shared.client
        self._fleet = shared.fleet
        self._settings = settings = shared.settings
        self._telemetry = shared.telemetry
        self._table = shared.table
        self._peers = shared.peers
        self._origins = shared.origins
        self._deliveries = shared.deliveries
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[tuple[str, str], set[asyncio.Future[None]]] = {}
        self._held = 0
        self._timeouts = Timeouts(
            connect=settings.connect_timeout, send=settings.send_timeout, first_byte=settings.follow_timeout + 10
        )

    @property
    def held(self) -> int:
        """Calls that wait for their part."""
        return self._held

    def part_moved(self, alias: str, req_id: str) -> None:
        """Wake the calls that wait for this part."""
        if not self._waiting:
            return
        for waiter in self._waiting.pop((alias, req_id), ()):
            if not waiter.done():
                waiter.set_result(None)

    # --- registrations

    async def register(self, request: Request, responder: Responder, alias: str) -> None:
        """``POST /scheduler_receive_url``: 200 ``null`` at once."""
        request_id, _ = request_id_of(request)
        if len(request.body) > self._settings.max_registration_bytes:
            raise Refusal(413, "body: a registration is no larger than a few hundred bytes", "bad_registration")
        try:
            registration = parse_registration(request.body)
        except BadBody as error:
            raise Refusal(400, str(error), "bad_registration", req_id=error.req_id) from None
        peer = address_of(request.peer)
        self._peers.saw(peer, "zmq_to_scheduler")
        headers = [h for h in end_to_end(request.headers) if h[0].lower() != b"host"]
        if sum(len(name) + len(value) for name, value in headers) > 4_096:
            headers = [(b"Content-Type", b"application/json")]
        try:
            part, fresh = self._table.register(alias, registration, bytes(request.body), headers, peer)
        except AmbiguousPart as error:
            raise Refusal(409, str(error), "ambiguous", req_id=registration.req_id) from None
        except (InconsistentCount, TooManyRegistrations) as error:
            raise Refusal(400, str(error), "bad_registration", req_id=registration.req_id) from None
        if fresh is not None:
            self._deliveries.start(part, fresh, self._origins.of(part.worker), None)
        outcome = "forwarded" if fresh is not None else str(part.state)
        self._telemetry.count("registrations", outcome=outcome if outcome != "sent" else "repeated")
        reply_json(responder, 200, None, [(b"x-request-id", request_id)])

    # --- mooncake

    async def meta_data(self, request: Request, responder: Responder, alias: str) -> None:
        """``POST /scheduler_receive_meta_data``: waits for the part, then for its encoder."""
        follow_up = self._read(request)
        deadline = self._loop.time() + self._settings.follow_timeout
        while True:
            part = await self._part_of(follow_up, alias, request, deadline, deadline)
            attempt = part.attempt
            result = await self._ask(request, part, b"/scheduler_receive_meta_data")
            if isinstance(result, Answer):
                self._pass_on(request, responder, part, result)
                return
            over = part.attempt == attempt and part.state in (PartState.ENCODED, PartState.DONE)
            if over or self._loop.time() + _PAUSE > deadline:
                raise self._lost(part, result)
            await asyncio.sleep(_PAUSE)

    async def send(self, request: Request, responder: Responder, alias: str) -> None:
        """``POST /send``: to the encoder of the part, whatever becomes of the caller."""
        follow_up = self._read(request)
        now = self._loop.time()
        settings = self._settings
        part = await self._part_of(
            follow_up, alias, request, now + settings.follow_timeout, now + settings.unknown_send_timeout
        )
        responder.detach()
        result = await self._ask(request, part, b"/send")
        if isinstance(result, Failure) and result.retry == "yes":
            result = await self._ask(request, part, b"/send")
        if isinstance(result, Failure):
            raise self._lost(part, result)
        if result.status == 200:
            self._table.send_done(part, follow_up)
        self._pass_on(request, responder, part, result)

    # --- internals

    def _read(self, request: Request) -> FollowUp:
        if len(request.body) > self._settings.max_follow_up_bytes:
            raise Refusal(413, "body: a follow-up call is no larger than some kilobytes", "bad_body")
        try:
            follow_up = parse_follow_up(request.body)
        except BadBody as error:
            raise Refusal(400, str(error), "bad_body", req_id=error.req_id) from None
        self._peers.saw(address_of(request.peer), "mooncake")
        return follow_up

    async def _part_of(
        self, follow_up: FollowUp, alias: str, request: Request, deadline: float, unknown_deadline: float
    ) -> Part:
        """The part, once an encoder has it. Raises Refusal."""
        name = (alias, follow_up.req_id)
        peer = address_of(request.peer)
        while True:
            try:
                part = self._table.find(alias, follow_up.req_id, follow_up.host, peer)
            except AmbiguousPart as error:
                raise Refusal(409, str(error), "ambiguous", req_id=follow_up.req_id) from None
            if part is not None and part.failure is not None:
                status, message = part.failure
                raise Refusal(status, message, "part_failed", req_id=follow_up.req_id)
            if part is not None and part.state in _SERVED:
                return part
            until = unknown_deadline if part is None else deadline
            if not await self._wait(name, until):
                what = "no /encode was seen" if part is None else "no encoder took the /encode"
                raise Refusal(504, f"Unknown req_id: {follow_up.req_id}: {what} in time", "part_unknown",
                              req_id=follow_up.req_id)  # fmt: skip

    async def _wait(self, name: tuple[str, str], deadline: float) -> bool:
        """False when the time is up."""
        if self._held >= self._settings.hold_max:
            raise Refusal(503, "too many calls wait for their /encode (hold_max)", "hold_full", retry_after=1)
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.setdefault(name, set()).add(waiter)
        self._held += 1
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._held -= 1
            waiters = self._waiting.get(name)
            if waiters is not None:
                waiters.discard(waiter)
                if not waiters:
                    del self._waiting[name]
        return True

    async def _ask(self, request: Request, part: Part, target: bytes) -> Answer | Failure:
        request_id, given = request_id_of(request)
        headers = request.forwarded_hostless()
        if not given:
            headers = headers.with_line(request_id_line(request_id))
        worker, body = part.worker, request.body
        told = part.wire_id
        if told != part.req_id:
            try:
                body = renamed(body, told)
            except CannotRewrite:
                told = part.req_id
        try:
            response = await self._client.send(
                self._origins.of(worker), b"POST", target, headers, body, timeouts=self._timeouts
            )
            reply = await response.read(self._settings.max_reply_bytes)
        except UpstreamError as error:
            failure = failure_of(error)
            if failure.report is not None:
                self._fleet.report_failure(worker, failure.report)
            return failure
        return with_id(answer_of(response, reply), told, part.req_id)

    def _pass_on(self, request: Request, responder: Responder, part: Part, answer: Answer) -> None:
        lines = answer.lines + header_block([(b"x-fullhit-worker", part.worker.encode("ascii", "replace"))])
        if not answer.tagged:
            lines += request_id_line(request_id_of(request)[0])
        responder.reply_lines(answer.status, lines, answer.body)

    def _lost(self, part: Part, failure: Failure) -> Refusal:
        message = f"encoder {part.worker} failed: {failure.message}"[:2_000]
        return Refusal(failure.status, message, failure.cause, req_id=part.req_id)
