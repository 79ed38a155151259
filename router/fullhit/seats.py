"""The seats of a router: places where requests come in, each with its listener, its connections and its workers' pool.

Both seats have the same life: made with the router, `start`ed last, `drain`ed first, `close`d with their connections.
A seat that the configuration leaves out is not made at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from fullhit import settings as build
from fullhit.config import Config, parse_address
from fullhit.config_tables import SERVING
from fullhit.core.pool import Pool
from fullhit.fleet import Fleet
from fullhit.http.encoder import EncoderGateway, sglang_error
from fullhit.http.openai import OpenAIFront, openai_error
from fullhit.http.openai import Seats as PoolSeat
from fullhit.http.wire import DrainReport, HttpListener, MemoryBudget, UpstreamClient
from fullhit.http.workers import Service, WorkerFront
from fullhit.telemetry import Telemetry

__all__ = ["EncoderSeat", "FrontSeat", "Seat", "WorkerFrontSeat", "make_seats"]


class Seat(Protocol):
    """``name`` for status and ``line`` for its address in the log; ``gauges``: name, help, key of `status`.
    ``address`` is where it listens, by the setting ``place``; ``listening`` since `start`."""

    name: str
    line: str
    gauges: tuple[tuple[str, str, str], ...]
    place: str
    address: str
    listening: bool
    listener: HttpListener
    client: UpstreamClient

    async def start(self) -> str:
        """Listen; returns the address. Raises OSError."""

    async def drain(self, seconds: float) -> tuple[DrainReport, bool]:
        """Take no more and finish what runs; the bool says that nothing is left open."""

    async def close(self) -> None:
        """End everything at once."""

    def oldest_inflight(self) -> dict[str, float]: ...

    def status(self) -> dict[str, Any]: ...

    def concerns(self) -> list[str]:
        """What is amiss, in words."""


class _Base:
    """What the seats have in common."""

    name: str
    place: str
    address: str
    listener: HttpListener
    client: UpstreamClient
    listening = False

    async def start(self) -> str:
        address = parse_address(self.address, self.place)
        host, port = await self.listener.start(address.host, address.port)
        self.listening = True
        return str(address._replace(host=host, port=port))

    async def close(self) -> None:
        if self.listening:
            await self.listener.close()
        await self.client.close()


class EncoderSeat(_Base):
    """`EncoderGateway` and what it needs."""

    name = "encoder_gateway"
    line = "data"
    gauges = (
        ("queue_depth", "Requests waiting for a worker", "queued"),
        ("queue_bytes", "Bytes of their bodies", "queued_bytes"),
        ("open_calls", "Calls of the encoder gateway under way", "open_calls"),
        ("parts", "Parts remembered by the encoder gateway", "parts"),
    )
    place = "server.listen"

    def __init__(
        self,
        config: Config,
        pools: dict[str, Pool],
        fleet: Fleet,
        telemetry: Telemetry,
        clock: Callable[[], float],
        listener: Callable[..., HttpListener],
    ) -> None:
        settings = config.encoder_gateway
        self.address = config.server.listen
        self.client = UpstreamClient(build.upstream_limits(settings))
        self.gateway = EncoderGateway(
            pools[settings.pool],
            self.client,
            fleet.view(settings.pool),
            build.gateway_settings(settings),
            telemetry,
            clock,
        )
        self.listener = listener(self.gateway.handle, error_format=sglang_error)
        self.oldest_inflight = self.gateway.oldest_inflight

    async def drain(self, seconds: float) -> tuple[DrainReport, bool]:
        report = await self.listener.drain(seconds)
        return report, await self.gateway.drain(max(0.0, seconds) if report.cut == 0 else 0.0)

    def status(self) -> dict[str, Any]:
        return self.gateway.status()

    def concerns(self) -> list[str]:
        return []  # those of its pool, which are told of every pool


class FrontSeat(_Base):
    """`OpenAIFront` and what it needs."""

    name = "openai_front"
    line = "openai"
    gauges = (
        ("front_queue_depth", "Requests of the OpenAI front waiting for a worker", "queued"),
        ("front_queue_bytes", "Bytes of their bodies", "queued_bytes"),
        ("front_open_calls", "Requests of the OpenAI front under way", "open_calls"),
        ("front_frontends_up", "Dynamo frontends that are not failing", "frontends_up"),
    )
    place = "openai_front.listen"

    def __init__(
        self,
        config: Config,
        pools: dict[str, Pool],
        fleet: Fleet,
        telemetry: Telemetry,
        clock: Callable[[], float],
        listener: Callable[..., HttpListener],
    ) -> None:
        front = config.openai_front
        assert front is not None
        pool = config.pool[front.pool]
        assert pool.dynamo is not None  # `load_config` has seen to it
        self.address = front.listen
        self.client = UpstreamClient(build.front_upstream_limits())
        prefill = front.prefill_pool
        self.front = OpenAIFront(
            PoolSeat(pools[front.pool], fleet.view(front.pool)),
            PoolSeat(pools[prefill], fleet.view(prefill)) if prefill else None,
            build.key_rules(pool.dynamo),
            self.client,
            build.front_settings(front, pool),
            telemetry,
            clock,
        )
        self.listener = listener(self.front.handle, error_format=openai_error)
        self.oldest_inflight = self.front.oldest_inflight

    async def drain(self, seconds: float) -> tuple[DrainReport, bool]:
        report = await self.listener.drain(seconds)
        return report, report.cut == 0

    async def close(self) -> None:
        await super().close()
        self.front.close()

    def status(self) -> dict[str, Any]:
        return self.front.status()

    def concerns(self) -> list[str]:
        status = self.front.status()
        found = [
            f"OpenAI front: frontend {row['url']} does not answer: {row['error']}"
            for row in status["frontends"]
            if not row["up"]
        ]
        if not status["pool_usable"]:
            found.append(f"OpenAI front: no worker of pool {status['pool']} can be used")
        return found


class WorkerFrontSeat(_Base):
    """`WorkerFront` and what it needs."""

    name = "openai_front"
    line = "openai"
    gauges = (
        ("front_queue_depth", "Requests of the OpenAI front waiting for a worker", "queued"),
        ("front_queue_bytes", "Bytes of their bodies", "queued_bytes"),
        ("front_open_calls", "Requests of the OpenAI front under way", "open_calls"),
        ("front_retries_refused", "Second attempts that the retry budget did not allow", "retries_refused"),
    )
    place = "openai_front.listen"

    def __init__(
        self,
        config: Config,
        pools: dict[str, Pool],
        fleet: Fleet,
        telemetry: Telemetry,
        clock: Callable[[], float],
        listener: Callable[..., HttpListener],
    ) -> None:
        front = config.openai_front
        assert front is not None

        def seat(name: str) -> PoolSeat:
            return PoolSeat(pools[name], fleet.view(name))

        services = [
            Service(name, seat(name), seat(pool.prefill_pool) if pool.prefill_pool else None, frozenset(pool.models))
            for name, pool in config.pool.items()
            if pool.role in SERVING
        ]
        self.address = front.listen
        self.client = UpstreamClient(build.worker_upstream_limits())
        self.front = WorkerFront(
            services,
            self.client,
            build.worker_front_settings(front),
            telemetry,
            clock,
            load_until={name: pool.load_until for name, pool in config.pool.items()},
        )
        self.listener = listener(self.front.handle, error_format=openai_error)
        self.oldest_inflight = self.front.oldest_inflight

    async def start(self) -> str:
        self.front.start()
        return await super().start()

    async def drain(self, seconds: float) -> tuple[DrainReport, bool]:
        report = await self.listener.drain(seconds)
        return report, report.cut == 0

    async def close(self) -> None:
        await super().close()
        await self.front.close()

    def status(self) -> dict[str, Any]:
        return self.front.status()

    def concerns(self) -> list[str]:
        return [
            f"OpenAI front: no worker is ready for pool {row['pool']}"
            for row in self.front.status()["services"]
            if not row["usable"]
        ]


def make_seats(
    config: Config,
    pools: dict[str, Pool],
    fleet: Fleet,
    telemetry: Telemetry,
    clock: Callable[[], float],
    refused: Callable[[str], None],
) -> list[Seat]:
    """The seats that the configuration asks for. Their listeners share one account for the memory of bodies."""
    limits = build.listener_limits(config)
    budget = MemoryBudget(limits.max_buffered_bytes)

    def listener(handler: Any, error_format: Any) -> HttpListener:
        return HttpListener(handler, limits, refused, error_format=error_format, budget=budget)

    kinds: list[type[EncoderSeat] | type[FrontSeat] | type[WorkerFrontSeat]] = []
    if config.encoder_gateway.enabled:
        kinds.append(EncoderSeat)
    if config.openai_front is not None:
        kinds.append(FrontSeat if config.openai_front.mode == "dynamo" else WorkerFrontSeat)
    return [cast("Seat", kind(config, pools, fleet, telemetry, clock, listener)) for kind in kinds]
