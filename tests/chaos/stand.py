"""What a case is played over: a broker, a router and mock encoders, all real processes on 127.0.0.1, with bad networks
between them where a case wants some; and the questions that show whether all is well again.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from fullhit.lab.processes import Child, Supervisor, fetch_json, free_port

from .planes import Plane
from .proxy import Proxy

__all__ = ["Encoder", "NotInTime", "Router", "Stand", "Vitals", "eventually"]

LIMIT = 60.0
# Keys whose holders one decision lists.
ASK = 32


class NotInTime(Exception):
    """A condition was not met within its time."""


class Vitals(NamedTuple):
    """What a process uses: open files, and resident memory in MB."""

    files: int
    rss: float


class Encoder:
    """A mock encoder at a fixed port; ``url`` is what it is called, the proxy's where one stands before it."""

    def __init__(self, stand: Stand, name: str, options: Sequence[str], publishes: bool) -> None:
        self.name = name
        self.port = free_port()
        self.direct = f"http://127.0.0.1:{self.port}"
        self.front: Proxy | None = None
        self.broker: Proxy | None = None
        self.publishes = publishes
        self.options = list(options)
        self.child: Child | None = None
        self._stand = stand
        self._url = ""

    @property
    def url(self) -> str:
        return self._url or (f"http://127.0.0.1:{self.front.port}" if self.front else self.direct)

    def call_yourself(self, url: str) -> None:
        """From the next start on it claims to be ``url``."""
        self._url = url

    async def start(self) -> None:
        """Start it, the first time or again with an empty cache; returns when it listens."""
        stand = self._stand
        options = ["--port", str(self.port), "--advertise-url", self.url, *self.options]
        if self.publishes:
            plane = stand.plane.url(self.broker.port if self.broker else 0)
            options += ["--multimodal-embedding-cache-publisher", "--event-plane", plane]
        else:
            options += ["--encoder-register-urls", stand.router.base]
        self.child = stand.processes.start(self.name, ["fullhit.lab.mock_encoder", *options])
        await self.child.json_line()

    def kill(self) -> None:
        assert self.child is not None
        self.child.kill()

    def pause(self) -> None:
        assert self.child is not None
        self.child.signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.child is not None
        self.child.signal(signal.SIGCONT)

    async def held(self) -> list[str]:
        """What it says itself that it holds."""
        keys: list[str] = await fetch_json(f"{self.direct}/mock/cache")
        return keys

    async def fill(self, keys: int, seed: int = 0) -> None:
        await _post(f"{self.direct}/mock/fill", {"keys": keys, "seed": seed})


class Router:
    """`fullhit serve` at fixed addresses."""

    def __init__(self, stand: Stand, options: Sequence[str]) -> None:
        self.base = f"http://127.0.0.1:{free_port()}"
        self.admin = f"http://127.0.0.1:{free_port()}"
        self.broker: Proxy | None = None
        self.options = list(options)
        self.child: Child | None = None
        self._stand = stand

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    async def start(self) -> None:
        listen, admin = self.base.removeprefix("http://"), self.admin.removeprefix("http://")
        plane = self._stand.plane.url(self.broker.port if self.broker else 0)
        addresses = ["--listen", listen, "--admin-listen", admin, "--event-plane", plane]
        command = ["fullhit", "serve", "--log-format", "json", "--log-decisions", "errors", *addresses, *self.options]
        self.child = self._stand.processes.start("router", command)
        await self.child.answers(f"{self.base}/health")

    def kill(self) -> None:
        assert self.child is not None
        self.child.kill()

    def pause(self) -> None:
        assert self.child is not None
        self.child.signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.child is not None
        self.child.signal(signal.SIGCONT)

    async def workers(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in await fetch_json(f"{self.admin}/workers")}

    async def worker(self, encoder: Encoder) -> dict[str, Any]:
        """Its row of ``/workers``; empty when it is not known."""
        return (await self.workers()).get(encoder.url, {})

    async def plane_connected(self) -> bool:
        try:
            return bool((await fetch_json(f"{self.admin}/readyz"))["event_plane"]["connected"])
        except urllib.error.HTTPError as refusal:  # 503: unready, which is told in the same form
            return bool(json.load(refusal)["event_plane"]["connected"])

    async def metric(self, name: str, **labels: str) -> float:
        """The sum over the series of this name with these labels."""

        def read() -> str:
            with urllib.request.urlopen(f"{self.admin}/metrics", timeout=30) as reply:
                return str(reply.read().decode())

        total = 0.0
        for line in (await asyncio.to_thread(read)).splitlines():
            found = re.match(rf"{name}(?:\{{(.*)\}})? (\S+)$", line)
            if found and all(f'{label}="{value}"' in (found[1] or "") for label, value in labels.items()):
                total += float(found[2])
        return total

    async def believes(self, keys: Sequence[str], encoder: Encoder) -> bool:
        """Whether it would say of each key, without a doubt, that this encoder holds it."""
        for at in range(0, len(keys), ASK):
            body = {"keys": list(keys[at : at + ASK]), "dry_run": True}
            holders = (await _post(f"{self.admin}/select", body))["decision"]["holders"]
            if not all(encoder.url in row["workers"] and encoder.url not in row["doubtful"] for row in holders):
                return False
        return True

    def vitals(self) -> Vitals:
        files = len(os.listdir(f"/proc/{self.pid}/fd"))
        with open(f"/proc/{self.pid}/status") as status:
            kilobytes = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
        return Vitals(files, kilobytes / 1024)


