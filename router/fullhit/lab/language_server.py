"""A client that does to encoders what SGLang's language server does: the caller of every lab run and many tests.

Theory of operation, after the 0.5.23 receiver (and what older ones share with it):

1. *Split.* The URL indices are shuffled; each gets ``items // urls``, the first few of the shuffle one more. One
   part per (modality, URL with at least one item). Slices and part numbers go in URL order, so that parts in the
   order of ``part_idx`` restore the prompt. No load, no health, no cache is looked at: with several encoder URLs
   this *is* the random split that Fullhit replaces, with path-prefixed aliases of one router it makes parts of one
   picture each.
2. *Dispatch.* Every ``/encode`` of a request leaves at once on a client session made for this request.
   ``zmq_to_scheduler``: meanwhile each tensor-parallel rank registers its receive address for each part; one PULL
   socket per rank serves all requests. ``zmq_to_tokenizer``: one fresh PULL socket per request, its port is in
   ``/encode``. ``mooncake``: each rank asks for the sizes of a part, then calls ``/send``; only a completion
   without payload arrives (nothing in the lab does RDMA).
3. *Aggregate.* ``num_parts`` and ``part_idx`` are believed as the encoder echoes them. Parts of unknown requests
   are dropped. A second copy of a part while the request is still collecting fails the request; afterwards it is
   dropped with a count.
4. *Fail.* Any ``/encode`` that is not 200, any registration from 400 up, an error part or silence for
   ``receive_timeout`` fails the request. With ``zmq_to_scheduler`` and a text prompt the 0.5.23 scheduler does not
   survive that; the mock does, but says so (``RequestFailed.would_stop_server``).
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self, get_args

import aiohttp

from fullhit.lab.aggregation import MODALITIES, Aggregation, Part, RequestFailed, split
from fullhit.lab.embedding import PART_MARK, PartHeader, base_request_id, decode_header
from fullhit.lab.images import LabExtraMissing

try:
    import zmq
    import zmq.asyncio
except ImportError:
    raise LabExtraMissing("pyzmq") from None

__all__ = [
    "Aggregation",
    "Backend",
    "EncodeReply",
    "EncodedRequest",
    "LanguageServerSettings",
    "MockLanguageServer",
    "Part",
    "RequestFailed",
    "split",
]

Backend = Literal["zmq_to_scheduler", "zmq_to_tokenizer", "mooncake"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# Headers of the router that are kept from a reply.
ROUTER_HEADERS = "x-fullhit-"


@dataclass(frozen=True, slots=True)
class LanguageServerSettings:
    """What of SGLang's server arguments matters here; times in seconds.

    ``encoder_urls`` as in ``--encoder-urls`` (path prefixes allowed), ``tp_size`` ranks which each want every part,
    ``receive_timeout`` is how long embeddings are waited for, ``http_timeout`` how long one call may take.
    ``register_first``: registrations leave before ``/encode``, as was seen now and then on real servers.
    """

    encoder_urls: tuple[str, ...]
    backend: Backend = "zmq_to_scheduler"
    tp_size: int = 1
    host: str = "127.0.0.1"
    receive_timeout: float = 180.0
    http_timeout: float = 1800.0
    register_first: bool = False

    def __post_init__(self) -> None:
        if not self.encoder_urls:
            raise ValueError("encoder_urls is empty: give at least one http://host:port[/prefix]")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {self.backend!r}")
        if self.tp_size < 1:
            raise ValueError(f"tp_size must be at least 1, not {self.tp_size}")


@dataclass(frozen=True, slots=True)
class EncodeReply:
    """How one ``/encode`` ended: ``headers`` holds the router's own (``x-fullhit-*``), ``seconds`` the whole call."""

    part: Part
    status: int
    headers: Mapping[str, str]
    seconds: float


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """A request whose embeddings are all there.

    ``embedding`` is one rank's bytes in prompt order (empty with mooncake), ``seconds`` from the call to the last
    part at the last rank, ``reasons`` the router's ``x-fullhit-reason`` per part (empty without a router).
    """

    rid: str
    parts: tuple[Part, ...]
    headers: tuple[PartHeader, ...]
    embedding: bytes
    seconds: float
    replies: tuple[EncodeReply, ...]

    @property
    def reasons(self) -> list[str]:
        return [reply.headers["x-fullhit-reason"] for reply in self.replies if "x-fullhit-reason" in reply.headers]


