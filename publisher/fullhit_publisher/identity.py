"""Who a worker is: its URL, in one spelling, and the number which stands for it on the wire.

The router knows a worker by the URL at which it forwards requests. The publisher inside the encoder is told
the same URL, and both sides derive the same number from it, so no table of identities has to be kept in
step. Two spellings of one URL would make two workers, hence the normal form; what cannot be a worker's
address is refused loudly, because a quiet correction on one side only would do the same.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

import xxhash

__all__ = ["MAX_WORKER_ID", "device_name", "dynamo_instance", "dynamo_name", "normalize_url", "worker_id_for"]

MAX_WORKER_ID = 2**53 - 1
"""Largest worker id we give out: the largest integer that JSON and Lua readers keep exactly."""

_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_.])?")
_MAX_URL_CHARS = 2048
_DYNAMO = "dynamo:"
_MAX_U64 = 2**64 - 1


def normalize_url(url: str) -> str:
    """The one spelling of a worker's URL: ``http://host[:port]``, scheme and host in lower case, no trailing
    slash.

    A port is kept as given, even when it is the default one of its scheme, and not added when it is missing.

    >>> normalize_url("HTTP://Encoder-1:30002/")
    'http://encoder-1:30002'

    Raises ValueError, with a message fit for the operator, for anything but a plain http or https origin: a
    path, query, fragment, user or password, a missing or malformed host, a port outside 1 to 65535.
    """
    if not isinstance(url, str):
        raise ValueError(f"worker URL must be text, not {type(url).__name__}")
    if not url or len(url) > _MAX_URL_CHARS:
        raise ValueError("worker URL is empty" if not url else f"worker URL is over {_MAX_URL_CHARS} characters")
    if not url.isascii() or any(char <= " " or char == "\x7f" for char in url):
        raise ValueError(f"worker URL {url[:80]!r} holds blanks, control or non-ASCII characters")
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError as error:
        raise ValueError(f"worker URL {url[:80]!r} is malformed: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"worker URL {url[:80]!r} must start with http:// or https://")
    if "@" in parts.netloc:
        # The text is not repeated: it holds a password.
        raise ValueError("worker URL must not hold a user name or password")
    if not host:
        raise ValueError(f"worker URL {url[:80]!r} names no host")
    if parts.path not in ("", "/") or "?" in url or "#" in url:
        raise ValueError(f"worker URL {url[:80]!r} must not have a path, query or fragment")
    if port == 0 or parts.netloc.endswith(":"):
        raise ValueError(f"worker URL {url[:80]!r} has no valid port (1 to 65535)")
    authority = _host_text(host, url)
    return f"{parts.scheme}://{authority}" if port is None else f"{parts.scheme}://{authority}:{port}"


def worker_id_for(name: str) -> int:
    """The number that stands for a worker on the wire, derived from its normalised URL; 1 to
    ``MAX_WORKER_ID``. A Dynamo instance has its number already, of up to 64 bits: ``dynamo_name``.
    """
    instance = dynamo_instance(name)
    if instance is not None:
        return instance
    return (xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) & MAX_WORKER_ID) or 1


def dynamo_name(instance_id: int) -> str:
    """The name of a Dynamo instance, which has no URL: ``dynamo:<decimal instance id>``. Text, because 64 bits do not
    survive every JSON reader.
    """
    if not 0 <= instance_id <= _MAX_U64:
        raise ValueError(f"instance id {instance_id} is no unsigned 64-bit integer")
    return f"{_DYNAMO}{instance_id}"


def dynamo_instance(name: str) -> int | None:
    """The instance id in a name made by ``dynamo_name``, None for any other text."""
    digits = name[len(_DYNAMO) :]
    if not name.startswith(_DYNAMO) or not (digits.isascii() and digits.isdecimal() and len(digits) <= 20):
        return None
    number = int(digits)
    return number if number <= _MAX_U64 and str(number) == digits else None


def device_name(device: object) -> str:
    """The kind of a device, from a name or a ``torch.device``: ``"cuda:0"`` is ``"cuda"``, ``"CPU"`` is
    ``"cpu"``.

    Raises ValueError when no kind is left.
    """
    kind = str(device).partition(":")[0].strip().lower()
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,31}", kind):
        raise ValueError(f"{str(device)[:80]!r} names no device; examples are cuda, cuda:0, cpu, xpu")
    return kind


def _host_text(host: str, url: str) -> str:
    if ":" in host:
        try:
            return f"[{ipaddress.IPv6Address(host)}]"
        except ValueError:
            raise ValueError(f"worker URL {url[:80]!r} has a malformed IPv6 address") from None
    if not _HOST_NAME.fullmatch(host):
        raise ValueError(f"worker URL {url[:80]!r} has a malformed host name")
    return host