class Stand:
    """``async with Stand(...)``; leaving it ends every process."""

    def __init__(self, make_plane: Callable[[Supervisor], Plane]) -> None:
        self.processes = Supervisor()
        self.plane = make_plane(self.processes)
        self.router = Router(self, [])
        self.encoders: list[Encoder] = []
        self._proxies = AsyncExitStack()

    async def __aenter__(self) -> Stand:
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self.processes.children:
            child.signal(signal.SIGCONT)  # a stopped process does not hear a SIGTERM
            child.signal(signal.SIGKILL)
        self.processes.close()
        await self._proxies.aclose()

    def encoder(self, *options: str, publishes: bool = True) -> Encoder:
        """One more encoder, not started yet."""
        encoder = Encoder(self, f"encoder-{len(self.encoders)}", options, publishes)
        self.encoders.append(encoder)
        return encoder

    async def proxy(self, target: int, *, receive_buffer: int = 0) -> Proxy:
        return await self._proxies.enter_async_context(Proxy(target, receive_buffer=receive_buffer))

    async def start(self) -> None:
        """Broker, then router and encoders beside each other; returns when the router trusts every encoder."""
        await self.plane.start()
        await asyncio.gather(self.router.start(), *(encoder.start() for encoder in self.encoders))
        await eventually(self.all_ready, "every encoder ready")

    async def all_ready(self) -> bool:
        rows = await self.router.workers()
        return all(
            rows.get(encoder.url, {}).get("state") == "ready"
            and (not encoder.publishes or (rows[encoder.url]["publishing"] and not rows[encoder.url]["doubtful"]))
            for encoder in self.encoders
        )

    async def agrees(self) -> str:
        """Empty when the router's index is, key for key, what every publishing encoder says that it holds; else what
        is not. As many keys, and each key of the encoder among them: the sets are equal."""
        for encoder in self.encoders:
            if not encoder.publishes:
                continue
            keys = await encoder.held()
            row = await self.router.worker(encoder)
            if row.get("state") != "ready" or row["doubtful"] or not row["publishing"]:
                return f"{encoder.name} is {row.get('state')}, doubtful: {row.get('doubtful')}, {row.get('stream')}"
            if row["keys"] != len(keys):
                return f"{encoder.name}: {row['keys']} keys in the index, {len(keys)} in its cache"
            if not await self.router.believes(keys, encoder):
                return f"{encoder.name}: not every key of its cache is in the index"
        return ""

    async def calm(self) -> str:
        """Empty when nothing is in flight or queued, else what is."""
        for id, row in (await self.router.workers()).items():
            if row["inflight_requests"] or row["encoding_requests"]:
                return f"{row['inflight_requests']} in flight, {row['encoding_requests']} encoding at {id}"
        waiting = await self.router.metric("fullhit_queue_depth")
        return f"{waiting:g} queued" if waiting else ""


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, limit: float = LIMIT) -> float:
    """Wait for a condition; the seconds it took. What cannot be asked just now is not so. Raises NotInTime."""
    began = time.monotonic()
    while True:
        try:
            if await condition():
                return time.monotonic() - began
        except (OSError, ValueError):
            pass
        if time.monotonic() - began > limit:
            raise NotInTime(f"{what}: not within {limit:g} s")
        await asyncio.sleep(0.05)


async def _post(url: str, body: object) -> Any:
    def post() -> Any:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read())

    return await asyncio.to_thread(post)
