"""Steady requests of repeated pictures, as a language server makes them, and who is to blame for each that failed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fullhit.lab.embedding import mock_embedding
from fullhit.lab.images import PictureSize, data_uri, draw_jpeg
from fullhit.lab.language_server import LanguageServerSettings, MockLanguageServer, RequestFailed

__all__ = ["Failure", "Traffic", "draw"]

ALIASES = 4
STREAMS = 4
PAUSE = 0.05
"""Seconds between two requests of one stream: steady, and not so many that a small machine is busy with them alone."""
PATIENCE = 60.0


class Failure(NamedTuple):
    """A request that failed: when it began and ended (monotonic), how many pictures it had, and what was said."""

    began: float
    ended: float
    pictures: int
    text: str


def draw(count: int) -> list[bytes]:
    """So many small pictures, all different."""
    return [draw_jpeg(number, PictureSize(64, 48)) for number in range(count)]


class Traffic:
    """``async with Traffic(base, pictures) as traffic``: runs in the background from ``go`` to ``rest``.

    Each request has 1 to ``most`` pictures, drawn at random with a bias to the first ones, over path-prefixed aliases,
    so that each picture is a part of its own. What comes back must be the embeddings of these pictures, in this order,
    of ``embedding_kb`` each.
    """

    def __init__(
        self, base: str, pictures: Sequence[bytes], embedding_kb: int, *, most: int = 3, seed: int = 1
    ) -> None:
        urls = tuple(f"{base}/v{index}" for index in range(ALIASES))
        settings = LanguageServerSettings(urls, receive_timeout=PATIENCE, http_timeout=PATIENCE)
        self.server = MockLanguageServer(settings, seed=seed)
        self.begun = self.done = 0
        self.failures: list[Failure] = []
        self.reasons: Counter[str] = Counter()
        self._pictures = [data_uri(picture) for picture in pictures]
        self._embeddings = [mock_embedding(picture, embedding_kb) for picture in pictures]
        self._most = most
        self._rng = random.Random(seed)
        self._running: list[asyncio.Task[None]] = []
        self._resting = False

    async def __aenter__(self) -> Traffic:
        await self.server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.server.__aexit__(None, None, None)

    def go(self) -> None:
        self._resting = False
        self._running = [asyncio.create_task(self._stream()) for _ in range(STREAMS)]

    async def rest(self) -> None:
        """Begin nothing new, and wait until what was begun is over."""
        self._resting = True
        await asyncio.gather(*self._running)
        self._running = []

    async def more(self, count: int) -> None:
        """Wait until so many more requests are over."""
        wanted = self.done + count
        async with asyncio.timeout(2 * PATIENCE):
            while self.done < wanted:  # noqa: ASYNC110 - the counter is all there is to wait for
                await asyncio.sleep(0.02)

    async def _stream(self) -> None:
        while not self._resting:
            count = self._rng.randint(1, self._most)
            # The least of two draws: some pictures are seen often, others return when they have been evicted.
            chosen = list({min(self._rng.randrange(len(self._pictures)) for _ in range(2)) for _ in range(count)})
            began = time.monotonic()
            self.begun += 1
            try:
                result = await self.server.encode([self._pictures[n] for n in chosen])
                self.reasons.update(result.reasons)
                if result.embedding != b"".join(self._embeddings[n] for n in chosen):
                    self.failures.append(Failure(began, time.monotonic(), len(chosen), "wrong embeddings"))
            except RequestFailed as failure:
                self.failures.append(Failure(began, time.monotonic(), len(chosen), str(failure)))
            self.done += 1
            await asyncio.sleep(PAUSE)
