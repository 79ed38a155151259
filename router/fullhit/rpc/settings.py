"""Settings of the gRPC listener."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RpcSettings"]


@dataclass(frozen=True, slots=True)
class RpcSettings:
    """``key``: the bearer token of every call, empty = none asked. PEM bytes: ``certificate`` (with its chain) and
    ``private_key`` switch TLS on, ``client_ca`` asks clients for a certificate of its own. Sizes in bytes, times in
    seconds.
    """

    key: str = ""
    certificate: bytes = b""
    private_key: bytes = b""
    client_ca: bytes = b""
    max_message_bytes: int = 64 << 20
    max_calls: int = 4_096
    """Calls under way, streams included; more are refused with RESOURCE_EXHAUSTED."""
    max_watchers: int = 256
    watch_interval: float = 0.2
    """How often the workers are compared with what watchers were told; comings and goings are told at once."""
    keepalive: float = 30.0
    """A silent connection is asked this often whether it lives, and given up when it does not say so."""
