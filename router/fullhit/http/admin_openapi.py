"""The OpenAPI document of the admin listener, made from its types. A test holds it against the real routes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

import fullhit
from fullhit.http import admin_types as types

__all__ = ["OPEN_PATHS", "OPERATIONS", "Operation", "openapi_document"]

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""What no key is asked for."""
_REF = "#/components/schemas/{name}"
_WORKER = "its URL, percent-encoded, or its number"


@dataclass(frozen=True, slots=True)
class Operation:
    """One route. ``replies``: the type of each good status; ``errors``: statuses with the common error body.

    A reply of None is text or JSON that is described no further. ``query``: name and meaning of each parameter.
    """

    id: str
    method: str
    path: str
    summary: str
    replies: tuple[tuple[int, Any], ...]
    errors: tuple[int, ...] = ()
    body: Any = None
    query: tuple[tuple[str, str], ...] = ()
    place: str = ""


OPERATIONS = (
    Operation("index", "GET", "/", "The routes of this listener", ((200, None),)),
    Operation("openapi", "GET", "/openapi.json", "This document", ((200, None),)),
    Operation("healthz", "GET", "/healthz", "Is the process alive?", ((200, types.Liveness),)),
    Operation("readyz", "GET", "/readyz", "Can requests be routed?", ((200, types.Readiness), (503, types.Readiness))),
    Operation("metrics", "GET", "/metrics", "Prometheus metrics", ((200, None),)),
    Operation("listWorkers", "GET", "/workers", "The workers", ((200, list[types.Worker]),),
              query=(("pool", "only those of this pool"),)),
    Operation("addWorker", "POST", "/workers", "Add a worker, or change one that is known",
              ((200, types.Worker), (201, types.Worker)), (400, 413), types.NewWorker),
    Operation("showWorker", "GET", "/workers/{id}", "One worker", ((200, types.Worker),), (404,), place=_WORKER),
    Operation("removeWorker", "DELETE", "/workers/{id}", "Take a worker out, with everything it holds",
              ((200, types.Removal), (202, types.Removal)), (400, 404), place=_WORKER,
              query=(("drain", "seconds to wait for its requests in flight"),)),
    Operation("drainWorker", "POST", "/workers/{id}/drain", "No new requests for it", ((200, types.Worker),), (404,),
              place=_WORKER),
    Operation("resumeWorker", "POST", "/workers/{id}/resume", "Undo a drain", ((200, types.Worker),), (404,),
              place=_WORKER),
    Operation("select", "POST", "/select",
              "Choose a worker and hold one of its in-flight slots; safe to repeat with the same request_id",
              ((200, types.Selection),), (400, 404, 413, 429, 503), types.SelectBody),
    Operation("release", "POST", "/release", "Give a slot back; 404 when that has happened already",
              ((200, types.Released),), (400, 404, 413), types.ReleaseBody),
    Operation("listDecisions", "GET", "/decisions", "The latest decisions", ((200, types.Decisions),), (400, 404),
              query=(("limit", "how many, 1 to 1000"), ("reason", "only this reason"), ("worker", "only this worker"),
                     ("request_id", "only this request"), ("pool", "only this pool"))),
    Operation("explain", "GET", "/decisions/{id}", "One decision", ((200, types.Decision),), (400, 404),
              query=(("pool", "its pool, where ids count per pool"),), place="the decision's id"),
)  # fmt: skip


@cache
def openapi_document() -> bytes:
    """The document as JSON text."""
    return msgspec.json.encode(_document())


def _document() -> dict[str, Any]:
    kinds = [types.Failure]
    for operation in OPERATIONS:
        kinds += [kind for kind in (operation.body, *(kind for _, kind in operation.replies)) if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    of = dict(zip(map(repr, kinds), schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fullhit admin listener",
            "version": fullhit.__version__,
            "description": "Workers, choices and their reasons. 64-bit numbers are decimal text.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(operation: Operation, of: dict[str, Any]) -> dict[str, Any]:
    failure = {"description": "What is wrong, and what to do", "content": _json(of[repr(types.Failure)])}
    replies: dict[str, Any] = {}
    for status, kind in operation.replies:
        replies[str(status)] = {"description": operation.summary}
        if kind is not None:
            replies[str(status)]["content"] = _json(of[repr(kind)])
    errors = operation.errors if operation.path in OPEN_PATHS else (*operation.errors, 401, 403)
    replies |= {str(status): failure for status in sorted(errors)}
    out: dict[str, Any] = {"operationId": operation.id, "summary": operation.summary, "responses": replies}
    parameters = [
        {"name": name, "in": "query", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in operation.query
    ]
    if operation.place:
        parameters.insert(0, {"name": "id", "in": "path", "required": True, "description": operation.place,
                              "schema": {"type": "string"}})  # fmt: skip
    if parameters:
        out["parameters"] = parameters
    if operation.body is not None:
        out["requestBody"] = {"required": True, "content": _json(of[repr(operation.body)])}
    if operation.path in OPEN_PATHS:
        out["security"] = []
    return out


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
