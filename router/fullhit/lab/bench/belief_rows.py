"""Belief against truth: how often a promised full hit is none, and how soon a restarted router knows what it knew.

Lost deltas: the demo's chats over mock encoders, each chat played twice; the caches hold little more than the pictures
that are in use, so that something is evicted all the time and wanted again later. One delta in ten never arrives. A
wrong full hit is a request which the router sent as a full hit and of which the encoder's reply (``x-fullhit-cache``)
says otherwise; the router counts both. Beside it the same without heartbeats, where only a gap in the numbers shows a
loss; with no means to notice at all, neither heartbeats nor gaps nor snapshots; and without any loss, where what is
left are evictions on the way. Hits are what encoders had, of all requests: doubt costs some of those.

Restart: requests of one picture, all of which some encoder holds; the router is killed and started again. Its hit rate
counts what encoders had, not what it believed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
import urllib.request
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from fullhit.lab.images import LabExtraMissing, PictureSize
from fullhit.lab.processes import Child, ChildFailed, Supervisor, free_port, start_nats
from fullhit.lab.workload import SlidingWindow

from .table import Row

__all__ = ["rows"]

COMMAND = "fullhit bench --only belief"
SMALL = PictureSize(64, 48)
EMBEDDING_KB = 4
ENCODERS = 4
LOSS = "0.1"
# Of the pictures that are in use at one moment, so much fits into all caches together.
ROOM = 1.3
# How often each chat is played from its beginning: the second time, its first pictures have been evicted.
OPENED = 2
PAUSE = 0.2
"""Mean seconds between two turns of a chat, as in the demo."""
STREAMS = 6
STEADY = 200
"""Requests over which a hit rate is taken, before the restart and after it."""
PATIENCE = 60.0


class Arm(NamedTuple):
    """One way to lose deltas."""

    name: str
    options: tuple[str, ...]
    budget: float | None


ARMS = (
    Arm("10 % of deltas lost, heartbeats 1 s", ("--drop-deltas", LOSS), 1.0),
    Arm("10 % lost, no heartbeats", ("--drop-deltas", LOSS, "--heartbeat-interval", "3600"), None),
    Arm("10 % lost, and no way to notice", ("--drop-deltas", LOSS, "--hide-losses"), None),
    Arm("nothing lost", (), None),
)


class Shares(NamedTuple):
    """In percent: full hits that were none, of those promised; and hits, of all requests."""

    wrong: float
    hits: float


def rows(args: argparse.Namespace) -> list[Row]:
    """All rows of this part."""
    from . import Skip

    try:
        import PIL  # noqa: F401
        import zmq  # noqa: F401
    except ImportError as missing:
        raise Skip(str(LabExtraMissing(missing.name or "Pillow"))) from None
    load = SlidingWindow(8, 6) if args.quick else SlidingWindow()
    rounds = 1 if args.quick else args.rounds
    shares: dict[str, list[Shares]] = {arm.name: [] for arm in ARMS}
    warm: list[Restart] = []
    try:
        for turn in range(rounds):
            for arm in ARMS:
                shares[arm.name].append(asyncio.run(_lossy_chats(arm, load, turn)))
            warm.append(asyncio.run(_restart(turn)))
    except ChildFailed as problem:
        raise Skip(str(problem)) from problem
    out = []
    for arm in ARMS:
        wrong, name = median(share.wrong for share in shares[arm.name]), f"{arm.name}: wrong full hits"
        if arm.budget is None:
            out.append(Row.info(name, wrong, "%", COMMAND))
        else:
            out.append(Row.at_most(name, wrong, "%", arm.budget, COMMAND))
        hits = median(share.hits for share in shares[arm.name])
        out.append(Row.info(f"{arm.name}: hits of all requests", hits, "%", COMMAND))
    rate = median(restart.rate for restart in warm)
    name = f"router killed: to 99 % of the steady hit rate ({100 * rate:.0f} %)"
    out.append(Row.at_most(f"{name}, from its start", median(r.warm for r in warm), "s", 5.0, COMMAND))
    out.append(Row.info("of which until it listens", median(r.listening for r in warm), "s", COMMAND))
    return out


@dataclass(slots=True)
class _Stand:
    """A broker, a router that knows its encoders from the start, and these."""

    processes: Supervisor
    plane: str = ""
    base: str = field(default_factory=lambda: f"http://127.0.0.1:{free_port()}")
    admin: str = field(default_factory=lambda: f"http://127.0.0.1:{free_port()}")
    encoders: list[str] = field(default_factory=list)
    router: Child | None = None

    async def start(self, keys: int, options: Sequence[str]) -> None:
        """``keys``: how many embeddings each encoder's cache holds."""
        _, self.plane = await start_nats(self.processes)
        ports = [free_port() for _ in range(ENCODERS)]
        self.encoders = [f"http://127.0.0.1:{port}" for port in ports]
        await self.start_router()
        capacity = f"{keys * EMBEDDING_KB * 1024 / 1024**3:.9f}"
        common = ["--vit-ms", "2", "--embedding-kb", str(EMBEDDING_KB), "--event-plane", self.plane]
        common += ["--multimodal-embedding-cache-publisher", "--multimodal-embedding-cache-capacity-gb", capacity]
        children = [
            self.processes.start(
                "encoder", ["fullhit.lab.mock_encoder", *common, "--port", str(port), "--seed", str(n), *options]
            )
            for n, port in enumerate(ports)
        ]
        for child in children:
            await child.json_line()
        await self.all_ready()

    async def start_router(self) -> None:
        options = ["--listen", self.base.removeprefix("http://"), "--admin-listen", self.admin.removeprefix("http://")]
        options += ["--event-plane", self.plane, "--log-decisions", "errors"]
        for url in self.encoders:
            options += ["--encoder-url", url]
        self.router = self.processes.start("router", ["fullhit", "serve", *options])
        await self.router.answers(f"{self.base}/health")

    async def all_ready(self) -> None:
        assert self.router is not None

        async def up() -> bool:
            return await self.metric("fullhit_worker_up") == ENCODERS

        await self.router.until(up, "routing to all encoders")

    async def metric(self, name: str, labels: str = "") -> float:
        """The sum over the series of this name whose labels match the pattern."""

        def read() -> str:
            with urllib.request.urlopen(f"{self.admin}/metrics", timeout=30) as reply:
                return str(reply.read().decode())

        lines = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", await asyncio.to_thread(read), re.M)
        return sum(float(value) for text, value in lines if re.search(labels, text))


