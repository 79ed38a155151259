"""Cache keys: what names one encoded media item.

A key is compared in two programs, the encoder that holds the embedding and the router that looks for it, so
both import these functions. Three facts shape them:

* Inside the router a key is always 16 bytes. Short enough that millions of them are cheap, long enough that
  two pictures never meet by chance (a billion keys collide with probability 1e-21).
* What an encoder publishes is text and may be any text: our own 32 hex digits, Dynamo's 64 hex digits of
  BLAKE3, or something else. ``fold`` maps all of it to 16 bytes. The digits of a digest are taken as they
  are, because hashing a hash buys nothing and would hide the key from anybody who reads a log.
* A key says what the *embedding* depends on. The text of the URL (a ``data:`` URI is the picture itself), or
  an identity which the client vouches for, and every option that changes how the picture is read. Two
  requests that differ in such an option must not share a key; an option set to null is an option not given.

The URL is hashed exactly as sent, after the unescaping that JSON asks for: no canonical form, no case
folding. Equal text gives an equal key in both programs, and unequal text costs at worst one more encode.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import xxhash

__all__ = [
    "Key",
    "digest",
    "fold",
    "fold_many",
    "item_key",
    "item_key_from_base",
    "key_hash",
    "key_text",
    "text_key",
]

Key = bytes
"""Sixteen bytes."""

_KEY_BYTES = 16
# Members of an item which name it; all others are options.
_IDENTITY_MEMBERS = frozenset(("url", "content_hash", "uuid"))

_xxh3_128 = xxhash.xxh3_128_digest
_xxh3_64 = xxhash.xxh3_64_intdigest


def text_key(text: bytes | str) -> Key:
    """Key of a text: the XXH3-128 digest (big-endian, as its hex form reads) of the UTF-8 bytes.

    A lone surrogate, which JSON can smuggle into a string, is hashed as its three-byte form instead of
    refused.
    """
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogatepass")
    return _xxh3_128(text)


def fold(published: str) -> Key:
    """The 16-byte form of a key as some publisher wrote it.

    32 lower-case hex digits are those 16 bytes; 64 lower-case hex digits (BLAKE3, SHA-256) give their first
    16 bytes; any other text is hashed with ``text_key``.

    >>> fold("00112233445566778899aabbccddeeff").hex()
    '00112233445566778899aabbccddeeff'
    """
    if len(published) in (32, 64):
        try:
            raw = bytes.fromhex(published)
        except ValueError:
            return text_key(published)
        # fromhex also takes upper case and blanks; only the canonical spelling is a digest.
        if raw.hex() == published:
            return raw[:_KEY_BYTES]
    return text_key(published)


def fold_many(published: Sequence[str]) -> list[Key]:
    """``[fold(key) for key in published]``, about three times faster when all keys have 32 or all have 64
    digits.
    """
    count = len(published)
    if count > 2:
        width = len(published[0])
        if width in (32, 64) and set(map(len, published)) == {width}:
            joined = "".join(published)
            try:
                raw = bytes.fromhex(joined)
            except ValueError:
                raw = b""
            if raw.hex() == joined:
                step = width // 2
                return [raw[at : at + _KEY_BYTES] for at in range(0, count * step, step)]
    return [fold(key) for key in published]


def key_text(key: Key) -> str:
    """How we write a key on the wire and in logs: 32 lower-case hex digits. ``fold`` is its inverse."""
    return key.hex()


def item_key(item: object, modality: str = "IMAGE") -> Key | None:
    """Key of one media item of a request, or None when it has none.

    ``item`` is one element of SGLang's ``mm_items``: the URL (or ``data:`` URI, or bare base64) as text, or
    a mapping with ``url`` and options. ``content_hash`` and then ``uuid`` take the place of the URL when
    they are given. None means that the item names nothing, has a member of the wrong type, or options that
    no JSON can hold.
    """
    if isinstance(item, str):
        return item_key_from_base(text_key(item), {}, modality) if item else None
    if not isinstance(item, Mapping):
        return None
    base = _base_key(item)
    if base is None:
        return None
    try:
        return item_key_from_base(base, item, modality)
    except ValueError:
        return None


def item_key_from_base(base: Key, options: Mapping[str, object], modality: str = "IMAGE") -> Key:
    """Fold the options of an item into the key of its URL (``text_key`` of the URL's text).

    ``url``, ``content_hash`` and ``uuid`` among the options, and options that are null, are passed over, so
    the whole item may be handed in. A modality other than ``IMAGE`` counts as the option ``modality``.
    Without options the key is ``base`` itself, so that a plain picture has the key ``text_key(url)``.

    Raises ValueError when the options cannot be written as JSON.
    """
    chosen = {name: value for name, value in options.items() if value is not None and name not in _IDENTITY_MEMBERS}
    if modality != "IMAGE":
        chosen["modality"] = modality
    if not chosen:
        return base
    try:
        text = json.dumps(chosen, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"media item options cannot be written as JSON: {error}") from error
    return _xxh3_128(base + b"\0" + text.encode("utf-8", "surrogatepass"))


def key_hash(key: Key) -> int:
    """The 64-bit hash of a key that digests are made of (XXH3-64 of its 16 bytes)."""
    return _xxh3_64(key)


def digest(keys: Iterable[Key]) -> int:
    """XOR of ``key_hash`` over distinct keys: equal sets have equal digests in any order; 0 for no keys.

    Adding and removing a key are the same operation, so a digest is kept up to date in O(1) per change.
    """
    value = 0
    for key in keys:
        value ^= _xxh3_64(key)
    return value


def _base_key(item: Mapping[object, object]) -> Key | None:
    for member in ("content_hash", "uuid"):
        value = item.get(member)
        if value is None or value == "":
            continue
        if not isinstance(value, str):
            return None
        return text_key(f"{member}\0{value}")
    url = item.get("url")
    return text_key(url) if isinstance(url, str) and url else None
