"""The decision service: choosing on behalf of whoever forwards the request itself. Knows nothing of HTTP or gRPC.

`DecisionService.select` takes the in-flight slot in the same step as it chooses, as the gateway does, and lends it to
the caller until `release` or the end of the lease. Nothing is awaited anywhere, so a caller that goes away can only do
so before the slot is taken or after the lease is known.

Asking twice is harmless. While the lease of a request id is open, the same content gets the same decision; other
content under the same id is another request (a second attempt with the failed worker excluded, say) and gets a lease
of its own. Releasing twice is harmless too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fullhit.core.decision import Decision
from fullhit.core.pool import Pool
from fullhit.core.types import NoEligibleWorker, SelectRequest
from fullhit.decision.dynamo_media import DynamoMedia, read_dynamo_media
from fullhit.decision.leases import Lease, Leases, TooManyLeases
from fullhit.decision.media import Media, MediaError, read_media
from fullhit.decision.workers import WorkerFeed, WorkerRow, WorkerWatch, worker_rows
from fullhit.fleet.registry import Fleet
from fullhit.fleet.types import UnknownWorker
from fullhit.telemetry.facade import Telemetry
from fullhit_publisher.dynamo_keys import KeyRules
from fullhit_publisher.identity import dynamo_instance, normalize_url

__all__ = [
    "DecisionError",
    "DecisionService",
    "DecisionSettings",
    "Released",
    "SelectCall",
    "Selected",
    "keep_leases",
]

_MAX_REQUEST_ID = 256
_EXPIRY_SECONDS = 0.1
"""How late a slot may come back after its lease is over."""


class DecisionError(Exception):
    """The question cannot be answered. ``code`` is one of:

    ``invalid_request``, ``unknown_pool``, ``unknown_decision``: the caller's mistake, and the text names it;
    ``leaving``: the router is being stopped and takes nothing new; ``too_many_leases``: release finished ones;
    ``empty_pool``, ``all_busy``, ``all_down``, ``all_excluded``: nobody can
    take the request, as `NoEligibleWorker` tells. ``retryable``: the same call may succeed a little later.
    """

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class DecisionSettings:
    """Times in seconds. ``max_items`` bounds keys and items of one choice; far above any prompt."""

    default_pool: str = "default"
    lease_seconds: float = 60.0
    max_lease_seconds: float = 3_600.0
    max_leases: int = 10_000
    max_items: int = 10_000


@dataclass(slots=True)
class SelectCall:
    """What a caller asks. The shapes of media are those of `media.read_media`; ``session`` counts in Dynamo pools;
    ``exclude`` holds URLs or numbers."""

    pool: str = ""
    keys: Sequence[str] = ()
    items: Sequence[object] = ()
    modality: str = "IMAGE"
    sglang_encode: bytes | None = None
    openai_chat: bytes | None = None
    session: str = ""
    exclude: Sequence[str] = ()
    request_id: str = ""
    lease_seconds: float | None = None
    dry_run: bool = False


@dataclass(slots=True)
class Selected:
    """A decision; ``lease`` is None for a dry run, ``seconds`` the time it still lasts.

    ``repeated``: an earlier call of the same content made it.
    """

    decision: Decision
    lease: Lease | None
    seconds: float = 0.0
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """The lease that was given back, None when there was no such open one."""

    lease: Lease | None


class DecisionService:
    """See the module text. ``pools`` is the live mapping. ``dynamo``: pools of Dynamo workers, with how they key."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        fleet: Fleet,
        telemetry: Telemetry,
        settings: DecisionSettings | None = None,
        *,
        clock: Callable[[], float],
        dynamo: Mapping[str, KeyRules] | None = None,
    ) -> None:
        self.settings = settings or DecisionSettings()
        self._dynamo = dynamo or {}
        self.leases = Leases(self.settings.lease_seconds, self.settings.max_leases, clock=clock)
        self.telemetry = telemetry
        self.fleet = fleet
        self.leaving = False
        """Nothing is chosen any more; set it when the router begins to drain."""
        self.feed = WorkerFeed(self.workers, clock)
        """What all watchers share; `touch` it when somebody came or went."""
        self._pools = pools

    # -- choosing

    def select(self, call: SelectCall, holder: set[str] | None = None) -> Selected:
        """Choose, and unless it is a dry run hold the slot. Raises `DecisionError`.

        ``holder``: whose lease it is; see `Leases.bind`.
        """
        if self.leaving and not call.dry_run:
            raise DecisionError("leaving", "the router is being stopped; ask another one", retryable=True)
        name = call.pool or self.settings.default_pool
        pool = self._pool(name)
        seconds = self._lease_seconds(call.lease_seconds)
        request = self._request(call)
        if call.dry_run:
            return Selected(_choose(pool, request), None)
        leases = self.leases
        leases.expire()
        content = (request.keys, request.items, request.unkeyed, request.exclude, request.alternatives)
        if call.request_id:
            known = leases.find(name, call.request_id)
            if known is not None and known.content == content:
                if known.decision.worker.present:
                    leases.bind(known, holder)
                    return Selected(known.decision, known, leases.left(known), repeated=True)
                leases.release(known.id)  # that worker is gone: the question is open again
        if not leases.has_room(len(request.keys)):
            raise DecisionError("too_many_leases", "too many leases are open; release finished ones", retryable=True)
        decision = _choose(pool, request)
        try:
            lease = leases.open(name, decision, seconds, content=content)
        except TooManyLeases as error:
            raise DecisionError("too_many_leases", str(error), retryable=True) from None
        if holder is not None:
            leases.bind(lease, holder)
        self.telemetry.decision(decision, api="select")
        return Selected(decision, lease, seconds or leases.seconds)

    def release(self, lease_id: str = "", *, request_id: str = "", pool: str = "") -> Released:
        """Give a slot back, by its lease or by the request id that got it. Raises `DecisionError` for neither."""
        self.leases.expire()
        if lease_id:
            return Released(self.leases.release(lease_id))
        if not request_id:
            raise DecisionError("invalid_request", "lease_id or request_id is needed")
        known = self.leases.find(pool or self.settings.default_pool, request_id)
        return Released(None if known is None else self.leases.release(known.id))

    # -- explaining

    def explain(self, decision_id: int = 0, *, request_id: str = "", pool: str = "") -> dict[str, Any]:
        """The record of a decision by its id, or of the latest one of a request. Raises `DecisionError`."""
        record: dict[str, Any] | None = None
        if decision_id:
            record = self.telemetry.find_decision(decision_id, pool or None)
            what = f"{decision_id}"
        elif request_id:
            rows = self.telemetry.latest_decisions(
                1, pool=pool or None, wanted=lambda decision: decision.request_id == request_id
            )
            record, what = (rows[0] if rows else None), f"of request {request_id[:64]!r}"
        else:
            raise DecisionError("invalid_request", "decision_id or request_id is needed")
        if record is None:
            raise DecisionError("unknown_decision", f"no decision {what} among the latest; older ones are forgotten")
        return record

    # -- workers

    def workers(self, pool: str = "") -> list[WorkerRow]:
        """The workers (of one pool). Raises `DecisionError` for an unknown one."""
        if pool:
            self._pool(pool)
        return worker_rows(self._pools, self.fleet, pool)

    def watch(self, pool: str = "") -> WorkerWatch:
        """Changes among the workers (of one pool), from now on. Raises `DecisionError` for an unknown one."""
        if pool:
            self._pool(pool)
        return WorkerWatch(self.feed, pool)

    # -- within

    def _pool(self, name: str) -> Pool:
        pool = self._pools.get(name)
        if pool is None:
            raise DecisionError(
                "unknown_pool", f"no pool {name[:64]!r}; the pools are {', '.join(sorted(self._pools))}"
            )
        return pool

    def _lease_seconds(self, asked: float | None) -> float | None:
        if not asked:
            return None
        most = self.settings.max_lease_seconds
        if not (math.isfinite(asked) and 0 < asked <= most):
            raise DecisionError("invalid_request", f"lease_seconds must be above 0 and at most {most:g}")
        return asked

    def _request(self, call: SelectCall) -> SelectRequest:
        if len(call.request_id) > _MAX_REQUEST_ID:
            raise DecisionError("invalid_request", f"request_id is over {_MAX_REQUEST_ID} characters")
        rules = self._dynamo.get(call.pool or self.settings.default_pool)
        read = read_media if rules is None else partial(read_dynamo_media, rules, session=call.session)
        try:
            media: Media | DynamoMedia = read(
                call.keys,
                call.items,
                call.modality,
                encode_body=call.sglang_encode,
                chat_body=call.openai_chat,
                limit=self.settings.max_items,
            )
        except MediaError as error:
            raise DecisionError("invalid_request", str(error)) from None
        if len(call.exclude) > self.settings.max_items:
            raise DecisionError("invalid_request", f"exclude holds more than {self.settings.max_items} workers")
        exclude = frozenset(filter(None, map(self._excluded, call.exclude))) if call.exclude else frozenset()
        alternatives = media.alternatives if isinstance(media, DynamoMedia) else ()
        return SelectRequest(
            media.keys, media.items, call.request_id, exclude, call.dry_run, media.unkeyed, alternatives
        )

    def _excluded(self, text: str) -> str:
        """The id of a worker; empty for the number of one that is not here, which need not be excluded."""
        if self.fleet.get(text) is not None:
            return text
        if dynamo_instance(text) is not None:
            return ""
        if text.isascii() and text.isdigit():
            try:
                return self.fleet.find(text).id
            except UnknownWorker:
                return ""
        try:
            return normalize_url(text)
        except ValueError as error:
            raise DecisionError("invalid_request", f"exclude holds worker URLs: {error}") from None


async def keep_leases(service: DecisionService) -> None:
    """Take the slots of finished leases back, until cancelled. Each listener that lends some may run one."""
    while True:
        for lease in service.leases.expire():
            service.telemetry.limited(
                "lease-expired", "lease_expired", worker=lease.decision.worker.id, decision=lease.decision.id
            )
        await asyncio.sleep(_EXPIRY_SECONDS)


def _choose(pool: Pool, request: SelectRequest) -> Decision:
    try:
        return pool.select(request)
    except NoEligibleWorker as error:
        raise DecisionError(error.kind, str(error), retryable=error.retryable) from None
