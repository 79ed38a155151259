"""The admin listener's JSON: what it takes and what it answers, as types.

Bodies are decoded into these. Answers are made elsewhere as plain mappings; here they are described, for the OpenAPI
document and for clients, and a test holds each real answer against its type. 64-bit numbers (worker ids, epochs,
decision ids of a choice) are decimal text, because JavaScript rounds them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "Candidate",
    "Decision",
    "Decisions",
    "Failure",
    "Liveness",
    "NewWorker",
    "Readiness",
    "ReleaseBody",
    "Released",
    "Removal",
    "SelectBody",
    "Selection",
    "Worker",
]

ReasonName = Literal["full_hit", "partial_hit", "miss", "no_media", "predicted", "pending"]


class NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    """A worker to add, or to bring up to date: only what is given changes."""

    url: str
    device: str | None = None
    weight: float | None = None
    pool: str | None = None
    max_inflight: int | None = None
    labels: dict[str, str] = {}


class SelectBody(msgspec.Struct, forbid_unknown_fields=True):
    """``keys``: texts as an encoder would publish them. ``items``: elements of ``mm_items``, strings or objects.

    ``sglang_encode`` and ``openai_chat``: a whole body of that kind, as an object; all of these add up.
    ``session``: of an OpenAI chat, for a pool of Dynamo workers.
    """

    pool: str | None = None
    keys: list[str] = []
    items: list[Any] = []
    modality: str = "IMAGE"
    sglang_encode: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    openai_chat: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    session: str = ""
    exclude: list[str] = []
    dry_run: bool = False
    request_id: str = ""
    lease_seconds: float = 0.0


class ReleaseBody(msgspec.Struct, forbid_unknown_fields=True):
    """``lease_id`` as `/select` gave it, or the ``request_id`` (and ``pool``) of the `/select`."""

    lease_id: str = ""
    request_id: str = ""
    pool: str = ""


class Candidate(msgspec.Struct, rename={"device_class": "class"}):
    """One worker that was considered; ``inflight`` is null where it was far from the least loaded."""

    worker: str
    device_class: str
    inflight: int | None
    keys_held: int
    doubtful: bool
    predicted: bool
    chosen: bool


class Inputs(msgspec.Struct):
    """What was asked; keys as 32 hexadecimal digits."""

    keys: list[str]
    items: int
    unkeyed: int
    exclude: list[str]
    dry_run: bool


class KeyHolders(msgspec.Struct):
    """Workers believed to hold a key, which of them were doubtful, and how many more there are."""

    key: str
    workers: list[str]
    doubtful: list[str]
    more: int


class Decision(msgspec.Struct):
    """Why a worker was chosen. ``at``: UTC. ``outcome``: what became of the request, where this router saw it."""

    id: int
    pool: str
    request_id: str
    at: str
    worker: str
    reason: ReasonName
    policy: str
    why: str
    inputs: Inputs
    counts: dict[str, int]
    groups: list[dict[str, Any]]
    holders: list[KeyHolders]
    candidates: list[Candidate]
    ineligible_holders: list[str]
    outcome: dict[str, Any] = {}


class Decisions(msgspec.Struct):
    """The latest decisions, newest first."""

    decisions: list[Decision]


class ChosenWorker(msgspec.Struct):
    """Where to send the request."""

    id: str
    url: str
    worker_id: str
    device: str


class Selection(msgspec.Struct):
    """A choice. ``lease_id`` and ``lease_seconds`` are null for a dry run; ``repeated_call``: an earlier call with this
    request id made it."""

    worker: ChosenWorker
    pool: str
    reason: ReasonName
    decision_id: str
    request_id: str
    dry_run: bool
    lease_id: str | None
    lease_seconds: float | None
    repeated_call: bool
    decision: Decision


class Released(msgspec.Struct):
    """The slot is given back."""

    released: bool
    worker: str
    decision_id: str


class Worker(msgspec.Struct):
    """One worker. ``inflight_requests`` counts what this router sent; ``stream`` describes its event stream."""

    id: str
    url: str
    worker_id: str
    pool: str
    device: str
    weight: float
    max_inflight: int | None
    labels: dict[str, str]
    source: Literal["static", "admin", "registered", "discovered"]
    state: Literal["seen", "probing", "ready", "unhealthy", "draining", "gone"]
    draining: bool
    down: str | None
    breaker: dict[str, Any]
    age_seconds: dict[str, float | None]
    stalled_seconds: float
    oldest_inflight_age_seconds: float | None
    stream: dict[str, Any] | None
    device_class: str = ""
    inflight_requests: int = 0
    encoding_requests: int = 0
    keys: int = 0
    doubtful: bool = False
    publishing: bool = False


class Removal(msgspec.Struct):
    """``draining``: it leaves when its requests are finished or the time is over."""

    id: str
    removed: bool
    draining: bool
    requests_in_flight: int


class Liveness(msgspec.Struct):
    """The process answers."""

    status: str
    version: str


class Readiness(msgspec.Struct):
    """Whether requests can be routed, and everything that is amiss, in words."""

    ready: bool
    status: Literal["ready", "degraded", "unready"]
    degraded: bool
    reasons: list[str]
    pools: dict[str, dict[str, int]]
    event_plane: dict[str, Any]
    seats: dict[str, dict[str, Any]]
    uptime_seconds: float


class Fault(msgspec.Struct):
    """``code`` for programs, ``message`` for people: it says what to do."""

    code: str
    message: str


class Failure(msgspec.Struct):
    """Every error of this listener."""

    error: Fault
