"""The plugin's own figures, beside SGLang's on the encoder's ``/metrics`` (with ``--enable-metrics``).

``fullhit_encoder_items_total{result}``   items of batches: ``hit`` (the ViT was spared), ``miss``, ``unkeyed``
``fullhit_encoder_cache_entries``         embeddings held
``fullhit_encoder_cache_bytes``           and their size

SGLang's own figures keep their meaning: its forward times count the forwards that took place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..cache import EmbeddingCache

__all__ = ["make_metrics"]

_log = logging.getLogger("fullhit_publisher")


def make_metrics(cache: EmbeddingCache[Any]) -> Callable[[int, int, int], None]:
    """What to tell of each batch: hits, misses and unkeyed items. Without the metrics package it is told to nobody."""
    try:
        from prometheus_client import Counter, Gauge

        items = Counter("fullhit_encoder_items", "Items of batches by what became of them", ["result"])
        # Several processes of one encoder are summed up, as long as they live.
        entries = Gauge("fullhit_encoder_cache_entries", "Embeddings held", multiprocess_mode="livesum")
        size = Gauge("fullhit_encoder_cache_bytes", "Bytes of embeddings held", multiprocess_mode="livesum")
    except Exception as error:  # not installed, or the names are taken
        _log.warning("the embedding cache has no metrics: %s: %s", type(error).__name__, error)
        return lambda hits, misses, unkeyed: None

    def count(hits: int, misses: int, unkeyed: int) -> None:
        for result, number in (("hit", hits), ("miss", misses), ("unkeyed", unkeyed)):
            if number:
                items.labels(result).inc(number)
        entries.set(len(cache))
        size.set(cache.used_bytes)

    return count
