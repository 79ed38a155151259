"""Each call of fullhit.v1.Router over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest

from fullhit.core import Pool, SelectRequest
from fullhit.decision import DecisionSettings
from fullhit.rpc.v1 import router_pb2 as pb
from fullhit_publisher.identity import worker_id_for
from fullhit_publisher.keys import item_key, key_text

A, B = "http://127.0.0.1:1001", "http://127.0.0.1:1002"
URL = "https://pictures.invalid/cat.jpg"


async def refused(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, code of the service, message."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    trailing = dict(caught.value.trailing_metadata() or ())
    return caught.value.code(), str(trailing.get("fullhit-code", "")), caught.value.details() or ""


async def test_a_choice_holds_its_slot_until_it_is_released(house):
    house.add_ready(A)
    stub = house.stub()
    got = await stub.Select(pb.SelectRequest(items=[pb.MediaItem(url=URL)], request_id="r1"))
    assert (got.worker.id, got.worker.url, got.worker.device) == (A, A, "cuda")
    assert got.worker.worker_id == worker_id_for(A)
    assert (got.reason, got.pool, got.lease_seconds, got.request_id) == (pb.REASON_MISS, "default", 60.0, "r1")
    assert (got.keys, got.unkeyed, got.decision_id > 0, len(got.candidates)) == (1, 0, True, 0)
    assert house.inflight() == 1
    freed = await stub.Release(pb.ReleaseRequest(lease_id=got.lease_id))
    assert (freed.released, freed.worker, freed.decision_id) == (True, A, got.decision_id)
    assert house.inflight() == 0
    again = await stub.Release(pb.ReleaseRequest(lease_id=got.lease_id))
    assert not again.released, "releasing twice is no error"


async def test_a_dry_run_takes_nothing(house):
    house.add_ready(A)
    got = await house.stub().Select(pb.SelectRequest(dry_run=True))
    assert (got.worker.id, got.lease_id, got.reason) == (A, "", pb.REASON_NO_MEDIA)
    assert house.inflight() == 0 and len(house.service.leases) == 0


@pytest.mark.parametrize(
    "shape",
    [
        {"keys": [key_text(item_key({"url": URL, "detail": "low"}))]},
        {"items": [pb.MediaItem(url=URL, options_json='{"detail": "low"}')]},
        {"sglang_encode": json.dumps({"req_id": "x", "mm_items": [{"url": URL, "detail": "low"}]}).encode()},
        {"openai_chat": json.dumps({"messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": [
                {"type": "text", "text": "what is it?"},
                {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
            ]},
        ]}).encode()},
    ],
    ids=["keys", "items", "encode body", "chat body"],
)  # fmt: skip
async def test_every_shape_of_the_same_media_finds_the_holder(house, shape):
    house.add_ready(A, B)
    house.pool.apply_delta(B, [item_key({"url": URL, "detail": "low"})], [])
    for _ in range(3):
        got = await house.stub().Select(pb.SelectRequest(**shape, candidates=16))
        assert (got.worker.id, got.reason, got.keys) == (B, pb.REASON_FULL_HIT, 1)
        assert {c.id: c.keys_held for c in got.candidates} == {A: 0, B: 1}
        assert [c.id for c in got.candidates if c.chosen] == [B]


async def test_an_item_without_a_key_is_never_a_full_hit(house):
    house.add_ready(A)
    house.pool.apply_delta(A, [item_key(URL)], [])
    got = await house.stub().Select(pb.SelectRequest(items=[pb.MediaItem(url=URL), pb.MediaItem()], dry_run=True))
    assert (got.reason, got.unkeyed, got.keys) == (pb.REASON_PARTIAL_HIT, 1, 1)


async def test_a_request_asked_twice_gets_one_slot(house):
    house.add_ready(A, B)
    stub = house.stub()
    ask = pb.SelectRequest(items=[pb.MediaItem(url=URL)], request_id="r1")
    first = await stub.Select(ask)
    second = await stub.Select(ask)
    assert second.repeated_call and not first.repeated_call
    assert (second.lease_id, second.decision_id, second.worker.id) == (
        first.lease_id,
        first.decision_id,
        first.worker.id,
    )
    assert house.inflight() == 1
    other = await stub.Select(pb.SelectRequest(items=ask.items, request_id="r1", exclude=[first.worker.id]))
    assert other.worker.id != first.worker.id and house.inflight() == 2, "other content is another request"
    for lease in (first.lease_id, other.lease_id):
        assert (await stub.Release(pb.ReleaseRequest(lease_id=lease))).released
    third = await stub.Select(ask)
    assert third.lease_id != first.lease_id and not third.repeated_call, "the lease is over, the question is open"
    assert (await stub.Release(pb.ReleaseRequest(request_id="r1"))).worker == third.worker.id
    assert house.inflight() == 0


async def test_a_repeated_request_is_decided_anew_when_its_worker_has_gone(house):
    house.add_ready(A, B)
    stub = house.stub()
    first = await stub.Select(pb.SelectRequest(request_id="r1"))
    house.fleet.remove(first.worker.id, cause="test")
    second = await stub.Select(pb.SelectRequest(request_id="r1"))
    assert second.worker.id != first.worker.id and not second.repeated_call
    assert house.inflight() == 1 and len(house.service.leases) == 1


async def test_workers_are_excluded_by_name_or_number(house):
    house.add_ready(A, B)
    stub = house.stub()
    for name in (A, A.upper() + "/", str(worker_id_for(A))):
        got = await stub.Select(pb.SelectRequest(exclude=[name, "9999", "dynamo:18446744073709551615"], dry_run=True))
        assert got.worker.id == B


@pytest.mark.parametrize(
    ("ask", "status", "code", "message"),
    [
        ({"pool": "nowhere"}, "NOT_FOUND", "unknown_pool", "the pools are default"),
        ({"exclude": ["x"]}, "INVALID_ARGUMENT", "invalid_request", "exclude holds worker URLs"),
        ({"keys": ["k"] * 10_001}, "INVALID_ARGUMENT", "invalid_request", "more than 10000"),
        ({"modality": "SMELL"}, "INVALID_ARGUMENT", "invalid_request", "IMAGE, VIDEO, AUDIO"),
        ({"items": [pb.MediaItem(options_json="[")]}, "INVALID_ARGUMENT", "invalid_request", "items[0].options_json"),
        ({"items": [pb.MediaItem(options_json="[" * 9000)]}, "INVALID_ARGUMENT", "invalid_request", "options_json"),
        (
            {"items": [pb.MediaItem(options_json='{"a":"' + "x" * 4096 + '"}')]},
            "INVALID_ARGUMENT",
            "invalid_request",
            "4096",
        ),
        ({"items": [pb.MediaItem()] * 10_001}, "INVALID_ARGUMENT", "invalid_request", "more than 10000"),
        ({"exclude": ["1"] * 10_001}, "INVALID_ARGUMENT", "invalid_request", "exclude holds more than 10000"),
        (
            {"openai_chat": b'{"messages":[' + b"[]," * 200_000 + b"{}]}"},
            "INVALID_ARGUMENT",
            "invalid_request",
            "values",
        ),
        (
            {"sglang_encode": b'{"mm_items":[' + b"[]," * 200_000 + b"{}]}"},
            "INVALID_ARGUMENT",
            "invalid_request",
            "values",
        ),
        ({"items": [pb.MediaItem(options_json="7")]}, "INVALID_ARGUMENT", "invalid_request", "options_json"),
        ({"sglang_encode": b"{"}, "INVALID_ARGUMENT", "invalid_request", "sglang_encode.body"),
        ({"sglang_encode": b"{}"}, "INVALID_ARGUMENT", "invalid_request", "sglang_encode.req_id"),
        ({"sglang_encode": b""}, "INVALID_ARGUMENT", "invalid_request", "sglang_encode.body"),
        ({"openai_chat": b"\xff"}, "INVALID_ARGUMENT", "invalid_request", "openai_chat: not valid JSON"),
        ({"openai_chat": b"[" * 100_000}, "INVALID_ARGUMENT", "invalid_request", "openai_chat"),
        ({"openai_chat": b"{}"}, "INVALID_ARGUMENT", "invalid_request", "openai_chat.messages"),
        ({"lease_seconds": -1.0}, "INVALID_ARGUMENT", "invalid_request", "above 0 and at most 3600"),
        ({"lease_seconds": float("nan")}, "INVALID_ARGUMENT", "invalid_request", "lease_seconds"),
        ({"lease_seconds": 1e9}, "INVALID_ARGUMENT", "invalid_request", "lease_seconds"),
        ({"request_id": "x" * 257}, "INVALID_ARGUMENT", "invalid_request", "request_id"),
    ],
)
async def test_a_senseless_question_gets_a_clear_answer(house, ask, status, code, message):
    house.add_ready(A)
    got = await refused(house.stub().Select(pb.SelectRequest(**ask)))
    assert got[:2] == (grpc.StatusCode[status], code) and message in got[2]
    assert house.inflight() == 0


async def test_odd_chat_bodies_are_read_as_far_as_they_make_sense(house):
    house.add_ready(A)
    parts: list[Any] = [
        None, 7, {"type": None}, {"type": "image_url"}, {"type": "image_url", "image_url": URL},
        {"type": "image_url", "image_url": {"url": URL}, "uuid": "u1"}, {"type": "image_url", "uuid": "u1"},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}, {"type": "input_audio"},
        {"type": "video_url", "video_url": {"url": URL}},
    ]  # fmt: skip
    body = json.dumps({"messages": [7, {"content": None}, {"content": "text"}, {"content": parts}]}).encode()
    got = await house.stub().Select(pb.SelectRequest(openai_chat=body))
    assert (got.keys, got.unkeyed) == (4, 2), "the picture, the same by uuid, the sound, the video; two name nothing"


async def test_bytes_that_are_no_message_are_refused_and_survived(house):
    house.add_ready(A)
    channel = house.channel()
    call = channel.unary_unary("/fullhit.v1.Router/Select")
    for bytes_ in (b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f"):
        assert (await refused(call(bytes_)))[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")
    assert (await refused(channel.unary_unary("/fullhit.v1.Router/Nonsense")(b"")))[0] is grpc.StatusCode.UNIMPLEMENTED
    assert (await house.stub().Select(pb.SelectRequest(dry_run=True))).worker.id == A


async def test_nobody_to_choose_is_told_apart(house):
    stub = house.stub()
    assert (await refused(stub.Select(pb.SelectRequest())))[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "empty_pool")
    house.fleet.add(A, max_inflight=1)
    assert (await refused(stub.Select(pb.SelectRequest())))[:2] == (grpc.StatusCode.UNAVAILABLE, "all_down")
    house.add_ready(A)
    await stub.Select(pb.SelectRequest())
    assert (await refused(stub.Select(pb.SelectRequest())))[:2] == (grpc.StatusCode.UNAVAILABLE, "all_busy")
    assert (await refused(stub.Release(pb.ReleaseRequest())))[:2] == (
        grpc.StatusCode.INVALID_ARGUMENT, "invalid_request",
    )  # fmt: skip


async def test_the_number_of_leases_is_bounded(opening):
    async with opening(decision=DecisionSettings(max_leases=2)) as house:
        house.add_ready(A)
        stub = house.stub()
        for _ in range(2):
            await stub.Select(pb.SelectRequest())
        got = await refused(stub.Select(pb.SelectRequest()))
        assert got[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_many_leases")
        assert house.inflight() == 2


async def test_explain_shows_who_was_considered_and_why(house):
    house.add_ready(A, B)
    house.pool.apply_delta(B, [item_key(URL)], [])
    stub = house.stub()
    chosen = await stub.Select(pb.SelectRequest(items=[pb.MediaItem(url=URL)], request_id="r1"))
    for ask in ({"decision_id": chosen.decision_id}, {"request_id": "r1"}):
        told = await stub.Explain(pb.ExplainRequest(**ask))
        assert (told.decision_id, told.worker, told.reason) == (chosen.decision_id, B, pb.REASON_FULL_HIT)
        assert (told.request_id, told.policy, list(told.keys)) == (
            "r1", "device-aware-weighted", [item_key(URL).hex()],
        )  # fmt: skip
        assert "hold all 1 keys" in told.why and {c.id for c in told.candidates} == {A, B}
        assert json.loads(told.record_json)["outcome"] == {"api": "select"}
    assert (await refused(stub.Explain(pb.ExplainRequest(decision_id=2**64 - 1))))[:2] == (
        grpc.StatusCode.NOT_FOUND, "unknown_decision",
    )  # fmt: skip
    assert (await refused(stub.Explain(pb.ExplainRequest(request_id="r2"))))[1] == "unknown_decision"
    assert (await refused(stub.Explain(pb.ExplainRequest())))[1] == "invalid_request"


async def test_workers_are_listed_by_pool(house):
    house.pools["other"] = Pool("other", clock=house.pool._clock)
    house.fleet.add(A, weight=2.0, max_inflight=4, labels={"zone": "a"})
    house.add_ready(A)
    house.fleet.add(B, pool="other", device="cpu")
    house.pool.apply_delta(A, [item_key(URL)], [])
    house.pool.select(SelectRequest())
    stub = house.stub()
    (a,) = (await stub.ListWorkers(pb.ListWorkersRequest(pool="default"))).workers
    assert (a.id, a.url, a.worker_id, a.pool) == (A, A, worker_id_for(A), "default")
    assert (a.weight, a.max_inflight, dict(a.labels), a.source) == (2.0, 4, {"zone": "a"}, "static")
    assert (a.state, a.usable, a.publishing, a.keys) == ("ready", True, True, 1)
    assert (a.inflight_requests, a.encoding_requests, a.device, a.device_class) == (1, 1, "cuda", "gpu")
    _, b = (await stub.ListWorkers(pb.ListWorkersRequest())).workers
    assert (b.id, b.pool, b.device_class, b.state, b.usable, b.HasField("max_inflight")) == (
        B, "other", "cpu", "seen", False, False,
    )  # fmt: skip
    for call in (stub.ListWorkers(pb.ListWorkersRequest(pool="nowhere")),
                 stub.WatchWorkers(pb.WatchWorkersRequest(pool="nowhere")).read()):  # fmt: skip
        got = await refused(call)
        assert got[:2] == (grpc.StatusCode.NOT_FOUND, "unknown_pool") and "the pools are default" in got[2]


async def test_a_watcher_gets_the_list_and_then_each_change(house):
    house.add_ready(A)
    call = house.stub().WatchWorkers(pb.WatchWorkersRequest())
    try:
        async with asyncio.timeout(20):
            first = await call.read()
            assert first.initial and [w.id for w in first.changed] == [A]
            house.fleet.add(B)
            came = await call.read()
            assert not came.initial and [w.id for w in came.changed] == [B]
            house.fleet.drain(A)
            changed = await call.read()
            assert [(w.id, w.state, w.usable) for w in changed.changed] == [(A, "draining", False)]
            house.fleet.remove(B, cause="test")
            gone = await call.read()
            assert [(w.id, w.pool) for w in gone.gone] == [(B, "default")] and not gone.changed
    finally:
        call.cancel()


async def test_a_watcher_of_one_pool_hears_of_no_other(house):
    house.pools["other"] = Pool("other", clock=house.pool._clock)
    call = house.stub().WatchWorkers(pb.WatchWorkersRequest(pool="other"))
    try:
        async with asyncio.timeout(20):
            assert not (await call.read()).changed
            house.fleet.add(A)
            house.fleet.add(B, pool="other")
            assert [w.id for w in (await call.read()).changed] == [B]
    finally:
        call.cancel()
