"""What can be done about a part that has failed while nobody but the router knows.

With ``zmq_to_scheduler`` an encoder can push to those only that have registered with it, and `verify` keeps the
registrations back until the media are decoded. An ``/encode`` that fails before that can be mended, and must be:
SGLang 0.5.23 loses the language server over it. The part is sent again under a fresh id (see `parts`).

| answer of the encoder              | remedy                                                               |
|------------------------------------|----------------------------------------------------------------------|
| 400 about the media, pictures only | a picture that says "unreadable image" for the bad one, else for all |
| 500, 504                           | another encoder; if that says 500 about the media too, like 400      |
| 400 about anything else            | none: the caller has sent nonsense                                   |
| connection lost                    | another encoder, also with several parts (`upstream`)                |

Which picture it was is seldom said in so many words. In this order: the only one; those whose URL the message of
the encoder quotes (SGLang's does); those that the look at the header finds; all of the part. So in a part with five
pictures one bad one may cost the other four, which one URL per picture (aliases) avoids.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

import msgspec

from .imagecheck import inspect_image
from .media import EncodeInfo

__all__ = ["MAX_RESENDS", "brief", "is_media_fault", "suspects"]

MAX_RESENDS: Final = 2
"""How often a part is sent again with other pictures: first those suspected, then all."""

_NO_MEDIA_FAULT: Final = re.compile(
    r"(Bad request error: )?("
    r"(missing|invalid|unsupported)\b.{0,20}\b(req_id|modality|mm_items|num_parts|part_idx|hashes)\b"
    r"|(num_parts|part_idx|hashes|mm_items) must be|User-supplied hashes|Encoder request is not active)",
    re.IGNORECASE,
)
"""400s about the call itself, in the words of SGLang's ``validate_encode_request`` and its like. They must stand at
the start of the message: further on it quotes URLs, which say what the client likes."""
_MEDIA_FAULT: Final = re.compile(r"loading data|process mm items|(decode|load|open|identify|fetch)\w* image", re.I)
_URL: Final = re.compile(r"(https?://)(?:[^\s/@]*@)?([^\s/?#:]+(?::\d+)?[^\s?#]*)\S*")
_LONG: Final = re.compile(r"[A-Za-z0-9+/=_%-]{64,}")
_LEAST_QUOTED: Final = 8
"""A shorter text may stand in a message by chance."""


def is_media_fault(status: int, message: str, info: EncodeInfo) -> bool:
    """Whether an error of ``/encode`` is about its pictures.

    >>> is_media_fault(400, "missing or invalid modality", info)
    False
    """
    if info.modality != "IMAGE" or not info.items:
        return False
    head = message[:2_000]
    if status == 400:
        return info.num_parts is not None and info.part_idx is not None and not _NO_MEDIA_FAULT.match(head)
    return status == 500 and _MEDIA_FAULT.search(head) is not None


def suspects(
    body: bytes | bytearray | memoryview, message: str, done: Collection[int] = (), *, again: bool = False
) -> list[int]:
    """Places in ``mm_items`` of the pictures to replace, in order; those in ``done`` have been replaced before.

    ``body`` is a valid ``/encode`` body, ``message`` what the encoder said about it; ``again``: it is not the
    first complaint, so all that are left. An empty list: none is.
    """
    items = msgspec.json.decode(body)["mm_items"]
    urls = {
        place: item.get("url") if isinstance(item, dict) else item
        for place, item in enumerate(items)
        if place not in done
    }
    if again:
        return list(urls)
    texts = {place: url for place, url in urls.items() if isinstance(url, str)}
    quoted = {place: url for place, url in texts.items() if len(url) >= _LEAST_QUOTED and url in message}
    # http://host/1 also stands in a message about http://host/10.
    named = [place for place, url in quoted.items() if not any(url != o and url in o for o in quoted.values())]
    return named or [place for place, url in texts.items() if inspect_image(url) is not None] or list(urls)


def brief(message: str) -> str:
    """An encoder's message for a log: without the picture that it quotes, and without secrets of URLs.

    >>> brief("Error while loading data https://u:p@h/a.png?token=1: 404")
    'Error while loading data https://h/a.png 404'
    """
    return _LONG.sub("...", _URL.sub(r"\1\2", message))[:300]
