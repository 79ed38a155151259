"""Passing registrations on to the encoder of their part.

The caller has its answer already, so nobody waits for these. They go out as soon as the encoder has said that it
could read the media (`verify`): a part that fails before that has told nobody, and the ``/encode`` call can mend it
(`remedy`). If it is not mended, `hand_over` gives the encoder its destinations after all, for the error it has to
tell them: before 0.5.23 a language server heard of the failure in no other way.

An encoder with ``--dp-size`` answers 404 when the
``/encode`` has not come through to one of its ranks within 5 s, another one may be restarting: a delivery is
offered again a few times while the part lives on that encoder. When all of it fails, the encode will end with the
encoder's own 504, and the log says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from fullhit.http.wire import Origin, Timeouts, UpstreamClient, UpstreamError

from .parts import Part, PartState, PartTable, Registered
from .rewrite import CannotRewrite, renamed
from .settings import GatewaySettings, GatewayTelemetry
from .verify import MediaQuestions

__all__ = ["Deliveries"]

_PAUSE_MAX = 2.0
_HAND_OVER_SECONDS = 5.0


class Deliveries:
    """Starts one task for each registration to be delivered."""

    def __init__(
        self,
        client: UpstreamClient,
        table: PartTable,
        settings: GatewaySettings,
        telemetry: GatewayTelemetry,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._table = table
        self._settings = settings
        self._telemetry = telemetry
        self._questions = MediaQuestions(client, settings, clock)
        self.withdraw = self._questions.withdraw
        self._timeouts = Timeouts(
            connect=settings.connect_timeout, send=settings.send_timeout, first_byte=settings.delivery_timeout
        )
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(
        self, part: Part, registered: Registered, origin: Origin, on_end: Callable[[asyncio.Task[None]], None] | None
    ) -> asyncio.Task[None]:
        """Deliver ``registered`` to the present encoder of ``part``. ``on_end`` is called when it is over."""
        task = asyncio.create_task(self._deliver(part, registered, part.attempt, origin))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        if on_end is not None:
            task.add_done_callback(on_end)
        return task

    async def close(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._questions.close()

    def hand_over(self, part: Part, origin: Origin) -> None:
        """Give the encoder of a part that has failed the destinations it was not told. Call it before the part is
        closed."""
        for registered in part.registrations.values():
            task = asyncio.create_task(self._offer_once(_body_for(part, registered), registered, origin))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _offer_once(self, body: bytes, registered: Registered, origin: Origin) -> None:
        timeouts = Timeouts(connect=self._settings.connect_timeout, total=_HAND_OVER_SECONDS)
        try:
            response = await self._client.send(
                origin, b"POST", b"/scheduler_receive_url", registered.headers, body, timeouts=timeouts
            )
            await response.read(1 << 20)
        except UpstreamError:
            return
        self._telemetry.count("registrations", outcome="handed_over")

    async def _deliver(self, part: Part, registered: Registered, attempt: int, origin: Origin) -> None:
        if self._questions.needed(part):
            await self._questions.settled(part, attempt, origin)
        pause = self._settings.delivery_pause
        problem = ""
        for _ in range(max(1, self._settings.delivery_tries)):
            if not self._table.offer(part, attempt):
                if part.offered != attempt:
                    self._telemetry.count("registrations", outcome="withheld")
                return
            try:
                response = await self._client.send(
                    origin,
                    b"POST",
                    b"/scheduler_receive_url",
                    registered.headers,
                    _body_for(part, registered),
                    timeouts=self._timeouts,
                )
                answer = await response.read(1 << 20)
            except UpstreamError as error:
                problem = str(error)
            else:
                if response.status < 300:
                    self._table.delivered(part, registered, attempt)
                    self._telemetry.count("registrations", outcome="delivered")
                    return
                problem = f"{response.status} {answer[:200].decode('utf-8', 'replace')}"
                if response.status in (400, 422):
                    break  # It will not like it better the next time.
            self._telemetry.count("registrations", outcome="delivery_retried")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_MAX)
        if part.attempt == attempt and part.state in (PartState.SENT, PartState.ENCODED):
            self._telemetry.count("registrations", outcome="delivery_failed")
            self._telemetry.event(
                "registration_not_delivered",
                level="error",
                req_id=part.req_id,
                worker=part.worker,
                receive_url=registered.receive_url,
                problem=problem,
            )


def _body_for(part: Part, registered: Registered) -> bytes:
    """The registration under the id by which the encoder knows the part."""
    if not part.alias_id:
        return registered.body
    try:
        return renamed(registered.body, part.alias_id)
    except CannotRewrite:
        return msgspec.json.encode({**msgspec.json.decode(registered.body), "req_id": part.alias_id})
