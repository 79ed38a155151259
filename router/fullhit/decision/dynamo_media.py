"""The media of a request for a pool of Dynamo workers: the same shapes as `media`, keyed as Dynamo keys them.

One item may have several keys of which any will do; the first stands in ``keys``, the others beside it in
``alternatives``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fullhit.decision.media import bounded, load
from fullhit_publisher import dynamo_keys
from fullhit_publisher.dynamo_keys import KeyRules, MediaKeys
from fullhit_publisher.keys import Key, fold

__all__ = ["DynamoMedia", "fold_media", "read_dynamo_media"]


class DynamoMedia(NamedTuple):
    """As `media.Media`; ``alternatives`` is empty or as long as ``keys``."""

    keys: tuple[Key, ...]
    alternatives: tuple[tuple[Key, ...], ...]
    items: int
    unkeyed: int


def read_dynamo_media(
    rules: KeyRules,
    keys: Sequence[str] = (),
    items: Sequence[object] = (),
    modality: str = "IMAGE",
    *,
    encode_body: bytes | None = None,
    chat_body: bytes | None = None,
    session: str = "",
    limit: int = 10_000,
) -> DynamoMedia:
    """Everything a caller named, as one. ``session``: that of an OpenAI body; a preprocessed one names its own.

    Raises `MediaError`, also for more than ``limit`` keys and items.
    """
    bounded(len(keys) + len(items), limit)
    media = fold_media(_named(rules, items, modality, encode_body, chat_body, session), keys)
    bounded(media.items, limit)
    return media


def fold_media(media: Iterable[MediaKeys], keys: Sequence[str] = ()) -> DynamoMedia:
    """What the extractors found, and further ``keys``, as the index knows them."""
    found: dict[Key, tuple[Key, ...]] = {fold(text): () for text in keys}
    count, unkeyed = len(keys), 0
    for named in media:
        count += len(named.items)
        unkeyed += named.unkeyed
        for first, *others in named.distinct:
            found.setdefault(fold(first), tuple(map(fold, others)))
    alternatives = tuple(found.values()) if any(found.values()) else ()
    return DynamoMedia(tuple(found), alternatives, count, unkeyed)


def _named(
    rules: KeyRules,
    items: Sequence[object],
    modality: str,
    encode_body: bytes | None,
    chat_body: bytes | None,
    session: str,
) -> Iterator[MediaKeys]:
    if items:
        yield dynamo_keys.from_encode({"mm_items": list(items), "modality": modality}, rules)
    if encode_body is not None:
        yield dynamo_keys.from_encode(load(encode_body, "sglang_encode"), rules)
    if chat_body is not None:
        body = load(chat_body, "openai_chat")
        if "multi_modal_data" in body:  # the front end has been over it
            yield dynamo_keys.from_preprocessed(body, rules)
        else:
            yield dynamo_keys.from_chat(body, rules, scope=session or None)
