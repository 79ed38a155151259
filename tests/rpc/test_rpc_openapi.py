"""The OpenAPI document against the real routes and real answers."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from fullhit.http import admin_types as types
from fullhit.http.admin import build_admin_app
from fullhit.http.admin_openapi import OPERATIONS, openapi_document
from fullhit_publisher.keys import item_key

A, B = "http://127.0.0.1:1001", "http://127.0.0.1:1002"
URL = "https://pictures.invalid/cat.jpg"


async def test_the_document_names_exactly_the_routes_there_are(house):
    app = build_admin_app(house.context)
    real = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    async with aiohttp.ClientSession() as session, session.get(house.admin + "/openapi.json") as reply:
        document = await reply.json()
    written = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert written == real
    assert document["openapi"].startswith("3.1") and document["info"]["version"]


def test_the_document_hangs_together():
    text = openapi_document().decode()
    document = json.loads(text)
    schemas = document["components"]["schemas"]
    used: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                prefix, _, name = node["$ref"].rpartition("/")
                assert prefix == "#/components/schemas" and name in schemas
                used.add(name)
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    assert used == set(schemas), "no schema without use"
    ids = [operation.id for operation in OPERATIONS]
    assert len(set(ids)) == len(ids)
    for operation in OPERATIONS:
        entry = document["paths"][operation.path][operation.method.lower()]
        named = {p["name"] for p in entry.get("parameters", ()) if p["in"] == "path"}
        assert named == ({"id"} if "{id}" in operation.path else set())
        assert entry["responses"] and all(reply["description"] for reply in entry["responses"].values())
    worker_id = schemas["Worker"]["properties"]["worker_id"]
    assert worker_id == {"type": "string"}, "64-bit numbers are text"


async def test_every_answer_is_as_its_type_says(house):
    """Each operation is called in each way it can end well, and most of those in which it ends badly."""
    house.add_ready(A, B)
    house.pool.apply_delta(B, [item_key(URL)], [])
    a, b = (f"/workers/{quote(url, safe='')}" for url in (A, B))
    seen: set[tuple[str, int]] = set()
    answers: dict[str, Any] = {}

    async with aiohttp.ClientSession() as session:

        async def call(id: str, path: str = "", body: object = None) -> Any:
            operation = next(o for o in OPERATIONS if o.id == id)
            path = path or operation.path
            async with session.request(operation.method, house.admin + path, json=body) as reply:
                content = await reply.read()
                seen.add((id, reply.status))
                kinds = dict(operation.replies)
                if reply.status in kinds:
                    if kinds[reply.status] is not None:
                        msgspec.json.decode(content, type=kinds[reply.status])
                else:
                    assert reply.status in operation.errors, (id, reply.status, content)
                    msgspec.json.decode(content, type=types.Failure)
                return json.loads(content) if reply.content_type == "application/json" else content

        for id in ("index", "openapi", "healthz", "readyz", "metrics", "listWorkers", "listDecisions"):
            await call(id)
        await call("addWorker", body={"url": "http://127.0.0.1:1003"})
        await call("addWorker", body={"url": "http://127.0.0.1:1003", "weight": 2})
        await call("addWorker", body={"url": 7})
        for id, path in (("showWorker", a), ("drainWorker", a + "/drain"), ("resumeWorker", a + "/resume")):
            await call(id, path)
            await call(id, path.replace("1001", "9"))
        got = await call("select", body={"items": [URL], "request_id": "r1"})
        again = await call("select", body={"items": [URL], "request_id": "r1"})
        assert again["repeated_call"] and again["lease_id"] == got["lease_id"]
        await call("select", body={"items": [URL], "dry_run": True})
        for bad in ({"pool": "x"}, {"keys": 1}, {"lease_seconds": -1}, {"exclude": [A, B]}):
            await call("select", body=bad)
        await call("listDecisions", "/decisions?limit=5&reason=full_hit")
        await call("listDecisions", "/decisions?limit=x")
        answers["decision"] = await call("explain", f"/decisions/{got['decision_id']}")
        await call("explain", "/decisions/99999")
        await call("removeWorker", b + "?drain=60")
        await call("release", body={"lease_id": got["lease_id"]})
        await call("release", body={"lease_id": got["lease_id"]})
        await call("release", body={})
        await call("removeWorker", a)
        await call("removeWorker", a)
        await call("removeWorker", b + "?drain=x")
        house.fleet.remove("http://127.0.0.1:1003", cause="test")
        house.fleet.remove(B, cause="test")
        await call("readyz")
        await call("select", body={})
    wanted = {(o.id, status) for o in OPERATIONS for status, _ in o.replies}
    assert wanted <= seen, "every good answer was seen"
    assert answers["decision"]["outcome"] == {"api": "select"}
