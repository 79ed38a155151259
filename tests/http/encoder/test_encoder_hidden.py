"""Failures over media that the language server must not hear of: asked for, kept back, mended, or passed on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fullhit.http.encoder.substitute import unreadable_uri

GOOD = "http://h.invalid/good-picture.png"
GONE = "http://h.invalid/gone-picture.png"
RID = "0a1b_local_part_0"
META = "/scheduler_receive_meta_data"
REGISTER = "/scheduler_receive_url"


async def encode_and_register(house: Any, body: dict[str, Any], *ports: int, alias: str = "") -> Any:
    call = await house.start(f"{alias}/encode", body)
    for port in ports or (40001,):
        registration = house.registration(body["req_id"], port, len(ports) or 1)
        assert (await house.call(f"{alias}{REGISTER}", registration)).status == 200
    async with asyncio.timeout(20):
        return await call.answer()


def with_bad(encoders: list[Any], *urls: str) -> None:
    for encoder in encoders:
        encoder.unreadable |= set(urls)


def all_calls(encoders: list[Any], path: str) -> list[dict[str, Any]]:
    return [seen.json for encoder in encoders for seen in encoder.calls(path)]


# --- the question


async def test_registrations_follow_one_question_which_all_ranks_share(house: Any) -> None:
    encoder = await house.encoder()
    body = house.body(part_idx=1, num_parts=2)
    reply = await encode_and_register(house, body, 1, 2, 3)
    assert (reply.status, reply.body) == (200, b"null")
    assert all_calls([encoder], META) == [{"req_id": body["req_id"], "part_idx": 1}]
    assert [seen.path for seen in encoder.seen] == ["/encode", META, REGISTER, REGISTER, REGISTER]
    assert encoder.calls("/encode")[0].json == body
    await house.at_rest()
    assert len(house.gateway._deliveries._questions) == 0


async def test_registrations_wait_for_the_word_of_the_encoder(house: Any) -> None:
    encoder = await house.encoder()
    decoded = asyncio.Event()

    async def when_decoded(encoder: Any, seen: Any, writer: Any) -> None:
        await decoded.wait()
        await encoder._proper(seen, writer)

    encoder.on(META, when_decoded)
    call = await house.start("/encode", house.body(RID))
    assert (await house.call(REGISTER, house.registration(RID))).status == 200, "the caller never waits"
    await encoder.until(lambda: len(encoder.calls(META)) == 1)
    assert encoder.calls(REGISTER) == []
    decoded.set()
    assert (await call.answer()).status == 200
    assert len(encoder.calls(REGISTER)) == 1
    await house.at_rest()


@pytest.mark.parametrize("backend", ["zmq_to_tokenizer", "mooncake"])
async def test_without_registrations_no_encoder_is_asked(house: Any, backend: str) -> None:
    encoder = await house.encoder(backend)
    fields = {"embedding_port": 5000} if backend == "zmq_to_tokenizer" else {}
    assert (await house.call("/encode", house.body(**fields))).status == 200
    assert encoder.calls(META) == []


async def test_verify_media_off_asks_nobody(open_house: Any) -> None:
    house = await open_house(verify_media=False)
    encoder = await house.encoder()
    assert (await encode_and_register(house, house.body())).status == 200
    assert [seen.path for seen in encoder.seen] == ["/encode", REGISTER]


async def test_an_encoder_without_the_route_is_asked_once_in_a_while(house: Any, lab: Any) -> None:
    encoder = await house.encoder()
    now = [1_000.0]
    house.gateway._deliveries._questions._clock = lambda: now[0]
    encoder.on(META, lab.says(404, {"detail": "Not Found"}), always=True)
    for _ in range(3):
        assert (await encode_and_register(house, house.body())).status == 200
    assert len(encoder.calls(META)) == 1
    now[0] += 301.0
    assert (await encode_and_register(house, house.body())).status == 200
    assert len(encoder.calls(META)) == 2
    await house.at_rest()


async def test_a_data_parallel_encoder_that_does_not_know_the_part_is_asked_again_the_next_time(
    house: Any, lab: Any
) -> None:
    encoder = await house.encoder()
    unknown = {"status": "error", "message": "Unknown req_id: x", "req_id": "x"}
    encoder.on(META, lab.says(404, unknown), lab.says(404, unknown))
    for count in (1, 2, 3):
        assert (await encode_and_register(house, house.body())).status == 200
        assert len(encoder.calls(META)) == count


async def test_a_question_without_an_answer_delays_but_does_not_block(open_house: Any) -> None:
    house = await open_house(verify_timeout=0.1)
    encoder = await house.encoder()

    async def silent(encoder: Any, seen: Any, writer: Any) -> None:
        await asyncio.Event().wait()

    encoder.on(META, silent, always=True)
    for _ in range(2):
        assert (await encode_and_register(house, house.body())).status == 200
    assert len(encoder.calls(META)) == 1, "an encoder that never answers is not asked each time"
    await house.at_rest()


@pytest.mark.parametrize("trouble", ["resets", "500", "503", "504", "400"])
async def test_a_question_that_fails_does_not_fail_the_part(
    house: Any, lab: Any, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr("fullhit.http.encoder.verify._AFTER_REFUSAL", 0.05)
    monkeypatch.setattr("fullhit.http.encoder.verify._AFTER_LOSS", 0.05)
    encoder = await house.encoder()
    script = lab.resets if trouble == "resets" else lab.says(int(trouble), {"status": "error", "message": "?"})
    encoder.on(META, script, always=True)
    assert (await encode_and_register(house, house.body())).status == 200
    assert len(encoder.calls("/encode")) == 1
    await house.at_rest()


# --- unreadable pictures


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("num_parts", [1, 3])
async def test_a_picture_that_only_the_encoder_finds_unreadable_is_replaced(
    house: Any, early: bool, num_parts: int
) -> None:
    encoders = [await house.encoder() for _ in range(2)]
    with_bad(encoders, GONE)
    body = house.body(RID, items=[{"url": GONE, "detail": "high"}], num_parts=num_parts)
    if early:
        assert (await house.call(REGISTER, house.registration(RID))).status == 200
    reply = await encode_and_register(house, body)
    assert (reply.status, reply.body) == (200, b"null")
    first, second = sorted(all_calls(encoders, "/encode"), key=lambda one: len(one["req_id"]))
    fresh = second["req_id"]
    assert first == body
    assert fresh.startswith(RID + "r")
    assert fresh.rpartition("_local_part_")[0] == "0a1b"
    assert second == body | {"req_id": fresh, "mm_items": [{"url": unreadable_uri(), "detail": "high"}]}
    assert [push for e in encoders for push in e.pushed] == [(fresh, "127.0.0.1:40001")]
    assert all_calls(encoders, REGISTER) == [house.registration(RID) | {"req_id": fresh}]
    assert {one["req_id"] for one in all_calls(encoders, META)} <= {RID, fresh}
    assert not any(encoder.errors_pushed for encoder in encoders), "nobody may ever register the refused id"
    assert house.fleet.failures == {}, "it was not the encoder's fault"
    assert house.telemetry.counters["bad_images:substituted_after_refusal"] == 1
    assert house.telemetry.requests[-1][2] == 200
    event = dict(house.telemetry.events)["bad_image"]
    assert (event["action"], event["req_id"]) == ("substituted_after_refusal", RID)
    outcome = house.telemetry.decisions[-1][1]
    assert (outcome["code"], outcome["req_id"]) == (200, RID)
    assert "item 0 of 1: refused by http://" in outcome["bad_images"][0]
    assert f"loading data {GONE}" in outcome["bad_images"][0]
    await house.at_rest()


async def test_all_ranks_are_replayed_under_the_fresh_id_late_ones_too(house: Any) -> None:
    encoder = await house.encoder()
    with_bad([encoder], GONE)
    call = await house.start("/v3/encode", house.body(RID, items=[GONE]))
    assert (await house.call(f"/v3{REGISTER}", house.registration(RID, 1, 2))).status == 200
    await encoder.until(lambda: len(encoder.registered) == 1)
    assert (await house.call(f"/v3{REGISTER}", house.registration(RID, 2, 2))).status == 200
    assert (await call.answer()).status == 200
    fresh = encoder.calls("/encode")[1].json["req_id"]
    assert encoder.pushed == [(fresh, "127.0.0.1:1"), (fresh, "127.0.0.1:2")]
    stray = await house.call(f"/v3{REGISTER}", house.registration(RID, 3, 2))
    assert (stray.status, stray.body) == (200, b"null")
    await house.at_rest()


async def test_the_other_pictures_stay_when_the_encoder_names_the_one(house: Any) -> None:
    encoder = await house.encoder()
    with_bad([encoder], GONE)
    body = house.body(RID, items=[GOOD, GONE, GOOD + "?2"])
    assert (await encode_and_register(house, body)).status == 200
    assert encoder.calls("/encode")[1].json["mm_items"] == [GOOD, unreadable_uri(), GOOD + "?2"]
    assert house.telemetry.counters["bad_images:substituted_after_refusal"] == 1


async def test_when_the_encoder_complains_a_second_time_all_pictures_are_replaced(house: Any) -> None:
    encoder = await house.encoder()
    with_bad([encoder], GONE, GONE + "?2")
    assert (await encode_and_register(house, house.body(RID, items=[GOOD, GONE, GONE + "?2"]))).status == 200
    sent = [seen.json for seen in encoder.calls("/encode")]
    assert [one["mm_items"].count(unreadable_uri()) for one in sent] == [0, 1, 3]
    assert len({one["req_id"] for one in sent}) == 3
    assert house.telemetry.counters["bad_images:substituted_after_refusal"] == 3
    await house.at_rest()


async def test_a_picture_that_the_router_replaced_itself_is_no_complaint(house: Any) -> None:
    encoder = await house.encoder()
    with_bad([encoder], GONE)
    broken = "data:image/png;base64,aGVsbG8gd29ybGQsIHRoaXMgaXMgbm8gcGljdHVyZQ=="
    assert (await encode_and_register(house, house.body(RID, items=[GOOD, broken, GONE]))).status == 200
    assert [one.json["mm_items"] for one in encoder.calls("/encode")] == [
        [GOOD, unreadable_uri(), GONE],
        [GOOD, unreadable_uri(), unreadable_uri()],
    ]
    assert len(house.telemetry.decisions[-1][1]["bad_images"]) == 2


async def test_when_nobody_knows_which_picture_it_was_all_are_replaced(house: Any, lab: Any) -> None:
    encoder = await house.encoder()
    encoder.on("/encode", lab.says(400, {"status": "error", "message": "cannot decode image", "req_id": RID}))
    assert (await encode_and_register(house, house.body(RID, items=[GOOD, {"url": GONE}]))).status == 200
    assert encoder.calls("/encode")[1].json["mm_items"] == [unreadable_uri(), {"url": unreadable_uri()}]


async def test_a_part_that_cannot_be_mended_is_passed_on_after_two_resends(house: Any, lab: Any) -> None:
    encoder = await house.encoder()

    async def refuses(encoder: Any, seen: Any, writer: Any) -> None:
        req_id = seen.json["req_id"]
        encoder.refused[req_id] = "out of luck"
        await encoder._note(lambda: encoder.started.add(req_id))
        await lab.says(400, {"status": "error", "message": "out of luck", "req_id": req_id})(encoder, seen, writer)

    encoder.on("/encode", refuses, always=True)
    body = house.body(RID, items=[GOOD, GONE])
    body["mm_items"] += ["http://h.invalid/?" + "x" * 9_000]
    reply = await encode_and_register(house, body)
    assert (reply.status, reply.json["message"]) == (400, "out of luck")
    assert reply.json["req_id"] == RID, "the caller knows it by its own id"
    sent = all_calls([encoder], "/encode")
    assert len(sent) == 2, "all three had been replaced, nothing was left"
    await encoder.until(lambda: len(encoder.errors_pushed) == 1)
    assert encoder.errors_pushed == [(sent[-1]["req_id"], "127.0.0.1:40001")], "it is told after all, for older servers"
    await house.at_rest()


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("missing or invalid modality", {}),
        ("num_parts must be a positive integer", {}),
        ("User-supplied hashes length 3 != grid count 1 for req x", {}),
        ("Failed to process mm items", {"modality": "VIDEO"}),
        ("Failed to process mm items", {"modality": "AUDIO"}),
        ("Failed to process mm items", {"num_parts": ...}),
        ("Failed to process mm items", {"embedding_port": [5001]}),
    ],
)
async def test_a_400_that_no_picture_can_mend_is_passed_on(
    house: Any, lab: Any, message: str, fields: dict[str, Any]
) -> None:
    encoder = await house.encoder()
    error = {"status": "error", "message": message, "req_id": RID}
    encoder.on("/encode", lab.says(400, error), always=True)
    reply = await house.call("/encode", house.body(RID, **fields))
    assert (reply.status, reply.json) == (400, error)
    assert len(encoder.calls("/encode")) == 1
    await house.at_rest()


@pytest.mark.parametrize("setting", ["reject", "pass"])
async def test_pictures_are_replaced_only_where_that_is_wanted(open_house: Any, setting: str) -> None:
    house = await open_house(bad_image=setting)
    encoder = await house.encoder()
    with_bad([encoder], GONE)
    assert (await encode_and_register(house, house.body(RID, items=[GONE]))).status == 400
    assert len(encoder.calls("/encode")) == 1
    await encoder.until(lambda: encoder.errors_pushed == [(RID, "127.0.0.1:40001")])
    await house.at_rest()


async def test_ids_of_the_first_generation_are_never_changed(house: Any) -> None:
    encoder = await house.encoder()
    with_bad([encoder], GONE)
    assert (await encode_and_register(house, house.body("rid", items=[GONE], modality=...))).status == 400
    assert len(encoder.calls("/encode")) == 1


async def test_a_refusal_after_a_registration_was_passed_on_is_passed_on_too(house: Any, lab: Any) -> None:
    encoder = await house.encoder()

    async def late(encoder: Any, seen: Any, writer: Any) -> None:
        encoder.started.add(RID)
        await encoder._note(lambda: None)
        await encoder.until(lambda: RID in encoder.registered)
        await lab.says(500, {"status": "error", "message": "forward", "req_id": RID})(encoder, seen, writer)

    encoder.on("/encode", late)
    reply = await encode_and_register(house, house.body(RID))
    assert (reply.status, reply.json["message"]) == (500, "forward")
    assert len(encoder.calls("/encode")) == 1
    await house.at_rest()


async def test_a_client_that_uses_its_id_again_does_not_meet_the_old_refusal(house: Any) -> None:
    encoder = await house.encoder()
    with_bad([encoder], GONE)
    assert (await encode_and_register(house, house.body(RID, items=[GONE]))).status == 200
    assert (await encode_and_register(house, house.body(RID, items=[GOOD]), 40002)).status == 200
    ids = [seen.json["req_id"] for seen in encoder.calls("/encode")]
    assert ids[0] == RID
    assert len(set(ids)) == 3
    assert encoder.errors_pushed == []
    assert encoder.pushed[-1] == (ids[2], "127.0.0.1:40002")


# --- other failures before anything was passed on


@pytest.mark.parametrize("status", [500, 504])
@pytest.mark.parametrize("num_parts", [1, 3])
async def test_an_encoder_that_fails_unheard_is_followed_by_another(
    house: Any, lab: Any, status: int, num_parts: int
) -> None:
    bad, good = await house.encoder(), await house.encoder()

    async def fails(encoder: Any, seen: Any, writer: Any) -> None:
        await house.until(lambda: any(part.registrations for part in house.gateway.table.parts()))
        await lab.says(status, {"status": "error", "message": "no memory"})(encoder, seen, writer)

    bad.on("/encode", fails, always=True)
    while not bad.calls("/encode"):
        body = house.body(num_parts=num_parts)
        reply = await encode_and_register(house, body)
        assert (reply.status, reply.headers["x-fullhit-worker"]) == (200, good.url)
    assert good.calls("/encode")[-1].json == body | {"req_id": good.pushed[-1][0]}
    assert good.pushed[-1][0].startswith(body["req_id"] + "r")
    assert bad.calls(REGISTER) == []
    assert house.fleet.failures[(bad.url, "5xx")] == 1
    assert house.telemetry.counters["retries:refused"] == 1
    await house.at_rest()


async def test_a_500_at_every_encoder_is_passed_on_after_max_lost(open_house: Any, lab: Any) -> None:
    house = await open_house(max_lost=2)
    encoders = [await house.encoder() for _ in range(4)]
    for encoder in encoders:
        encoder.on("/encode", lab.says(500, {"status": "error", "message": "no memory", "req_id": "?"}), always=True)
    reply = await house.call("/encode", house.body(RID))
    assert (reply.status, reply.json["message"]) == (500, "no memory")
    assert len(all_calls(encoders, "/encode")) == 2
    await house.at_rest()


async def test_a_500_about_the_picture_at_two_encoders_is_mended_like_a_400(house: Any, lab: Any) -> None:
    encoders = [await house.encoder() for _ in range(2)]
    message = f"Internal encoding error: Failed to process mm items: Error while loading data {GONE}: a bomb"
    refusal = lab.says(500, {"status": "error", "message": message})
    for encoder in encoders:
        encoder.on("/encode", refusal)
    reply = await encode_and_register(house, house.body(RID, items=[GOOD, GONE]))
    assert reply.status == 200
    sent = sorted(all_calls(encoders, "/encode"), key=lambda one: len(one["mm_items"][1]))
    assert [one["mm_items"][1] for one in sent] == [GONE, GONE, unreadable_uri()]
    await house.at_rest()


async def test_an_encoder_lost_unheard_is_followed_by_another_also_with_several_parts(house: Any, lab: Any) -> None:
    bad, good = await house.encoder(), await house.encoder()
    bad.on("/encode", lab.resets, always=True)
    while not bad.calls("/encode"):
        body = house.body(num_parts=3)
        reply = await encode_and_register(house, body)
        assert (reply.status, reply.headers["x-fullhit-worker"]) == (200, good.url)
    assert good.pushed[-1][0].startswith(body["req_id"] + "r"), "should the first one live on, it has another id"
    await house.at_rest()


async def test_questions_for_sizes_and_transfers_follow_a_part_with_a_fresh_id(house: Any, lab: Any) -> None:
    """Mooncake seen for the first time looks like zmq_to_scheduler; nothing is lost by that."""
    encoder = await house.encoder("mooncake")
    encoder.on("/encode", lab.says(400, {"status": "error", "message": "cannot decode image", "req_id": RID}))
    reply = await house.call("/encode", house.body(RID))
    assert (reply.status, reply.json["req_id"]) == (200, RID)
    sizes = await house.call(META, {"req_id": RID, "part_idx": 0})
    assert (sizes.status, sizes.json["req_id"]) == (200, RID)
    send = sizes.json | {"prefill_host": "127.0.0.1", "embedding_port": 7, "receive_count": 1}
    assert (await house.call("/send", send)).status == 200
    assert encoder.pushed[0][0].startswith(RID + "r")
    await house.at_rest()
