"""Admin routes that ask for choices and explain them: ``/select``, ``/release``, ``/decisions``.

``POST /select`` takes the in-flight slot in the same step as it chooses, like the gateway does, and lends it to the
caller: the answer's ``lease_id`` goes to ``POST /release`` when the request is over, or the slot returns by itself
after ``lease_seconds``. With ``dry_run`` nothing is taken and nothing has to be released.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from fullhit.core.decision import Decision
from fullhit.core.types import NoEligibleWorker, Reason, SelectRequest
from fullhit.http.admin_base import CONTEXT, AdminContext, AdminError, json_reply, read_json
from fullhit.http.leases import Leases, TooManyLeases
from fullhit_publisher.identity import normalize_url, worker_id_for
from fullhit_publisher.keys import Key, fold, item_key

__all__ = ["add_select_routes"]

MAX_ITEMS = 10_000
"""Keys and items of one choice; far above any prompt."""
MAX_DECISIONS = 1_000


class SelectBody(msgspec.Struct, forbid_unknown_fields=True):
    """``keys``: texts as an encoder would publish them. ``items``: elements of ``mm_items``, strings or objects."""

    pool: str | None = None
    keys: list[str] = []
    items: list[Any] = []
    modality: str = "IMAGE"
    exclude: list[str] = []
    dry_run: bool = False
    request_id: str = ""


class ReleaseBody(msgspec.Struct, forbid_unknown_fields=True):
    """``lease_id`` as `/select` gave it."""

    lease_id: str


def add_select_routes(app: web.Application) -> None:
    """Add the routes to ``app`` and the timer that takes expired leases back."""
    app.router.add_post("/select", _select)
    app.router.add_post("/release", _release)
    app.router.add_get("/decisions", _decisions)
    app.router.add_get("/decisions/{id}", _decision)
    app.cleanup_ctx.append(_expire_leases)


async def _select(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    wanted = await read_json(request, SelectBody)
    name = wanted.pool or context.settings.default_pool
    pool = context.pools.get(name)
    if pool is None:
        raise AdminError(404, "unknown_pool", f"no pool {name!r}; the pools are {', '.join(sorted(context.pools))}")
    if not wanted.dry_run and context.leases.full:
        raise AdminError(429, "too_many_leases", "too many leases are open; POST /release finished ones")
    try:
        decision = pool.select(_select_request(wanted))
    except NoEligibleWorker as error:
        raise AdminError(503, error.kind, str(error), {"Retry-After": "1"} if error.retryable else None) from None
    lease_id = _lend(context, name, decision)
    if not wanted.dry_run:
        context.telemetry.decision(decision, api="select")
    worker = decision.worker
    return json_reply(
        {
            "worker": {
                "id": worker.id,
                "url": worker.url,
                "worker_id": str(worker_id_for(worker.id)),
                "device": worker.device,
            },
            "reason": str(decision.reason),
            "decision_id": decision.id,
            "dry_run": wanted.dry_run,
            "lease_id": lease_id,
            "lease_seconds": context.leases.seconds if lease_id else None,
            "decision": decision.record(),
        }
    )


def _lend(context: AdminContext, pool: str, decision: Decision) -> str | None:
    if decision.ticket is None:
        return None
    try:
        return context.leases.open(pool, decision).id
    except TooManyLeases as error:
        raise AdminError(429, "too_many_leases", str(error)) from None


def _select_request(wanted: SelectBody) -> SelectRequest:
    if len(wanted.keys) + len(wanted.items) > MAX_ITEMS:
        raise AdminError(400, "invalid_request", f"more than {MAX_ITEMS} keys and items")
    keys: dict[Key, None] = {fold(text): None for text in wanted.keys}
    unkeyed = 0
    for item in wanted.items:
        key = item_key(item, wanted.modality)
        if key is None:
            unkeyed += 1
        else:
            keys[key] = None
    return SelectRequest(
        keys=tuple(keys),
        items=len(wanted.keys) + len(wanted.items),
        request_id=wanted.request_id[:256],
        exclude=frozenset(map(_worker_name, wanted.exclude)),
        dry_run=wanted.dry_run,
        unkeyed=unkeyed,
    )


def _worker_name(text: str) -> str:
    try:
        return normalize_url(text)
    except ValueError as error:
        raise AdminError(400, "invalid_request", f"exclude holds worker URLs: {error}") from None


async def _release(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    wanted = await read_json(request, ReleaseBody)
    context.leases.expire()
    lease = context.leases.release(wanted.lease_id)
    if lease is None:
        raise AdminError(
            404,
            "unknown_lease",
            f"no open lease {wanted.lease_id[:64]!r}: released before, or taken back after "
            f"{context.leases.seconds:g} s",
        )
    return json_reply({"released": True, "worker": lease.decision.worker.id, "decision_id": lease.decision.id})


async def _decisions(request: web.Request) -> web.Response:
    context, query = request.app[CONTEXT], request.query
    unknown = set(query) - {"limit", "reason", "worker", "request_id", "pool"}
    if unknown:
        raise AdminError(400, "invalid_request", f"unknown filter {sorted(unknown)[0]!r}; use limit, reason, worker, "
                         "request_id, pool")  # fmt: skip
    limit = _whole(query.get("limit", "50"), "limit", MAX_DECISIONS)
    reason, request_id = query.get("reason"), query.get("request_id")
    if reason is not None and reason not in set(Reason):
        raise AdminError(400, "invalid_request", f"unknown reason {reason!r}; one of {', '.join(Reason)}")
    worker = query.get("worker")
    if worker is not None:
        worker = context.fleet.find(worker).id

    def wanted(decision: Decision) -> bool:
        return (
            (reason is None or decision.reason == reason)
            and (worker is None or decision.worker.id == worker)
            and (request_id is None or decision.request_id == request_id)
        )

    rows = context.telemetry.latest_decisions(limit, pool=query.get("pool"), wanted=wanted)
    return json_reply({"decisions": rows})


async def _decision(request: web.Request) -> web.Response:
    id = _whole(request.match_info["id"], "id", 1 << 62)
    record = request.app[CONTEXT].telemetry.find_decision(id, request.query.get("pool"))
    if record is None:
        raise AdminError(404, "unknown_decision", f"no decision {id} among the latest; older ones are forgotten")
    return json_reply(record)


def _whole(text: str, name: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and 0 < int(text) <= most):
        raise AdminError(400, "invalid_request", f"{name} must be a whole number from 1 to {most}")
    return int(text)


async def _expire_leases(app: web.Application) -> AsyncIterator[None]:
    context = app[CONTEXT]
    task = asyncio.create_task(_take_back(context, context.leases), name="fullhit-leases")
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    context.leases.release_all()


async def _take_back(context: AdminContext, leases: Leases) -> None:
    while True:
        for lease in leases.expire():
            context.telemetry.limited(
                "lease-expired", "lease_expired", worker=lease.decision.worker.id, decision=lease.decision.id
            )
        ends = leases.ends_next
        # A lease opened meanwhile ends later than this sleep does: all last equally long.
        pause = leases.seconds if ends is None else max(0.0, ends - context.clock())
        await asyncio.sleep(min(pause, leases.seconds) + 0.001)
