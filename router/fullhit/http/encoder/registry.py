"""The registry of encoders, as SGLang's own language servers offer it on their ``--encoder-bootstrap-port``.

An encoder started with ``--encoder-register-urls http://router:8780`` announces itself here. It tries at most
30 times, 5 s apart, and never again after its first success, so a restart of the router needs a list in the
configuration besides, or the event plane.
"""

from __future__ import annotations

import msgspec

from fullhit.http.wire import Request, Responder

from .replies import Refusal, reply_json, reply_text
from .settings import FleetView, GatewayTelemetry

__all__ = ["RegistryRoutes"]


class RegistryRoutes:
    """Handlers of ``/register_encoder_url``, ``/unregister_encoder_url`` and ``/list_encoder_urls``."""

    def __init__(self, fleet: FleetView, telemetry: GatewayTelemetry, *, enabled: bool) -> None:
        self._fleet = fleet
        self._telemetry = telemetry
        self._enabled = enabled

    async def register(self, request: Request, responder: Responder, alias: str) -> None:
        """``POST {"url"}``: 200 ``OK``, also when it is known already; 400 with the reason."""
        url = self._url_of(request)
        try:
            self._fleet.register_url(url)
        except ValueError as error:
            raise Refusal(400, f"url: {error}", "bad_registration") from None
        self._telemetry.event("encoder_registered", url=url, peer=request.peer)
        reply_text(responder, 200, "OK")

    async def unregister(self, request: Request, responder: Responder, alias: str) -> None:
        """``DELETE {"url"}``: 200 ``OK``, also when it was not known: it is gone either way."""
        url = self._url_of(request)
        try:
            gone = self._fleet.unregister_url(url)
        except ValueError as error:
            raise Refusal(400, f"url: {error}", "bad_registration") from None
        self._telemetry.event("encoder_unregistered", url=url, peer=request.peer, removed=gone)
        reply_text(responder, 200, "OK")

    async def list(self, request: Request, responder: Responder, alias: str) -> None:
        """``GET``: ``{"encoder_urls": [...]}``."""
        reply_json(responder, 200, {"encoder_urls": self._fleet.urls()})

    def _url_of(self, request: Request) -> str:
        if not self._enabled:
            raise Refusal(403, "encoders may not register themselves here (setting: registration)", "bad_registration")
        try:
            fields = msgspec.json.decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise Refusal(400, 'body: expected JSON like {"url": "http://host:port"}', "bad_registration") from None
        url = fields.get("url") if isinstance(fields, dict) else None
        if not isinstance(url, str):
            raise Refusal(400, 'url: expected JSON like {"url": "http://host:port"}', "bad_registration")
        return url
