"""What the callers' addresses tell: which transfer backend a language server uses, and who has been warned.

``/encode`` carries an int as ``embedding_port`` with ``zmq_to_tokenizer``, and null with both ``zmq_to_scheduler``
and mooncake. The latter two differ in what follows: a registration, or a ``/send``. What was seen of an address
before is taken as true for it; until then null means ``zmq_to_scheduler``, the default of SGLang, and the one
that suffers most from a wrong guess.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from functools import lru_cache
from typing import Final, Literal

from .media import EncodeInfo

__all__ = ["Backend", "PeerMemory", "address_of", "is_loopback", "is_wildcard"]

Backend = Literal["zmq_to_scheduler", "zmq_to_tokenizer", "mooncake"]

_MAX_PEERS: Final = 4_096


class PeerMemory:
    """Bounded memory by address; the longest unseen is forgotten first."""

    def __init__(self) -> None:
        self._backends: OrderedDict[str, Backend] = OrderedDict()
        self._warned: OrderedDict[str, None] = OrderedDict()

    def saw(self, peer: str, backend: Backend) -> None:
        """``peer`` did what only callers with ``backend`` do."""
        if self._backends.get(peer) != backend:
            self._backends[peer] = backend
            self._backends.move_to_end(peer)
            if len(self._backends) > _MAX_PEERS:
                self._backends.popitem(last=False)

    def backend(self, peer: str, info: EncodeInfo) -> Backend:
        """The transfer backend behind an ``/encode`` from ``peer``."""
        if isinstance(info.embedding_port, int):
            return "zmq_to_tokenizer"
        if info.embedding_port is not None:
            return "zmq_to_scheduler"
        return self._backends.get(peer, "zmq_to_scheduler")

    def warn_once(self, peer: str) -> bool:
        """True the first time for each peer."""
        if peer in self._warned:
            return False
        self._warned[peer] = None
        if len(self._warned) > _MAX_PEERS:
            self._warned.popitem(last=False)
        return True


@lru_cache(maxsize=4_096)
def address_of(peer: str) -> str:
    """``10.0.0.1:5000`` -> ``10.0.0.1``; ``[::1]:5000`` -> ``::1``."""
    return peer.rpartition(":")[0].strip("[]")


@lru_cache(maxsize=1_024)
def is_wildcard(host: str) -> bool:
    """An address to bind to, which nobody can dial from elsewhere."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


@lru_cache(maxsize=1_024)
def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
