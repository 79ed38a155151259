"""The cache around one encoder's compute step.

`ItemCache.compute` takes the place of SGLang's step for one batch. Where nothing of the batch is held, SGLang's own
step runs and its result is kept, cut into items; so the first time is exactly what it always was. Otherwise the missing
items alone go through the encoder's ``_encode_missing``, and everything is put together in the order of the batch.

Held embeddings lie in host memory, each in memory of its own: a slice would keep its whole batch alive. An embedding
whose number of rows is not what the batch expects (a processor that was changed, say) is dropped and encoded anew.
Whatever goes wrong with the cache itself, SGLang's own step is the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from ..cache import EmbeddingCache
from .plan import Plan, batch_keys, make_plan

__all__ = ["ItemCache", "Tensors"]

_log = logging.getLogger("fullhit_publisher")

Original = Callable[[], Awaitable[Any]]


class Tensors(Protocol):
    """What is done with tensors; a batch's are two-dimensional, one row a token."""

    def rows(self, tensor: Any) -> int: ...
    def keep(self, tensor: Any) -> Any:
        """A copy in host memory of its own."""

    def bring(self, tensor: Any, *, on_device: bool) -> Any:
        """A tensor where the step wants its result: on the device, or in host memory."""

    def join(self, tensors: Sequence[Any]) -> Any:
        """One tensor of all rows."""


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

    async def compute(
        self, original: Original, ctx: Any, requests: Sequence[Any], *, keep_on_gpu: bool, modality: str
    ) -> Any:
        """The embeddings of a batch, as ``original`` would give them. Raises what SGLang's own steps raise."""
        plan, keys = self._plan(ctx, requests, modality)
        if plan is None:
            return await original()
        counts = ctx.preprocess_result.token_counts
        unkeyed = keys.count(None)
        self._count(plan.size - len(plan.encode), len(plan.encode) - unkeyed, unkeyed)
        if plan.plain:
            whole = await original()
            self._keep(keys, plan.encode, lambda: self._encoder.slice_embedding(whole, counts))
            return whole
        encoded: list[Any] = []
        if plan.encode:
            encoded = [
                self._tensors.bring(piece, on_device=keep_on_gpu)
                for piece in self._encoder._encode_missing(
                    ctx.mm_feature, ctx.preprocess_result, plan.encode, ctx.modality, ctx.get_feature_fn
                )
            ]
        held = {place: self._tensors.bring(piece, on_device=keep_on_gpu) for place, piece in plan.held.items()}
        whole = self._tensors.join(Plan(plan.size, held, plan.encode, plan.same_as).in_order(encoded))
        self._encoder._validate_embedding_token_count(ctx, whole)
        found = dict(zip(plan.encode, encoded, strict=True))
        self._keep(keys, plan.encode, lambda: [found.get(place) for place in range(plan.size)])
        return whole

    def _plan(self, ctx: Any, requests: Sequence[Any], modality: str) -> tuple[Plan[Any] | None, list[str | None]]:
        if self.broken or ctx.is_health_check or _carries_sound(ctx):
            return None, []
        try:
            counts = ctx.preprocess_result.token_counts
            keys = batch_keys(requests, ctx.items_per_req, modality)
            if not any(keys):
                return None, []

            def look_up(key: str, place: int) -> Any:
                held = self.cache.get(key)
                if held is not None and self._tensors.rows(held) != counts[place]:
                    self.cache.pop(key)
                    return None
                return held

            return make_plan(keys, look_up), keys
        except Exception as error:
            self._give_up(error)
            return None, []

    def _keep(self, keys: list[str | None], places: list[int], pieces: Callable[[], Sequence[Any]]) -> None:
        try:
            found = pieces()
            for place in places:
                key = keys[place]
                if key is not None and key not in self.cache:
                    self.cache.put(key, self._tensors.keep(found[place]))
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.broken = f"{type(error).__name__}: {error}"
        self.cache.clear()
        _log.exception("the embedding cache is switched off, the encoder works on without it")


def _carries_sound(ctx: Any) -> bool:
    """Videos with sound leave something beside the embedding in the batch, which is not kept."""
    return bool(ctx.preprocess_result.mm_inputs.get("video_audio_features"))
