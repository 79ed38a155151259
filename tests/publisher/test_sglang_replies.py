"""What an encoder's reply says of the cache: the middleware, and the note that reaches it from the step inside."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fullhit_publisher.cache import EmbeddingCache
from fullhit_publisher.sglang.encoder import Batch, ItemCache
from fullhit_publisher.sglang.replies import ATTRIBUTE, CacheHeader, encode_pipeline


class Rows:
    """Tensors as lists of rows."""

    rows = staticmethod(len)
    keep = staticmethod(list)
    grid_of = staticmethod(lambda grids, place: grids[place])
    grids = staticmethod(list)

    def bring(self, tensor: Any, *, on_device: bool) -> Any:
        return tensor

    def join(self, tensors: Any) -> Any:
        return [row for tensor in tensors for row in tensor]

    def same_grid(self, grid: Any, grids: Any, place: int) -> bool:
        return bool(grid == grids[place])


class Sized(list[str]):
    nbytes = 1


class Inside:
    """The parts of `MMEncoder` that matter here."""

    def slice_embedding(self, whole: Any, counts: Any) -> Any:
        return [Sized([row]) for row in whole]

    def _encode_missing(self, feature: Any, result: Any, places: list[int], *_: Any) -> Any:
        return [Sized([feature[place]]) for place in places]

    def _validate_embedding_token_count(self, ctx: Any, whole: Any) -> None:
        assert len(whole) == sum(ctx.preprocess_result.token_counts)


def items_of() -> ItemCache:
    tensors: Any = Rows()
    tensors.keep = Sized
    return ItemCache(EmbeddingCache(1 << 20), Inside(), tensors, lambda *_: None)


async def run(items: ItemCache, *requests: tuple[str, list[str]], fail: bool = False, health: bool = False) -> None:
    """A fused batch of these requests."""
    pictures = [url for _, urls in requests for url in urls]
    result = SimpleNamespace(token_counts=[1] * len(pictures), mm_inputs={}, grid_thw=[1] * len(pictures))
    modality = SimpleNamespace(name="IMAGE")
    ctx = SimpleNamespace(
        preprocess_result=result, mm_feature=pictures, items_per_req=[len(urls) for _, urls in requests],
        is_health_check=health, modality=modality, get_feature_fn=None, aux_data={"more": 1},
    )  # fmt: skip
    batch = Batch([{"req_id": name, "mm_items": urls} for name, urls in requests])

    async def original() -> Any:
        if fail:
            raise RuntimeError("out of memory")
        return list(pictures)

    await items.compute(original, ctx, batch, keep_on_gpu=False, modality="IMAGE")


async def test_each_request_of_a_fused_batch_has_its_own_outcome_told_once() -> None:
    items = items_of()
    await run(items, ("first", ["http://a.invalid/1"]))
    await run(items, ("held", ["http://a.invalid/1"]), ("both", ["http://a.invalid/2", "http://a.invalid/1"]),
              ("new", ["http://a.invalid/3", "http://a.invalid/4"]))  # fmt: skip
    told = {name: items.outcome(name) for name in ("first", "held", "both", "new", "never")}
    assert told == {"first": "miss", "held": "hit", "both": "partial", "new": "miss", "never": None}
    assert items.outcome("held") is None


async def test_failures_and_health_probes_have_no_outcome() -> None:
    items = items_of()
    with pytest.raises(RuntimeError):
        await run(items, ("failed", ["http://a.invalid/1"]), fail=True)
    await run(items, ("probe", ["http://a.invalid/1"]), health=True)
    assert items.outcome("failed") is None and items.outcome("probe") is None


async def test_outcomes_that_nobody_asks_for_are_bounded() -> None:
    items = items_of()
    for number in range(3000):
        await run(items, (f"r{number}", [f"http://a.invalid/{number % 7}"]))
    assert len(items._outcomes) == 1024 and items.outcome("r2999") == "hit"


async def call(app: CacheHeader, path: str = "/encode") -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "path": path}, None, send)
    return sent[0]["headers"] if sent else []


async def test_the_header_tells_the_outcome_of_the_very_request_though_another_task_computes_it() -> None:
    items = items_of()
    encoder = SimpleNamespace(**{ATTRIBUTE: items})
    name = iter(("first", "again", "third"))
    urls = iter((["http://a.invalid/1"], ["http://a.invalid/1"], ["http://a.invalid/1", "http://a.invalid/2"]))

    async def pipeline(encoder: Any, scheduler: Any, request: dict[str, Any], *, send_sockets: Any) -> None:
        await asyncio.create_task(run(items, (request["req_id"], request["mm_items"])))

    async def server(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/encode":
            request = {"req_id": next(name), "mm_items": next(urls)}
            await encode_pipeline(pipeline, encoder, None, request, send_sockets=None)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})

    app = CacheHeader(server)
    said = [await call(app) for _ in range(3)]
    assert said == [[(b"a", b"b"), (b"x-fullhit-cache", word)] for word in (b"miss", b"hit", b"partial")]
    assert await call(app, "/health") == [(b"a", b"b")]


async def test_an_encoder_without_a_cache_and_a_failed_step_add_nothing() -> None:
    async def pipeline(encoder: Any, scheduler: Any, request: Any, **_: Any) -> str:
        if request["req_id"] == "bad":
            raise RuntimeError("no picture")
        return "content"

    async def server(scope: Any, receive: Any, send: Any) -> None:
        assert await encode_pipeline(pipeline, SimpleNamespace(), None, {"req_id": "r"}) == "content"
        with pytest.raises(RuntimeError):
            await encode_pipeline(pipeline, SimpleNamespace(), None, {"req_id": "bad"})
        await send({"type": "http.response.start", "status": 200, "headers": []})

    assert await call(CacheHeader(server)) == []
    lifespan: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        lifespan.append(scope["type"])

    await CacheHeader(inner)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert lifespan == ["lifespan"]
