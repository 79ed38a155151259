"""The plugin's logic without SGLang: which items are encoded, that nothing else changes, and that it never stands in
the way."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullhit_publisher import EmbeddingCache
from fullhit_publisher.keys import item_key, key_text
from fullhit_publisher.sglang.encoder import Batch, Held, ItemCache
from fullhit_publisher.sglang.guard import with_ids
from fullhit_publisher.sglang.plan import batch_keys, make_plan
from fullhit_publisher.sglang.settings import PluginSettings, add_flags, carry_over
from fullhit_publisher.sglang.torch_tensors import TorchTensors

Rows = list[tuple[str, int]]
"""A tensor of these tests: one entry a row, which picture it is of and which of its rows."""


class Tensors:
    def rows(self, tensor: Rows) -> int:
        return len(tensor)

    def keep(self, tensor: Rows) -> bytes:
        return Kept(tensor)

    def __init__(self) -> None:
        self.brought: list[bool] = []

    def bring(self, tensor: Any, *, on_device: bool) -> Rows:
        self.brought.append(on_device)
        return list(tensor)

    def join(self, tensors: Any) -> Rows:
        return [row for tensor in tensors for row in tensor]

    def grid_of(self, grids: list[int], place: int) -> int:
        return grids[place]

    def same_grid(self, grid: int, grids: list[int], place: int) -> bool:
        return grid == grids[place]

    def grids(self, grids: Any) -> list[int]:
        return list(grids)


class Kept(list[Any]):
    """Sized in bytes, as a tensor is."""

    @property
    def nbytes(self) -> int:
        return 8 * len(self)


@dataclass
class Encoder:
    """What of `MMEncoder` is used. ``ran``: pictures that the ViT saw, in order."""

    ran: list[str] = field(default_factory=list)
    fail: bool = False
    skipped: int = 0
    counted: list[int] = field(default_factory=lambda: [0, 0, 0])

    def count(self, *numbers: int) -> None:
        self.counted = [before + now for before, now in zip(self.counted, numbers, strict=True)]

    def forward(self, pictures: list[str]) -> Rows:
        if self.fail:
            raise RuntimeError("out of memory")
        self.ran += pictures
        return [(picture, row) for picture in pictures for row in range(rows_of(picture))]

    def slice_embedding(self, whole: Rows, counts: Any) -> list[Rows]:
        slices, at = [], 0
        for count in counts:
            slices.append(whole[at : at + count])
            at += count
        return slices

    def _encode_missing(self, feature: Any, result: Any, places: list[int], *_: Any) -> list[Rows]:
        whole = self.forward([feature[place] for place in places])
        return self.slice_embedding(whole, [result.token_counts[place] for place in places])

    def _validate_embedding_token_count(self, ctx: Any, whole: Rows) -> None:
        assert len(whole) == sum(ctx.preprocess_result.token_counts)


def rows_of(picture: str) -> int:
    return 1 + sum(picture.encode()) % 4


class Modality(Enum):
    IMAGE = 1
    VIDEO = 2


def batch(
    requests: list[list[Any]], *, health: bool = False, sound: bool = False, aux: Any = None
) -> tuple[Any, list[dict[str, Any]]]:
    pictures = [item if isinstance(item, str) else item.get("url", "?") for items in requests for item in items]
    inputs = {"video_audio_features": [1]} if sound else {}
    counts = [rows_of(one) for one in pictures]
    result = SimpleNamespace(token_counts=counts, mm_inputs=inputs, grid_thw=[100 + count for count in counts])
    ctx = SimpleNamespace(
        preprocess_result=result, mm_feature=pictures, items_per_req=[len(items) for items in requests],
        is_health_check=health, modality=Modality.IMAGE, get_feature_fn=None, aux_data={"timestamps": aux},
    )  # fmt: skip
    return ctx, [{"req_id": str(number), "mm_items": items} for number, items in enumerate(requests)]


def compute(
    items: ItemCache,
    encoder: Encoder,
    requests: list[list[Any]],
    *,
    on_device: bool = False,
    skip: bool = False,
    **how: Any,
) -> Rows:
    ctx, bodies = batch(requests, **how)
    under_way = Batch(bodies)
    prepared = items.prepare(under_way, ctx.modality) if skip else None
    if prepared is not None:
        encoder.skipped += 1
        for name in ("token_counts", "grid_thw"):
            assert getattr(prepared.preprocess_result, name) == getattr(ctx.preprocess_result, name)
        assert (prepared.items_per_req, prepared.aux_data) == (ctx.items_per_req, ctx.aux_data)
        ctx = prepared

    async def original() -> Rows:
        return encoder.forward(ctx.mm_feature)

    return asyncio.run(items.compute(original, ctx, under_way, keep_on_gpu=on_device, modality="IMAGE"))


def house(capacity: int = 1 << 20) -> tuple[ItemCache, Encoder]:
    encoder = Encoder()
    return ItemCache(EmbeddingCache(capacity), encoder, Tensors(), encoder.count), encoder


PICTURES = [f"https://pictures.invalid/{number}.png" for number in range(7)]
UNKEYED: dict[str, Any] = {"feature": "precomputed"}
ITEMS = [*PICTURES, UNKEYED, {"url": PICTURES[0], "detail": "low"}]


def test_only_what_is_not_held_is_encoded_and_the_order_stays() -> None:
    items, encoder = house()
    a, b, c = PICTURES[:3]
    assert compute(items, encoder, [[a, b]]) == Encoder().forward([a, b])
    assert compute(items, encoder, [[b], [c, a]]) == Encoder().forward([b, c, a])
    assert compute(items, encoder, [[c, b, a]]) == Encoder().forward([c, b, a])
    assert encoder.ran == [a, b, c]
    assert (items.cache.hits, items.cache.misses) == (5, 3)
    assert encoder.counted == [5, 3, 0]


def test_a_picture_that_stands_twice_in_a_batch_is_encoded_once_when_anything_is_saved() -> None:
    items, encoder = house()
    a, b = PICTURES[:2]
    assert compute(items, encoder, [[a, b], [a]]) == Encoder().forward([a, b, a])
    assert encoder.ran == [a, b]


def test_health_probes_sound_and_items_without_key_go_by_untouched() -> None:
    items, encoder = house()
    a = PICTURES[0]
    for _ in range(2):
        compute(items, encoder, [[a]], health=True)
        compute(items, encoder, [[a]], sound=True)
        compute(items, encoder, [[UNKEYED]])
    assert len(encoder.ran) == 6 and not items.cache.keys()
    compute(items, encoder, [[UNKEYED, a]])
    encoder.ran.clear()
    assert compute(items, encoder, [[a, UNKEYED]]) == Encoder().forward([a, "?"])
    assert encoder.ran == ["?"]


def test_what_does_not_fit_the_batch_any_more_is_encoded_anew() -> None:
    items, encoder = house()
    a = PICTURES[0]
    key = item_key(a)
    assert key is not None
    items.cache.put(key_text(key), Held(Kept([("old", 0)] * 9)))
    assert compute(items, encoder, [[a]]) == Encoder().forward([a])
    assert encoder.ran == [a] and compute(items, encoder, [[a]]) == Encoder().forward([a]) and encoder.ran == [a]


def test_a_failing_forward_is_sglangs_own_failure_and_keeps_nothing() -> None:
    items, encoder = house()
    encoder.fail = True
    with pytest.raises(RuntimeError, match="out of memory"):
        compute(items, encoder, [[PICTURES[0]]])
    encoder.fail = False
    compute(items, encoder, [[PICTURES[0]]])
    encoder.fail = True
    with pytest.raises(RuntimeError, match="out of memory"):
        compute(items, encoder, [[PICTURES[0], PICTURES[1]]])
    assert len(items.cache) == 1 and not items.broken


def test_a_fault_of_the_cache_switches_it_off_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    items, encoder = house()
    compute(items, encoder, [[PICTURES[0]]])

    def broken(*_: Any) -> Any:
        raise OSError("no memory to be had")

    items._tensors.rows = broken  # type: ignore[method-assign]
    assert compute(items, encoder, [[PICTURES[0]]]) == Encoder().forward([PICTURES[0]])
    assert "no memory to be had" in items.broken and "switched off" in caplog.text and not items.cache.keys()
    assert compute(items, encoder, [[PICTURES[0]]]) == Encoder().forward([PICTURES[0]])
    assert len(encoder.ran) == 3


@given(
    st.lists(
        st.lists(
            st.lists(st.sampled_from(ITEMS), min_size=1, max_size=4), min_size=1, max_size=3
        ),
        min_size=1, max_size=8,
    ),
    st.sampled_from([0, 100, 250, 1 << 20]),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=1_000, deadline=None)
def test_with_and_without_cache_every_batch_is_the_same(
    batches: list[list[list[Any]]], capacity: int, skip: bool
) -> None:
    items, encoder = house(max(capacity, 1))
    for requests in batches:
        expected = Encoder().forward(batch(requests)[0].mm_feature)
        assert compute(items, encoder, requests, skip=skip) == expected
    assert not items.broken and items.cache.used_bytes <= max(capacity, 1)


def test_keys_are_the_routers_and_only_where_items_and_entries_agree() -> None:
    a, b = PICTURES[:2]
    detail = {"url": b, "detail": "low"}
    requests = [{"mm_items": [a, detail]}, {"mm_items": [a]}, {"mm_items": None}, {"mm_items": "text"}]
    keys = batch_keys(requests, [2, 2, 1, 4], "IMAGE")
    own = [key_text(key) for item in (a, detail) if (key := item_key(item)) is not None]
    assert keys == [*own, None, None, None, *[None] * 4]
    assert batch_keys([{"mm_items": [a]}], [1], "VIDEO") != own[:1]


def test_a_plan_is_plain_when_nothing_is_saved() -> None:
    plan = make_plan(["a", None, "b"], lambda key, place: None)
    assert plan.plain and plan.encode == [0, 1, 2]
    rng = random.Random(1)
    plan = make_plan(["a", "b", "a", None], lambda key, place: key if key == "b" else None)
    assert (plan.held, plan.encode, plan.same_as) == ({1: "b"}, [0, 3], {2: 0}), rng
    assert plan.in_order(["A", "N"]) == ["A", "b", "A", "N"]


def test_flags_reach_children_by_the_environment() -> None:
    environ: dict[str, str] = {}
    parser = argparse.ArgumentParser()
    add_flags(parser, environ)
    line = "--multimodal-embedding-cache-capacity-gb 0.5 --multimodal-embedding-cache-publisher"
    line += " --event-plane nats://127.0.0.1:9 --embedding-cache-pool vl --embedding-cache-url http://e:1"
    carry_over(parser.parse_args(line.split()), environ)
    assert PluginSettings.from_environ(environ) == PluginSettings(
        1 << 29, True, "nats://127.0.0.1:9", None, "vl", "http://e:1"
    )
    carry_over(argparse.Namespace(), environ)
    assert PluginSettings.from_environ(environ).wanted
    assert not PluginSettings.from_environ({}).wanted
    for text in ("x", "-1", "nan"):
        with pytest.raises(ValueError, match="CAPACITY_GB"):
            PluginSettings.from_environ({"DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB": text})


def test_without_the_flags_there_are_the_usual_defaults() -> None:
    given = PluginSettings.from_environ({"DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB": "1"})
    assert (given.event_plane, given.pool, given.publish) == ("nats://127.0.0.1:4222", "default", False)


def test_an_aborted_request_without_ids_gets_an_empty_list_and_others_stay() -> None:
    aborted = SimpleNamespace(origin_input_ids=None, origin_input_ids_unpadded=None)
    assert with_ids(aborted) is aborted
    assert (len(aborted.origin_input_ids), len(aborted.origin_input_ids_unpadded)) == (0, 0)
    whole = SimpleNamespace(origin_input_ids=[1, 2], origin_input_ids_unpadded=[1])
    with_ids(whole)
    assert (whole.origin_input_ids, whole.origin_input_ids_unpadded) == ([1, 2], [1])
    with_ids(other := SimpleNamespace())
    assert vars(other) == {}


def test_where_the_backend_keeps_them_on_the_device_all_pieces_are_brought_there() -> None:
    items, encoder = house()
    tensors = items._tensors
    assert isinstance(tensors, Tensors)
    a, b = PICTURES[:2]
    compute(items, encoder, [[a]], on_device=True)
    assert compute(items, encoder, [[a, b]], on_device=True) == Encoder().forward([a, b])
    assert tensors.brought == [True, True]
    held = [items.cache.get(key) for key in items.cache.keys()]  # noqa: SIM118 (it is no dictionary)
    assert held and all(type(one.piece) is Kept for one in held), "what is held is in host memory"


def test_pictures_that_are_all_held_are_not_fetched_again_where_that_is_wanted() -> None:
    items, encoder = house()
    a, b, c = PICTURES[:3]
    for requests in ([[a, b]], [[a, b]], [[b], [a]], [[a, c]], [[c, a, b]], [[a, UNKEYED]]):
        assert compute(items, encoder, requests, skip=True) == Encoder().forward(batch(requests)[0].mm_feature)
    assert (encoder.skipped, encoder.ran) == (3, [a, b, c, "?"])
    assert encoder.counted == [2 + 2 + 1 + 3 + 1, 3, 1]


def test_what_leaves_more_than_grid_and_tokens_beside_the_embedding_is_always_fetched() -> None:
    items, encoder = house()
    a = PICTURES[0]
    for _ in range(3):
        compute(items, encoder, [[a]], skip=True, aux=[1.5])
    assert (encoder.skipped, encoder.ran) == (0, [a])


def test_an_eviction_between_the_steps_does_not_matter() -> None:
    items, encoder = house()
    a = PICTURES[0]
    compute(items, encoder, [[a]])
    _, bodies = batch([[a]])
    under_way = Batch(bodies)
    ctx = items.prepare(under_way, Modality.IMAGE)
    items.cache.clear()

    async def original() -> Rows:
        raise AssertionError("nothing was fetched for it")

    whole = asyncio.run(items.compute(original, ctx, under_way, keep_on_gpu=False, modality="IMAGE"))
    assert whole == Encoder().forward([a])
    assert items.prepare(Batch(bodies), Modality.IMAGE) is None and items.prepare(Batch(bodies), Modality.VIDEO) is None


def test_another_picture_behind_the_same_url_is_noticed_by_its_grid() -> None:
    items, encoder = house()
    a = PICTURES[0]
    compute(items, encoder, [[a]])
    ctx, bodies = batch([[a]])
    ctx.preprocess_result.grid_thw = [999]

    async def original() -> Rows:
        return encoder.forward(ctx.mm_feature)

    asyncio.run(items.compute(original, ctx, Batch(bodies), keep_on_gpu=False, modality="IMAGE"))
    assert encoder.ran == [a, a]


class Torch(ModuleType):
    """So much of torch as keeping an embedding needs. ``lockable``: tensors for which memory may still be locked."""

    def __init__(self, lockable: int) -> None:
        super().__init__("torch")
        self.lockable = lockable

    def device(self, name: str) -> Any:
        return SimpleNamespace(type=str(name).partition(":")[0])

    def empty_like(self, tensor: Any, *, device: str, pin_memory: bool = False) -> Any:
        assert device == "cpu"
        if pin_memory:
            self.lockable -= 1
            if self.lockable < 0:
                raise RuntimeError("CUDA error: out of memory")
        return SimpleNamespace(copy_=lambda other: (other, pin_memory))


@pytest.mark.parametrize(
    ("device", "pinned", "expected"),
    [("cuda:0", True, [True, True, False, False]), ("cuda:0", False, [False] * 4), ("cpu", True, [False] * 4)],
)
def test_memory_is_locked_where_embeddings_go_back_to_a_gpu_and_as_long_as_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
    pinned: bool,
    expected: list[bool],
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch(2))
    tensors = TorchTensors(device, pinned=pinned)
    kept = [tensors.keep(SimpleNamespace(detach=lambda number=number: number)) for number in range(4)]
    assert kept == list(enumerate(expected))
    assert caplog.text.count("ordinary memory") == (1 if True in expected else 0)
