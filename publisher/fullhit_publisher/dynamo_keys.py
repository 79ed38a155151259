"""Cache keys as NVIDIA Dynamo makes them, from the three shapes in which a request can reach a router.

Dynamo's encoders publish text keys, and a router finds a picture only if it derives the same text from a request:

* a picture by URL is the BLAKE3 digest (64 hex digits) of the URL's text as its front end passes it on, that is parsed
  and written again by the WHATWG rules: ``HTTPS://EXAMPLE.com`` is ``https://example.com/``. A ``data:`` URI is a URL
  like any other, hashed whole. Text that is no URL is hashed as it is;
* a picture which the front end has decoded is its ``content_hash`` (16 hex digits);
* encoders that separate sessions put the SHA-256 of the session before the key. A request then has two keys for one
  picture, and either is good;
* a video is the digest of its URL and of the encoder's own video settings, which the router can only be told;
* an item of any other kind, one named by ``uuid`` alone, or one with a malformed hash has no key. Such an item may be
  anything, so a request with one is at best a partial hit.

Nothing in a request is trusted: whatever its shape, an extractor returns ``MediaKeys`` and raises nothing. What it
cannot read is an item without key.

Needs the extra ``dynamo``: BLAKE3 and a WHATWG parser. Without it ``require`` raises ImportError with the remedy.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

__all__ = [
    "KeyRules",
    "MediaKeys",
    "content_key",
    "from_chat",
    "from_encode",
    "from_preprocessed",
    "normalized_url",
    "require",
    "scoped_key",
    "url_key",
    "video_key",
]

_CONTENT_HASH: Final = re.compile(r"[0-9a-f]{16}")
# Most of a request's bytes are in such URIs, and the parser would hand them back as they are. They are looked through
# in steps, between which other threads get their turn.
_DATA_URI: Final = re.compile(r"data:[a-z0-9.+/-]*;base64,")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/=]*")
_STEP: Final = 256 << 10
# What Python's own strip takes away, which is what Dynamo's workers use.
_SCOPE_BLANKS: Final = "".join(char for char in map(chr, range(0x3001)) if char.isspace())
_MEDIA_PARTS: Final = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio": "audio",
}
_MODALITIES: Final = {"IMAGE": "image", "MULTI_IMAGES": "image", "VIDEO": "video", "AUDIO": "audio"}
_MAX_SCOPE_CHARS: Final = 4096


class MediaKeys(NamedTuple):
    """What a request asks an encoder's cache for.

    ``items``: for each media item, in order, the keys of which any one is good enough; empty for an item without key.
    """

    items: tuple[tuple[str, ...], ...]

    @property
    def unkeyed(self) -> int:
        """Items for which no key can be computed."""
        return sum(1 for item in self.items if not item)

    @property
    def distinct(self) -> tuple[tuple[str, ...], ...]:
        """Items with keys, each once, in order of first appearance."""
        return tuple(dict.fromkeys(item for item in self.items if item))


@dataclass(frozen=True, slots=True)
class KeyRules:
    """What a pool knows of its encoders.

    ``session_scoped``: its encoders may put the session into their keys. ``video_config``: their video settings as JSON
    values, as they hash them; None = unknown, videos have no key.
    """

    session_scoped: bool = True
    video_config: Mapping[str, Any] | None = None


_DEFAULT: Final = KeyRules()


def require() -> None:
    """Raises ImportError, with what to install, unless everything this module needs is there."""
    _blake3()
    _parser()


def normalized_url(text: str) -> str:
    """The text that Dynamo's front end makes of a URL; the text itself when it is none.

    >>> normalized_url("https://EXAMPLE.com/Q.png?a=1")
    'https://example.com/Q.png?a=1'
    """
    head = _DATA_URI.match(text)
    if head and all(_BASE64.fullmatch(text, at, at + _STEP) for at in range(head.end(), len(text), _STEP)):
        return text
    try:
        return str(_parser()(text).href)
    except ValueError:
        return text


def url_key(text: str) -> str:
    """Key of a picture by the text of its URL, exactly as given: normalise it first if a client sent it."""
    digest: str = _blake3()(text.encode("utf-8", "surrogatepass")).hexdigest()
    return digest


def content_key(value: object) -> str | None:
    """Key of a decoded picture by its ``content_hash``; None when that is malformed."""
    return value if isinstance(value, str) and _CONTENT_HASH.fullmatch(value) else None


def scoped_key(scope: str, key: str) -> str:
    """The key under which an encoder files ``key`` for one session."""
    return f"{hashlib.sha256(scope.strip(_SCOPE_BLANKS).encode('utf-8', 'surrogatepass')).hexdigest()}:{key}"


def video_key(url: str, video_config: Mapping[str, Any]) -> str:
    """Key of a video by its URL, exactly as given, and the encoder's settings."""
    text = json.dumps({"url": url, "video_config": video_config}, sort_keys=True, separators=(",", ":"))
    return url_key(text)


