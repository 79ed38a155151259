"""The decision API over gRPC: Selects a second of 32 clients, each on a connection of its own.

A real `fullhit serve` with 16 workers in one process, with the settings it has by default (each decision leaves a log
line); the 32 clients in another process, this one. Each client asks with two keys, waits for the answer, asks again: on
its session, the way for a front end with much to ask, or with a call each. The clients are lean ones (`rpc_load`), so
that the router is measured; the last rows show what is left with 32 clients of grpcio's Python library, which need
about two thirds of the router's CPU. Slots are lent for a second and not released. CPU times of both sides stand beside
it: on two cores they share, their sum is what bounds the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import tempfile
import time
import urllib.error
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fullhit.lab.processes import Child, Supervisor, fetch_json

from . import Skip
from .rpc_load import LeanClient
from .table import Row

__all__ = ["rows"]

COMMAND = "fullhit bench --only rpc"
CLIENTS = 32
WORKERS = 16
SECONDS = 3.0
QUICK_SECONDS = 0.5
BUDGET = 3_000

CONFIG = """
[server]
listen = "127.0.0.1:0"
admin_listen = "127.0.0.1:0"
grpc_listen = "127.0.0.1:0"
[events]
plane = "none"
[pool.default]
max_inflight = 0
"""


@dataclass(frozen=True, slots=True)
class _Figure:
    rate: float
    server_ms: float
    client_ms: float
    """CPU milliseconds a turn of each side."""


def rows(args: argparse.Namespace) -> list[Row]:
    try:
        import grpc  # noqa: F401
    except ImportError:
        raise Skip("grpcio is not installed: pip install 'fullhit[grpc]'") from None
    seconds = QUICK_SECONDS if args.quick else SECONDS
    with asyncio.Runner(loop_factory=_loop()) as runner:
        session, single, python = runner.run(_measure(args.rounds, seconds))
    what = f"gRPC, {CLIENTS} clients, {WORKERS} workers"
    out = [Row.at_least(f"{what}: Selects on sessions", median(f.rate for f in session), "/s", BUDGET, COMMAND)]
    out += _cpu(session)
    out.append(Row.at_least(f"{what}: Selects, a call each", median(f.rate for f in single), "/s", BUDGET, COMMAND))
    out += _cpu(single)
    what += ", grpcio's own"
    out.append(Row.info(f"{what}: Selects on sessions", median(f.rate for f in python), "/s", COMMAND))
    return out + _cpu(python)


def _cpu(figures: list[_Figure]) -> list[Row]:
    return [
        Row.info("  CPU of the router each", median(f.server_ms for f in figures), "ms", COMMAND),
        Row.info("  CPU of the clients each", median(f.client_ms for f in figures), "ms", COMMAND),
    ]


def _loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _measure(rounds: int, seconds: float) -> tuple[list[_Figure], list[_Figure], list[_Figure]]:
    async with _router() as (router, target):
        session, single, python = [], [], []
        await _round(router, target, min(0.5, seconds), sessions=True)  # warm
        for _ in range(rounds):
            session.append(await _round(router, target, seconds, sessions=True))
            single.append(await _round(router, target, seconds, sessions=False))
            python.append(await _python_round(router, target, seconds))
        return session, single, python


@contextlib.asynccontextmanager
async def _router() -> AsyncIterator[tuple[Child, str]]:
    """A router, its workers ready (they are answered for here), and its gRPC address."""

    async def healthy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    workers = [await asyncio.start_server(healthy, "127.0.0.1", 0) for _ in range(WORKERS)]
    urls = [f"http://127.0.0.1:{worker.sockets[0].getsockname()[1]}" for worker in workers]
    try:
        with tempfile.TemporaryDirectory() as folder, Supervisor(Path(folder)) as processes:
            config = Path(folder) / "fullhit.toml"
            config.write_text(CONFIG)
            flags = itertools.chain.from_iterable(("--encoder-url", url) for url in urls)
            router = processes.start("router", ["fullhit", "serve", "--config", str(config), "--log-format", "json",
                                                *flags])  # fmt: skip
            told: dict[str, Any] = {}

            async def up() -> bool:
                if not told:
                    told.update(_listening(router) or {})
                return bool(told) and (await _usable(told["admin"])) == WORKERS

            await router.until(up, "ready with all workers")
            yield router, told["grpc"]
    finally:
        for worker in workers:
            worker.close()


def _listening(router: Child) -> dict[str, Any] | None:
    """The line in which the router says where it listens."""
    for line in router.log.read_text().splitlines():
        if '"listening"' in line and line.endswith("}"):
            told: dict[str, Any] = json.loads(line)
            return told
    return None


async def _usable(admin: str) -> int:
    with contextlib.suppress(urllib.error.HTTPError):
        return int((await fetch_json(admin + "/readyz"))["pools"]["default"]["usable"])
    return 0  # 503: none


async def _round(router: Child, target: str, seconds: float, *, sessions: bool) -> _Figure:
    """Lean clients, so that the router is measured."""
    from fullhit.rpc.v1 import router_pb2 as pb

    answers = itertools.count()
    questions = _questions()

    def answered(data: bytes) -> None:
        chosen = pb.SessionReply.FromString(data).selected if sessions else pb.SelectReply.FromString(data)
        if not chosen.lease_id:
            raise RuntimeError("an answer without a lease: the router has refused")
        next(answers)

    def question() -> bytes | None:
        if time.monotonic() > ends:
            return None
        select = next(questions)
        message = pb.SessionRequest(select=select) if sessions else select
        return bytes(message.SerializeToString())

    host, _, port = target.rpartition(":")
    loop = asyncio.get_running_loop()
    method = f"/fullhit.v1.Router/{'Session' if sessions else 'Select'}"
    clients = [LeanClient(method, target, question, answered, session=sessions) for _ in range(CLIENTS)]
    cpu, own, began = _cpu_seconds(router.pid), time.process_time(), time.monotonic()
    ends = began + seconds
    for client in clients:
        await loop.create_connection(lambda client=client: client, host, int(port))  # type: ignore[misc]
    await asyncio.gather(*(client.finished for client in clients))
    took, cpu, own = time.monotonic() - began, _cpu_seconds(router.pid) - cpu, time.process_time() - own
    done = next(answers)
    return _Figure(done / took, cpu * 1e3 / done, own * 1e3 / done)


async def _python_round(router: Child, target: str, seconds: float) -> _Figure:
    """Sessions of grpcio's own client, as a front end in Python would have them."""
    import grpc

    from fullhit.rpc.v1 import router_pb2 as pb
    from fullhit.rpc.v1 import router_pb2_grpc

    channels = [
        grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(CLIENTS)
    ]
    questions = _questions()
    done = 0

    async def client(channel: Any, ends: float) -> None:
        nonlocal done
        session = router_pb2_grpc.RouterStub(channel).Session()  # type: ignore[no-untyped-call]
        try:
            while time.monotonic() < ends:
                await session.write(pb.SessionRequest(select=next(questions)))
                assert (await session.read()).selected.lease_id
                done += 1
        finally:
            session.cancel()

    try:
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        cpu, own, began = _cpu_seconds(router.pid), time.process_time(), time.monotonic()
        await asyncio.gather(*(client(channel, began + seconds) for channel in channels))
        took, cpu, own = time.monotonic() - began, _cpu_seconds(router.pid) - cpu, time.process_time() - own
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
    return _Figure(done / took, cpu * 1e3 / done, own * 1e3 / done)


def _questions() -> Iterator[Any]:
    from fullhit.rpc.v1 import router_pb2 as pb

    rng = random.Random(4)
    keys = [rng.randbytes(16).hex() for _ in range(2_000)]
    for number in itertools.count(time.time_ns()):
        yield pb.SelectRequest(keys=rng.sample(keys, 2), request_id=f"{number}", lease_seconds=1.0)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
