"""What the front must know of a request for a worker: the model, the media, and what a prefill and decode pair needs.

Bodies over 8 KB are parsed as a skeleton (`fullhit.http.skeleton`): a chat with pictures is megabytes of base64. A
placeholder is understood where it is the URL of a medium, and it may be any text that nobody here looks at (a long
prompt). Where a string counts that is neither (a model's name, an option of a picture), it is a doubt, and the body is
parsed in full. Both ways give the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from fullhit.decision.media import chat_parts
from fullhit.http.encoder.media import Text, key_and_size
from fullhit.http.skeleton import PLAIN_BYTES, Doubt, Slices, cut, has_placeholder
from fullhit.json_limits import MAX_VALUES, too_many_values
from fullhit_publisher.keys import Key

__all__ = ["BOOTSTRAP", "BadBody", "Generation", "Shape", "read_generation"]

Shape = Literal["chat", "responses", "generate", "text"]
"""Where media may be: in ``messages``, in ``input``, in ``image_data`` and its like, or nowhere."""

BOOTSTRAP: Final = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_DATA: Final = (("image_data", "IMAGE"), ("video_data", "VIDEO"), ("audio_data", "AUDIO"))
_MAX_MODEL_CHARS: Final = 512

_decode = msgspec.json.Decoder().decode

Bytes = bytes | bytearray | memoryview


class BadBody(ValueError):
    """Not JSON, or no object. The text is for the client."""


@dataclass(slots=True)
class Generation:
    """Read-only. ``sizes``: the distinct keys with the bytes of each medium (0 = unknown); ``items``: all media,
    ``unkeyed`` those without key. ``batch``: the number of sequences where the body asks for several, else None.
    ``logprobs``: those of the prompt are wanted (``/generate``). ``bootstrap``: the body names a rendezvous itself.
    """

    model: str = ""
    stream: bool = False
    sizes: tuple[tuple[Key, int], ...] = ()
    items: int = 0
    unkeyed: int = 0
    batch: int | None = None
    logprobs: bool = False
    bootstrap: bool = False

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(key for key, _ in self.sizes)


def read_generation(body: Bytes, shape: Shape) -> Generation:
    """Read the body of a request. Raises `BadBody`.

    >>> read_generation(b'{"model": "m", "messages": [], "stream": true}', "chat").model
    'm'
    """
    if isinstance(body, memoryview):
        body = bytes(body)
    if len(body) > PLAIN_BYTES:
        skeleton = cut(body)
        if skeleton is not None:
            rest, slices = skeleton
            try:
                return _interpret(_load(rest), shape, slices)
            except (Doubt, BadBody):
                pass  # the full parse also words the error
    return _interpret(_load(body), shape, None)


def _load(body: bytes | bytearray) -> dict[str, Any]:
    if too_many_values(body, _MOST_VALUES):
        raise BadBody(f"the body holds more than {_MOST_VALUES} values")
    try:
        top = _decode(body)
    except RecursionError:
        raise BadBody("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is not valid JSON: {error}") from None
    if not isinstance(top, dict):
        raise BadBody("the body must be a JSON object")
    return top


_MOST_VALUES: Final = 10 * MAX_VALUES
"""Prompts may be lists of token ids."""


def _interpret(top: dict[str, Any], shape: Shape, slices: Slices | None) -> Generation:
    found = Generation(bootstrap=any(name in top for name in BOOTSTRAP))
    model = top.get("model")
    if isinstance(model, str):
        if slices is not None and slices.take(model) is not None:
            raise Doubt
        found.model = model[:_MAX_MODEL_CHARS]
    found.stream = top.get("stream") is True
    found.batch = _batch(top, shape)
    found.logprobs = shape == "generate" and bool(top.get("return_logprob"))
    sizes: dict[Key, int] = {}
    for item, modality in _media(top, shape):
        found.items += 1
        key, size = key_and_size(item, _url_text(item, slices), modality)
        if key is None:
            found.unkeyed += 1
        else:
            sizes[key] = size
    found.sizes = tuple(sizes.items())
    return found


def _url_text(item: object, slices: Slices | None) -> Text | None:
    """The text of an item's URL. Raises Doubt where a placeholder stands for anything else of it."""
    url = item.get("url") if isinstance(item, Mapping) else item
    if slices is not None and isinstance(item, Mapping):
        others = {name: value for name, value in item.items() if name != "url"}
        if others and has_placeholder(msgspec.json.encode(others)):
            raise Doubt
    if isinstance(url, str):
        return (slices.take(url) if slices is not None else None) or url
    if slices is not None and url is not None and has_placeholder(msgspec.json.encode(url)):
        raise Doubt
    return None


def _media(top: dict[str, Any], shape: Shape) -> Iterator[tuple[object, str]]:
    if shape == "chat":
        messages = top.get("messages")
        if isinstance(messages, list):
            yield from chat_parts(messages)
    elif shape == "responses":
        items = top.get("input")
        for item in items if isinstance(items, list) else ():
            content = item.get("content") if isinstance(item, dict) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and part.get("type") == "input_image":
                    yield part.get("image_url"), "IMAGE"
    elif shape == "generate":
        for name, modality in _DATA:
            yield from ((item, modality) for item in _flat(top.get(name)))


def _flat(data: object) -> Iterator[object]:
    """The media of ``image_data`` and its like: one, a list, or a list for each sequence of a batch."""
    if data is None:
        return
    for outer in data if isinstance(data, list) else [data]:
        yield from (outer if isinstance(outer, list) else [outer])


def _batch(top: dict[str, Any], shape: Shape) -> int | None:
    """How many sequences a body asks for; None for a single one that is no list.

    As sglang-router 0.3.2 counts (measured): ``n`` of a chat, a list of prompts, nested ``input_ids``, a list of texts.
    """
    n = top.get("n")
    several = n if type(n) is int and n > 1 else None
    if shape == "generate":
        text, ids = top.get("text"), top.get("input_ids")
        if isinstance(text, list):
            return len(text)
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            return len(ids)
        return None
    prompt = top.get("prompt")
    if shape == "text" and isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return len(prompt) * (several or 1)
    return several
