"""What a case is: a fault under traffic, and then the same questions for all of them.

A case starts its stand with `Run.begin`, does the harm inside ``async with run.fault()``, and may look at more. Then
`Run.finish` asks: did a request fail that need not have? Does the router's index become, key for key, what the
encoders hold, and in what time? Do requests work as before? Is nothing left in flight, and does the router use no more
files and memory than before?
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from .stand import Encoder, NotInTime, Stand, Vitals, eventually
from .traffic import Failure, Traffic

__all__ = ["CASES", "Case", "CaseFailed", "Run", "case"]

PICTURES = 60
# Two encoders of this size hold most of the pictures, not all: something is evicted all the time.
CACHE_KEYS = 24
EMBEDDING_KB = 4
WARM_UP, AFTERWARDS = 60, 25
# Files: connections to encoders that are kept for a moment, and the listener's own. Memory: allocators keep what a
# burst took, and code that runs for the first time is loaded.
SPARE_FILES, SPARE_MB = 6, 16.0
ENCODER_OPTIONS = (
    "--vit-ms", "2", "--embedding-kb", str(EMBEDDING_KB),
    "--multimodal-embedding-cache-capacity-gb", f"{CACHE_KEYS * EMBEDDING_KB * 1024 / 1024**3:.9f}",
)  # fmt: skip


Link = Literal["router-broker", "encoder-broker", "router-encoder"]


class CaseFailed(Exception):
    """Something was not as it must be."""


@dataclass
class Run:
    """One case at work. The figures go into the table."""

    stand: Stand
    pictures: Sequence[bytes]
    limit: float
    seconds: float = 0.0
    during: int = 0
    avoidable: int = 0
    excused: int = 0
    converged: float | None = None
    growth: Vitals | None = None
    note: str = ""
    traffic: Traffic | None = None
    _excuses: list[Callable[[Failure], bool]] = field(default_factory=list)
    _before: Vitals | None = None
    _healed_at: float = 0.0

    async def begin(
        self, encoders: int = 2, *options: str, most: int = 3, bad: Sequence[Link] = (), receive_buffer: int = 0
    ) -> None:
        """Everything up and trusted, traffic running, caches warm. ``options`` are more for each encoder; ``most``:
        pictures in a request; ``bad``: links of the first encoder, or of the router, that lead through a proxy."""
        stand = self.stand
        for _ in range(encoders):
            stand.encoder(*ENCODER_OPTIONS, *options)
        first = stand.encoders[0]
        if "router-broker" in bad:
            stand.router.broker = await stand.proxy(stand.plane.port, receive_buffer=receive_buffer)
        if "encoder-broker" in bad:
            first.broker = await stand.proxy(stand.plane.port)
        if "router-encoder" in bad:
            first.front = await stand.proxy(first.port)
        await stand.start()
        files = stand.router.vitals().files
        self.traffic = await Traffic(stand.router.base, self.pictures, EMBEDDING_KB, most=most).__aenter__()
        self.traffic.go()
        await self.traffic.more(WARM_UP)
        self._before = Vitals(files, stand.router.vitals().rss)
        self.expect(not self.traffic.failures, f"failed before any fault: {self.traffic.failures[:1]}")

    @property
    def load(self) -> Traffic:
        assert self.traffic is not None, "begin() comes first"
        return self.traffic

    @asynccontextmanager
    async def fault(self) -> AsyncIterator[None]:
        """The harm is done inside; on leaving it is healed, and the time to converge begins."""
        before = self.load.done
        yield
        self._healed_at = time.monotonic()
        self.during = self.load.begun - before

    def excuse(self, excused: Callable[[Failure], bool]) -> None:
        """Failures of this kind could not be avoided, by the protocol."""
        self._excuses.append(excused)

    def expect(self, condition: object, what: str) -> None:
        if not condition:
            raise CaseFailed(what)

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, limit: float = 60.0) -> None:
        try:
            await eventually(condition, what, limit)
        except NotInTime as late:
            raise CaseFailed(str(late)) from None

    async def until_doubted(self, encoder: Encoder) -> None:
        async def doubted() -> bool:
            return bool((await self.stand.router.worker(encoder))["doubtful"])

        await self.until(doubted, "the encoder that is not heard in doubt")

    async def until_plane_lost(self) -> None:
        async def lost() -> bool:
            return not await self.stand.router.plane_connected()

        await self.until(lost, "the loss of the broker noticed")

    async def converge(self) -> None:
        """Let the traffic rest until the index is right. `finish` does so where the case has not. Raises CaseFailed."""
        await self.load.rest()
        await self._settle("agree with the caches", self.stand.agrees, self._healed_at + self.limit)
        self.converged = time.monotonic() - self._healed_at

    async def finish(self) -> None:
        """All that every case has to show at its end. Raises CaseFailed."""
        traffic, stand = self.load, self.stand
        if self.converged is None:
            await self.converge()
        traffic.go()
        await traffic.more(AFTERWARDS)
        await traffic.rest()
        await self._settle("agree with the caches again", stand.agrees, time.monotonic() + 30)
        await self._settle("have nothing in flight", stand.calm, time.monotonic() + 30)
        before = self._before
        assert before is not None

        async def lean() -> str:
            now = stand.router.vitals()
            self.growth = Vitals(now.files - before.files, now.rss - before.rss)
            if self.growth.files > SPARE_FILES:
                return f"{self.growth.files} files more than before"
            return f"{self.growth.rss:.0f} MB more than before" if self.growth.rss > SPARE_MB else ""

        await self._settle("use what it used before", lean, time.monotonic() + 30)
        for failure in traffic.failures:
            if any(excused(failure) for excused in self._excuses):
                self.excused += 1
            else:
                self.avoidable += 1
                self.note = failure.text
        self.expect(not self.avoidable, f"{self.avoidable} requests failed that need not have: {self.note}")

    async def _settle(self, what: str, problem: Callable[[], Awaitable[str]], deadline: float) -> None:
        while True:
            try:
                text = await problem()
            except (OSError, ValueError) as error:
                text = f"{type(error).__name__} {error}"
            if not text:
                return
            if time.monotonic() > deadline:
                raise CaseFailed(f"the router does not {what}: {text}")
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        if self.traffic is not None:
            await self.traffic.__aexit__(None, None, None)


Body = Callable[[Run], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """``unavoidable``: which client errors the protocol lets nobody avoid, in words. ``limit``: seconds in which the
    index must be right again. ``planes``: kinds of broker it can be played over; empty: all."""

    name: str
    body: Body
    unavoidable: str
    limit: float
    planes: tuple[str, ...]


CASES: list[Case] = []


def case(
    name: str, *, unavoidable: str = "none", limit: float = 30.0, planes: tuple[str, ...] = ()
) -> Callable[[Body], Body]:
    """Enter a coroutine into `CASES`; they run in the order in which they are entered."""

    def enter(body: Body) -> Body:
        CASES.append(Case(name, body, unavoidable, limit, planes))
        return body

    return enter
