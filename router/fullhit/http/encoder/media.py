"""What the gateway reads from a body: the media items of an ``/encode``, and the few fields of follow-ups.

Bodies over 8 KB are parsed as a skeleton (`fullhit.http.skeleton`). Where a placeholder comes out as an item or as its
``url``, the key is the hash of the slice, taken in place. Anywhere else (an option, a field we do not know, a duplicate
member) it is a doubt, and the body is parsed in full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

import msgspec

from fullhit.http.skeleton import LONG_BYTES, PLAIN_BYTES, Doubt, Slices, cut
from fullhit.json_limits import MAX_VALUES, too_many_values
from fullhit_publisher.keys import Key, item_key, item_key_from_base, text_key

__all__ = [
    "MODALITIES",
    "BadBody",
    "BadItem",
    "EncodeInfo",
    "FollowUp",
    "Registration",
    "Text",
    "key_and_size",
    "parse_encode",
    "parse_follow_up",
    "parse_registration",
]

MODALITIES: Final = ("IMAGE", "VIDEO", "AUDIO")

Body = bytes | bytearray | memoryview
Text = str | memoryview
"""The text of an inline item: a string after a full parse, a slice of the body (UTF-8) otherwise."""

Inspect = Callable[[Text], str | None]
"""Told the text of an inline picture; returns what is wrong with it, or None."""

_MAX_FIELD_CHARS: Final = 4_096
"""Longest req_id and host: they are kept in tables and put into logs."""

_decode = msgspec.json.Decoder().decode


class BadBody(ValueError):
    """The caller sent a body that cannot be an SGLang request; answer 400.

    ``field`` names the culprit ("body" for the whole), ``req_id`` is "" when it could not be read.
    """

    def __init__(self, field: str, problem: str, req_id: str = "") -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem
        self.req_id = req_id


@dataclass(frozen=True, slots=True)
class BadItem:
    """An inline picture that no decoder will take: its place in ``mm_items``, and why."""

    index: int
    problem: str


@dataclass(slots=True)
class EncodeInfo:
    """All that routing needs of an ``/encode`` body. Read-only (not ``frozen``, which makes its construction dear).

    ``keys``: the distinct cache keys in item order; ``sizes``: the same with the bytes of the medium (0 when
    only its URL is known); ``items``: media items; ``unkeyed``: those for which no key exists.
    ``num_parts`` and ``part_idx`` are None when the body has none.
    """

    req_id: str
    modality: str
    num_parts: int | None
    part_idx: int | None
    prefill_host: str
    embedding_port: int | tuple[int, ...] | None
    keys: tuple[Key, ...]
    sizes: tuple[tuple[Key, int], ...]
    items: int
    unkeyed: int
    bad: tuple[BadItem, ...] = ()
    parsed: str = "plain"
    """How: ``plain`` (small body), ``skeleton``, or ``full`` (a doubt)."""


@dataclass(frozen=True, slots=True)
class Registration:
    """Body of ``/scheduler_receive_url``: where one scheduler rank wants the embedding pushed."""

    req_id: str
    receive_url: str
    receive_count: int
    host: str


@dataclass(frozen=True, slots=True)
class FollowUp:
    """Body of ``/scheduler_receive_meta_data`` or ``/send``. ``host`` is "" when the body names none."""

    req_id: str
    host: str
    destination: str
    """``prefill_host:embedding_port`` of a ``/send``: one destination counts once."""
    receive_count: int | None


def parse_encode(body: Body, inspect: Inspect | None = None) -> EncodeInfo:
    """Read an ``/encode`` body. ``inspect`` is called with each inline picture (IMAGE only), in item order.

    >>> parse_encode(b'{"req_id": "r1", "mm_items": ["http://h/a.png"], "num_parts": 1}').items
    1

    Raises BadBody: not JSON, not an object, a field missing or of the wrong type, an unknown modality.
    """
    if isinstance(body, memoryview):
        body = bytes(body)
    if len(body) <= PLAIN_BYTES:
        return _interpret(_load(body), inspect, "plain")
    skeleton = cut(body)
    if skeleton is not None:
        rest, slices = skeleton
        try:
            info = _interpret(_load(rest), inspect, "skeleton", slices)
        except (Doubt, BadBody):
            pass  # The full parse also words the error.
        else:
            return info
    return _interpret(_load(body), inspect, "full")


def parse_registration(body: Body) -> Registration:
    """Read a ``/scheduler_receive_url`` body. Raises BadBody."""
    top = _object(_load(body))
    req_id = _req_id(top)
    url = top.get("receive_url")
    if not isinstance(url, str) or not 0 < len(url) <= _MAX_FIELD_CHARS:
        raise BadBody("receive_url", "must be text like host:port", req_id)
    count = _integer(top, "receive_count", 1, req_id)
    if count is None:
        raise BadBody("receive_count", "is missing", req_id)
    return Registration(req_id, url, count, _host_of(url))


def parse_follow_up(body: Body) -> FollowUp:
    """Read a ``/scheduler_receive_meta_data`` or ``/send`` body. Raises BadBody."""
    top = _object(_load(body))
    req_id = _req_id(top)
    host = _text(top, "prefill_host", req_id)
    return FollowUp(
        req_id, host, f"{host}:{top.get('embedding_port')}"[:256], _integer(top, "receive_count", 1, req_id)
    )


def _interpret(top: object, inspect: Inspect | None, parsed: str, slices: Slices | None = None) -> EncodeInfo:
    fields = _object(top)
    req_id = _req_id(fields)
    items = fields.get("mm_items")
    if not isinstance(items, list):
        raise BadBody("mm_items", "is missing" if items is None else "must be a list", req_id)
    modality = fields.get("modality", "IMAGE")
    if modality not in MODALITIES:
        what = repr(modality)[:80] if isinstance(modality, str) else "a value that is no text"
        raise BadBody("modality", f"expected one of {', '.join(MODALITIES)}, got {what}", req_id)
    num_parts = _integer(fields, "num_parts", 1, req_id)
    part_idx = _integer(fields, "part_idx", 0, req_id)
    prefill_host = _text(fields, "prefill_host", req_id)
    port = _embedding_port(fields, req_id)

    sizes: dict[Key, int] = {}
    bad: list[BadItem] = []
    unkeyed = 0
    plain = modality == "IMAGE" and slices is None
    for index, item in enumerate(items):
        url: object = item.get("url") if isinstance(item, dict) else item
        text: Text | None = None
        if isinstance(url, str):
            text = (slices.take(url) if slices is not None else None) or url
        if plain and item and type(item) is str:
            sizes[text_key(item)] = _media_bytes(text)
        else:
            key, size = key_and_size(item, text, modality)
            if key is None:
                unkeyed += 1
            else:
                sizes[key] = size
        if inspect is not None and text is not None and modality == "IMAGE":
            problem = inspect(text)
            if problem is not None:
                bad.append(BadItem(index, problem))
    if slices is not None and slices.used != len(slices.spans):
        raise Doubt
    return EncodeInfo(
        req_id,
        modality,
        num_parts,
        part_idx,
        prefill_host,
        port,
        keys=tuple(sizes),
        sizes=tuple(sizes.items()),
        items=len(items),
        unkeyed=unkeyed,
        bad=tuple(bad),
        parsed=parsed,
    )


def key_and_size(item: object, text: Text | None, modality: str) -> tuple[Key | None, int]:
    """Key of a media item (None = it has none) and the bytes of the medium (0 = unknown). ``text``: that of its URL,
    where the item itself may hold a placeholder for it."""
    return _key(item, text, modality), _media_bytes(text)


def _key(item: object, text: Text | None, modality: str) -> Key | None:
    if not isinstance(text, memoryview):
        return item_key(item, modality)
    if isinstance(item, dict):
        if item.get("content_hash") not in (None, "") or item.get("uuid") not in (None, ""):
            return item_key(item, modality)  # Named otherwise: the URL does not matter.
        options = item
    else:
        options = {}
    try:
        return item_key_from_base(text_key(cast(bytes, text)), options, modality)
    except ValueError:
        return None


def _media_bytes(text: Text | None) -> int:
    """Bytes of an inline medium (base64 is 4 for 3); 0 for one that is only pointed at."""
    if text is None:
        return 0
    if isinstance(text, str):
        if text.isascii():
            inline = text.startswith("data:") or (len(text) > LONG_BYTES and "://" not in text[:16])
            return len(text) * 3 // 4 if inline else 0
        text = memoryview(text.encode("utf-8", "surrogatepass"))
    head, length = bytes(text[:16]), len(text)
    if head.startswith(b"data:") or (length > LONG_BYTES and b"://" not in head):
        return length * 3 // 4
    return 0


def _load(body: Body) -> object:
    if too_many_values(bytes(body) if isinstance(body, memoryview) else body):
        raise BadBody("body", f"holds more than {MAX_VALUES} values")
    try:
        return _decode(body)
    except RecursionError:
        raise BadBody("body", "JSON is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody("body", f"not valid JSON: {error}") from None


def _object(top: object) -> dict[str, object]:
    if not isinstance(top, dict):
        raise BadBody("body", "must be a JSON object")
    return top


def _req_id(fields: dict[str, object]) -> str:
    req_id = fields.get("req_id")
    if not isinstance(req_id, str):
        raise BadBody("req_id", "is missing" if req_id is None else "must be text")
    if not 0 < len(req_id) <= _MAX_FIELD_CHARS:
        raise BadBody("req_id", "is empty" if not req_id else f"is over {_MAX_FIELD_CHARS} characters")
    return req_id


def _text(fields: dict[str, object], name: str, req_id: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > _MAX_FIELD_CHARS:
        raise BadBody(name, "must be text" if not isinstance(value, str) else "is too long", req_id)
    return value


def _integer(fields: dict[str, object], name: str, least: int, req_id: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or value < least:
        raise BadBody(name, f"must be a whole number of at least {least}", req_id)
    return value


def _embedding_port(fields: dict[str, object], req_id: str) -> int | tuple[int, ...] | None:
    port = fields.get("embedding_port")
    if port is None:
        return None
    if type(port) is int:
        return port
    if isinstance(port, list) and all(type(one) is int for one in port):
        return tuple(port)
    raise BadBody("embedding_port", "must be a number, a list of numbers or null", req_id)


def _host_of(receive_url: str) -> str:
    """Host of ``host:port`` (an IPv6 address may be bracketed; a scheme is passed over)."""
    address = receive_url.rpartition("://")[2]
    host = address.rpartition(":")[0] or address
    return host.strip("[]").lower()
