"""From the front to one of Dynamo's frontends, and to another one when the first cannot take the request.

| what happened                                        | then                                                        |
|------------------------------------------------------|-------------------------------------------------------------|
| not connected, body not taken in full                | another frontend, same worker: nothing was processed        |
| ended on a kept-alive connection, without a byte     | again, as if it had not happened: the server's idle timer   |
| gone, or garbage, after all was sent, before an      | another frontend, once: a generation begun in vain costs    |
| answer                                               | compute; a request that ends frontends must not visit all   |
| no answer in time                                    | 504: the client's own patience is likely spent              |
| cut inside the answer                                | cut at the client too, so that it sees it                   |
| 404 Model not found; or 400, and its ``/health``     | another frontend, same worker: one that has just started    |
| lists no worker of the pool                          | has not heard of everything yet. 404 by all: passed on      |
"""

from __future__ import annotations

from collections.abc import Callable

from fullhit.http.wire import (
    HeaderBlock,
    LostAfterSend,
    Timeouts,
    UpstreamClient,
    UpstreamError,
    UpstreamResponse,
    UpstreamTimeout,
)

from .calls import Call
from .frontends import Frontend, Frontends
from .replies import Refusal
from .settings import FrontSettings, FrontTelemetry
from .verdict import instances_in

__all__ = ["Behind", "Broken", "Forwarding"]

_MAX_LOST = 2
_MAX_STALE = 2
_MAX_HEALTH = 16 << 20


class Broken(Exception):
    """A frontend broke its answer off before it had said anything."""


class Behind(Exception):
    """A frontend does not know the model, or none of the workers, and there is another one to ask."""


class Forwarding:
    """`send` puts a call on a frontend, `leave` takes it off once its answer has ended."""

    def __init__(
        self, client: UpstreamClient, frontends: Frontends, settings: FrontSettings, telemetry: FrontTelemetry
    ) -> None:
        self._client = client
        self._frontends = frontends
        self._telemetry = telemetry
        self._timeouts = Timeouts(
            connect=settings.connect_timeout,
            send=settings.send_timeout,
            first_byte=settings.first_byte_timeout,
            idle=settings.idle_timeout,
        )
        self._patience = settings.head_patience
        limit = settings.connect_timeout
        self._brief = Timeouts(connect=limit, first_byte=limit, total=2 * limit)

    async def send(self, call: Call, headers: HeaderBlock) -> UpstreamResponse:
        """The head of an answer. Raises Refusal when there is none to be had."""
        tried: set[Frontend] = set(call.behind)
        stale = 0
        problem = "none is left"
        status = 502
        request = call.request
        while True:
            frontend = call.frontend = self._frontends.enter(tried)
            if frontend is None:
                text = f"no Dynamo frontend could take the request: {problem}"
                raise Refusal(status, "frontend_unavailable", text, retry_after=1)
            try:
                response = await self._client.send(
                    frontend.origin, request.method, request.target, headers, call.body.body, timeouts=self._timeouts
                )
            except UpstreamError as error:
                self.leave(call)
                problem = str(error)
                fault = _fault_of(error)
                if fault == "timeout":
                    raise Refusal(504, "frontend_timeout", f"a Dynamo frontend did not answer: {problem}") from error
                if fault == "stale" and stale < _MAX_STALE:
                    stale += 1
                    continue
                tried.add(frontend)
                if fault == "full":
                    status = 503
                    continue
                self.rest(frontend, error.kind, str(error))
                if fault == "lost":
                    self.lose(call, problem)
                continue
            if self._frontends.answered(frontend):
                self._telemetry.limited(f"up {frontend.url}", "frontend_up", 10.0, "info", frontend=frontend.url)
            return response

    async def peek(self, call: Call, response: UpstreamResponse, enough: Callable[[bytes], bool]) -> bytes:
        """The beginning of the answer's body, until there is ``enough`` of it, or what there is when it takes its time.
        Raises Broken, and Refusal for a time-out."""
        try:
            return await response.peek(self._patience, enough)
        except UpstreamTimeout as error:
            raise Refusal(504, "frontend_timeout", f"a Dynamo frontend fell silent: {error}") from error
        except UpstreamError as error:
            if call.frontend is not None:
                self.rest(call.frontend, error.kind, str(error))
            raise Broken(str(error)) from error

    def lose(self, call: Call, problem: str) -> None:
        """A frontend was lost over a request that it had in full. Raises Refusal when it is not the first."""
        call.lost += 1
        if call.lost >= _MAX_LOST:
            raise Refusal(502, "frontend_lost", f"Dynamo frontends broke the connection: {problem}")

    def rest(self, frontend: Frontend, kind: str, cause: str) -> None:
        """It cannot be reached, does not speak HTTP, or is not ready: leave it alone for a moment."""
        self._telemetry.count("retries", cause=f"frontend_{kind}")
        if self._frontends.failed(frontend, cause):
            self._telemetry.limited(f"down {frontend.url}", "frontend_down", 10.0, frontend=frontend.url, cause=cause)

    def behind(self, call: Call) -> bool:
        """The frontend of this call does not know what it should. True when there is another one to ask."""
        assert call.frontend is not None
        call.behind.append(call.frontend)
        return len(call.behind) < len(self._frontends)

    def leave(self, call: Call) -> None:
        """The call's answer has ended, in whatever way. Idempotent."""
        frontend, call.frontend = call.frontend, None
        if frontend is not None:
            self._frontends.leave(frontend)

    async def instances(self, frontend: Frontend) -> frozenset[int] | None:
        """The instances that a frontend knows; None when it does not say."""
        try:
            response = await self._client.send(frontend.origin, b"GET", b"/health", (), timeouts=self._brief)
            return instances_in(await response.read(_MAX_HEALTH))
        except UpstreamError:
            return None


def _fault_of(error: UpstreamError) -> str:
    """``full``: no connection free; ``down``: nothing was processed; ``stale``: a kept-alive connection had ended, as
    far as one can see; ``lost``: gone or garbage after all was sent; ``timeout``."""
    if isinstance(error, UpstreamTimeout):
        return "full" if error.stage == "pool" else "down" if error.not_processed else "timeout"
    if error.not_processed:
        return "stale" if error.reused else "down"
    if isinstance(error, LostAfterSend) and error.reused and not error.received:
        return "stale"
    return "lost"
