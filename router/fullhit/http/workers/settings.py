"""What the front for workers is told at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullhit.http.openai.settings import FrontTelemetry, LoadUntil, Reporter

__all__ = ["FrontTelemetry", "LoadUntil", "Reporter", "WorkerFrontSettings"]


@dataclass(frozen=True, slots=True)
class WorkerFrontSettings:
    """Seconds, bytes, counts. Raises ValueError for values which cannot work."""

    connect_timeout: float = 2.0
    send_timeout: float = 30.0
    """Longest time in which a worker takes no byte of a body."""
    first_byte_timeout: float = 1_800.0
    idle_timeout: float = 600.0
    """Longest silence inside an answer."""
    total_timeout: float | None = None
    """Longest time for one attempt, from the first byte sent to the last one received; None = no such limit."""
    max_attempts: int = 3
    retry_share: float = 0.2
    """Second attempts per request, in the long run: when most workers fail, retries would double the load."""
    queue_max: int = 4_096
    queue_max_bytes: int = 2 << 30
    queue_timeout: float = 60.0
    thread_bytes: int = 1 << 20
    """Bodies above this are read in a thread."""
    max_merge_bytes: int = 64 << 20
    """Answers of a pair up to this size can have their log-probabilities merged."""
    pass_through: Sequence[str] = ("/tokenize", "/detokenize")
    """Further paths that are passed on to any worker, as prefixes."""
    learn_interval: float = 30.0
    """How often workers are asked for their models."""

    def __post_init__(self) -> None:
        for name in (
            "connect_timeout", "first_byte_timeout", "idle_timeout", "max_attempts", "queue_max", "queue_max_bytes",
            "queue_timeout", "learn_interval",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0")
        if not 0 <= self.retry_share <= 1:
            raise ValueError("retry_share: must be between 0 and 1")
        for prefix in self.pass_through:
            if not prefix.startswith("/") or prefix == "/" or "?" in prefix:
                raise ValueError(f"pass_through: {prefix!r} must begin with / and name a path")
