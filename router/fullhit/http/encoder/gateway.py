"""The encoder gateway: the one entry of ``--encoder-urls``, with any number of SGLang encoders behind it.

Only control messages pass here; embeddings go from the encoder to the language server directly. What it promises
(sources: SGLang's encoder and receiver modules, and recorded exchanges of 0.5.23):

* A part stays with one encoder process (`parts`); bodies and answers are passed on byte for byte, path prefixes
  stripped; a JSON ``null`` stays one.
* Registrations and ``/health`` are answered from memory, whatever else goes on.
* A failure of an encoder is hidden whenever that is safe (`upstream` and `remedy` have the tables), and when nobody
  can take a request it waits (`waiting`) instead of being refused: SGLang 0.5.23 with ``zmq_to_scheduler`` may lose
  the whole language server over one failed ``/encode``. There also registrations are passed on only when the encoder
  could read the media (`verify`), so that a failure over them is known to the router alone.

| backend          | a failed /encode at the language server       | an unreadable picture (bad_image = auto)         |
|------------------|-----------------------------------------------|--------------------------------------------------|
| zmq_to_scheduler | 0.5.23: may end the server; older: 180 s wait | replaced by a picture saying "unreadable image"  |
| zmq_to_tokenizer | 503 to that client                            | 400 naming the picture, when its header shows it |
| mooncake         | error to that client                          | the same                                         |

Aliases: ``/v0`` to ``/vN`` are the same gateway under other URLs. Listed as separate encoders they make SGLang send
every picture as a part of its own, which is what lets each picture find its own encoder.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Final

from fullhit.core.pool import Pool
from fullhit.http.common import Origins, request_id_of
from fullhit.http.wire import Request, Responder, UpstreamClient

from .delivery import Deliveries
from .encode import EncodeRoute
from .followups import FollowUpRoutes
from .parts import PartTable
from .peers import PeerMemory, address_of
from .registry import RegistryRoutes
from .replies import Refusal, reply_error
from .settings import FleetView, GatewaySettings, GatewayTelemetry
from .shared import Seldom, Shared
from .substitute import unreadable_uri

__all__ = ["EncoderGateway"]

Route = Callable[[Request, Responder, str], Awaitable[None]]

_ALIAS: Final = re.compile(r"/v(0|[1-9][0-9]{0,8})(?=/|\Z)")
_MAX_KNOWN: Final = 512
_MAX_KNOWN_TARGET: Final = 128
"""Bounds of the memory of targets whose route has been found before."""
_LOG_EVERY: Final = 10.0
"""Refusals of one cause are logged at most this often (seconds)."""


class EncoderGateway:
    """`handle` is a handler for `HttpListener`. Create it inside the running loop.

    >>> gateway = EncoderGateway(pool, client, fleet, GatewaySettings(), telemetry, time.monotonic)
    >>> listener = HttpListener(gateway.handle, error_format=sglang_error)
    >>> await gateway.drain(30)
    """

    def __init__(
        self,
        pool: Pool,
        client: UpstreamClient,
        fleet: FleetView,
        settings: GatewaySettings | None = None,
        telemetry: GatewayTelemetry | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        origins: Origins | None = None,
    ) -> None:
        self.pool = pool
        self.settings = settings = settings or GatewaySettings()
        self._telemetry = telemetry = telemetry or _Silence()
        self.table = PartTable(settings.parts, clock=clock)
        self._deliveries = Deliveries(client, self.table, settings, telemetry, clock)
        self._seldom = Seldom(clock)
        shared = Shared(
            pool=pool,
            client=client,
            fleet=fleet,
            settings=settings,
            telemetry=telemetry,
            table=self.table,
            peers=PeerMemory(),
            origins=origins or Origins(),
            deliveries=self._deliveries,
            seldom=self._seldom,
            clock=clock,
        )
        self._follow_ups = FollowUpRoutes(shared)
        self._encode = EncodeRoute(shared, self._follow_ups.part_moved)
        unreadable_uri()  # Drawn now, not while somebody waits.
        registry = RegistryRoutes(fleet, telemetry, enabled=settings.registration)
        self._routes: dict[str, dict[bytes, Route]] = {
            "/encode": {b"POST": self._encode.handle},
            "/scheduler_receive_url": {b"POST": self._follow_ups.register},
            "/scheduler_receive_meta_data": {b"POST": self._follow_ups.meta_data},
            "/send": {b"POST": self._follow_ups.send},
            "/health": {b"GET": self._healthy, b"HEAD": self._healthy},
            "/health_generate": {b"GET": self._healthy, b"HEAD": self._healthy},
            "/register_encoder_url": {b"POST": registry.register},
            "/unregister_encoder_url": {b"DELETE": registry.unregister},
            "/list_encoder_urls": {b"GET": registry.list, b"HEAD": registry.list},
        }
        self._known: dict[tuple[bytes, bytes], tuple[Route, str]] = {}
        self._open = 0
        self._calm = asyncio.Event()
        self._calm.set()

    def __repr__(self) -> str:
        return f"<EncoderGateway {self.pool.name} open={self._open} {self._encode.room!r} {self.table!r}>"

    async def handle(self, request: Request, responder: Responder) -> None:
        """Serve one request. Everything that is the caller's or an encoder's fault is answered here."""
        if not self._open:
            self._calm.clear()
        self._open += 1
        try:
            route, alias = self._known.get((request.method, request.target)) or self._route(request)
            await route(request, responder, alias)
        except Refusal as refusal:
            self._refuse(request, responder, refusal)
        finally:
            self._open -= 1
            if not self._open:
                self._calm.set()

    async def drain(self, timeout: float = 30.0) -> bool:
        """Wait until no call is open, detached ones included; then end what is left. False when time ran out.

        Stop the listener from accepting first.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._calm.wait()
        except TimeoutError:
            pass
        await self._deliveries.close()
        self._encode.close()
        return not self._open

    def oldest_inflight(self) -> dict[str, float]:
        """Seconds since the oldest unanswered ``/encode`` of each encoder began; for health checks."""
        return self._encode.in_flight.oldest()

    def status(self) -> dict[str, object]:
        """Figures for gauges and status pages."""
        return {
            "open_calls": self._open,
            "queued": len(self._encode.room),
            "queued_bytes": self._encode.room.bytes,
            "encoding": len(self._encode.in_flight),
            "parts": len(self.table),
            "deliveries": len(self._deliveries),
            "held_follow_ups": self._follow_ups.held,
            "counters": dict(self.table.counters),
        }

    # --- internals

    def _route(self, request: Request) -> tuple[Route, str]:
        """The handler of a request and its alias ("" or like "v3"). Raises Refusal (404, 405)."""
        path = request.target.partition(b"?")[0].decode("latin-1")
        if not path.startswith("/"):
            # The absolute form, http://host/path.
            path = "/" + path.partition("://")[2].partition("/")[2]
        if "//" in path:
            path = re.sub("/{2,}", "/", path)
        alias = ""
        match = _ALIAS.match(path)
        if match is not None:
            alias, path = match[0][1:], path[match.end() :] or "/"
            if int(match[1]) >= self.settings.aliases:
                served = f"/v0 to /v{self.settings.aliases - 1}" if self.settings.aliases else "none"
                raise Refusal(404, f"there is no alias /{alias}; served: {served} (setting: aliases)", "not_found")
        methods = self._routes.get(path)
        if methods is None:
            raise Refusal(404, f"there is no {path[:200]!r} here; this is a Fullhit encoder gateway", "not_found")
        route = methods.get(request.method)
        if route is None:
            allowed = ", ".join(method.decode() for method in methods)
            raise Refusal(405, f"{path} takes {allowed}", "method", headers=[(b"Allow", allowed.encode())])
        if len(request.target) <= _MAX_KNOWN_TARGET:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[request.method, request.target] = route, alias
        return route, alias

    async def _healthy(self, request: Request, responder: Responder, alias: str) -> None:
        """200 from memory. It says that the router is alive: a language server which hears anything else three
        times encodes by itself, with weights it may not have. Whether encoders are there says /readyz."""
        responder.reply(200, [])

    def _refuse(self, request: Request, responder: Responder, refusal: Refusal) -> None:
        if refusal.cause in ("not_found", "method", "bad_registration", "ambiguous", "hold_full", "part_unknown"):
            self._telemetry.count("rejected", cause=refusal.cause)
        if self._seldom.due(f"refused {refusal.cause}", _LOG_EVERY):
            self._telemetry.event(
                "refused",
                level="warning",
                cause=refusal.cause,
                status=refusal.status,
                message=refusal.message,
                peer=address_of(request.peer),
                path=request.target[:200].decode("latin-1"),
            )
        if not responder.started:
            reply_error(responder, refusal, refusal.request_id or request_id_of(request)[0])


class _Silence:
    """Telemetry for nobody."""

    def request_done(self, pool: str, reason: str, code: int, seconds: float) -> None: ...

    def observe_select(self, pool: str, seconds: float) -> None: ...

    def count(self, name: str, /, **labels: object) -> None: ...

    def event(self, kind: str, /, level: str = "info", **fields: object) -> None: ...

    def decision(self, decision: object, **outcome: object) -> None: ...
