"""Admin routes that ask for choices and explain them: ``/select``, ``/release``, ``/decisions``.

The HTTP door of the decision service (`fullhit.decision`): bodies in, `DecisionService` asked, JSON out. The answer's
``lease_id`` goes to ``POST /release`` when the request is over, or the slot returns by itself after
``lease_seconds``. With ``dry_run`` nothing is taken and nothing has to be released. 64-bit numbers are text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from fullhit.core.decision import Decision
from fullhit.core.types import Reason
from fullhit.decision.service import DecisionError, SelectCall, Selected, keep_leases
from fullhit.http.admin_base import CONTEXT, AdminError, json_reply, read_json
from fullhit.http.admin_types import ReleaseBody, SelectBody
from fullhit.telemetry.facade import Telemetry
from fullhit_publisher.identity import worker_id_for

__all__ = ["add_select_routes"]

MAX_DECISIONS = 1_000
_STATUS = {"invalid_request": 400, "unknown_pool": 404, "unknown_decision": 404, "too_many_leases": 429}


def add_select_routes(app: web.Application) -> None:
    """Add the routes to ``app`` and the timer that takes expired leases back."""
    app.router.add_post("/select", _select)
    app.router.add_post("/release", _release)
    app.router.add_get("/decisions", _decisions)
    app.router.add_get("/decisions/{id}", _decision)
    app.cleanup_ctx.append(_expire_leases)


async def _select(request: web.Request) -> web.Response:
    service = request.app[CONTEXT].service
    wanted = await read_json(request, SelectBody)
    call = SelectCall(
        pool=wanted.pool or "",
        keys=wanted.keys,
        items=wanted.items,
        modality=wanted.modality,
        sglang_encode=_text(wanted.sglang_encode),
        openai_chat=_text(wanted.openai_chat),
        session=wanted.session,
        exclude=wanted.exclude,
        request_id=wanted.request_id,
        lease_seconds=wanted.lease_seconds,
        dry_run=wanted.dry_run,
    )
    try:
        selected = service.select(call)
    except DecisionError as error:
        raise _refusal(error) from None
    return json_reply(_selected(selected, request.app[CONTEXT].telemetry))


def _text(body: msgspec.Raw | msgspec.UnsetType) -> bytes | None:
    return None if isinstance(body, msgspec.UnsetType) else bytes(body)


def _selected(selected: Selected, telemetry: Telemetry) -> dict[str, Any]:
    decision, lease = selected.decision, selected.lease
    worker = decision.worker
    return {
        "worker": {
            "id": worker.id,
            "url": worker.url,
            "worker_id": str(worker_id_for(worker.id)),
            "device": worker.device,
        },
        "pool": decision.pool,
        "reason": str(decision.reason),
        "decision_id": str(decision.id),
        "request_id": decision.request_id,
        "dry_run": lease is None,
        "lease_id": None if lease is None else lease.id,
        "lease_seconds": None if lease is None else selected.seconds,
        "repeated_call": selected.repeated,
        "decision": telemetry.account(decision),
    }


def _refusal(error: DecisionError) -> AdminError:
    status = _STATUS.get(error.code, 503)
    return AdminError(status, error.code, str(error), {"Retry-After": "1"} if error.retryable else None)


async def _release(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    wanted = await read_json(request, ReleaseBody)
    try:
        lease = context.service.release(wanted.lease_id, request_id=wanted.request_id, pool=wanted.pool).lease
    except DecisionError as error:
        raise _refusal(error) from None
    if lease is None:
        raise AdminError(
            404,
            "unknown_lease",
            f"no open lease {(wanted.lease_id or wanted.request_id)[:64]!r}: released before, or taken back after "
            f"{context.leases.seconds:g} s",
        )
    return json_reply({"released": True, "worker": lease.decision.worker.id, "decision_id": str(lease.decision.id)})


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
    try:
        return json_reply(request.app[CONTEXT].service.explain(id, pool=request.query.get("pool", "")))
    except DecisionError as error:
        raise _refusal(error) from None


def _whole(text: str, name: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and 0 < int(text) <= most):
        raise AdminError(400, "invalid_request", f"{name} must be a whole number from 1 to {most}")
    return int(text)


async def _expire_leases(app: web.Application) -> AsyncIterator[None]:
    context = app[CONTEXT]
    task = asyncio.create_task(keep_leases(context.service), name="fullhit-leases")
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    context.leases.release_all()
