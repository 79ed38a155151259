"""The servers of a run: two real encoders, the router, one real language server, all of one ZMQ backend.

The first encoder is known to the router from the start, the second one announces itself
(``--encoder-register-urls``), so both ways in are in use all the time. The language server knows nothing but
the router. Servers are started one after the other: on two cores that is faster than at once.
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from fullhit.lab.processes import free_port

from .client import Client
from .environment import Environment, say
from .processes import Process, ProcessGroup, until

__all__ = ["ALIASES", "PLUGIN", "TO_SCHEDULER", "TO_TOKENIZER", "Stack"]

TO_SCHEDULER = "zmq_to_scheduler"
TO_TOKENIZER = "zmq_to_tokenizer"
PLUGIN = "plugin"
"""Stands for the backend of the stack whose encoders have the embedding-cache plugin; they use `TO_TOKENIZER`."""
ALIASES = ("/v0", "/v1", "/v2", "/v3")
ENCODER_START = 180.0
LANGUAGE_START = 240.0
ROUTER_START = 30.0


@dataclass
class Server:
    """One server: where it listens and its process."""

    url: str
    process: Process

    @property
    def encodes(self) -> int:
        """How many ``/encode`` this encoder says it has completed, over all its starts."""
        return self.process.log.read_bytes().count(b"/encode completed")


@dataclass
class Stack:
    """Everything that runs, and how to bring it up again. ``aliases``: start with four URLs instead of one."""

    environment: Environment
    processes: ProcessGroup
    client: Client
    backend: str
    aliases: bool
    router_command: str | None = None
    encoders: list[Server] = field(default_factory=list)
    router: Server = field(init=False)
    language: Server = field(init=False)
    admin: str = ""
    registry: str = ""  # the language server's own list of encoder URLs

    async def start(self) -> None:
        self.plan()
        first, second = self.encoders
        await self.start_encoder(first)
        await self.start_router()
        await self.start_encoder(second)  # announces itself: the router must be there
        await self.start_language()

    def plan(self) -> None:
        """Choose all ports and write all command lines."""
        label = self.backend.removeprefix("zmq_")
        self.router, self.admin = self.plan_router(label)
        for number in (1, 2):
            url = f"http://127.0.0.1:{free_port()}"
            options = ["--encoder-only"]
            if number == 2:
                options += ["--encoder-register-urls", self.router.url]
            self.encoders.append(Server(url, self.sglang(f"encoder{number}-{label}", url, options)))
        if self.router_command is None:
            self.router.process.command += ["--encoder-url", self.encoders[0].url]
        else:
            self.router.process.command += [encoder.url for encoder in self.encoders]
        url, bootstrap = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self.registry = bootstrap
        targets = [self.router.url + alias for alias in ALIASES] if self.aliases else [self.router.url]
        options = ["--language-only", "--encoder-urls", *targets]
        options += ["--encoder-bootstrap-port", bootstrap.rpartition(":")[2]]
        options += ["--context-length", "4096", "--max-total-tokens", "16384", "--max-running-requests", "8"]
        options += ["--disable-overlap-schedule", "--skip-server-warmup"]
        self.language = Server(url, self.sglang(f"language-{label}", url, options))

    def plan_router(self, label: str) -> tuple[Server, str]:
        listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
        if self.router_command is not None:
            command = [*shlex.split(self.router_command), listen]
        else:
            command = [sys.executable, "-m", "fullhit", "serve", "--listen", listen, "--admin-listen", admin]
            command += ["--event-plane", "embedded:0", "--log-format", "text"]
        variables = self.environment.variables()
        for name in [name for name in variables if name.startswith(("FULLHIT_", "PYTHONPATH"))]:
            del variables[name]
        process = self.processes.add(f"router-{label}", command, variables)
        return Server(f"http://{listen}", process), f"http://{admin}"

    def sglang(self, name: str, url: str, options: list[str]) -> Process:
        command = [str(self.environment.python), "-m", "sglang.launch_server"]
        command += ["--model-path", str(self.environment.model), "--load-format", "dummy"]
        command += ["--device", "cpu", "--dtype", "float32"]
        command += ["--encoder-transfer-backend", TO_TOKENIZER if self.backend == PLUGIN else self.backend]
        command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2], *options]
        return self.processes.add(name, command, self.environment.variables())

    async def start_encoder(self, encoder: Server) -> None:
        await self.bring_up(encoder, "/health", ENCODER_START)

    async def start_router(self) -> None:
        await self.bring_up(self.router, "/health", ROUTER_START)

    async def start_language(self) -> None:
        await self.bring_up(self.language, "/health", LANGUAGE_START)

    async def bring_up(self, server: Server, path: str, limit: float) -> None:
        started = time.monotonic()
        server.process.start()
        await until(
            lambda: self.client.answers(server.url + path, 35.0),
            f"{server.process.name} answers {path}",
            limit,
            needs=(server.process,),
            every=0.25,
        )
        say(f"  {server.process.name} is up after {time.monotonic() - started:.1f} s")

    async def repair(self) -> bool:
        """Start again whatever a failed case left dead. False: nothing was."""
        dead = [s for s in (*self.encoders, self.router, self.language) if not s.process.alive]
        for server in dead:
            server.process.kill()  # what is left of its group
        for server in dead:
            say(f"  {server.process.name} is dead; starting it again for the next case")
            await self.bring_up(server, "/health", LANGUAGE_START)
        return bool(dead)

    async def workers(self) -> list[dict[str, Any]]:
        """The router's own list of workers; empty while it cannot be asked."""
        if self.router_command is not None:  # another router: believe what we see ourselves
            return [
                {"url": encoder.url, "state": "ready" if encoder.process.alive else "gone", "inflight_requests": 0}
                for encoder in self.encoders
            ]
        try:
            workers: list[dict[str, Any]] = (await self.client.get(f"{self.admin}/workers")).json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return []
        return workers

    async def router_idle(self) -> bool:
        workers = await self.workers()
        return bool(workers) and not any(worker["inflight_requests"] for worker in workers)

    async def ready_encoders(self) -> set[str]:
        """URLs the router would send an ``/encode`` to."""
        return {worker["url"].rstrip("/") for worker in await self.workers() if worker["state"] == "ready"}

    async def all_encoders_ready(self, limit: float = 60.0) -> None:
        async def condition() -> bool:
            return {encoder.url for encoder in self.encoders} <= await self.ready_encoders()

        await until(condition, "the router counts both encoders as ready", limit, needs=(self.router.process,))

    async def use_aliases(self, aliases: bool) -> None:
        """Change the running language server's list of encoder URLs: four aliases or the one bare URL."""
        many, one = [self.router.url + alias for alias in ALIASES], [self.router.url]
        wanted, unwanted = (many, one) if aliases else (one, many)
        for url in wanted:
            await self.client.post(f"{self.registry}/register_encoder_url", {"url": url})
        for url in unwanted:
            await self.client.request("DELETE", f"{self.registry}/unregister_encoder_url", {"url": url}, limit=10.0)
        listed = (await self.client.get(f"{self.registry}/list_encoder_urls")).json()["encoder_urls"]
        assert sorted(listed) == sorted(wanted), f"the language server lists {listed}"

    async def stop(self) -> None:
        """Everything of this stack, language server first, so that nothing complains about the other."""
        for server in (self.language, self.router, *self.encoders):
            if server.process.popen is not None:
                server.process.kill()
