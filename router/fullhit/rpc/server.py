"""The gRPC listener: the router's service, health and reflection on one address, with or without TLS and a key.

It runs in the router's own loop, because a choice and its slot are one step there. Like the admin listener it refuses
to be reachable from other machines without a key.

The key is compared for each call, in constant time. Only the health service is open: load balancers ask it, and it
names no worker. Its status follows the router's readiness.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from fullhit.config_tables import Address
from fullhit.decision import DecisionService, keep_leases
from fullhit.rpc.plane import LinePlane
from fullhit.rpc.servicer import SERVICE, RouterServicer
from fullhit.rpc.settings import RpcSettings

__all__ = ["ExposedWithoutKey", "RpcServer"]

_READINESS_SECONDS = 0.25
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class ExposedWithoutKey(ValueError):
    """The address can be reached from other machines and no key is set."""


class RpcServer:
    """One listener. Create it inside the running loop.

    Usage::

        server = RpcServer(service, plane, RpcSettings(key="..."), ready=lambda: True)
        host, port = await server.start("127.0.0.1", 0)    # raises OSError, ExposedWithoutKey, ValueError (TLS)
        ...
        await server.stop(grace=5)
    """

    def __init__(
        self, service: DecisionService, plane: LinePlane, settings: RpcSettings, *, ready: Callable[[], bool]
    ) -> None:
        self.plane = plane
        self.servicer = RouterServicer(service, plane, settings)
        self._service = service
        self._settings = settings
        self._ready = ready
        self._health = health_aio.HealthServicer()
        self._server: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; port 0 takes a free one. Returns where."""
        settings = self._settings
        address = Address(host, port)
        if not address.loopback and not settings.key:
            raise ExposedWithoutKey(f"{address} can be reached from other machines: set a key, or use 127.0.0.1")
        server = grpc.aio.server(
            interceptors=(_KeyInterceptor(settings.key),) if settings.key else (),
            options=_options(settings),
            maximum_concurrent_rpcs=settings.max_calls,
        )
        self.servicer.add_to(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            if settings.certificate:
                bound = server.add_secure_port(str(address), _credentials(settings))
            else:
                bound = server.add_insecure_port(str(address))
        except RuntimeError as error:
            raise OSError(f"cannot bind {address}: {error}") from None
        if not bound:
            raise ValueError("the TLS certificate and key are not usable")
        await self._tell_readiness()
        await self.plane.start()
        await server.start()
        self._server = server
        self._tasks = [
            asyncio.create_task(keep_leases(self._service), name="fullhit-rpc-leases"),
            asyncio.create_task(self._follow_readiness(), name="fullhit-rpc-health"),
        ]
        return host, bound

    async def stop(self, grace: float = 1.0) -> None:
        """Take no new calls, end the streams, give the rest ``grace`` seconds."""
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.enter_graceful_shutdown()
        self.servicer.leave()
        await self.plane.close()
        await server.stop(grace)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow_readiness(self) -> None:
        while True:
            await asyncio.sleep(_READINESS_SECONDS)
            await self._tell_readiness()

    async def _tell_readiness(self) -> None:
        status = _SERVING if self._ready() else _NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)


def _options(settings: RpcSettings) -> list[tuple[str, int]]:
    silence = int(settings.keepalive * 1000)
    return [
        ("grpc.so_reuseport", 0),  # a second router on this port must fail, not share it
        # Beyond 1,000 calls that came at once the library would break them off; `max_calls` is the limit.
        ("grpc.server.max_pending_requests", 100_000),
        ("grpc.server.max_pending_requests_hard_limit", 100_000),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", silence),
        ("grpc.keepalive_timeout_ms", max(1_000, silence // 3)),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _credentials(settings: RpcSettings) -> Any:
    return grpc.ssl_server_credentials(
        [(settings.private_key, settings.certificate)],
        root_certificates=settings.client_ca or None,
        require_client_auth=bool(settings.client_ca),
    )


class _KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # the library ships no types
    """Answers calls without the key itself."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if details.method.startswith("/grpc.health.v1.Health/"):
            return await continuation(details)
        if hmac.compare_digest(_token(details.invocation_metadata), self._key):
            return await continuation(details)
        return _refusal(await continuation(details))


def _token(metadata: Any) -> bytes:
    fields: Mapping[str, Any] = dict(metadata or ())
    value = fields.get("authorization", "")
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    scheme, _, token = text.partition(" ")
    return token.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""


def _refusal(handler: Any) -> Any:
    """A handler of the same shape that refuses. None (no such method) stays None."""
    if handler is None:
        return None

    async def unary(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send the key as metadata `authorization: Bearer KEY`")

    async def stream(_: Any, context: Any) -> Any:
        await unary(_, context)
        yield

    if handler.request_streaming:
        return (
            grpc.stream_stream_rpc_method_handler(stream)
            if handler.response_streaming
            else (grpc.stream_unary_rpc_method_handler(unary))
        )
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream)
    return grpc.unary_unary_rpc_method_handler(unary)
