"""Values of the client, and how each door's answers become them."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

__all__ = [
    "AsyncDoor",
    "Candidate",
    "ClientOptions",
    "Door",
    "Explanation",
    "Question",
    "Selection",
    "WorkerInfo",
    "backoff",
    "scheme_of",
]


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Times in seconds. ``timeout`` bounds a whole call, its repetitions included.

    ``attempts``: how often a call is sent at most. `select` and `release` may be repeated because a repeated request
    id takes no second slot. ``wait_for_worker``: whether `select` also asks again while all workers are busy or down.
    ``session``: the asynchronous client over gRPC asks on one stream, which is cheaper; the slots it holds then
    end with its connection. ``ca``, ``certificate``, ``private_key``: PEM files for TLS.
    """

    timeout: float = 5.0
    attempts: int = 4
    first_pause: float = 0.05
    longest_pause: float = 1.0
    wait_for_worker: bool = False
    session: bool = False
    ca: str = ""
    certificate: str = ""
    private_key: str = ""

    def __post_init__(self) -> None:
        if not self.timeout > 0 or self.attempts < 1:
            raise ValueError("timeout must be above 0 and attempts at least 1")


@dataclass(frozen=True, slots=True)
class Question:
    """What `select` asks. One without a ``request_id`` is given one, so that it can be repeated."""

    pool: str = ""
    keys: Sequence[str] = ()
    items: Sequence[str | Mapping[str, Any]] = ()
    modality: str = "IMAGE"
    sglang_encode: bytes | None = None
    openai_chat: bytes | None = None
    session: str = ""
    exclude: Sequence[str] = ()
    request_id: str = field(default_factory=lambda: secrets.token_hex(12))
    lease_seconds: float = 0.0
    dry_run: bool = False
    candidates: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that was considered."""

    id: str
    device_class: str
    inflight: int | None
    keys_held: int
    doubtful: bool
    predicted: bool
    chosen: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """The router's answer. ``worker`` is its name in the router, ``url`` where to send the request."""

    worker: str
    url: str
    worker_id: int
    device: str
    pool: str
    reason: str
    decision_id: int
    request_id: str
    lease_id: str
    lease_seconds: float
    repeated_call: bool
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a decision was made; ``record`` has everything."""

    decision_id: int
    pool: str
    request_id: str
    worker: str
    reason: str
    why: str
    candidates: tuple[Candidate, ...]
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker."""

    id: str
    url: str
    worker_id: int
    pool: str
    device: str
    state: str
    draining: bool
    doubtful: bool
    publishing: bool
    keys: int
    inflight_requests: int
    encoding_requests: int


class Door(Protocol):
    """One way to a router. Each method sends one request, within ``timeout`` seconds, and raises `ClientError`."""

    def select(self, question: Question, timeout: float) -> Selection: ...
    def release(self, lease_id: str, request_id: str, pool: str, timeout: float) -> bool: ...
    def explain(self, decision_id: int, request_id: str, pool: str, timeout: float) -> Explanation: ...
    def workers(self, pool: str, timeout: float) -> list[WorkerInfo]: ...
    def close(self) -> None: ...


class AsyncDoor(Protocol):
    """The same, asynchronous."""

    async def select(self, question: Question, timeout: float) -> Selection: ...
    async def release(self, lease_id: str, request_id: str, pool: str, timeout: float) -> bool: ...
    async def explain(self, decision_id: int, request_id: str, pool: str, timeout: float) -> Explanation: ...
    async def workers(self, pool: str, timeout: float) -> list[WorkerInfo]: ...
    async def close(self) -> None: ...


def scheme_of(url: str) -> str:
    """``http``, ``https``, ``grpc`` or ``grpcs``. Raises ValueError for another one or a URL without a host."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.hostname:
        raise ValueError(f"{url!r} is no router: use http(s)://HOST:PORT (admin listener) or grpc(s)://HOST:PORT")
    return parts.scheme


def backoff(attempt: int, options: ClientOptions) -> float:
    """Pause before attempt ``attempt`` + 1, half to all of a doubling time."""
    return min(options.longest_pause, options.first_pause * 2.0**attempt) * random.uniform(0.5, 1.0)
