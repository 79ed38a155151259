"""Requests for one worker: choose, send, judge, and another one while nothing has reached the client."""

from __future__ import annotations

from fullhit.http.openai.replies import Refusal
from fullhit.http.wire import UpstreamResponse

from .calls import Call
from .house import House
from .verdict import judge

__all__ = ["Single"]


class Single:
    """`serve` a call on one worker of its service's pool."""

    def __init__(self, house: House) -> None:
        self._house = house

    async def serve(self, call: Call, *, media: bool = True) -> int:
        """Answer the call; returns the status for the books. Raises Refusal when there was no answer to pass on."""
        response = await self._until_answered(call, media)
        return await self._house.relay(call, response)

    async def _until_answered(self, call: Call, media: bool) -> UpstreamResponse:
        house, pool = self._house, call.service.seats.pool
        while True:
            leg = call.main = await house.choose(call, pool, media=media)
            call.attempts += 1
            answer = await house.send(call, leg, call.request.body)
            if isinstance(answer, UpstreamResponse):
                failure = judge(answer.status)
                if failure is None:
                    if answer.status < 500:
                        house.good(call, leg)
                    return answer
                if not house.mind(call, leg, failure):
                    return answer
                answer.close()
            elif not house.mind(call, leg, answer):
                code = "worker_timeout" if answer.status == 504 else "worker_lost"
                message = f"worker {leg.worker}: {answer.message}; tried: {', '.join(call.failures)}"
                raise Refusal(answer.status, code, message[:2_000])
            call.drop(house.in_flight)
