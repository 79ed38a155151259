"""One worker as the fleet sees it: where it came from, whether it answers, what its record is.

The state which people see is computed from independent facts, so that no two of them can contradict each other::

    seen ----probe sent---> probing ----first answer---> ready <---> unhealthy        gone: removed, for good
                                                           ^              ^
                                                 drain/resume             |  several missed probes, stuck,
                                                           v              |  or an open breaker
                                                        draining <--------+

A worker gets new requests while it is ready and its breaker does not hold it (see `breaker`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fullhit.core.types import WorkerSpec
from fullhit.fleet.breaker import Breaker, BreakerState
from fullhit.fleet.promises import Promises, PromiseSettings
from fullhit_publisher.identity import worker_id_for

__all__ = ["MAX_LABELS", "MAX_LABEL_CHARS", "Member", "Source", "State", "checked_labels"]

MAX_LABELS = 64
MAX_LABEL_CHARS = 256
"""Of a name or a value. Labels are shown wherever a worker is."""


class State(StrEnum):
    """Station of a worker's life."""

    SEEN = "seen"
    PROBING = "probing"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    GONE = "gone"


class Source(StrEnum):
    """Who told us about a worker. Static and admin ones are kept for ever, the others forgotten when long dead; leased
    ones live exactly as long as somebody else (Dynamo's discovery) says, and are not probed."""

    STATIC = "static"
    ADMIN = "admin"
    REGISTERED = "registered"
    DISCOVERED = "discovered"
    LEASED = "leased"

    @property
    def lasting(self) -> bool:
        """Whether an operator named it, so that only an operator takes it away."""
        return self in (Source.STATIC, Source.ADMIN)


@dataclass(slots=True, eq=False)
class Member:
    """Facts about one worker. Times are monotonic seconds, ``None`` = never."""

    spec: WorkerSpec
    pool: str
    source: Source
    breaker: Breaker
    added_at: float
    worker_id: int = field(init=False)
    device_given: bool = False
    """The device was named, not assumed."""
    answered: bool = False
    """A probe was answered at least once."""
    down: str = ""
    """Why it gets no traffic, beside the breaker: empty when it is up."""
    down_since: float | None = None
    draining: bool = False
    gone: bool = False
    misses: int = 0
    unreachable: bool = False
    """A probe since the last answer found nobody listening."""
    probes: int = 0
    probe_due: float = 0.0
    probe_started: float | None = None
    retry_delay: float = 0.0
    last_answer: float | None = None
    last_success: float | None = None
    last_failure: float | None = None
    last_failure_kind: str = ""
    last_probe_error: str = ""
    last_heartbeat: float | None = None
    idle_at: float = 0.0
    """When it was last seen with nothing in flight."""
    remove_at: float | None = None
    """End of the grace period of a removal with draining."""
    trial_cap: int | None = None
    """In-flight cap while its breaker is half open."""
    alive: bool = False
    """Counted as living: it answered once and is not down."""
    usable: bool = False
    """Counted as one that may be chosen: alive, not held by its breaker, not draining."""
    promises: Promises = field(default_factory=lambda: Promises(PromiseSettings()))
    shown: State = State.SEEN
    """The state last announced."""

    def __post_init__(self) -> None:
        self.worker_id = worker_id_for(self.spec.id)
        self.idle_at = self.added_at

    @property
    def id(self) -> str:
        """The normalised URL, or the name of an instance that has none."""
        return self.spec.id

    @property
    def leased(self) -> bool:
        """Its life is another's business: never probed, never forgotten."""
        return self.source is Source.LEASED

    @property
    def state(self) -> State:
        """Station of its life, computed."""
        if self.gone:
            return State.GONE
        if not self.answered:
            return State.PROBING if self.probes else State.SEEN
        if self.down or self.breaker.state is BreakerState.OPEN:
            return State.UNHEALTHY
        return State.DRAINING if self.draining else State.READY

    def last_life(self) -> float | None:
        """The latest proof of life that no probe had to ask for."""
        proofs = [at for at in (self.last_success, self.last_heartbeat) if at is not None]
        return max(proofs, default=None)

    def describe(self, now: float) -> dict[str, Any]:
        """JSON-ready facts; ages in seconds."""
        return {
            "id": self.spec.id,
            "url": self.spec.url,
            "worker_id": str(self.worker_id),
            "pool": self.pool,
            "device": self.spec.device,
            "weight": self.spec.weight,
            "max_inflight": self.spec.max_inflight,
            "labels": dict(self.spec.labels or {}),
            "source": str(self.source),
            "state": str(self.state),
            "draining": self.draining,
            "down": self.down or None,
            "breaker": {
                "state": str(self.breaker.state),
                "failures_in_row": self.breaker.failures_in_row,
                "opened": self.breaker.opened,
                "held_seconds": _round(max(0.0, self.breaker.held_until(now) - now)),
            },
            "probe_misses": self.misses,
            "probe_outstanding": self.probe_started is not None,
            "last_probe_error": self.last_probe_error or None,
            "last_failure": self.last_failure_kind or None,
            "age_seconds": {
                "added": _round(now - self.added_at),
                "answer": _age(now, self.last_answer),
                "success": _age(now, self.last_success),
                "failure": _age(now, self.last_failure),
                "heartbeat": _age(now, self.last_heartbeat),
                "down": _age(now, self.down_since),
            },
        }


def checked_labels(labels: Mapping[str, str] | None) -> None:
    """Raises ValueError for labels that are too many or too long."""
    if not labels:
        return
    if len(labels) > MAX_LABELS:
        raise ValueError(f"{len(labels)} labels, at most {MAX_LABELS} are taken")
    if any(len(text) > MAX_LABEL_CHARS for label in labels.items() for text in label):
        raise ValueError(f"a label is longer than {MAX_LABEL_CHARS} characters")


def _age(now: float, at: float | None) -> float | None:
    return None if at is None else _round(now - at)


def _round(seconds: float) -> float:
    return round(seconds, 3)