@dataclass(slots=True)
class _Waiting:
    """A request in collection: one aggregation per rank, one future for all."""

    rid: str
    ranks: list[Aggregation]
    done: asyncio.Future[float]

    def take(self, rank: int, header: PartHeader, payload: bytes) -> None:
        if self.done.done():
            return
        try:
            self.ranks[rank].add(header, payload)
        except RequestFailed as failure:
            self.done.set_exception(failure)
            return
        if all(aggregation.complete for aggregation in self.ranks):
            self.done.set_result(time.perf_counter())


@dataclass(slots=True)
class LanguageServerStats:
    """Counts since start: parts that belonged to no request in collection, and frames that were no part at all."""

    dropped_parts: int = 0
    garbage_frames: int = 0
    finished: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Sockets:
    context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)
    ports: list[int] = field(default_factory=list)
    readers: list[asyncio.Task[None]] = field(default_factory=list)


class MockLanguageServer:
    """Encodes media through ``encoder_urls`` as a ``--language-only`` server would; many requests at a time.

    >>> async with MockLanguageServer(LanguageServerSettings(("http://127.0.0.1:8780",))) as server:
    ...     result = await server.encode([data_uri(draw_jpeg(1))])
    """

    def __init__(self, settings: LanguageServerSettings, *, seed: int | None = None) -> None:
        self.settings = settings
        self.stats = LanguageServerStats()
        self._rng = random.Random(seed)
        self._waiting: dict[str, _Waiting] = {}
        self._sockets: _Sockets | None = None

    async def __aenter__(self) -> Self:
        self._sockets = _Sockets()
        if self.settings.backend != "zmq_to_tokenizer":
            for rank in range(self.settings.tp_size):
                port, reader = self._listen(rank)
                self._sockets.ports.append(port)
                self._sockets.readers.append(reader)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sockets, self._sockets = self._sockets, None
        if sockets is None:
            return
        await _cancel(sockets.readers)
        sockets.context.destroy(linger=0)

    async def encode(
        self,
        media: Sequence[object] | Mapping[str, Sequence[object]],
        *,
        rid: str | None = None,
    ) -> EncodedRequest:
        """One request: ``media`` is a list of images, or ``{modality: items}``; items as in ``mm_items``.

        Raises RequestFailed; ValueError for no media or an unknown modality.
        """
        if self._sockets is None:
            raise RuntimeError("use 'async with MockLanguageServer(...)' first")
        items = dict(media) if isinstance(media, Mapping) else {"IMAGE": media}
        unknown = set(items) - set(MODALITIES)
        if unknown or not any(items.values()):
            raise ValueError(f"unknown modality {sorted(unknown)}" if unknown else "a request needs at least one item")
        tokenizer = self.settings.backend == "zmq_to_tokenizer"
        # The tokenizer path makes its own id, so a client's id never reaches the encoder there.
        rid = uuid.uuid4().hex if tokenizer or rid is None else rid
        if rid in self._waiting:
            raise ValueError(f"request id {rid!r} is already in flight here")
        parts = split(items, len(self.settings.encoder_urls), self._rng)
        ranks = 1 if tokenizer else self.settings.tp_size
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        waiting = self._waiting[rid] = _Waiting(rid, [Aggregation(rid, fatal=self._fatal) for _ in range(ranks)], done)
        readers: list[asyncio.Task[None]] = []
        port = None
        if tokenizer:
            port, reader = self._listen(0)
            readers.append(reader)
        started = time.perf_counter()
        try:
            replies = await self._collect(waiting, parts, port)
            self.stats.finished += 1
        except BaseException:
            self.stats.failed += 1
            raise
        finally:
            del self._waiting[rid]
            await _cancel(readers)
        first = waiting.ranks[0]
        return EncodedRequest(rid, parts, first.headers(), first.embedding(), done.result() - started, replies)

    async def _collect(self, waiting: _Waiting, parts: tuple[Part, ...], port: int | None) -> tuple[EncodeReply, ...]:
        """Send everything, wait for the embeddings and all replies; the first failure ends it."""
        timeout = aiohttp.ClientTimeout(total=self.settings.http_timeout)
        tasks: list[asyncio.Task[Any]] = []
        async with aiohttp.ClientSession(timeout=timeout) as session:
            dispatch = [self._encode_part(session, waiting.rid, part, len(parts), port) for part in parts]
            follow: list[Coroutine[Any, Any, None]] = []
            if self.settings.backend == "zmq_to_scheduler":
                follow = [self._register(session, waiting.rid, part, rank) for part, rank in self._per_rank(parts)]
            elif self.settings.backend == "mooncake":
                follow = [self._pull(session, waiting.rid, part, rank) for part, rank in self._per_rank(parts)]
            try:
                if self.settings.register_first:
                    tasks += [asyncio.create_task(call) for call in follow]
                    await asyncio.sleep(0)
                encodes = [asyncio.create_task(call) for call in dispatch]
                tasks += encodes
                if not self.settings.register_first:
                    tasks += [asyncio.create_task(call) for call in follow]
                await self._first_failure(waiting, tasks)
                return tuple(task.result() for task in encodes)
            finally:
                await _cancel(tasks)
                if waiting.done.done() and not waiting.done.cancelled():
                    waiting.done.exception()  # seen: a late failure beside the one that is raised is no surprise

    async def _first_failure(self, waiting: _Waiting, tasks: Sequence[asyncio.Task[Any]]) -> None:
        everything: list[asyncio.Future[Any]] = [waiting.done, *tasks]
        done, pending = await asyncio.wait(
            everything, timeout=self.settings.receive_timeout, return_when=asyncio.FIRST_EXCEPTION
        )
        for outcome in done:
            outcome.result()
        if pending:
            got = [sorted(rank.parts) for rank in waiting.ranks]
            raise RequestFailed(
                waiting.rid,
                f"embeddings not complete after {self.settings.receive_timeout:g} s, parts per rank: {got}",
                408,
                would_stop_server=self._fatal,
            )

    @property
    def _fatal(self) -> bool:
        return self.settings.backend == "zmq_to_scheduler"

    def _per_rank(self, parts: Sequence[Part]) -> list[tuple[Part, int]]:
        return [(part, rank) for rank in range(self.settings.tp_size) for part in parts]

    async def _encode_part(
        self, session: aiohttp.ClientSession, rid: str, part: Part, num_parts: int, port: int | None
    ) -> EncodeReply:
        url = self.settings.encoder_urls[part.url_index]
        body = {
            "encoder_idx": part.url_index,
            "encoder_url": url,
            "mm_items": part.items,
            "num_parts": num_parts,
            "part_idx": part.part_idx,
            "req_id": f"{rid}{PART_MARK}{part.part_idx}",
            "modality": part.modality,
            "prefill_host": self.settings.host,
            "embedding_port": port,
            "time_stats_json": None,
        }
        started = time.perf_counter()
        status, headers, reply = await self._post(session, rid, f"{url}/encode", body)
        if status != 200:
            user_status = 503 if self.settings.backend == "zmq_to_tokenizer" else status
            message = f"encoder answered {status} for part {part.part_idx}: {_message(reply)}"
            raise RequestFailed(rid, message, user_status, would_stop_server=self._fatal)
        if self.settings.backend != "mooncake" and reply.strip() != b"null":
            raise RequestFailed(rid, f"/encode answered {reply[:80]!r} instead of null", 502)
        return EncodeReply(part, status, headers, time.perf_counter() - started)

    async def _register(self, session: aiohttp.ClientSession, rid: str, part: Part, rank: int) -> None:
        assert self._sockets is not None
        body = {
            "req_id": f"{rid}{PART_MARK}{part.part_idx}",
            "receive_count": self.settings.tp_size,
            "receive_url": f"{self.settings.host}:{self._sockets.ports[rank]}",
            "modality": part.modality,
        }
        url = f"{self.settings.encoder_urls[part.url_index]}/scheduler_receive_url"
        status, _, reply = await self._post(session, rid, url, body)
        if status >= 400:
            message = f"registration of part {part.part_idx} answered {status}: {_message(reply)}"
            raise RequestFailed(rid, message, 502, would_stop_server=self._fatal)

    async def _pull(self, session: aiohttp.ClientSession, rid: str, part: Part, rank: int) -> None:
        assert self._sockets is not None
        url = self.settings.encoder_urls[part.url_index]
        question = {"req_id": f"{rid}{PART_MARK}{part.part_idx}", "part_idx": part.part_idx}
        status, _, reply = await self._post(session, rid, f"{url}/scheduler_receive_meta_data", question)
        if status == 200:
            order = {
                **json.loads(reply),
                "prefill_host": self.settings.host,
                "embedding_port": self._sockets.ports[rank],
                "session_id": f"mock-session-{rank}",
                "buffer_address": 0,
                "receive_count": self.settings.tp_size,
            }
            status, _, reply = await self._post(session, rid, f"{url}/send", order)
        if status != 200:
            raise RequestFailed(rid, f"part {part.part_idx} answered {status}: {_message(reply)}", status)

    async def _post(
        self, session: aiohttp.ClientSession, rid: str, url: str, body: Mapping[str, object]
    ) -> tuple[int, Mapping[str, str], bytes]:
        headers = {"content-type": "application/json"}
        # A file object is sent in pieces, so that megabytes of one part do not hold up the others.
        data = io.BytesIO(json.dumps(body).encode())
        try:
            async with session.post(url, data=data, headers=headers) as reply:
                kept = {name.lower(): value for name, value in reply.headers.items()}
                kept = {name: value for name, value in kept.items() if name.startswith(ROUTER_HEADERS)}
                return reply.status, kept, await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as problem:
            text = f"{url}: {type(problem).__name__} {problem}".rstrip()
            status = 503 if self.settings.backend == "zmq_to_tokenizer" else 502
            raise RequestFailed(rid, text, status, would_stop_server=self._fatal) from None

    def _listen(self, rank: int) -> tuple[int, asyncio.Task[None]]:
        assert self._sockets is not None
        socket = self._sockets.context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 0)
        port = socket.bind_to_random_port(f"tcp://{self.settings.host}")
        return port, asyncio.create_task(self._receive(socket, rank), name=f"rank-{rank}")

    async def _receive(self, socket: zmq.asyncio.Socket, rank: int) -> None:
        try:
            while True:
                frames = await socket.recv_multipart()
                try:
                    header = decode_header(frames[0])
                except ValueError:
                    self.stats.garbage_frames += 1
                    continue
                waiting = self._waiting.get(base_request_id(header.req_id))
                if waiting is None or waiting.done.done():
                    self.stats.dropped_parts += 1
                else:
                    waiting.take(rank, header, frames[1] if len(frames) > 1 else b"")
        finally:
            socket.close(linger=0)


def _message(reply: bytes) -> str:
    """The ``message`` of an error reply, or its first bytes."""
    try:
        return str(json.loads(reply)["message"])
    except (ValueError, KeyError, TypeError):
        return repr(reply[:200])


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
