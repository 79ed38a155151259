"""What the front is told at its start: its settings, and the faces of the things it uses but does not own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fullhit.core.decision import Decision

__all__ = ["FrontSettings", "FrontTelemetry", "LoadUntil", "Reporter"]

LoadUntil = Literal["first_token", "end"]


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Seconds, bytes, counts.

    >>> FrontSettings(frontends=("http://127.0.0.1:8000",), max_attempts=2)

    Raises ValueError for values which cannot work.
    """

    frontends: Sequence[str]
    """Origins of Dynamo HTTP frontends, ``http://host[:port]``."""
    models: frozenset[str] = frozenset()
    """Models whose requests are steered; empty = all. Others are passed on as they are."""
    load_until: LoadUntil = "first_token"
    """How long a request counts as one that encodes."""
    connect_timeout: float = 2.0
    send_timeout: float = 30.0
    """Longest time in which a frontend takes no byte of a body."""
    first_byte_timeout: float = 1_800.0
    """From the request sent to the head of the answer, which comes last where the client does not stream."""
    idle_timeout: float = 600.0
    """Longest silence inside an answer; the wait for the first token is one."""
    max_attempts: int = 3
    """Workers tried for one request in all."""
    queue_max: int = 4_096
    queue_max_bytes: int = 2 << 30
    queue_timeout: float = 60.0
    """How long a request may wait for a worker, all its waits together."""
    thread_bytes: int = 64 << 10
    """Bodies above this are read in a thread."""
    max_items: int = 10_000
    """Media items looked at in one request; with more it is steered by load alone."""
    head_patience: float = 15.0
    """How long the head of a stream may wait for the beginning of its body, by which the answer is judged."""
    retry_within: float = 30.0
    """A worker's time-out is tried elsewhere only if it came sooner than this."""

    def __post_init__(self) -> None:
        if not self.frontends:
            raise ValueError("frontends: at least one is needed")
        if self.load_until not in ("first_token", "end"):
            raise ValueError(f"load_until: {self.load_until!r} is neither first_token nor end")
        for name in (
            "connect_timeout", "first_byte_timeout", "idle_timeout", "max_attempts", "queue_max", "queue_max_bytes",
            "queue_timeout",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0")


class Reporter(Protocol):
    """What the front tells the fleet about workers."""

    def report_success(self, worker_id: str) -> None: ...

    def report_failure(self, worker_id: str, kind: str) -> None:
        """``kind``: connect, reset, timeout, 5xx, or busy. Never for a client's fault."""

    def report_promise(self, worker_id: str, kept: bool) -> None:
        """It was chosen as one that holds everything; ``kept``: its cache had everything, as it says itself."""


class FrontTelemetry(Protocol):
    """Where the front tells what happens."""

    def request_done(self, pool: str, reason: str, code: int, seconds: float) -> None: ...

    def observe_select(self, pool: str, seconds: float) -> None: ...

    def count(self, name: str, /, **labels: object) -> None: ...

    def event(self, kind: str, /, level: str = "info", **fields: object) -> None: ...

    def limited(
        self, key: str, kind: str, /, every: float = 60.0, level: str = "warning", **fields: object
    ) -> None: ...

    def remember(self, decision: Decision, **outcome: object) -> None: ...

    def decision(self, decision: Decision, **outcome: object) -> None: ...
