"""A small Dynamo deployment with routers in front: workers, frontends, and our own processes, over one NATS server.

Everything is seen from outside: which worker got a request, and what the client was answered. Nobody can ask a frontend
what is in its index, so `Fleet.told` finds it out by requests whose way tells: see there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from fullhit.lab.processes import Child, Supervisor, free_port, start_nats
from fullhit_publisher.dynamo_keys import url_key

from .environment import Environment
from .stand import CaseFailed
from .toy_model import write_toy_model

__all__ = ["POOL", "PUBLISHER", "Door", "Fleet", "Held", "Worker", "forget_the_surroundings", "until"]

ACTOR = Path(__file__).with_name("actor.py")
PUBLISHER = Path(__file__).parents[2] / "publisher"
POOL = "vision"
RELEASE = "1.6.1"
PATIENCE = 60.0
AT_ONCE, UNTIL_RELEASED, TOKEN_FIRST = 1, 2, 7
"""Wishes of a request; `actor.py` says what they mean."""


async def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        if loop.time() > end:
            raise CaseFailed(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.005)


class Worker:
    """One fake worker. ``letter`` stands for it in results; ``total`` counts the requests that came to it."""

    def __init__(self, letter: str, process: asyncio.subprocess.Process) -> None:
        self.letter = letter
        self.id = ""
        self.total = 0
        self._process = process
        self._done: asyncio.Queue[str] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def say(self, *command: Any) -> None:
        """Give a command and wait until it is carried out."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        async with asyncio.timeout(PATIENCE):
            done = await self._done.get()
        if done != command[0]:
            raise CaseFailed(f"worker {self.letter} did {done!r} instead of {command[0]!r}")

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._reader.cancel()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = json.loads(line)
            if "id" in message:
                self.id = message["id"]
            elif "got" in message:
                self.total += 1
            else:
                self._done.put_nowait(message["done"])
        self._done.put_nowait("ended")


@dataclass(frozen=True, slots=True)
class Door:
    """Where a client sends requests: a frontend, or a router in front of one. ``admin``: a router's admin listener."""

    name: str
    url: str
    admin: str = ""


@dataclass(slots=True)
class Held:
    """Requests on their way, in order. ``ways``: the letters of the workers that got them, or the status."""

    ways: list[str] = field(default_factory=list)
    tasks: list[asyncio.Task[int]] = field(default_factory=list)

    def __str__(self) -> str:
        return "".join(self.ways)


