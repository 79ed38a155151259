"""What the failure of a worker allows. Pure.

| what happened                                      | then, while no byte has reached the client              |
|----------------------------------------------------|---------------------------------------------------------|
| not connected, or the body not taken in full       | another worker; counted against this one                |
| ended on a kept-alive connection, without a byte   | again, as if nothing had happened: an idle timer        |
| gone, or garbage, after all was sent               | another worker, once: one that ends workers must not    |
|                                                    | visit all of them                                       |
| no answer in time                                  | 504: the client's own patience is likely spent          |
| 503, 529                                           | another worker; a pause for this one, which is no fault |
| 500, 502, 504                                      | another worker; counted only when that one can          |
| any 4xx, 501                                       | passed on: the client's business                        |
| cut inside the answer                              | cut at the client too, so that it sees it               |

"Counted only when that one can": a picture that makes every worker fail is the request's doing, and a client alone must
not be able to eject workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from fullhit.http.wire import LostAfterSend, UpstreamError, UpstreamTimeout

__all__ = ["Failure", "failure_of", "judge"]

Retry = Literal["yes", "stale", "once", "no"]
Blame = Literal["now", "suspect", "none"]
_BUSY: Final = (503, 529)
_FAILED: Final = (500, 502, 504)


@dataclass(frozen=True, slots=True)
class Failure:
    """``cause``: a short word for counters. ``kind``: what the fleet is told. ``status``: for the client."""

    cause: str
    kind: str
    retry: Retry
    blame: Blame
    status: int
    message: str


def failure_of(error: UpstreamError) -> Failure:
    """What a broken exchange means."""
    text = str(error)
    if isinstance(error, UpstreamTimeout):
        if error.stage == "pool":
            return Failure("no_connection", "busy", "yes", "none", 503, text)
        if error.not_processed:
            return Failure("timeout", "timeout", "yes", "now", 503, text)
        return Failure("timeout", "timeout", "no", "now", 504, text)
    if error.not_processed:
        return Failure(error.kind, "connect", "stale" if error.reused else "yes", "now", 502, text)
    if isinstance(error, LostAfterSend) and error.reused and not error.received:
        return Failure(error.kind, "reset", "stale", "now", 502, text)
    return Failure(error.kind, "reset", "once", "now", 502, text)


def judge(status: int) -> Failure | None:
    """What the status of an answer says about the worker; None: the answer is for the client."""
    if status in _BUSY:
        return Failure(f"status_{status}", "busy", "yes", "now", status, f"it answered {status}")
    if status in _FAILED:
        return Failure(f"status_{status}", "5xx", "yes", "suspect", status, f"it answered {status}")
    return None
