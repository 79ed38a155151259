"""The decision service over a pool of Dynamo workers: media in every shape, keyed as Dynamo keys them."""

from __future__ import annotations

import hashlib
import io
import json
import random
import time

import pytest

from fullhit.core import Pool, Reason
from fullhit.decision import DecisionService, SelectCall
from fullhit.decision.dynamo_media import read_dynamo_media
from fullhit.decision.media import MediaError
from fullhit.fleet import Fleet
from fullhit.telemetry import Log, Metrics, Telemetry
from fullhit_publisher.dynamo_keys import KeyRules, url_key
from fullhit_publisher.identity import dynamo_name
from fullhit_publisher.keys import fold

URL = "https://pictures.invalid/Cat.png"
SHOUTED = "HTTPS://PICTURES.invalid/Cat.png"
CHAT = {"messages": [{"content": [{"type": "image_url", "image_url": {"url": SHOUTED}}]}]}
BIG = dynamo_name(2**64 - 1)


class Desk:
    def __init__(self) -> None:
        pools = {"vision": Pool("vision", clock=time.monotonic, rng=random.Random(1))}
        telemetry = Telemetry(Metrics(pools), Log(io.StringIO(), "error", "json"))
        self.fleet = Fleet(pools, clock=time.monotonic, observer=telemetry)
        self.pool = pools["vision"]
        for name in (dynamo_name(1), BIG):
            self.fleet.add_leased(name, pool="vision")
        self.service = DecisionService(
            pools, self.fleet, telemetry, clock=time.monotonic, dynamo={"vision": KeyRules()}
        )

    def ask(self, **call: object):
        return self.service.select(SelectCall(pool="vision", dry_run=True, **call)).decision  # type: ignore[arg-type]


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.mark.parametrize(
    "call",
    [
        {"keys": [url_key(URL)]},
        {"items": [SHOUTED]},
        {"items": [{"url": SHOUTED, "detail": "high"}]},
        {"openai_chat": json.dumps(CHAT).encode()},
        {"openai_chat": json.dumps({"multi_modal_data": {"image_url": [{"Url": URL}]}}).encode()},
        {"sglang_encode": json.dumps({"mm_items": [SHOUTED], "modality": "IMAGE"}).encode()},
    ],
    ids=lambda call: next(iter(call)),
)
def test_every_shape_finds_the_worker_that_holds_the_picture(desk: Desk, call: dict[str, object]) -> None:
    desk.pool.apply_delta(BIG, [fold(url_key(URL))], [])
    decision = desk.ask(**call)
    assert (decision.worker.id, decision.reason) == (BIG, Reason.FULL_HIT)
    assert desk.ask(**call, exclude=[BIG]).worker.id == dynamo_name(1)
    assert desk.ask(**call, exclude=[str(2**64 - 1), dynamo_name(99)]).worker.id == dynamo_name(1)


def test_a_session_is_found_under_either_key(desk: Desk) -> None:
    body = {"multi_modal_data": {"image_url": [{"Url": URL}]}, "image_cache_scope": "s1"}
    call = {"openai_chat": json.dumps(body).encode()}
    assert desk.ask(**call).reason is Reason.MISS
    desk.pool.apply_delta(BIG, [fold(f"{hashlib.sha256(b's1').hexdigest()}:{url_key(URL)}")], [])
    assert desk.ask(**call).worker.id == BIG
    assert desk.ask(openai_chat=json.dumps(CHAT).encode()).reason is Reason.MISS, "another session's"
    assert desk.ask(openai_chat=json.dumps(CHAT).encode(), session=" s1 ").worker.id == BIG
    assert desk.ask(openai_chat=json.dumps(CHAT).encode(), session="s2").reason is Reason.MISS


def test_an_item_without_key_makes_it_a_partial_hit_at_best(desk: Desk) -> None:
    desk.pool.apply_delta(BIG, [fold(url_key(URL))], [])
    body = {
        "messages": [{"content": [*CHAT["messages"][0]["content"], {"type": "video_url", "video_url": {"url": URL}}]}]
    }
    decision = desk.ask(openai_chat=json.dumps(body).encode())
    assert decision.reason is Reason.PARTIAL_HIT and decision.request.unkeyed == 1


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_bodies_that_are_none_are_the_callers_mistake(body: bytes) -> None:
    with pytest.raises(MediaError):
        read_dynamo_media(KeyRules(), chat_body=body)
    with pytest.raises(MediaError):
        read_dynamo_media(KeyRules(), encode_body=body)
    with pytest.raises(MediaError, match="more than 3"):
        read_dynamo_media(KeyRules(), items=["x"] * 4, limit=3)
