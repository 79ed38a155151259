"""The router as one process: builds the parts, connects them, runs until told to stop, takes them down in order.

Start: the core first, then the event plane (never waited for), then probing, and the listeners last, so that the
first request meets a complete router. Stop: the data listener goes first and running requests are finished, the
admin listener last, so that an operator can watch the drain.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import msgspec
from aiohttp import web

import fullhit
from fullhit import settings as build
from fullhit.config import Config, ConfigError, WorkerConfig, parse_address
from fullhit.core import Pool
from fullhit.core.parity import make_pool
from fullhit.decision import DecisionService, DecisionSettings
from fullhit.dynamo import DynamoPool
from fullhit.events import EmbeddedNats, EmbeddedNatsError, EventPlane, NatsPlane
from fullhit.events.linked import LinkedIngest
from fullhit.events.no_plane import NoPlane
from fullhit.fleet import Fleet, HealthSupervisor, StateFile
from fullhit.http.admin import AdminContext, AdminSettings, build_admin_app, readiness
from fullhit.rpc import LinePlane, RpcMissing, load_server
from fullhit.seats import Seat, make_seats
from fullhit.telemetry import DecisionLines, Log, LogFormat, LoopLag, Metrics, Telemetry, bridge_logging
from fullhit_publisher.dynamo_keys import require as require_keys
from fullhit_publisher.wire import Heartbeat

if TYPE_CHECKING:
    from fullhit.rpc.server import RpcServer

__all__ = ["Router", "serve"]

EMBEDDED_PORT = 4222
"""Where publishers look when nobody tells them otherwise."""


class StartError(Exception):
    """The router cannot start; the text says what to do."""


class Router:
    """All parts of one router. Create it inside the running loop.

    Usage::

        router = Router(config, log)
        await router.start()          # raises StartError
        ...
        await router.stop(drain=30)
    """

    def __init__(self, config: Config, log: Log) -> None:
        self.config = config
        self.log = log
        clock = time.monotonic
        ids = itertools.count(1)  # shared, so that a decision's id says all
        self.pools: dict[str, Pool] = {
            name: make_pool(name, build.pool_settings(pool), clock=clock, ids=ids) for name, pool in config.pool.items()
        }
        metrics = Metrics(self.pools)
        self.telemetry = Telemetry(metrics, log, decisions=cast("DecisionLines", config.log.decisions))
        self.fleet = Fleet(self.pools, build.fleet_settings(config), clock=clock, observer=self.telemetry)
        self.ingest = LinkedIngest(
            self.pools,
            build.ingest_settings(config),
            clock=clock,
            metrics=self.telemetry,
            log=self.telemetry.event_line,
            on_unknown_worker=self._unknown_worker,
            on_heartbeat=self._heartbeat,
        )
        self.ingest.promised = self.telemetry.promised
        self.fleet.on_added.append(self.ingest.worker_added)
        self.fleet.on_returned.append(self.ingest.worker_returned)
        self.fleet.on_contradiction.append(self.ingest.worker_contradicts)
        self.fleet.on_removed.append(self.ingest.worker_removed)
        self.fleet.on_removed.append(self.telemetry.worker_removed)
        self.service = DecisionService(
            self.pools,
            self.fleet,
            self.telemetry,
            DecisionSettings(config.default_pool),
            clock=clock,
            dynamo={name: build.key_rules(pool.dynamo) for name, pool in config.pool.items() if pool.dynamo},
        )
        self.supervisor = HealthSupervisor(self.fleet, clock=clock)
        state = config.server.state_file
        self.state_file = StateFile(state, self.fleet, self.telemetry) if state else None
        self.seats: list[Seat] = make_seats(config, self.pools, self.fleet, self.telemetry, clock, self._refused)
        self.fleet.oldest_inflight = self._oldest_inflight
        self.lag = LoopLag()
        self.nats: EmbeddedNats | None = None
        self.plane: EventPlane | None = None
        self.dynamo: dict[str, DynamoPool] = {}
        self.draining = False
        self._admin: web.AppRunner | None = None
        self._context: AdminContext | None = None
        self._rpc: RpcServer | None = None
        self._clock = clock
        self._add_gauges(metrics)

    async def start(self) -> None:
        """Start everything. Raises StartError; what was started by then is for `stop` to end."""
        for name, pool in self.config.pool.items():
            for worker in pool.workers:
                assert isinstance(worker, WorkerConfig)  # `load_config` makes them so
                self.fleet.add(
                    worker.url,
                    pool=name,
                    device=worker.device,
                    weight=worker.weight,
                    max_inflight=worker.max_inflight,
                    labels={"bootstrap_port": str(worker.bootstrap_port)} if worker.bootstrap_port else None,
                )
        if self.state_file is not None:
            self.state_file.load()
            await self.state_file.start()
        self.plane = await self._make_plane()
        await self.plane.start()
        self._make_dynamo()
        for dynamo in self.dynamo.values():
            await dynamo.start()
        await self.supervisor.start()
        heard = {seat.line: f"http://{await self._seat(seat)}" for seat in self.seats}
        admin = await self._listen_admin()
        rpc = await self._listen_rpc() if self.config.server.grpc_listen else None
        self.lag.start()
        self.log.event(
            "listening",
            **heard,
            admin=f"http://{admin}",
            **({"grpc": rpc} if rpc else {}),
            event_plane=self.plane.status().url or "none",
            workers=len(self.fleet),
            version=fullhit.__version__,
        )

    async def stop(self, drain: float) -> None:
        """Finish what runs for up to ``drain`` seconds, then end everything. Never raises."""
        self.draining = self.service.leaving = True
        await asyncio.gather(*(self._drain(seat, drain) for seat in self.seats if seat.listening))
        for name, ending in (
            *((seat.name, seat.close) for seat in self.seats),
            ("grpc", self._rpc.stop if self._rpc is not None else None),
            ("health", self.supervisor.stop),
            ("state file", self.state_file.close if self.state_file is not None else None),
            *((f"dynamo {name}", dynamo.close) for name, dynamo in self.dynamo.items()),
            ("event plane", self.plane.close if self.plane is not None else None),
            ("nats-server", self.nats.close if self.nats is not None else None),
            ("admin", self._admin.cleanup if self._admin is not None else None),
        ):
            if ending is not None:
                try:
                    await ending()
                except Exception as error:
                    self.log.event("stop_failed", "error", part=name, cause=repr(error))
        self.lag.stop()

    async def _make_plane(self) -> EventPlane:
        plane = self.config.events.plane
        if plane == "none":
            return NoPlane(self.ingest)
        if plane.partition(":")[0] == "embedded":
            port = int(plane.partition(":")[2] or EMBEDDED_PORT)
            self.nats = EmbeddedNats(port, log=self.telemetry.event_line)
            try:
                await self.nats.start()
            except EmbeddedNatsError as error:
                raise StartError(
                    f"{error}\nIf a NATS server runs there already, use it: --event-plane nats://127.0.0.1:{port}; "
                    "or take another port: --event-plane embedded:PORT"
                ) from None
            plane = self.nats.url
        try:
            return NatsPlane(plane, self.ingest, build.nats_settings(self.config), log=self.telemetry.event_line)
        except ValueError as error:
            raise StartError(f"events.plane: {error}") from None

    def _make_dynamo(self) -> None:
        for name, pool in self.config.pool.items():
            if pool.dynamo is None:
                continue
            try:
                require_keys()
                self.dynamo[name] = DynamoPool(
                    name,
                    build.dynamo_options(self.config, pool.dynamo),
                    self.ingest,
                    self.fleet,
                    clock=self._clock,
                    metrics=self.telemetry,
                    log=self.telemetry.event_line,
                )
            except (ImportError, ValueError) as error:
                raise StartError(f"pool.{name}.dynamo: {error}") from None

    async def _drain(self, seat: Seat, seconds: float) -> None:
        report, calm = await seat.drain(seconds)
        self.log.event(
            "drained",
            "info" if report.cut == 0 and calm else "warning",
            seat=seat.name,
            running=report.running,
            finished=report.finished,
            cut=report.cut,
        )

    async def _seat(self, seat: Seat) -> str:
        try:
            return await seat.start()
        except OSError as error:
            raise StartError(f"cannot listen on {seat.address} ({seat.place}): {error.strerror or error}") from None

    async def _listen_admin(self) -> str:
        server = self.config.server
        address = parse_address(server.admin_listen, "server.admin_listen")
        context = AdminContext(
            pools=self.pools,
            fleet=self.fleet,
            telemetry=self.telemetry,
            clock=self._clock,
            settings=AdminSettings(key=server.admin_key, default_pool=self.config.default_pool),
            plane_status=self._plane_status,
            streams=self._streams,
            oldest_inflight=self._oldest_inflight,
            draining=lambda: self.draining,
            seats=lambda: {seat.name: seat.status() for seat in self.seats},
            concerns=lambda: [concern for seat in self.seats for concern in seat.concerns()],
            service=self.service,
        )
        self._context = context
        self._admin = web.AppRunner(build_admin_app(context), access_log=None, handle_signals=False)
        await self._admin.setup()
        site = web.TCPSite(self._admin, address.host, address.port)
        try:
            await site.start()
        except OSError as error:
            raise StartError(f"cannot listen on {address} (server.admin_listen): {error.strerror or error}") from None
        host, port = self._admin.addresses[0][:2]
        return str(address._replace(host=str(host), port=int(port)))

    async def _listen_rpc(self) -> str:
        address = parse_address(self.config.server.grpc_listen, "server.grpc_listen")
        context = self._context
        assert context is not None
        try:
            server = load_server()(
                self.service,
                LinePlane(self.ingest, self.fleet),
                build.rpc_settings(self.config),
                ready=lambda: bool(readiness(context)["ready"]),
            )
            host, port = await server.start(address.host, address.port)
        except RpcMissing as error:
            raise StartError(f"server.grpc_listen is set, but {error}") from None
        except (OSError, ValueError) as error:
            raise StartError(f"cannot listen on {address} (server.grpc_listen): {error}") from None
        self._rpc = server
        return str(address._replace(host=host, port=port))

    def _plane_status(self) -> Mapping[str, Any]:
        if self.plane is None:
            return {"connected": False, "error": "not started"}
        status = asdict(self.plane.status())
        if status["kind"] == "none":
            del status["connected"]  # nobody wants it to be
        if self.dynamo:
            status["dynamo"] = {name: dynamo.status() for name, dynamo in self.dynamo.items()}
        return status

    def _streams(self) -> dict[tuple[str, str], Mapping[str, Any]]:
        return {
            (row.pool, row.worker): {
                **msgspec.to_builtins(row),
                # 64-bit numbers are text in JSON: JavaScript rounds them.
                "worker_id": str(row.worker_id),
                "epoch": None if row.epoch is None else str(row.epoch),
            }
            for row in self.ingest.status()
        }

    def _oldest_inflight(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for seat in self.seats:
            for worker, age in seat.oldest_inflight().items():
                found[worker] = max(age, found.get(worker, 0.0))
        return found

    def _unknown_worker(self, pool: str, heartbeat: Heartbeat) -> None:
        if self.config.pool[pool].dynamo is None:  # there only Dynamo's own discovery says who is a worker
            self.fleet.discover(pool, heartbeat)

    def _heartbeat(self, pool: str, worker: str, heartbeat: Heartbeat) -> None:
        self.fleet.heartbeat(worker, heartbeat.device)

    def _refused(self, kind: str) -> None:
        if kind.startswith("refused_"):
            self.telemetry.count("rejected", cause=kind.removeprefix("refused_"))

    def _add_gauges(self, metrics: Metrics) -> None:
        def gauge(seat: Seat, name: str, help: str, key: str) -> None:
            metrics.gauge(name, help, lambda: float(seat.status()[key]))

        for seat in self.seats:
            for name, help, key in seat.gauges:
                gauge(seat, name, help, key)
        if (state := self.state_file) is not None:
            metrics.gauge(
                "state_file_failing", "1 while the state file cannot be written", lambda: float(bool(state.error))
            )
        metrics.gauge("event_loop_lag_seconds", "Worst delay of the event loop lately", lambda: self.lag.worst)
        metrics.gauge(
            "connections",
            "Open client connections",
            lambda: float(sum(len(seat.listener.connections) for seat in self.seats)),
        )
        metrics.gauge(
            "upstream_connections",
            "Open connections to workers and frontends",
            lambda: float(sum(seat.client.open_connections for seat in self.seats)),
        )
        metrics.gauge("event_plane_up", "1 while the event plane is connected",
                      lambda: float(self.plane is not None and self.plane.status().connected))  # fmt: skip
        metrics.gauge("snapshots_outstanding", "Snapshots asked of workers and not yet complete",
                      lambda: float(self.ingest.snapshots_outstanding))  # fmt: skip
        metrics.gauge("snapshots_waiting", "Workers to be asked as soon as fewer are outstanding",
                      lambda: float(self.ingest.snapshots_waiting))  # fmt: skip


def serve(config: Config) -> int:
    """Run a router until SIGTERM or SIGINT. Returns the exit code."""
    log = Log(
        sys.stderr, config.log.level, None if config.log.format == "auto" else cast("LogFormat", config.log.format)
    )
    try:
        with bridge_logging(log), asyncio.Runner(loop_factory=_loop_factory(config.server.loop)) as runner:
            return runner.run(_run(config, log))
    finally:
        log.close()


async def _run(config: Config, log: Log) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    told = 0

    def asked(name: str) -> None:
        nonlocal told
        told += 1
        log.event("stopping" if told == 1 else "stopping_now", signal=name)
        stop.set()
        if told > 1 and task is not None:
            task.cancel()

    task: asyncio.Task[None] | None = None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked, number.name)
    loop.add_signal_handler(signal.SIGHUP, log.event, "sighup_ignored", "warning")
    router = Router(config, log)
    drain = 0.0
    code = 1
    try:
        await router.start()
        gc.collect()
        gc.freeze()
        await stop.wait()
        drain, code = config.server.drain_timeout, 0
    except (StartError, ConfigError) as error:
        log.flush()
        sys.stderr.write(f"fullhit: {error}\n")
        code = 2
    finally:
        task = asyncio.create_task(router.stop(drain))
        await asyncio.wait({task})
        if task.cancelled():
            await router.stop(0.0)
    return code


def _loop_factory(name: str) -> Any:
    if name == "asyncio":
        return asyncio.new_event_loop
    try:
        import uvloop
    except ImportError:
        if name == "uvloop":
            raise ConfigError("the package uvloop is not installed; use auto or asyncio", "server.loop") from None
        return asyncio.new_event_loop
    return uvloop.new_event_loop
