"""Passing registrations on to the encoder of their part.

The caller has its answer already, so nobody waits for these. An encoder with ``--dp-size`` answers 404 when the
``/encode`` has not come through to one of its ranks within 5 s, another one may be restarting: a delivery is
offered again a few times while the part lives on that encoder. When all of it fails, the encode will end with the
encoder's own 504, and the log says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fullhit.http.wire import Origin, Timeouts, UpstreamClient, UpstreamError

from .parts import Part, PartState, PartTable, Registered
from .settings import GatewaySettings, GatewayTelemetry

__all__ = ["Deliveries"]

_PAUSE_MAX = 2.0


class Deliveries:
    """Starts one task for each registration to be delivered."""

    def __init__(
        self, client: UpstreamClient, table: PartTable, settings: GatewaySettings, telemetry: GatewayTelemetry
    ) -> None:
        self._client = client
        self._table = table
        self._settings = settings
        self._telemetry = telemetry
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

    async def _deliver(self, part: Part, registered: Registered, attempt: int, origin: Origin) -> None:
        pause = self._settings.delivery_pause
        problem = ""
        for _ in range(max(1, self._settings.delivery_tries)):
            if part.attempt != attempt or part.state not in (PartState.SENT, PartState.ENCODED):
                return
            try:
                response = await self._client.send(
                    origin,
                    b"POST",
                    b"/scheduler_receive_url",
                    registered.headers,
                    registered.body,
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
