"""The test stand: a router of ours with one pool of Dynamo workers, the brokers in between, and real publishers."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import zmq

from fullhit.app import Router
from fullhit.config import load_config
from fullhit.events import EmbeddedNats
from fullhit.lab.processes import Supervisor, free_port
from fullhit.telemetry import Log
from fullhit_publisher.identity import dynamo_name
from fullhit_publisher.keys import fold

from .environment import Environment

__all__ = ["CaseFailed", "Publisher", "Stand", "eventually"]

PUBLISHER = Path(__file__).with_name("publisher.py")
POOL = "vision"


class CaseFailed(Exception):
    """What was expected did not come about."""


async def eventually(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise CaseFailed(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.02)


class Publisher:
    """A real publisher of one release in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, release: str) -> None:
        self.process = process
        self.release = release
        self.number = 0

    @property
    def name(self) -> str:
        return dynamo_name(self.number)

    async def ask(self, *command: Any, seconds: float = 120.0) -> dict[str, Any]:
        assert self.process.stdin is not None
        if command:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self.answer(seconds)

    async def answer(self, seconds: float = 60.0) -> dict[str, Any]:
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise CaseFailed(f"the publisher of {self.release} gave no answer within {seconds:g} s") from None
        if not line:
            raise CaseFailed(f"the publisher of {self.release} ended with {await self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class Stand:
    """``transport``: ``nats``, ``zmq`` (publishers' own sockets), ``broker``, or ``etcd`` (discovery there, events over
    NATS). Use with ``async with``."""

    def __init__(self, environment: Environment, transport: str) -> None:
        self.transport = transport
        self.namespace = "fullhit"
        self.component = "encoder"
        self._environment = environment
        self._folder = tempfile.TemporaryDirectory()
        self.store = Path(self._folder.name) / "store"
        self.nats: EmbeddedNats | None = None
        self.router: Router | None = None
        self._publishers: list[Publisher] = []
        self._broker: _Broker | None = None
        self._processes = Supervisor(Path(self._folder.name) / "logs")
        self._etcd = ""

    async def __aenter__(self) -> Stand:
        self.store.mkdir()
        if self.transport == "etcd":
            self._etcd = await start_etcd(self._processes, Path(self._folder.name) / "etcd")
        if self.transport in ("nats", "etcd"):
            self.nats = EmbeddedNats(0)
            await self.nats.start()
        elif self.transport == "broker":
            self._broker = _Broker()
        return self

    async def __aexit__(self, *_: object) -> None:
        for publisher in self._publishers:
            await publisher.kill()
        await self.stop_router()
        if self.nats is not None:
            await self.nats.close()
        if self._broker is not None:
            self._broker.close()
        self._processes.close()
        self._folder.cleanup()

    async def start_router(self) -> None:
        plane = {
            "nats": lambda: f'nats_url = "{self.nats.url}"',  # type: ignore[union-attr]
            "etcd": lambda: f'nats_url = "{self.nats.url}"',  # type: ignore[union-attr]
            "zmq": lambda: 'plane = "zmq"',
            "broker": lambda: f'plane = "zmq"\nbrokers = ["{self._broker.xpub}"]',  # type: ignore[union-attr]
        }[self.transport]()
        file = Path(self._folder.name) / "fullhit.toml"
        file.write_text(
            '[server]\nlisten = "127.0.0.1:0"\nadmin_listen = "127.0.0.1:0"\n[events]\nplane = "none"\n'
            f'[pool.default]\n[pool.{POOL}.dynamo]\nnamespace = "{self.namespace}"\ncomponent = "{self.component}"\n'
            f'discovery = "{f"etcd:{self._etcd}" if self._etcd else f"file:{self.store}"}"\n{plane}\n'
        )
        self.router = Router(load_config(file, environ={}), Log(io.StringIO(), "info", "json"))
        await self.router.start()
        await eventually(lambda: self.status()["plane"]["connected"], "our router on the event plane")

    async def stop_router(self) -> None:
        router, self.router = self.router, None
        if router is not None:
            await router.stop(0.0)

    async def publisher(self, release: str) -> Publisher:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "NATS_"))}
        environment.update(
            PYTHONPATH=str(self._environment.runtimes[release]),
            DYN_FILE_KV=str(self.store),
            DISCOVERY="etcd" if self._etcd else "file",
            DYN_EVENT_PLANE="nats" if self.nats is not None else "zmq",
            DYN_EVENT_PLANE_HOST="127.0.0.1",
            DYN_TCP_RPC_HOST="127.0.0.1",
            DYN_LOG="error",
        )
        if self._etcd:
            environment["ETCD_ENDPOINTS"] = self._etcd
        if self.nats is not None:
            environment["NATS_SERVER"] = self.nats.url
        if self._broker is not None:
            environment["DYN_ZMQ_BROKER_URL"] = f"xsub={self._broker.xsub} , xpub={self._broker.xpub}"
        process = await asyncio.create_subprocess_exec(
            str(self._environment.python),
            str(PUBLISHER),
            f"{self.namespace}.{self.component}.generate",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
            limit=64 * 1024 * 1024,
        )
        publisher = Publisher(process, release)
        self._publishers.append(publisher)
        publisher.number = int((await publisher.answer())["id"])
        return publisher

    async def heard(self, publisher: Publisher) -> None:
        """Publish until the router hears it: what is sent before a subscription has arrived is lost for good."""
        await eventually(lambda: self.pool.get(publisher.name), f"discovery of {publisher.release}")
        for turn in range(200):
            await publisher.ask("publish", [f"probe {turn}"], [f"probe {turn - 1}"])
            await asyncio.sleep(0.05)
            if self.key_count(publisher):
                await publisher.ask("publish", [], [f"probe {turn}"])
                return
        raise CaseFailed(f"nothing of {publisher.release} was heard")

    # What our router believes.

    @property
    def pool(self) -> Any:
        assert self.router is not None
        return self.router.pools[POOL]

    def status(self) -> dict[str, Any]:
        assert self.router is not None
        return self.router.dynamo[POOL].status()

    def key_count(self, publisher: Publisher) -> int:
        return int(self.pool.key_count(publisher.name))

    def holds(self, publisher: Publisher, keys: Iterable[str]) -> int:
        return sum(self.pool.holds(publisher.name, fold(key)) for key in keys)

    def state(self, publisher: Publisher) -> str:
        assert self.router is not None
        stream = self.router.ingest.stream(POOL, publisher.name)
        return "absent" if stream is None else str(stream.state)

    async def agrees(self, publisher: Publisher, held: list[str], seconds: float = 30.0) -> None:
        """The index holds exactly what the publisher says it holds."""
        await eventually(
            lambda: self.key_count(publisher) == len(held) == self.holds(publisher, held),
            f"{publisher.release}: {len(held)} keys, of which we hold {self.key_count(publisher)}",
            seconds,
        )


async def start_etcd(processes: Supervisor, folder: Path) -> str:
    """A server of its own on loopback; returns the URL of its clients."""
    url, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    flags = {
        "data-dir": str(folder),
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
    }
    child = processes.run("etcd", ["etcd", *(f"--{name}={value}" for name, value in flags.items())])
    await child.answers(url + "/health")
    return url


class _Broker:
    """XSUB and XPUB in a thread of libzmq's own proxy."""

    def __init__(self) -> None:
        import threading

        self._context = zmq.Context()
        self._front = self._context.socket(zmq.XSUB)
        self._back = self._context.socket(zmq.XPUB)
        for socket in (self._front, self._back):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 100_000)
            socket.setsockopt(zmq.RCVHWM, 100_000)
            socket.bind("tcp://127.0.0.1:0")
        self.xsub = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self.xpub = self._back.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            zmq.proxy(self._front, self._back)
        except zmq.ZMQError:
            pass
        finally:
            self._front.close(0)
            self._back.close(0)

    def close(self) -> None:
        self._context.term()
        self._thread.join(5)
