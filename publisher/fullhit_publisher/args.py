"""Command-line arguments for an encoder's own parser.

Names and environment variables of the first two are those of NVIDIA Dynamo's encoders, so that a launch
script works for both.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any

from .cache import EmbeddingCache
from .dynamo import DynamoTarget
from .publisher import EmbeddingCachePublisher
from .transports.base import Transport

__all__ = ["add_cli_args", "from_args"]

_CAPACITY_ENV = "DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB"
_PUBLISHER_ENV = "DYN_MULTIMODAL_EMBEDDING_CACHE_PUBLISHER"
_EVENT_PLANE_ENV = "FULLHIT_EVENT_PLANE"
_CREDENTIALS_ENV = "FULLHIT_EVENT_PLANE_CREDENTIALS"
_TRUE = frozenset(("1", "true", "yes", "on"))
_FALSE = frozenset(("", "0", "false", "no", "off"))
_BYTES_PER_GB = 1024**3


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add ``--multimodal-embedding-cache-capacity-gb``, ``--multimodal-embedding-cache-publisher`` and
    ``--event-plane`` to a parser.

    An argument wins over its environment variable, which is named in the help. A malformed variable is
    reported as a malformed argument would be, by ``parser.error``.
    """
    group = parser.add_argument_group("embedding cache")
    group.add_argument(
        "--multimodal-embedding-cache-capacity-gb",
        type=_gigabytes,
        default=os.environ.get(_CAPACITY_ENV) or "0",
        metavar="GB",
        help=f"memory for embeddings of pictures already seen, in units of 2^30 bytes; 0 is none "
        f"(env {_CAPACITY_ENV}, default 0)",
    )
    group.add_argument(
        "--multimodal-embedding-cache-publisher",
        action=argparse.BooleanOptionalAction,
        default=_flag(parser),
        help=f"tell routers which pictures the cache holds (env {_PUBLISHER_ENV}, default off)",
    )
    group.add_argument(
        "--event-plane",
        default=os.environ.get(_EVENT_PLANE_ENV) or "nats://127.0.0.1:4222",
        metavar="URL",
        help=f"where changes are published: nats:// or tls:// URL, several separated by commas "
        f"(env {_EVENT_PLANE_ENV}, default nats://127.0.0.1:4222)",
    )
    group.add_argument(
        "--event-plane-credentials",
        default=os.environ.get(_CREDENTIALS_ENV) or None,
        metavar="FILE",
        help=f"NATS credentials file (env {_CREDENTIALS_ENV})",
    )


def from_args(
    args: argparse.Namespace,
    *,
    url: str = "",
    dynamo: DynamoTarget | None = None,
    device: object = "cuda",
    pool: str = "default",
    size_of: Any = None,
    heartbeat_interval: float = 1.0,
    wrap: Callable[[Transport], Transport] | None = None,
) -> tuple[EmbeddingCache[Any] | None, EmbeddingCachePublisher | None]:
    """The cache and the publisher that the arguments ask for, attached to each other; the publisher is not
    started.

    ``url`` is where routers reach this encoder, or ``dynamo`` what it is in a Dynamo deployment; ``device`` what it
    computes on, ``pool`` the name its routers know; ``heartbeat_interval`` and ``wrap`` are the publisher's. Raises
    ValueError for a publisher without a cache, and for a malformed URL.
    """
    capacity = int(args.multimodal_embedding_cache_capacity_gb * _BYTES_PER_GB)
    cache: EmbeddingCache[Any] | None = EmbeddingCache(capacity, size_of=size_of) if capacity > 0 else None
    if not args.multimodal_embedding_cache_publisher:
        return cache, None
    if cache is None:
        raise ValueError(
            "--multimodal-embedding-cache-publisher has nothing to publish: "
            f"set --multimodal-embedding-cache-capacity-gb (or {_CAPACITY_ENV}) above 0"
        )
    publisher = EmbeddingCachePublisher(
        url,
        dynamo=dynamo,
        pool=pool,
        event_plane=args.event_plane,
        device=device,
        credentials=args.event_plane_credentials,
        heartbeat_interval=heartbeat_interval,
        wrap=wrap,
    )
    return cache, publisher.attach(cache)


def _gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 2**20:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of gigabytes (0 or more)")
    return value


def _flag(parser: argparse.ArgumentParser) -> bool:
    text = os.environ.get(_PUBLISHER_ENV, "").strip().lower()
    if text not in _TRUE | _FALSE:
        parser.error(f"environment variable {_PUBLISHER_ENV} must be one of 1, 0, true, false, yes, no, on, off")
    return text in _TRUE
