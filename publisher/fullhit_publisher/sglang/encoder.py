"""The cache around one encoder's steps for a batch.

`ItemCache.compute` takes the place of SGLang's compute step. Where nothing of the batch is held, SGLang's own step runs
and its result is kept, cut into items; so the first time is exactly what it always was. Otherwise the missing items
alone go through the encoder's ``_encode_missing``, and everything is put together in the order of the batch.

`ItemCache.prepare` takes the place of the step before, where that is switched on: when every picture of a batch is
held, nothing has to be fetched and preprocessed, because what the rest of the way wants to know of a picture (its grid,
its number of tokens) was kept with it. What it found is handed on to `compute`, so that an eviction in between does not
matter.

Held embeddings lie in host memory, each in memory of its own: a slice would keep its whole batch alive. An embedding
whose rows or grid are not what the batch expects (another picture behind the same URL, a processor that was changed) is
dropped and encoded anew.
Whatever goes wrong with the cache itself, SGLang's own step is the answer.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..cache import EmbeddingCache
from .plan import Plan, batch_keys, make_plan

__all__ = ["Batch", "Held", "ItemCache", "Tensors"]

_log = logging.getLogger("fullhit_publisher")

Original = Callable[[], Awaitable[Any]]
_GRID_BYTES = 64
_MAX_OUTCOMES = 1024
"""Requests whose outcome is remembered until their reply asks for it; fewer are ever under way."""


class Tensors(Protocol):
    """What is done with tensors; a batch's are two-dimensional, one row a token."""

    def rows(self, tensor: Any) -> int: ...
    def keep(self, tensor: Any) -> Any:
        """A copy in host memory of its own."""

    def bring(self, tensor: Any, *, on_device: bool) -> Any:
        """A tensor where the step wants its result: on the device, or in host memory."""

    def join(self, tensors: Sequence[Any]) -> Any:
        """One tensor of all rows."""

    def grid_of(self, grids: Any, place: int) -> Any:
        """The grid of one item, in memory of its own."""

    def same_grid(self, grid: Any, grids: Any, place: int) -> bool:
        """Whether an item has this grid."""

    def grids(self, grids: Sequence[Any]) -> Any:
        """The grids of a batch, as preprocessing gives them."""


@dataclass(slots=True)
class Held:
    """One item: its embedding, and its grid where that can be used again."""

    piece: Any
    grid: Any = None

    @property
    def nbytes(self) -> int:
        return int(self.piece.nbytes) + _GRID_BYTES


@dataclass(slots=True)
class Batch:
    """A batch on its way: the bodies of its requests, and what `prepare` found, by place."""

    requests: Sequence[Any]
    ready: dict[int, Held] = field(default_factory=dict)


