"""The admin listener: alive? ready? which workers, why this one, how often?

One aiohttp application, far off the data path and on a listener of its own, so that it answers from memory while
thousands of requests are under way. `build_admin_app` gets everything it shows through an `AdminContext`.

Rules of all routes:

* Every error is ``{"error": {"code": ..., "message": ...}}`` and its message says what to do.
* With a key configured, all but ``/healthz`` and ``/readyz`` (asked by load balancers, and naming no worker) want
  ``Authorization: Bearer KEY``. A listener that other machines can reach must have one: `check_exposure`.
* A browser page of another origin is refused: a listener on loopback without a key is still reachable from the
  browser of whoever sits at this machine.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

import fullhit
from fullhit.fleet.member import Member, Source
from fullhit.fleet.types import UnknownWorker
from fullhit.http.admin_base import CONTEXT, AdminContext, AdminError, AdminSettings, json_reply, read_json
from fullhit.http.admin_openapi import OPEN_PATHS, openapi_document
from fullhit.http.admin_select import add_select_routes
from fullhit.http.admin_types import NewWorker
from fullhit.telemetry.metrics import CONTENT_TYPE

__all__ = ["AdminContext", "AdminSettings", "build_admin_app", "check_exposure", "describe_workers", "readiness"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


def check_exposure(host: str, key: str) -> None:
    """Raises ValueError when a listener at ``host`` can be reached from other machines and there is no ``key``."""
    if not _is_loopback(host) and not key:
        raise ValueError(
            f"the admin listener at {host} can be reached from other machines: set an admin key, or use 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def build_admin_app(context: AdminContext) -> web.Application:
    """The application; give it to an `aiohttp.web.AppRunner` with ``access_log=None``."""
    app = web.Application(middlewares=[_errors, _guard], client_max_size=context.settings.max_body_bytes)
    app[CONTEXT] = context
    app.router.add_get("/", _index)
    app.router.add_get("/openapi.json", _openapi)
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/workers", _workers)
    app.router.add_post("/workers", _add_worker)
    app.router.add_get("/workers/{id}", _worker)
    app.router.add_delete("/workers/{id}", _remove_worker)
    app.router.add_post("/workers/{id}/drain", _drain)
    app.router.add_post("/workers/{id}/resume", _resume)
    add_select_routes(app)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except AdminError as error:
        return _error(error.status, error.code, str(error), error.headers)
    except UnknownWorker as error:
        return _error(404, "unknown_worker", str(error))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        text = error.text or error.reason
        if error.status == 404:
            text = f"nothing at {request.path}; GET / lists what there is"
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return _error(error.status, _CODES.get(error.status, "http_error"), text, headers)
    except Exception as error:
        request.app[CONTEXT].telemetry.limited(
            "admin-internal:" + request.path,
            "admin_internal_error",
            level="error",
            path=request.path,
            cause=repr(error),
        )
        return _error(500, "internal", "a fault of the router, not of the request; its log has the details")


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.host:
        raise AdminError(403, "cross_origin", f"pages of {origin[:200]} may not use this listener")
    key = request.app[CONTEXT].settings.key
    if not key and request.path not in OPEN_PATHS and not _is_loopback(request.url.host or ""):
        # A name that somebody else's DNS points here makes a browser take their page for ours.
        raise AdminError(
            403, "foreign_host", f"without an admin key only a loopback name will do, not {request.host[:200]}"
        )
    if key and request.path not in OPEN_PATHS:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, key.encode()):
            raise AdminError(
                401,
                "unauthorized",
                "send the admin key as `Authorization: Bearer KEY`",
                {"WWW-Authenticate": "Bearer"},
            )
    return await handler(request)


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return json_reply({"error": {"code": code, "message": message}}, status, headers)


async def _index(request: web.Request) -> web.Response:
    routes = sorted({f"{route.method} {route.resource.canonical}" for route in request.app.router.routes()
                     if route.resource is not None and route.method != "HEAD"})  # fmt: skip
    return json_reply({"fullhit": fullhit.__version__, "routes": routes})


async def _openapi(request: web.Request) -> web.Response:
    return web.Response(body=openapi_document(), content_type="application/json")


async def _healthz(request: web.Request) -> web.Response:
    return json_reply({"status": "alive", "version": fullhit.__version__})


async def _readyz(request: web.Request) -> web.Response:
    verdict = readiness(request.app[CONTEXT])
    return json_reply(verdict, 200 if verdict["ready"] else 503)


def readiness(context: AdminContext) -> dict[str, Any]:
    """Whether requests can be routed, whether something is amiss, and every reason in words."""
    reasons: list[str] = []
    pools: dict[str, dict[str, int]] = {}
    routable = False
    for name, pool in context.pools.items():
        workers = pool.workers()
        states: dict[str, int] = {}
        for member in context.fleet:
            if member.pool == name:
                states[str(member.state)] = states.get(str(member.state), 0) + 1
        fit = sum(worker.ready and not worker.draining for worker in workers)
        doubtful = sum(worker.doubtful for worker in workers)
        pools[name] = {"workers": len(workers), "usable": fit, "doubtful": doubtful, **states}
        routable = routable or fit > 0
        if not workers:
            reasons.append(f"pool {name} has no workers")
        elif not fit:
            reasons.append(f"pool {name}: none of its {len(workers)} workers is ready")
        if states.get("unhealthy"):
            reasons.append(f"pool {name}: {states['unhealthy']} unhealthy")
        if doubtful:
            reasons.append(f"pool {name}: entries of {doubtful} workers are doubtful")
    plane = dict(context.plane_status())
    if plane.get("connected") is False:
        reasons.append("event plane: " + str(plane.get("error") or "not connected"))
    for name, dynamo in plane.get("dynamo", {}).items():
        if not dynamo["plane"]["connected"]:
            reasons.append(f"pool {name}: Dynamo's event plane: " + (dynamo["plane"]["error"] or "not connected"))
        if dynamo["discovery_error"]:
            reasons.append(f"pool {name}: Dynamo's discovery: {dynamo['discovery_error']}")
    reasons.extend(context.concerns())
    leaving = context.draining()
    if leaving:
        reasons.insert(0, "the router is draining")
    ready = routable and not leaving
    return {
        "ready": ready,
        "status": "unready" if not ready else "degraded" if reasons else "ready",
        "degraded": bool(reasons),
        "reasons": reasons,
        "pools": pools,
        "event_plane": plane,
        "seats": dict(context.seats()),
        "uptime_seconds": round(context.clock() - context.started_at, 3),
    }


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[CONTEXT].telemetry.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def _workers(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    pool = request.query.get("pool")
    if pool is not None and pool not in context.pools:
        known = ", ".join(sorted(context.pools))
        raise AdminError(404, "unknown_pool", f"no pool {pool[:64]!r}; the pools are {known}")
    return json_reply(describe_workers(context, pool))


async def _worker(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    return json_reply(_describe_one(context, context.fleet.find(request.match_info["id"])))


async def _add_worker(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    wanted = await read_json(request, NewWorker)
    before = len(context.fleet)
    try:
        member = context.fleet.add(
            wanted.url,
            source=Source.ADMIN,
            pool=wanted.pool,
            device=wanted.device,
            weight=wanted.weight,
            max_inflight=wanted.max_inflight,
            labels=wanted.labels,
        )
    except ValueError as error:
        raise AdminError(400, "invalid_worker", str(error)) from None
    return json_reply(_describe_one(context, member), 201 if len(context.fleet) > before else 200)


async def _remove_worker(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    member = context.fleet.find(request.match_info["id"])
    try:
        grace = float(request.query.get("drain", "0"))
        if not 0 <= grace <= 86_400:
            raise ValueError
    except ValueError:
        raise AdminError(
            400, "invalid_request", "drain is the number of seconds to wait for requests in flight"
        ) from None
    inflight = _inflight(context, member.pool, member.id)
    context.fleet.remove(member.id, cause="removed by admin", drain_seconds=grace)
    waiting = context.fleet.get(member.id) is not None
    body = {"id": member.id, "removed": not waiting, "draining": waiting, "requests_in_flight": inflight}
    return json_reply(body, 202 if waiting else 200)


async def _drain(request: web.Request) -> web.Response:
    return _set_draining(request, True)


async def _resume(request: web.Request) -> web.Response:
    return _set_draining(request, False)


def _set_draining(request: web.Request, draining: bool) -> web.Response:
    context = request.app[CONTEXT]
    member = context.fleet.find(request.match_info["id"])
    (context.fleet.drain if draining else context.fleet.resume)(member.id)
    return json_reply(_describe_one(context, member))


def _inflight(context: AdminContext, pool: str, id: str) -> int:
    worker = context.pools[pool].get(id)
    return worker.inflight if worker is not None else 0


def describe_workers(context: AdminContext, pool: str | None = None) -> list[dict[str, Any]]:
    """Everything known about the workers (of one pool). ``inflight_requests`` counts what this router sent."""
    streams, oldest = context.streams(), context.oldest_inflight()
    return [_describe(context, m, streams, oldest) for m in context.fleet if pool is None or m.pool == pool]


def _describe_one(context: AdminContext, member: Member) -> dict[str, Any]:
    return _describe(context, member, context.streams(), context.oldest_inflight())


def _describe(
    context: AdminContext, member: Member, streams: Mapping[tuple[str, str], object], oldest: Mapping[str, float]
) -> dict[str, Any]:
    out = member.describe(context.clock())
    worker = context.pools[member.pool].get(member.id)
    if worker is not None:
        out |= {
            "device_class": worker.device_class,
            "inflight_requests": worker.inflight,
            "encoding_requests": worker.encoding,
            "keys": worker.key_count,
            "doubtful": worker.doubtful,
            "publishing": worker.publishing,
        }
    age = oldest.get(member.id)
    out["stalled_seconds"] = round(context.fleet.stalled(member), 3)
    out["oldest_inflight_age_seconds"] = None if age is None else round(age, 3)
    out["stream"] = streams.get((member.pool, member.id))
    return out
