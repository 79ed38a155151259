"""The gRPC door. Importing this package needs nothing beyond the router itself; `open_server` needs the extra."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from .plane import Line, LineClosed, LinePlane
from .settings import RpcSettings

if TYPE_CHECKING:
    from .server import RpcServer

__all__ = ["Line", "LineClosed", "LinePlane", "RpcMissing", "RpcSettings", "load_server"]

_NEEDED = ("grpc", "grpc_health", "grpc_reflection", "google.protobuf")


class RpcMissing(ImportError):
    """The packages of the extra are not installed; the text says how to get them."""


def load_server() -> type[RpcServer]:
    """The class `RpcServer`. Raises `RpcMissing` when the extra ``grpc`` is not installed."""
    for name in _NEEDED:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise RpcMissing(f"the package {name} is not installed: pip install 'fullhit[grpc]'")
    from .server import RpcServer

    return RpcServer