class ItemCache:
    """``cache``: by key texts; ``encoder``: SGLang's ``MMEncoder``, of which three methods are used."""

    def __init__(
        self, cache: EmbeddingCache[Any], encoder: Any, tensors: Tensors, count: Callable[[int, int, int], None]
    ) -> None:
        """``count(hits, misses, unkeyed)`` is told of each batch, in items."""
        self.cache = cache
        self._count = count
        self.broken = ""
        """Why the cache is not used any more; empty while it is."""
        self._encoder = encoder
        self._tensors = tensors
        self._example: Any = None  # a context of this encoder's: what the next one is modelled on
        self._outcomes: OrderedDict[str, str] = OrderedDict()

    def outcome(self, req_id: str) -> str | None:
        """What became of a request that was computed, told once: ``hit`` when all its items were held, ``partial`` when
        some were, ``miss``. None for one that the cache had no part in."""
        return self._outcomes.pop(req_id, None)

    def prepare(self, batch: Batch, modality: Any) -> Any:
        """The context of a batch of pictures that are all held; None when it must be prepared as ever."""
        example = self._example
        if self.broken or example is None or modality != example.modality:
            return None
        try:
            counts = [len(request["mm_items"]) for request in batch.requests]
            keys = batch_keys(batch.requests, counts, modality.name)
            if not keys or not all(keys) or not all(key in self.cache for key in keys):
                return None
            wanted: list[Held | None] = [self.cache.get(key) for key in keys if key is not None]
            found = [held for held in wanted if held is not None and held.grid is not None]
            if len(found) < len(keys):
                return None
            ready: dict[int, Held] = dict(enumerate(found))
            context = type(example)(
                req_id=batch.requests[0]["req_id"],
                modality=modality,
                preprocess_result=type(example.preprocess_result)(
                    mm_inputs={},
                    grid_thw=self._tensors.grids([held.grid for held in found]),
                    token_counts=[self._tensors.rows(held.piece) for held in found],
                ),
                get_feature_fn=example.get_feature_fn,
                mm_feature=None,
                num_items=len(found),
                items_per_req=counts,
                aux_data=dict(example.aux_data),
                str_mm_hashes=None,
                use_global_cache=False,
                is_health_check=False,
            )
        except Exception as error:
            self._give_up(error)
            return None
        batch.ready = ready
        return context

    async def compute(self, original: Original, ctx: Any, batch: Batch, *, keep_on_gpu: bool, modality: str) -> Any:
        """The embeddings of a batch, as ``original`` would give them. Raises what SGLang's own steps raise."""
        if batch.ready:
            self._count(len(batch.ready), 0, 0)
            pieces = [batch.ready[place].piece for place in range(len(batch.ready))]
            self._note(batch.requests, ctx.items_per_req, batch.ready)
            return self._tensors.join([self._tensors.bring(piece, on_device=keep_on_gpu) for piece in pieces])
        plan, keys = self._plan(ctx, batch.requests, modality)
        if plan is None:
            return await original()
        counts = ctx.preprocess_result.token_counts
        unkeyed = keys.count(None)
        self._count(plan.size - len(plan.encode), len(plan.encode) - unkeyed, unkeyed)
        if plan.plain:
            whole = await original()
            self._note(batch.requests, ctx.items_per_req, ())
            self._keep(ctx, keys, plan.encode, lambda: self._encoder.slice_embedding(whole, counts))
            return whole
        encoded: list[Any] = []
        if plan.encode:
            encoded = [
                self._tensors.bring(piece, on_device=keep_on_gpu)
                for piece in self._encoder._encode_missing(
                    ctx.mm_feature, ctx.preprocess_result, plan.encode, ctx.modality, ctx.get_feature_fn
                )
            ]
        held = {place: self._tensors.bring(one.piece, on_device=keep_on_gpu) for place, one in plan.held.items()}
        whole = self._tensors.join(Plan(plan.size, held, plan.encode, plan.same_as).in_order(encoded))
        self._encoder._validate_embedding_token_count(ctx, whole)
        self._note(batch.requests, ctx.items_per_req, plan.held)
        found = dict(zip(plan.encode, encoded, strict=True))
        self._keep(ctx, keys, plan.encode, lambda: [found.get(place) for place in range(plan.size)])
        return whole

    def _note(self, requests: Sequence[Any], items_per_request: Sequence[int], held: Container[int]) -> None:
        """Remember for each request of a batch what became of it. ``held``: the places that were not encoded."""
        first = 0
        for request, count in zip(requests, items_per_request, strict=False):
            spared = sum(place in held for place in range(first, first + count))
            first += count
            request_id = request.get("req_id")
            if isinstance(request_id, str) and count:
                self._outcomes[request_id] = "hit" if spared == count else "partial" if spared else "miss"
        while len(self._outcomes) > _MAX_OUTCOMES:
            self._outcomes.popitem(last=False)

    def _plan(self, ctx: Any, requests: Sequence[Any], modality: str) -> tuple[Plan[Held] | None, list[str | None]]:
        if self.broken or ctx.is_health_check or _carries_sound(ctx):
            return None, []
        try:
            keys = batch_keys(requests, ctx.items_per_req, modality)
            if not any(keys):
                return None, []

            def look_up(key: str, place: int) -> Held | None:
                held: Held | None = self.cache.get(key)
                if held is not None and not self._fits(held, ctx, place):
                    self.cache.pop(key)
                    return None
                return held

            return make_plan(keys, look_up), keys
        except Exception as error:
            self._give_up(error)
            return None, []

    def _fits(self, held: Held, ctx: Any, place: int) -> bool:
        """Whether what is held can be the embedding of what was fetched now: a file may have changed behind its URL."""
        result = ctx.preprocess_result
        if self._tensors.rows(held.piece) != result.token_counts[place]:
            return False
        return held.grid is None or self._tensors.same_grid(held.grid, result.grid_thw, place)

    def _keep(self, ctx: Any, keys: list[str | None], places: list[int], pieces: Callable[[], Sequence[Any]]) -> None:
        try:
            found = pieces()
            simple = _is_simple(ctx)
            if simple and self._example is None:
                self._example = _without_content(ctx)
            for place in places:
                key = keys[place]
                if key is not None and key not in self.cache:
                    grid = self._tensors.grid_of(ctx.preprocess_result.grid_thw, place) if simple else None
                    self.cache.put(key, Held(self._tensors.keep(found[place]), grid))
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.broken = f"{type(error).__name__}: {error}"
        self.cache.clear()
        _log.exception("the embedding cache is switched off, the encoder works on without it")


def _carries_sound(ctx: Any) -> bool:
    """Videos with sound leave something beside the embedding in the batch, which is not kept."""
    return bool(ctx.preprocess_result.mm_inputs.get("video_audio_features"))


def _is_simple(ctx: Any) -> bool:
    """Pictures of which nothing but grid and number of tokens goes with the embedding."""
    name = getattr(ctx.modality, "name", "")
    return name == "IMAGE" and not any(value is not None for value in ctx.aux_data.values())


def _without_content(ctx: Any) -> Any:
    """A context like this one that keeps no pictures alive."""
    return type(ctx)(
        req_id="",
        modality=ctx.modality,
        preprocess_result=type(ctx.preprocess_result)(mm_inputs={}, grid_thw=[], token_counts=[]),
        get_feature_fn=ctx.get_feature_fn,
        mm_feature=None,
        num_items=0,
        items_per_req=[],
        aux_data=dict(ctx.aux_data),
        str_mm_hashes=None,
        use_global_cache=False,
        is_health_check=False,
    )
