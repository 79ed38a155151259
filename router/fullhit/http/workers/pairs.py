"""Requests for a prefill and a decode worker at the same time (SGLang's P/D disaggregation).

Both legs get the same body with a rendezvous spliced in, and both are sent at once: a prefill does not finish before
its decode has joined the room. The client gets the decode's answer; the prefill's is read and thrown away, but for the
log-probabilities of the prompt where they are wanted. Rooms are fresh for each attempt. When one leg fails the other is
dropped: while nothing has reached the client another pair is tried, later the client's connection is cut, so that it
sees it. A client that leaves takes both legs with it. A 4xx of either leg is the client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

from fullhit.http.openai.replies import Refusal
from fullhit.http.wire import UpstreamError, UpstreamResponse, end_to_end

from .calls import Call, Leg
from .generation import BadBody
from .house import House, is_stream
from .logprobs import LogprobStream, merged, prompt_logprobs
from .splice import Rendezvous, new_rooms, spliced
from .verdict import Failure, failure_of, judge

__all__ = ["Pairs"]

_GRACE = 5.0
"""Seconds for which the prefill's answer may go on when the decode's is complete."""


class _LegFailed(Exception):
    """A leg came to nothing. ``answer``: what its worker said, if it said anything; ``failure`` None: a 4xx."""

    def __init__(self, leg: Leg, failure: Failure | None, answer: UpstreamResponse | None = None) -> None:
        super().__init__(failure.message if failure is not None else "refused")
        self.leg = leg
        self.failure = failure
        self.answer = answer


class Pairs:
    """`serve` a call on a pair. ``port_of``: a prefill worker's bootstrap port, None when it is not known."""

    def __init__(self, house: House, port_of: Callable[[str], int | None]) -> None:
        self._house = house
        self._port_of = port_of

    async def serve(self, call: Call) -> int:
        """Answer the call; returns the status for the books. Raises Refusal when there was no answer to pass on."""
        house, service = self._house, call.service
        assert service.prefill is not None
        while True:
            call.prefill = await house.choose(call, service.prefill.pool, media=True)
            call.main = await house.choose(call, service.seats.pool, media=False)
            call.attempts += 1
            outcome = await _Attempt(house, call, call.main, call.prefill).run(self._body(call))
            if outcome is not None:
                return outcome
            call.drop(house.in_flight)

    def _body(self, call: Call) -> bytes:
        assert call.prefill is not None
        prefill, wanted, body = call.prefill.decision.worker, call.wanted, call.request.body
        where = Rendezvous(
            urlsplit(prefill.url).hostname or "",
            self._port_of(prefill.id),
            new_rooms(wanted.batch, self._house.rng),
            wanted.batch is not None,
        )
        plain = bytes(body) if isinstance(body, memoryview) else body
        try:
            return spliced(plain, where, clean=not wanted.bootstrap)
        except BadBody as error:
            raise Refusal(400, "invalid_json", str(error)) from None


class _Attempt:
    """One pair at work."""

    def __init__(self, house: House, call: Call, decode: Leg, prefill: Leg) -> None:
        self._house = house
        self._call = call
        self._decode = decode
        self._prefill = prefill
        self._answers: list[UpstreamResponse] = []

    async def run(self, body: bytes) -> int | None:
        """The status that the client got; None when another pair may be tried. Raises Refusal."""
        prefill = asyncio.create_task(self._prefilled(body))
        decode = asyncio.create_task(self._answered(self._decode, body))
        relay: asyncio.Task[int] | None = None
        try:
            await _either(decode, prefill)
            answer = decode.result()
            relay = asyncio.create_task(self._relayed(answer, prefill))
            await _either(relay, prefill)
            code = relay.result()
            if code < 400:
                await asyncio.wait({prefill}, timeout=_GRACE)
                if prefill.done() and prefill.exception() is None:
                    self._house.reporters[self._prefill.pool.name].report_success(self._prefill.worker)
            return code
        except _LegFailed as failed:
            if relay is not None:
                await _ended(relay)
            return await self._after(failed)
        finally:
            await _ended(prefill, decode, *(() if relay is None else (relay,)))
            for answer in self._answers:
                answer.close()

    async def _answered(self, leg: Leg, body: bytes) -> UpstreamResponse:
        """The head of a leg's answer, which is no failure. Raises _LegFailed."""
        answer = await self._house.send(self._call, leg, body)
        if isinstance(answer, Failure):
            raise _LegFailed(leg, answer)
        self._answers.append(answer)
        failure = judge(answer.status)
        if failure is not None:
            raise _LegFailed(leg, failure, answer)
        return answer

    async def _prefilled(self, body: bytes) -> bytes:
        """The prefill's part to its end; its answer where that is needed. Raises _LegFailed."""
        answer = await self._answered(self._prefill, body)
        if answer.status >= 400:
            raise _LegFailed(self._prefill, None, answer)
        try:
            if self._call.wanted.logprobs:
                return await answer.read(self._house.settings.max_merge_bytes)
            await answer.discard()
        except UpstreamError as error:
            raise _LegFailed(self._prefill, failure_of(error)) from error
        return b""

    async def _relayed(self, answer: UpstreamResponse, prefill: asyncio.Task[bytes]) -> int:
        house, call = self._house, self._call
        if answer.status < 500:
            house.good(call, self._decode)
        if not call.wanted.logprobs or answer.status >= 400:
            return await house.relay(call, answer)
        return await self._merged(answer, prompt_logprobs(await asyncio.shield(prefill)))

    async def _merged(self, answer: UpstreamResponse, prompt: list[list[object]]) -> int:
        """The decode's answer with the prompt's log-probabilities in it."""
        call, house = self._call, self._house
        try:
            if not is_stream(answer):
                body = merged(await answer.read(house.settings.max_merge_bytes), prompt)
                call.responder.reply(answer.status, [*_kept(answer), *call.marks()], body)
                return answer.status
            lines = LogprobStream(prompt)
            call.responder.start(answer.status, [*_kept(answer), *call.marks()], None)
            async for piece in answer.pieces():
                if passing := lines.feed(piece):
                    await call.responder.write(passing)
            await call.responder.write(lines.end())
            call.responder.finish()
        except (UpstreamError, ValueError) as error:
            failure = failure_of(error) if isinstance(error, UpstreamError) else None
            raise _LegFailed(self._decode, failure or _UNREADABLE) from error
        return answer.status

    async def _after(self, failed: _LegFailed) -> int | None:
        house, call = self._house, self._call
        failure, answer = failed.failure, failed.answer
        if call.responder.started:
            if failure is not None:
                house.mind(call, failed.leg, failure)
            call.responder.abort()
            return 502
        if failure is not None and house.mind(call, failed.leg, failure):
            return None
        if answer is not None:
            return await house.relay(call, answer)
        assert failure is not None
        code = "worker_timeout" if failure.status == 504 else "worker_lost"
        message = f"worker {failed.leg.worker}: {failure.message}; tried: {', '.join(call.failures)}"
        raise Refusal(failure.status, code, message[:2_000])


_UNREADABLE = Failure("garbage", "5xx", "no", "now", 502, "its stream cannot be read")


def _kept(answer: UpstreamResponse) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in end_to_end(answer.headers) if name.lower() != b"content-length"]


async def _either(wanted: asyncio.Task[object], other: asyncio.Task[bytes]) -> None:
    """Wait for the first, as long as the second does not fail. Raises what the second failed of."""
    while not wanted.done():
        await asyncio.wait({wanted} if other.done() else {wanted, other}, return_when=asyncio.FIRST_COMPLETED)
        if other.done():
            other.result()


async def _ended(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
