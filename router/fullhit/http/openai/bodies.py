"""What the front must know of a request's body: the model, the media, and whether it pins workers. Pure.

The body is cut at its top level only; what lies inside a member is decoded where media may be, and stays as it is
otherwise. A body is passed on byte for byte, unless its ``nvext`` names workers or ranks: a client must not overrule
the router. A frontend of release 1.6.1 obeys our headers before those members, but a rank, and a prefill worker that no
header names, it takes from the body. So these pins are left out and nothing else; every other member keeps its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from fullhit.decision.dynamo_media import DynamoMedia, fold_media
from fullhit_publisher import dynamo_keys
from fullhit_publisher.dynamo_keys import KeyRules

__all__ = ["NO_MEDIA", "PINS", "BadBody", "Body", "Shape", "read_body"]

Shape = Literal["chat", "responses", "text"]
"""Where media may be: in ``messages``, in ``input``, or nowhere."""

PINS: Final = frozenset(
    ("backend_instance_id", "decode_worker_id", "prefill_worker_id", "dp_rank", "decode_dp_rank", "prefill_dp_rank")
)
"""Members of ``nvext`` that name workers or ranks."""

_Members = dict[str, msgspec.Raw]
_members = msgspec.json.Decoder(_Members)
_text = msgspec.json.Decoder(str)
_any = msgspec.json.Decoder()
NO_MEDIA: Final = DynamoMedia((), (), 0, 0)
_UNREADABLE: Final = DynamoMedia((), (), 1, 1)
_ESCAPED_LETTER: Final = re.compile(rb"\\u00(?:6[5eE]|7[468])")
"""One of the letters of ``nvext``, spelt as an escape."""
_FAULTS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Bytes = bytes | bytearray | memoryview


class BadBody(ValueError):
    """Not JSON, or no object. The text is for the client."""


@dataclass(frozen=True, slots=True)
class Body:
    """``model`` is empty when the body names none. ``body`` is what is to be forwarded: the very object that was given,
    unless it had pins."""

    model: str
    media: DynamoMedia
    body: Bytes
    pinned: bool = False


def read_body(body: Bytes, shape: Shape, rules: KeyRules, scope: str | None = None, limit: int = 10_000) -> Body:
    """Read a request's body. ``scope``: its session. Raises `BadBody`.

    Media that cannot be read are items without key; more than ``limit`` are the same.
    """
    try:
        members = _members.decode(body)
    except msgspec.ValidationError:
        raise BadBody("the body must be a JSON object") from None
    except RecursionError:
        raise BadBody("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is not valid JSON: {error}") from None
    model = ""
    if "model" in members:
        try:
            model = _text.decode(members["model"])
        except _FAULTS:
            pass  # the frontend will say so
    media = NO_MEDIA if shape == "text" else _media(members, shape, rules, scope, limit)
    unpinned = _without_pins(members, body)
    return Body(model, media, body) if unpinned is None else Body(model, media, unpinned, True)


def _media(members: _Members, shape: Shape, rules: KeyRules, scope: str | None, limit: int) -> DynamoMedia:
    raw = members.get("messages" if shape == "chat" else "input")
    if raw is None:
        return NO_MEDIA
    try:
        messages = _any.decode(raw)
    except _FAULTS:
        return _UNREADABLE
    if shape == "responses":
        messages = _as_chat(messages)
    media = fold_media([dynamo_keys.from_chat({"messages": messages}, rules, scope=scope)])
    return media if media.items <= limit else DynamoMedia((), (), media.items, media.items)


def _as_chat(items: object) -> object:
    """The ``input`` of ``/v1/responses``, its pictures in the shape of chat messages."""
    if not isinstance(items, list):
        return items
    messages = []
    for item in items:
        content = item.get("content") if isinstance(item, Mapping) else None
        if isinstance(content, list):
            messages.append({"content": [_as_chat_part(part) for part in content]})
    return messages


def _as_chat_part(part: object) -> object:
    if isinstance(part, Mapping) and part.get("type") == "input_image":
        return {"type": "image_url", "image_url": part.get("image_url")}
    return part


def _without_pins(members: _Members, body: Bytes) -> bytes | None:
    """The body again without the pins in it; None when there are none.

    Where the name stands in the body more than once, or is spelt with escapes, only the member that counts here is
    passed on: another reader might take another one.
    """
    if "nvext" not in members:
        return None
    raw = bytes(body)
    plain = raw.count(b"nvext") == 1 and not _ESCAPED_LETTER.search(raw)
    try:
        nvext = _members.decode(members["nvext"])
    except _FAULTS:
        return None if plain else msgspec.json.encode(members)
    if PINS.isdisjoint(nvext):
        return None if plain else msgspec.json.encode(members)
    kept = {name: value for name, value in nvext.items() if name not in PINS}
    return msgspec.json.encode({**members, "nvext": kept})
