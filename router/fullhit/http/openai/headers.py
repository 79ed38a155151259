"""The headers by which a Dynamo frontend is told where to send a request: a client's go out, ours come in."""

from __future__ import annotations

from typing import Final

from fullhit.http.wire import HeaderBlock, Request, end_to_end, header_block

__all__ = ["ROUTING", "forwarded_headers", "steering_lines"]

ROUTING: Final = frozenset(
    (
        b"x-dynamo-worker-instance-id",
        b"x-worker-instance-id",
        b"x-dynamo-prefill-instance-id",
        b"x-prefill-instance-id",
        b"x-dynamo-dp-rank",
        b"x-dp-rank",
        b"x-data-parallel-rank",
        b"x-dynamo-prefill-dp-rank",
        b"x-prefill-dp-rank",
    )
)
"""Names in lower case, the current and the legacy ones (Dynamo's documentation of its frontend)."""


def forwarded_headers(request: Request) -> HeaderBlock:
    """The end-to-end headers of a request without Host and without any that chooses a worker or rank."""
    if ROUTING.isdisjoint(request.names):
        return request.forwarded_hostless()
    kept = [
        item for item in end_to_end(request.headers) if (name := item[0].lower()) != b"host" and name not in ROUTING
    ]
    return HeaderBlock(header_block(kept), False)


def steering_lines(worker: int, prefill: int | None = None) -> bytes:
    """Header lines that pin a request to instances, under their current and their legacy names."""
    lines = b"x-dynamo-worker-instance-id: %d\r\nx-worker-instance-id: %d\r\n" % (worker, worker)
    if prefill is not None:
        lines += b"x-dynamo-prefill-instance-id: %d\r\nx-prefill-instance-id: %d\r\n" % (prefill, prefill)
    return lines