def from_chat(body: object, rules: KeyRules = _DEFAULT, *, scope: str | None = None) -> MediaKeys:
    """Keys of an OpenAI chat body, as a client sent it. ``scope``: the session, where the front end takes one from
    elsewhere (the header ``x-dynamo-session-id``)."""
    return _collect(_chat_items(body, rules), rules, scope)


def from_preprocessed(body: object, rules: KeyRules = _DEFAULT) -> MediaKeys:
    """Keys of a request as Dynamo's front end hands it to workers. Its URLs are normalised already."""
    if not isinstance(body, Mapping):
        return MediaKeys(())
    scope = body.get("image_cache_scope")
    return _collect(_preprocessed_items(body, rules), rules, scope if isinstance(scope, str) else None)


def from_encode(body: object, rules: KeyRules = _DEFAULT, *, scope: str | None = None) -> MediaKeys:
    """Keys of the body of SGLang's ``/encode``."""
    return _collect(_encode_items(body, rules), rules, scope)


# Items, each as its key or None.


def _chat_items(body: object, rules: KeyRules) -> Iterator[tuple[str, str | None]]:
    messages = body.get("messages") if isinstance(body, Mapping) else None
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping):
                continue
            kind = part.get("type")
            media = _MEDIA_PARTS.get(kind) if isinstance(kind, str) else None
            if media is None:
                continue
            holder = part.get(kind)
            url = holder.get("url") if isinstance(holder, Mapping) else holder
            yield media, _url_item(media, normalized_url(url) if isinstance(url, str) else None, rules)


def _preprocessed_items(body: Mapping[object, object], rules: KeyRules) -> Iterator[tuple[str, str | None]]:
    data = body.get("multi_modal_data")
    for name, entries in data.items() if isinstance(data, Mapping) else ():
        media = _MEDIA_PARTS.get(name, "other") if isinstance(name, str) else "other"
        for entry in entries if isinstance(entries, list) else ():
            if not isinstance(entry, Mapping):
                yield media, None
                continue
            decoded = entry.get("Decoded")
            if isinstance(decoded, Mapping):
                yield media, content_key(decoded.get("content_hash")) if media == "image" else None
                continue
            url = entry.get("Url", entry.get("RawUrl"))
            yield media, _url_item(media, url if isinstance(url, str) else None, rules)


def _encode_items(body: object, rules: KeyRules) -> Iterator[tuple[str, str | None]]:
    items = body.get("mm_items") if isinstance(body, Mapping) else None
    modality = body.get("modality", "IMAGE") if isinstance(body, Mapping) else "IMAGE"
    media = _MODALITIES.get(modality.upper(), "other") if isinstance(modality, str) else "other"
    for item in items if isinstance(items, list) else ():
        if isinstance(item, Mapping):
            if media == "image" and item.get("content_hash") is not None:
                yield media, content_key(item["content_hash"])
                continue
            item = item.get("url")
        yield media, _url_item(media, normalized_url(item) if isinstance(item, str) else None, rules)


def _url_item(media: str, url: str | None, rules: KeyRules) -> str | None:
    if not url:
        return None
    if media == "image":
        return url_key(url)
    if media == "video" and rules.video_config is not None:
        return video_key(url, rules.video_config)
    return None


def _collect(items: Iterator[tuple[str, str | None]], rules: KeyRules, scope: str | None) -> MediaKeys:
    session = (scope or "").strip(_SCOPE_BLANKS) if rules.session_scoped else ""
    if len(session) > _MAX_SCOPE_CHARS:
        session = ""
    return MediaKeys(
        tuple(
            () if key is None else (scoped_key(session, key), key) if session and media == "image" else (key,)
            for media, key in items
        )
    )


def _missing(name: str) -> ImportError:
    return ImportError(
        f"Dynamo's cache keys need the package {name}: pip install 'fullhit[dynamo]'", name=name.replace("-", "_")
    )


def _blake3() -> Callable[[bytes], Any]:
    try:
        from blake3 import blake3
    except ImportError:
        raise _missing("blake3") from None
    return blake3


def _parser() -> Callable[[str], Any]:
    try:
        from ada_url import URL
    except ImportError:
        raise _missing("ada-url") from None
    return URL