class Fleet:
    """Use with ``async with``. ``workers`` by letter, in the order in which they came; ``audience``: the doors that
    scenarios are played at."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self.workers: dict[str, Worker] = {}
        self.audience: tuple[Door, ...] = ()
        self.nats = ""
        self._environment = environment
        self._folder = folder
        self._model = folder / "model"
        self._store = folder / "store"
        self._processes = Supervisor(folder / "logs")
        self._numbers = count(1)
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Fleet:
        write_toy_model(self._model)
        self._store.mkdir()
        _, self.nats = await start_nats(self._processes)
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers.values():
            await worker.kill()
        if self._client is not None:
            await self._client.close()
        self._processes.close()

    # Who takes part.

    async def worker(self, letter: str, *, device: str = "gpu", role: str = "encode") -> Worker:
        """Start a worker; it is up when this returns, and in discovery soon."""
        name = "toy.encoder.generate" if role == "encode" else "toy.backend.generate"
        devices = {"CUDA_VISIBLE_DEVICES": "-1"} if device == "cpu" else {}
        log = (self._folder / f"worker-{letter}.log").open("wb")
        with log:
            process = await asyncio.create_subprocess_exec(
                str(self._environment.python), str(ACTOR), "worker", name, str(self._model), role,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                env={**os.environ, **self._runtime(), **devices},
            )  # fmt: skip
        worker = self.workers[letter] = Worker(letter, process)
        await until(lambda: worker.id or process.returncode is not None, f"worker {letter}")
        if not worker.id:
            raise CaseFailed(f"worker {letter} ended: {(self._folder / f'worker-{letter}.log').read_text()[-600:]}")
        return worker

    async def frontend(self, name: str, mode: str = "DeviceAwareWeighted", ratio: str | None = "1", migration: int = 0
                       ) -> Door:  # fmt: skip
        """A real frontend that lists the model."""
        port = free_port()
        variables = {} if ratio is None else {"DYN_ENCODER_CUDA_TO_CPU_RATIO": ratio}
        command = [str(self._environment.python), str(ACTOR), "frontend", str(port), mode, str(migration)]
        child = self._processes.run(name.replace(" ", "-"), command, {**self._runtime(), **variables})
        door = Door(name, f"http://127.0.0.1:{port}")

        async def lists() -> bool:
            try:
                async with self._http.get(door.url + "/v1/models") as reply:
                    return b"toy" in await reply.read()
            except aiohttp.ClientError:
                return False

        await child.until(lists, "listing the model")
        return door

    async def router(
        self, name: str, frontend: Door, *, parity: bool, ratio: str | None = "1", plane: bool = True
    ) -> Door:
        """``fullhit serve`` in front of a frontend in direct mode."""
        number = next(self._numbers)
        file = self._folder / f"fullhit-{number}.toml"
        file.write_text(
            '[server]\nadmin_listen = "127.0.0.1:0"\n'
            f'[events]\nplane = "{self.nats if plane else "none"}"\n'
            "[encoder_gateway]\nenabled = false\n"
            f'[openai_front]\nlisten = "127.0.0.1:0"\npool = "{POOL}"\nfrontends = ["{frontend.url}"]\n'
            f'[pool.{POOL}]\nparity = "{"dynamo" if parity else "none"}"\n'
            f'[pool.{POOL}.dynamo]\nnamespace = "toy"\ncomponent = "encoder"\nnats_url = "{self.nats}"\n'
            f'discovery = "file:{self._store}"\n'
        )
        variables = {} if ratio is None else {"DYN_ENCODER_CUDA_TO_CPU_RATIO": ratio}
        command = ["fullhit", "serve", "--config", str(file), "--log-format", "json"]
        child = self._processes.start(f"fullhit-{number}", command, variables)
        listening: dict[str, Any] = {}

        async def up() -> bool:
            if not listening:
                listening.update(_listening(child))
            if not listening:
                return False
            async with self._http.get(listening["admin"] + "/readyz") as reply:
                ready = await reply.json()
            planes = ready["event_plane"]["dynamo"][POOL]
            return bool(ready["ready"] and planes["plane"]["connected"])

        await child.until(up, "ready")
        return Door(name, listening["openai"], listening["admin"])

    # Requests.

    async def send(self, door: Door, pictures: Sequence[str], held: Held, *, wish: int = UNTIL_RELEASED,
                   headers: dict[str, str] | None = None, extra: dict[str, Any] | None = None) -> str:  # fmt: skip
        """Send a chat with these pictures; returns, and notes, the letter of the worker that got it, or the status when
        nobody did. The request itself stays on its way."""
        before = {letter: worker.total for letter, worker in self.workers.items()}
        parts: list[dict[str, Any]] = [{"type": "text", "text": "what is this"}]
        parts += [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
        body = {"model": "toy", "max_tokens": wish, "messages": [{"role": "user", "content": parts}], **(extra or {})}
        first = asyncio.Event()
        task = asyncio.create_task(self._post(door, body, headers or {}, first))
        held.tasks.append(task)

        def way() -> str:
            return "".join(one for one, worker in self.workers.items() if worker.total > before.get(one, 0))

        await until(lambda: way() or task.done(), f"an answer of {door.name}")
        if not way() and task.result() == 200:
            await until(way, f"a worker's word on a request that {door.name} has answered")  # it comes by another way
        letters = way() or str(task.result())
        if wish == TOKEN_FIRST:
            await until(lambda: first.is_set() or task.done(), f"the first token through {door.name}")
        held.ways.append(letters)
        return letters

    async def burst(self, door: Door, batch: Sequence[Sequence[str]], **how: Any) -> str:
        """Send one after another, all of them held; then let all finish. Returns their ways."""
        held = Held()
        for pictures in batch:
            await self.send(door, pictures, held, **how)
        await self.finish(held)
        return str(held)

    async def finish(self, held: Held) -> list[int]:
        """Let held requests finish; returns their statuses."""
        for worker in self.workers.values():
            await worker.say("release")
        return list(await asyncio.gather(*held.tasks))

    async def status(self, door: Door, pictures: Sequence[str]) -> int:
        """Send one that is answered at once; returns its status."""
        held = Held()
        await self.send(door, pictures, held, wish=AT_ONCE)
        return await held.tasks[0]

    async def _post(self, door: Door, body: dict[str, Any], headers: dict[str, str], first: asyncio.Event) -> int:
        streamed = body["max_tokens"] == TOKEN_FIRST
        if streamed:
            body = {**body, "stream": True}
        try:
            async with self._http.post(door.url + "/v1/chat/completions", json=body, headers=headers) as reply:
                async for _ in reply.content.iter_any():
                    first.set()
                return reply.status
        except aiohttp.ClientError:
            return 0

    # What they know.

    async def told(self, *doors: Door) -> None:
        """Return when these doors have taken all that the workers have published so far.

        A picture that nobody has seen is published by each worker as its last one; a door knows it when it sends a
        request for it there although it would go elsewhere otherwise: to a GPU worker from an idle fleet, to C when
        each GPU worker is busy with one request (which is why all doors here have ratio 1).
        """
        fast = [letter for letter in self.workers if letter in "GH"]
        for letter in ("C", *fast):
            mark = self.fresh()
            await self.workers[letter].say("publish", [url_key(mark)], [])
            for door in doors:
                if not await self._learns(door, letter, mark, 2_000):
                    raise CaseFailed(f"{door.name} never learnt what {letter} published")
            await self.workers[letter].say("publish", [], [url_key(mark)])

    async def hears(self, *doors: Door) -> None:
        """Return when doors that were just opened take what workers publish: a frontend lists its model before it has
        subscribed, and what is published in between it never learns. So one picture after another is published."""
        for letter in ("C", *[letter for letter in self.workers if letter in "GH"]):
            for door in doors:
                for _ in range(60):
                    mark = self.fresh()
                    await self.workers[letter].say("publish", [url_key(mark)], [])
                    learnt = await self._learns(door, letter, mark, 50)
                    await self.workers[letter].say("publish", [], [url_key(mark)])
                    if learnt:
                        break
                else:
                    raise CaseFailed(f"{door.name} never heard {letter}")

    async def _learns(self, door: Door, letter: str, mark: str, tries: int) -> bool:
        held = Held()
        if letter != "C":
            for _ in [one for one in self.workers if one in "GH"]:
                await self.send(door, [self.fresh()], held)
        try:
            for _ in range(tries):
                if await self._goes(door, mark) == letter:
                    return True
                await asyncio.sleep(0.01)
            return False
        finally:
            await self.finish(held)

    def fresh(self) -> str:
        """The URL of a picture that nobody has seen."""
        return f"https://pictures.invalid/fresh/{next(self._numbers)}.png"

    async def _goes(self, door: Door, picture: str) -> str:
        held = Held()
        way = await self.send(door, [picture], held, wish=AT_ONCE)
        await asyncio.gather(*held.tasks)
        return way

    async def ask(self, door: Door, path: str) -> Any:
        """GET from a router's admin listener."""
        async with self._http.get(door.admin + path) as reply:
            return await reply.json()

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._client is not None
        return self._client

    def _runtime(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(self._environment.runtimes[RELEASE]),
            "DYN_FILE_KV": str(self._store),
            "DYN_EVENT_PLANE": "nats",
            "NATS_SERVER": self.nats,
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_LOG": "error",
        }


def _listening(child: Child) -> dict[str, Any]:
    for line in child.log.read_text().splitlines():
        if '"listening"' in line and line.endswith("}"):
            told: dict[str, Any] = json.loads(line)
            return told
    return {}


def forget_the_surroundings() -> None:
    """Take out of our own environment, and so of all children's, what would steer a runtime."""
    for name in list(os.environ):
        if name.startswith(("DYN_", "NATS_")) or name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
            del os.environ[name]
    os.environ.setdefault("PATH", os.defpath)
    sys.stdout.flush()
