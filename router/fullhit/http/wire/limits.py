"""Every number that bounds this package, with its unit and its reason.

One body limit holds for both framings. The default is far above what pictures need because gateways with 1 to
8 MB caps are a common cause of refused or cut images; the memory of the process is bounded by
`max_buffered_bytes`, not by being mean to a single request.
"""

from __future__ import annotations

import ssl as ssl_module
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ListenerLimits", "Origin", "Timeouts", "UpstreamLimits"]

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """Limits of one `HttpListener`. Bytes and seconds.

    >>> ListenerLimits(max_body_bytes=64 << 20, keepalive_timeout=15)
    """

    max_head_bytes: int = 64 * KIB
    """Request line and headers together; more is 431. (nginx 32 KiB, HAProxy 16 KiB, h11 16 KiB.)"""
    max_headers: int = 200
    """Header lines in a request; more is 431."""
    max_body_bytes: int = 512 * MIB
    """One request body, however framed; more is 413."""
    max_buffered_bytes: int = 2048 * MIB
    """All request bodies in memory together. At the limit further bodies are not read until others are done
    (one may always go on, so the real ceiling is this plus one body); small bodies never wait."""
    buffer_wait_timeout: float = 30.0
    """How long a body may wait for memory before it is answered 503 with Retry-After."""
    head_timeout: float = 20.0
    """From the first byte of a request (or the accept) to the end of its head; then 408."""
    body_idle_timeout: float = 30.0
    """Longest silence inside a body; then 408."""
    keepalive_timeout: float = 75.0
    """An idle kept-alive connection is closed after this."""
    write_timeout: float = 60.0
    """Longest time in which a client that is owed bytes takes none; then its connection is aborted."""
    linger_timeout: float = 2.0
    """After an answer that refuses a body: how long the rest is read and thrown away, so that a close does
    not reset the connection before the client has read the answer."""
    max_connections: int = 16384
    """Open client connections; one more is answered 503 and closed."""
    backlog: int = 1024
    """Length of the kernel's accept queue."""


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Limits of one `UpstreamClient`.

    There is deliberately no small default for `max_connections`: a client library's silent cap of 100 is a
    well known way to choke a router. Admission limits belong to the caller, who knows the worker.
    """

    max_connections: int = 4096
    """Open connections per origin, idle ones included; a further request waits (stage `pool`)."""
    max_idle: int = 1024
    """Idle connections kept per origin."""
    idle_timeout: float = 3.0
    """An unused connection is closed after this: below the 5 s of uvicorn, so that the server's own close
    does not race with our next request. Learnt downward per origin."""
    min_idle_timeout: float = 0.2
    """Floor of what is learnt."""
    learn_for: float = 600.0
    """A learnt shorter idle time is forgotten after this many seconds (the server may have been replaced)."""
    max_head_bytes: int = 64 * KIB
    max_headers: int = 200
    read_ahead: int = 256 * KIB
    """Bytes of an answer held while nobody consumes it; then the upstream is not read any further."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits of one forwarded request in seconds; None = no limit.

    >>> Timeouts(connect=1, first_byte=120, idle=30, total=600)
    """

    pool: float | None = 10.0
    """Waiting for a free connection slot of the origin."""
    connect: float | None = 2.0
    """TCP and TLS handshake."""
    send: float | None = 30.0
    """Longest time in which the server takes no further byte of the request."""
    first_byte: float | None = 300.0
    """From the whole request sent to the first byte of the final answer's head."""
    idle: float | None = 60.0
    """Longest silence inside the answer, not counting time in which our own client does not read."""
    total: float | None = None
    """From the call to the end of the answer."""


class Origin(NamedTuple):
    """Where requests go: host (name or address literal without brackets), port, optional TLS context."""

    host: str
    port: int
    ssl: ssl_module.SSLContext | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
