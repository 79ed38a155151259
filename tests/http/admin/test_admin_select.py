"""Choices over the admin listener: select, release, decisions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from urllib.parse import quote

import pytest

from fullhit.core import Pool, SelectRequest
from fullhit_publisher.keys import item_key, key_text

A, B = "http://127.0.0.1:1001", "http://127.0.0.1:1002"
URL = "https://pictures.invalid/cat.jpg"


async def until(condition: Callable[[], object], what: str, limit: float = 20.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


async def test_a_dry_run_takes_nothing(desk):
    desk.add_ready(A)
    status, told = await desk.call("POST", "/select", {"items": [URL], "dry_run": True})
    assert status == 200 and told["reason"] == "miss" and told["lease_id"] is None
    assert told["worker"] == {
        "id": A,
        "url": A,
        "worker_id": str(desk.fleet.get(A).worker_id),
        "device": "cuda",
    }
    assert desk.pool.get(A).inflight == 0 and len(desk.context.leases) == 0
    assert desk.telemetry.latest_decisions(5) == []


async def test_keys_and_items_mean_the_same_media(desk):
    desk.add_ready(A, B)
    desk.pool.apply_delta(B, [item_key(URL), item_key({"url": URL, "detail": "low"})], [])
    for body in (
        {"items": [URL]},
        {"keys": [key_text(item_key(URL))]},
        {"items": [URL, {"url": URL, "detail": "low"}, URL], "keys": [key_text(item_key(URL))]},
    ):
        _, told = await desk.call("POST", "/select", body | {"dry_run": True})
        assert (told["worker"]["id"], told["reason"]) == (B, "full_hit"), body
    _, told = await desk.call("POST", "/select", {"items": [URL], "modality": "VIDEO", "dry_run": True})
    assert told["reason"] == "miss"
    _, told = await desk.call("POST", "/select", {"items": [URL, {"no": "url"}], "dry_run": True})
    assert told["reason"] == "partial_hit", "an item without a key is never a full hit"
    assert told["decision"]["inputs"]["unkeyed"] == 1


async def test_a_choice_holds_its_slot_until_it_is_released(desk):
    desk.add_ready(A)
    _, told = await desk.call("POST", "/select", {"items": [URL], "request_id": "r1"})
    assert desk.pool.get(A).inflight == 1 and told["lease_seconds"] == 60.0
    status, freed = await desk.call("POST", "/release", {"lease_id": told["lease_id"]})
    assert (status, freed) == (200, {"released": True, "worker": A, "decision_id": told["decision_id"]})
    assert desk.pool.get(A).inflight == 0
    status, code, message = await desk.refusal("POST", "/release", {"lease_id": told["lease_id"]})
    assert (status, code) == (404, "unknown_lease") and "60 s" in message


async def test_a_lease_that_nobody_releases_comes_back_by_itself(opening):
    async with opening(lease_seconds=0.1) as desk:
        desk.add_ready(A)
        await desk.call("POST", "/select", {"items": [URL]})
        await desk.call("POST", "/select", {"items": [URL]})
        await until(lambda: desk.pool.get(A).inflight == 0, "the slots are back")
        assert desk.context.leases.expired == 2


async def test_open_leases_end_with_the_listener(opening):
    async with opening() as desk:
        desk.add_ready(A)
        await desk.call("POST", "/select", {})
        worker = desk.pool.get(A)
        assert worker.inflight == 1
    assert worker.inflight == 0


async def test_the_number_of_leases_is_bounded_and_a_refusal_takes_no_slot(opening):
    async with opening(max_leases=2) as desk:
        desk.add_ready(A)
        for _ in range(2):
            await desk.call("POST", "/select", {})
        assert (await desk.refusal("POST", "/select", {}))[:2] == (429, "too_many_leases")
        assert desk.pool.get(A).inflight == 2
        assert (await desk.call("POST", "/select", {"dry_run": True}))[0] == 200


async def test_nobody_to_choose_is_503_with_the_cause(desk):
    status, code, message = await desk.refusal("POST", "/select", {})
    assert (status, code) == (503, "empty_pool") and "register one" in message
    desk.fleet.add(A)
    assert (await desk.refusal("POST", "/select", {}))[:2] == (503, "all_down")
    desk.add_ready(B)
    async with desk.client.post("/select", json={"exclude": [A, B]}) as reply:
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert (await reply.json())["error"]["code"] == "all_excluded"


@pytest.mark.parametrize(
    ("body", "status", "code", "message"),
    [
        ({"pool": "nowhere"}, 404, "unknown_pool", "the pools are default"),
        ({"exclude": ["x"]}, 400, "invalid_request", "exclude holds worker URLs"),
        ({"keys": [1]}, 400, "invalid_request", "$.keys[0]"),
        ({"keys": "abc"}, 400, "invalid_request", "$.keys"),
        ({"key": ["abc"]}, 400, "invalid_request", "key"),
        ({"items": [URL] * 10_001}, 400, "invalid_request", "more than 10000"),
        ({"dry_run": "yes"}, 400, "invalid_request", "$.dry_run"),
        (b"\x00", 400, "invalid_json", "not JSON"),
        (b'{"items":' + b"[" * 5_000 + b"]" * 5_000 + b"}", 400, "invalid_json", "nested too deeply"),
        (b'{"openai_chat":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001, 400, "invalid_json", "nested too deeply"),
        (b'{"items":[' + b"[]," * 200_000 + b"1]}", 400, "invalid_request", "more than 200000 values"),
    ],
)
async def test_a_senseless_question_gets_a_clear_answer(desk, body, status, code, message):
    desk.add_ready(A)
    got = await desk.refusal("POST", "/select", body)
    assert got[:2] == (status, code) and message in got[2]
    assert desk.pool.get(A).inflight == 0


async def test_items_of_any_shape_are_survived(desk):
    desk.add_ready(A)
    items = [None, 1, [], {}, {"url": None}, {"url": 5}, {"url": URL, "x": [1, {"y": None}]}, ""]
    status, told = await desk.call("POST", "/select", {"items": items, "dry_run": True})
    assert status == 200 and told["decision"]["inputs"]["items"] == len(items)


async def test_decisions_are_listed_newest_first_and_filtered(desk):
    desk.add_ready(A, B)
    desk.pool.apply_delta(B, [item_key(URL)], [])
    for n in range(3):
        await desk.call("POST", "/select", {"items": [URL], "request_id": f"hit-{n}"})
        await desk.call("POST", "/select", {"request_id": f"none-{n}", "exclude": [B]})

    async def ids(query: str) -> list[str]:
        _, told = await desk.call("GET", "/decisions" + query)
        return [row["request_id"] for row in told["decisions"]]

    assert await ids("") == ["none-2", "hit-2", "none-1", "hit-1", "none-0", "hit-0"]
    assert await ids("?limit=2") == ["none-2", "hit-2"]
    assert await ids("?reason=full_hit") == ["hit-2", "hit-1", "hit-0"]
    assert await ids("?worker=" + quote(A, safe="")) == ["none-2", "none-1", "none-0"]
    assert await ids(f"?worker={desk.fleet.get(B).worker_id}&limit=1") == ["hit-2"]
    assert await ids("?request_id=hit-1&pool=default") == ["hit-1"]
    assert await ids("?pool=nowhere") == []


async def test_one_decision_is_explained_by_its_id(desk):
    desk.add_ready(A, B)
    _, chosen = await desk.call("POST", "/select", {"items": [URL], "request_id": "r1"})
    status, told = await desk.call("GET", f"/decisions/{chosen['decision_id']}")
    assert status == 200
    assert (told["request_id"], told["worker"], told["pool"]) == ("r1", chosen["worker"]["id"], "default")
    assert {row["worker"] for row in told["candidates"]} == {A, B} and told["outcome"] == {"api": "select"}


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/decisions?limit=0", 400, "from 1 to 1000"),
        ("/decisions?limit=many", 400, "whole number"),
        ("/decisions?reason=whim", 400, "full_hit"),
        ("/decisions?color=red", 400, "unknown filter 'color'"),
        ("/decisions?worker=http%3A%2F%2Fnobody.invalid", 404, "GET /workers"),
        ("/decisions/abc", 400, "whole number"),
        ("/decisions/99999", 404, "older ones are forgotten"),
        ("/decisions/99999999999999999999999999", 400, "whole number"),
    ],
)
async def test_questions_about_decisions_that_make_no_sense(desk, path, status, message):
    got = await desk.refusal("GET", path)
    assert got[0] == status and message in got[2]


async def test_pools_are_told_apart(desk):
    other = Pool("other", clock=time.monotonic)
    desk.pools["other"] = other
    desk.fleet.add(B, pool="other")
    desk.add_ready(A)
    _, told = await desk.call("POST", "/select", {"pool": "other"})
    assert told["worker"]["id"] == B and told["decision"]["pool"] == "other"
    _, told = await desk.call("GET", "/decisions?pool=other")
    assert [row["pool"] for row in told["decisions"]] == ["other"]
    desk.pool.select(SelectRequest())
