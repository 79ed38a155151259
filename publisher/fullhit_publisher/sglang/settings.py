"""What an operator asked for. Flags become environment variables, because those reach spawned encoder processes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from ..args import add_cli_args

__all__ = ["PluginSettings", "add_flags", "carry_over"]

_CAPACITY: Final = "DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB"
_PUBLISHER: Final = "DYN_MULTIMODAL_EMBEDDING_CACHE_PUBLISHER"
_PLANE: Final = "FULLHIT_EVENT_PLANE"
_CREDENTIALS: Final = "FULLHIT_EVENT_PLANE_CREDENTIALS"
_POOL: Final = "FULLHIT_POOL"
_URL: Final = "FULLHIT_ENCODER_URL"
_GUARD: Final = "FULLHIT_SURVIVE_FAILED_ENCODES"
_SKIP: Final = "FULLHIT_SKIP_PREPROCESSING"
_TRUE: Final = frozenset(("1", "true", "yes", "on"))
_GB: Final = 1024**3
_DEFAULT_PLANE: Final = "nats://127.0.0.1:4222"
_DEFAULT_POOL: Final = "default"


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """``url``: under which routers reach this encoder; empty: as SGLang itself advertises it. ``guard``: for language
    servers, see `guard`."""

    capacity_bytes: int = 0
    publish: bool = False
    event_plane: str = _DEFAULT_PLANE
    credentials: str | None = None
    pool: str = _DEFAULT_POOL
    url: str = ""
    guard: bool = False
    skip_preprocessing: bool = False

    @property
    def wanted(self) -> bool:
        """Whether there is anything to do."""
        return self.capacity_bytes > 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> PluginSettings:
        """Raises ValueError, naming the variable, for a capacity that is no number of gigabytes."""
        text = environ.get(_CAPACITY) or "0"
        try:
            capacity = float(text)
        except ValueError:
            capacity = -1.0
        if not 0 <= capacity < 2**20:
            raise ValueError(f"{_CAPACITY}={text!r} is no number of gigabytes (0 or more)")
        return cls(
            int(capacity * _GB),
            environ.get(_PUBLISHER, "").strip().lower() in _TRUE,
            environ.get(_PLANE) or _DEFAULT_PLANE,
            environ.get(_CREDENTIALS) or None,
            environ.get(_POOL) or _DEFAULT_POOL,
            environ.get(_URL) or "",
            environ.get(_GUARD, "").strip().lower() in _TRUE,
            environ.get(_SKIP, "").strip().lower() in _TRUE,
        )


def add_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """Add the flags to SGLang's parser."""
    add_cli_args(parser)
    group = parser.add_argument_group("embedding cache, routing")
    group.add_argument(
        "--embedding-cache-pool",
        default=environ.get(_POOL) or _DEFAULT_POOL,
        metavar="NAME",
        help=f"the router's pool of encoders with this model and processor (env {_POOL}, default default)",
    )
    group.add_argument(
        "--embedding-cache-url",
        default=environ.get(_URL) or "",
        metavar="URL",
        help=f"where routers reach this encoder, if not where SGLang announces it (env {_URL})",
    )
    group.add_argument(
        "--embedding-cache-skip-preprocessing",
        action=argparse.BooleanOptionalAction,
        default=environ.get(_SKIP, "").strip().lower() in _TRUE,
        help="requests whose pictures are all held are answered without fetching and preprocessing them "
        f"(env {_SKIP}, default off)",
    )
    group.add_argument(
        "--survive-failed-encodes",
        action=argparse.BooleanOptionalAction,
        default=environ.get(_GUARD, "").strip().lower() in _TRUE,
        help="for language servers: a failed encode is an error for its client, instead of the end of the server as in "
        f"release 0.5.23 with zmq_to_scheduler (env {_GUARD}, default off)",
    )


def carry_over(args: Any, environ: MutableMapping[str, str]) -> None:
    """Write what the flags say into the environment. Flags that are not there (another parser) change nothing."""
    for name, variable in (
        ("multimodal_embedding_cache_capacity_gb", _CAPACITY),
        ("multimodal_embedding_cache_publisher", _PUBLISHER),
        ("event_plane", _PLANE),
        ("event_plane_credentials", _CREDENTIALS),
        ("embedding_cache_pool", _POOL),
        ("embedding_cache_url", _URL),
        ("survive_failed_encodes", _GUARD),
        ("embedding_cache_skip_preprocessing", _SKIP),
    ):
        value = getattr(args, name, None)
        if value is None or value == "":
            continue
        environ[variable] = str(int(value)) if isinstance(value, bool) else str(value)