async def _lossy_chats(arm: Arm, load: SlidingWindow, seed: int) -> Shares:
    from fullhit.lab.images import data_uri, draw_jpeg
    from fullhit.lab.language_server import LanguageServerSettings, MockLanguageServer, RequestFailed

    pictures: dict[int, str] = {}
    async with Supervisor() as processes:
        stand = _Stand(processes)
        in_use = load.users * load.window
        await stand.start(max(2, int(ROOM * in_use / ENCODERS)), arm.options)
        aliases = tuple(f"{stand.base}/v{index}" for index in range(load.window))
        async with MockLanguageServer(LanguageServerSettings(aliases), seed=seed) as server:

            async def chat(user: int) -> None:
                for turn, pause in enumerate(OPENED * load.pauses(user, PAUSE)):
                    turn %= load.turns
                    await asyncio.sleep(pause)
                    for number in load.pictures(user, turn):
                        if number not in pictures:
                            pictures[number] = data_uri(draw_jpeg(number, SMALL))
                    try:
                        await server.encode([pictures[number] for number in load.pictures(user, turn)])
                    except RequestFailed as failure:
                        raise ChildFailed(f"{arm.name}: {failure}") from None

            await asyncio.gather(*(chat(user) for user in range(load.users)))
        promised = await stand.metric("fullhit_cache_reports_total", 'predicted="full_hit"')
        kept = await stand.metric("fullhit_cache_reports_total", 'delivered="hit",predicted="full_hit"')
        hits = await stand.metric("fullhit_cache_reports_total", 'delivered="hit"')
        reports = await stand.metric("fullhit_cache_reports_total")
    if not promised:
        raise ChildFailed(f"{arm.name}: not one full hit was promised")
    return Shares(100 * (promised - kept) / promised, 100 * hits / reports)


class Restart(NamedTuple):
    rate: float
    """The steady hit rate, 0 to 1."""
    listening: float
    warm: float
    """Seconds from the start of the process until it listens, and until the hit rate is as it was."""


async def _restart(seed: int) -> Restart:
    from fullhit.lab.images import data_uri, draw_jpeg
    from fullhit.lab.language_server import LanguageServerSettings, MockLanguageServer, RequestFailed

    pictures = [data_uri(draw_jpeg(number, SMALL)) for number in range(120)]
    async with Supervisor() as processes:
        stand = _Stand(processes)
        await stand.start(len(pictures), ())
        settings = LanguageServerSettings((stand.base,), receive_timeout=PATIENCE, http_timeout=PATIENCE)
        async with MockLanguageServer(settings, seed=seed) as server:
            rng = random.Random(seed)
            answered: deque[tuple[float, bool]] = deque(maxlen=200_000)  # when begun, and whether it was a hit

            async def stream() -> None:
                while True:
                    began = time.perf_counter()
                    try:
                        [reply] = (await server.encode([rng.choice(pictures)])).replies
                    except RequestFailed:
                        await asyncio.sleep(0.01)  # nobody listens just now
                    else:
                        answered.append((began, reply.headers.get("x-fullhit-cache") == "hit"))

            for picture in pictures:
                await server.encode([picture])
            streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
            try:
                await _answers(answered, STEADY)
                steady = _rate([hit for _, hit in answered][-STEADY:])
                assert stand.router is not None
                stand.router.kill()
                answered.clear()
                began = time.perf_counter()
                await stand.start_router()
                listening = time.perf_counter() - began
                deadline = time.perf_counter() + PATIENCE
                while (warm := _regained(answered, 0.99 * steady)) is None:
                    if time.perf_counter() > deadline:
                        raise ChildFailed(f"the hit rate did not come back within {PATIENCE:g} s")
                    await asyncio.sleep(0.1)
            finally:
                for task in streams:
                    task.cancel()
                await asyncio.gather(*streams, return_exceptions=True)
    return Restart(steady, listening, max(warm - began, listening))


def _regained(answered: Sequence[tuple[float, bool]], wanted: float) -> float | None:
    """When the first of the earliest ``STEADY`` requests in a row with this hit rate began; None if there are none."""
    seen = sorted(answered)
    hits = sum(hit for _, hit in seen[:STEADY])
    for first in range(len(seen) - STEADY + 1):
        if hits >= wanted * STEADY:
            return seen[first][0]
        if first + STEADY < len(seen):
            hits += seen[first + STEADY][1] - seen[first][1]
    return None


def _rate(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits)


async def _answers(answered: Sequence[object], count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(answered) < count:  # noqa: ASYNC110 - the counter is all there is to wait for
            await asyncio.sleep(0.02)
