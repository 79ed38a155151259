"""What the front must know of a request's body: the model, the media, and whether it pins workers. Pure.

The body is cut at its top level only; what lies inside a member is decoded where media may be, and stays as it is
otherwise. A body is passed on byte for byte, unless its ``nvext`` names workers or ranks: a client must not overrule
the router. A frontend of release 1.6.1 obeys our headers before those members, but a rank, and a prefill worker that no
header names, it takes from the body. So these pins are left out and nothing else; every other member keeps its bytes.
An ``nvext`` that is no object is refused: that frontend reads a list as well, its elements by their places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from fullhit.decision.dynamo_media import DynamoMedia, fold_media
from fullhit.json_limits import too_many_values
from fullhit_publisher import dynamo_keys
from fullhit_publisher.dynamo_keys import KeyRules

__all__ = ["NO_MEDIA", "PINS", "BadBody", "Body", "Shape", "read_body"]

Shape = Literal["chat", "responses", "text"]
"""Where media may be: in ``messages``, in ``input``, or nowhere."""

PINS: Final = frozenset(
    ("backend_instance_id", "decode_worker_id", "prefill_worker_id", "dp_rank", "decode_dp_rank", "prefill_dp_rank")
)
"""Members of ``nvext`` that name workers or ranks."""

_Member = msgspec.Raw | msgspec.UnsetType


class _Top(msgspec.Struct):
    """The members that are looked at; the others cost nothing, however many there are."""

    model: _Member = msgspec.UNSET
    messages: _Member = msgspec.UNSET
    input: _Member = msgspec.UNSET
    nvext: _Member = msgspec.UNSET


_Pins = msgspec.defstruct("_Pins", [(name, _Member, msgspec.UNSET) for name in sorted(PINS)])
_NO_PINS: Final = _Pins()

_top = msgspec.json.Decoder(_Top)
_pins = msgspec.json.Decoder(_Pins | None)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
_any = msgspec.json.Decoder()
NO_MEDIA: Final = DynamoMedia((), (), 0, 0)
_UNREADABLE: Final = DynamoMedia((), (), 1, 1)
_ESCAPED_LETTER: Final = re.compile(rb"\\u00(?:6[5eE]|7[468])")
"""One of the letters of ``nvext``, spelt as an escape."""
_MAX_COLONS: Final = 1_000_000
"""In a body that is written anew; each of its members has one."""
_FAULTS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Bytes = bytes | bytearray | memoryview


class BadBody(ValueError):
    """Not JSON, no object, or pins that cannot be taken out. The text is for the client; ``param``: the member."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


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
        top = _top.decode(body)
    except msgspec.ValidationError:
        raise BadBody("the body must be a JSON object") from None
    except RecursionError:
        raise BadBody("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is not valid JSON: {error}") from None
    model = ""
    if isinstance(top.model, msgspec.Raw):
        try:
            model = _text.decode(top.model)
        except _FAULTS:
            pass  # the frontend will say so
    raw = {"chat": top.messages, "responses": top.input, "text": msgspec.UNSET}[shape]
    if not isinstance(raw, msgspec.Raw):
        media = NO_MEDIA
    elif too_many_values(bytes(body) if isinstance(body, memoryview) else body):
        media = _UNREADABLE
    else:
        media = _media(raw, shape, rules, scope, limit)
    unpinned = _without_pins(top.nvext, body) if isinstance(top.nvext, msgspec.Raw) else None
    return Body(model, media, body) if unpinned is None else Body(model, media, unpinned, True)


def _media(raw: msgspec.Raw, shape: Shape, rules: KeyRules, scope: str | None, limit: int) -> DynamoMedia:
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


def _without_pins(nvext: msgspec.Raw, body: Bytes) -> bytes | None:
    """The body again without the pins in it; None when there are none. Raises `BadBody`.

    Where the name stands in the body more than once, or is spelt with escapes, only the member that counts here is
    passed on: another reader might take another one.
    """
    raw = bytes(body)
    plain = raw.count(b"nvext") == 1 and not _ESCAPED_LETTER.search(raw)
    try:
        pins = _pins.decode(nvext)
    except _FAULTS:
        raise BadBody("nvext: must be an object", "nvext") from None
    if plain and (pins is None or pins == _NO_PINS):
        return None
    if raw.count(b":") > _MAX_COLONS:
        raise BadBody("nvext: names workers or ranks, in a body with too many members to take them out", "nvext")
    try:
        members = _members.decode(raw)
        inner = {} if pins is None else _members.decode(nvext)
    except _FAULTS as error:  # in a name that was passed over before
        raise BadBody(f"the body is not valid JSON: {error}") from None
    if pins is not None:
        kept = {name: value for name, value in inner.items() if name not in PINS}
        members["nvext"] = msgspec.Raw(msgspec.json.encode(kept))
    return msgspec.json.encode(members)
