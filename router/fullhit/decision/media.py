"""What a caller may show us of its request, and the cache keys in it.

Four shapes, which add up: keys as an encoder publishes them, media items as elements of SGLang's ``mm_items``, the
body of an SGLang ``/encode``, the body of an OpenAI chat completion. All end in the same keys, by the same function
that a publisher uses, so it does not matter which shape a front end finds easiest to send.

In a chat body the media are the content parts ``image_url``, ``video_url``, ``audio_url`` and ``input_audio`` of all
messages, in order. Options beside the URL (``detail``, ``fps`` ...) count as they do in ``mm_items``; a ``uuid`` of
the part, as vLLM takes it, names the medium.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from fullhit.http.encoder.media import MODALITIES, BadBody, parse_encode
from fullhit.json_limits import MAX_VALUES, too_many_values
from fullhit_publisher.keys import Key, fold, item_key

__all__ = ["Media", "MediaError", "bounded", "chat_items", "chat_parts", "load", "read_media"]

_CHAT_PARTS = {"image_url": "IMAGE", "video_url": "VIDEO", "audio_url": "AUDIO"}

_decode = msgspec.json.Decoder().decode


class MediaError(ValueError):
    """The caller's request cannot be read; the text names the field."""


class Media(NamedTuple):
    """Distinct ``keys`` in order; ``items``: all media items; ``unkeyed``: those for which no key exists."""

    keys: tuple[Key, ...]
    items: int
    unkeyed: int


def read_media(
    keys: Sequence[str] = (),
    items: Sequence[object] = (),
    modality: str = "IMAGE",
    *,
    encode_body: bytes | None = None,
    chat_body: bytes | None = None,
    limit: int = 10_000,
) -> Media:
    """Everything a caller named, as one. Raises `MediaError`, also for more than ``limit`` keys and items."""
    bounded(len(keys) + len(items), limit)
    if modality not in MODALITIES:
        # An unknown one would quietly give keys that nobody holds.
        raise MediaError(f"modality: expected one of {', '.join(MODALITIES)}, got {modality[:80]!r}")
    found: dict[Key, None] = {fold(text): None for text in keys}
    count, unkeyed = len(keys), 0
    pairs: Iterable[tuple[object, str]] = ((item, modality) for item in items)
    if encode_body is not None:
        try:
            info = parse_encode(encode_body)
        except BadBody as error:
            raise MediaError(f"sglang_encode.{error}") from None
        count += info.items
        unkeyed += info.unkeyed
        found.update(dict.fromkeys(info.keys))
    if chat_body is not None:
        pairs = [*pairs, *chat_items(chat_body)]
    for item, kind in pairs:
        count += 1
        key = item_key(item, kind)
        if key is None:
            unkeyed += 1
        else:
            found[key] = None
    bounded(count, limit)
    return Media(tuple(found), count, unkeyed)


def chat_items(body: bytes) -> list[tuple[object, str]]:
    """The media items of an OpenAI chat body with their modality. Raises `MediaError`."""
    messages = load(body, "openai_chat").get("messages")
    if not isinstance(messages, list):
        raise MediaError("openai_chat.messages: must be a list")
    return list(chat_parts(messages))


def load(body: bytes, name: str) -> dict[str, object]:
    """The JSON object of a body that the caller knows as ``name``. Raises `MediaError`."""
    if too_many_values(body):
        raise MediaError(f"{name}: more than {MAX_VALUES} values")
    try:
        top = _decode(body)
    except RecursionError:
        raise MediaError(f"{name}: JSON is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MediaError(f"{name}: not valid JSON: {error}") from None
    if not isinstance(top, dict):
        raise MediaError(f"{name}: must be an object")
    return top


def chat_parts(messages: list[object]) -> Iterator[tuple[object, str]]:
    """The media items of chat messages, as elements of ``mm_items``, with their modality."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "input_audio":
                sound = part.get("input_audio")
                yield _named(part, {"url": sound.get("data")} if isinstance(sound, dict) else None), "AUDIO"
            elif isinstance(kind, str) and kind in _CHAT_PARTS:
                yield _named(part, part.get(kind)), _CHAT_PARTS[kind]


def _named(part: dict[str, object], medium: object) -> object:
    """The medium, with the ``uuid`` that stands beside it."""
    uuid = part.get("uuid")
    if uuid is None:
        return medium
    if isinstance(medium, dict):
        return {"uuid": uuid, **medium}
    return {"uuid": uuid, "url": medium}


def bounded(count: int, limit: int) -> None:
    """Raises `MediaError` for more than ``limit`` keys and items."""
    if count > limit:
        raise MediaError(f"more than {limit} keys and items")
