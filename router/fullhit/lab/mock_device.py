"""Mock encoder, first half: media in, embeddings out, a real cache in between, and no GPU.

What is real: the media is fetched or unpacked and every pixel is decoded; the cache is the one of
``fullhit_publisher``, keyed per item by the key the router computes, and evicts by bytes. What is imitated: the
vision transformer is a wait. A device runs one picture at a time, as a GPU under a single encoder does, so waits
queue up; that queue is what a router can shorten.

The cache is asked first and a hit skips fetching, decoding and the wait (Dynamo's encode worker does so too; stock
SGLang would still decode). An item without a key is encoded every time.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from fullhit.lab.embedding import mock_embedding
from fullhit.lab.images import Undecodable, decode_picture, from_base64
from fullhit_publisher.cache import EmbeddingCache
from fullhit_publisher.keys import item_key, key_text

__all__ = ["DeviceSettings", "DeviceStats", "MockDevice"]

# Threads that fetch and decode, as SGLang's encoder has by default.
LOADERS = 4
# Largest file that is fetched, bytes, and how long it may take, seconds.
MAX_FETCH_BYTES = 64 * 1024 * 1024
FETCH_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """``vit_seconds`` per image on this device (already slower for a CPU), ``embedding_kb`` KiB per item."""

    vit_seconds: float = 0.025
    embedding_kb: int = 64


@dataclass(slots=True)
class DeviceStats:
    """Counts since start. ``images`` = ``vit_runs`` + ``hits`` + those that failed to load."""

    images: int = 0
    vit_runs: int = 0
    hits: int = 0
    vit_seconds: float = 0.0


class Encoded(NamedTuple):
    """The embeddings of a request's items, in order, and how many of them came from the cache."""

    embeddings: list[bytes]
    held: int

    @property
    def delivered(self) -> str:
        """What ``x-fullhit-cache`` says of it."""
        return "hit" if self.held == len(self.embeddings) else "partial" if self.held else "miss"


class MockDevice:
    """Encodes items one after the other; share one cache between all requests."""

    def __init__(self, cache: EmbeddingCache[bytes], settings: DeviceSettings) -> None:
        self.cache = cache
        self.settings = settings
        self.stats = DeviceStats()
        self.forgetful = False
        """Encode anew what the cache holds."""
        self._lock = asyncio.Lock()
        self._loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="mock-loader")
        self._session: aiohttp.ClientSession | None = None

    async def encode(
        self, items: Sequence[object], modality: str, on_loaded: Callable[[], None] = lambda: None
    ) -> Encoded:
        """One embedding per item, in order. Raises Undecodable when one cannot be fetched or decoded.

        ``on_loaded`` is called when all are, before the first one is encoded.
        """
        keys = [None if key is None else key_text(key) for key in (item_key(item, modality) for item in items)]
        self.stats.images += len(items)
        found = [None if key is None else self._cached(key) for key in keys]
        missing = [index for index, embedding in enumerate(found) if embedding is None]
        contents = await asyncio.gather(*(self._load(items[index], modality) for index in missing))
        loaded = dict(zip(missing, contents, strict=True))
        on_loaded()
        runs = 0
        result: list[bytes] = []
        for index, embedding in enumerate(found):
            if embedding is None:
                embedding, ran = await self._run(keys[index], loaded[index])
                runs += ran
            result.append(embedding)
        return Encoded(result, len(result) - runs)

    async def close(self) -> None:
        self._loaders.shutdown(wait=False, cancel_futures=True)
        if self._session is not None:
            await self._session.close()

    def _cached(self, key: str) -> bytes | None:
        embedding = self.cache.get(key) if key in self.cache and not self.forgetful else None
        if embedding is not None:
            self.stats.hits += 1
        return embedding

    async def _run(self, key: str | None, content: bytes) -> tuple[bytes, bool]:
        """The embedding, and whether the ViT ran for it."""
        async with self._lock:
            # Another request may have encoded the same picture while this one stood in the queue.
            embedding = None if key is None else self._cached(key)
            if embedding is not None:
                return embedding, False
            await asyncio.sleep(self.settings.vit_seconds)
            self.stats.vit_runs += 1
            self.stats.vit_seconds += self.settings.vit_seconds
            embedding = mock_embedding(content, self.settings.embedding_kb)
            if key is not None:
                self.cache.put(key, embedding)
            return embedding, True

    async def _load(self, item: object, modality: str) -> bytes:
        if isinstance(item, Mapping) and item.get("url") is None:
            # SGLang hands such dicts (precomputed features) to the processor as they are.
            return msgspec.json.encode(item, order="deterministic")
        url = item.get("url") if isinstance(item, Mapping) else item
        if not isinstance(url, str):
            raise Undecodable(f"a media item must be a URL or an object with one, not {type(item).__name__}")
        if url[:7].lower() == "http://" or url[:8].lower() == "https://":
            content = await self._fetch(url)
            unpack = False
        elif url.startswith(("/", "file:")):
            raise Undecodable("a mock encoder reads no local files")
        else:
            content, unpack = b"", True
        expected = item.get("content_hash") if isinstance(item, Mapping) else None

        def prepare() -> bytes:
            raw = from_base64(url) if unpack else content
            if isinstance(expected, str) and expected != f"sha256:{hashlib.sha256(raw).hexdigest()}":
                raise Undecodable("content_hash does not match the media")
            if modality == "IMAGE":
                decode_picture(raw)
            return raw

        return await asyncio.get_running_loop().run_in_executor(self._loaders, prepare)

    async def _fetch(self, url: str) -> bytes:
        if not _on_loopback(url):
            raise Undecodable(
                f"a mock encoder fetches from this machine only (127.0.0.0/8, ::1, localhost): {url[:200]}"
            )
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=FETCH_TIMEOUT))
        try:
            async with self._session.get(url, allow_redirects=False) as reply:
                if reply.status != 200:
                    raise Undecodable(f"{url[:200]} answered {reply.status}")
                content = await reply.content.read(MAX_FETCH_BYTES + 1)
                while len(content) <= MAX_FETCH_BYTES and (more := await reply.content.read(MAX_FETCH_BYTES)):
                    content += more
        except (aiohttp.ClientError, TimeoutError, ValueError) as problem:
            if isinstance(problem, Undecodable):
                raise
            raise Undecodable(f"cannot fetch {url[:200]}: {type(problem).__name__} {problem}") from None
        if len(content) > MAX_FETCH_BYTES:
            raise Undecodable(f"{url[:200]} is larger than {MAX_FETCH_BYTES} bytes")
        return content


def _on_loopback(url: str) -> bool:
    try:
        host: Any = urlsplit(url).hostname
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
