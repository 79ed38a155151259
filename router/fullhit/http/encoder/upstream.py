"""What became of a call to an encoder, in the words the gateway decides by.

Where a failed ``/encode`` may go to another encoder (contract: a second copy of a part may fail a request that has
several parts, while a late copy of an only part is dropped as inactive):

| what happened                            | one part  | several parts                                            |
|------------------------------------------|-----------|----------------------------------------------------------|
| not connected, body not taken in full    | elsewhere | elsewhere: nothing was processed                         |
| 503                                      | elsewhere | elsewhere: turned away                                   |
| 404, 405: no such route                  | elsewhere | elsewhere: this is no encoder                            |
| lost on a kept-alive connection, 0 bytes | elsewhere | elsewhere: the server's idle timer, as far as one can see|
| lost after the body was sent, garbage    | elsewhere | elsewhere if the process is provably dead, else 502      |
| no answer in time                        | 504       | 504: the caller's own wait is spent                      |
| 409 and all others                       | passed on | passed on                                                |
| 400, 500, 504                            | passed on | passed on: the encoder has told the prefill side already |

With zmq_to_scheduler the last row, and the loss of an encoder, look better while no registration has been passed on
to it: then nothing can have been pushed and nobody knows (`remedy`).

"Provably dead" means that a fresh TCP connect to its port is refused. It cannot push an embedding any more then;
without a new attempt the request would fail for certain, with one it can only fail.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec

from fullhit.http.wire import (
    BadReply,
    LostAfterSend,
    NotAccepted,
    Origin,
    UpstreamError,
    UpstreamResponse,
    UpstreamTimeout,
)

__all__ = ["Answer", "Failure", "answer_of", "failure_of", "is_listening", "refusal_of", "with_id"]

Retry = Literal["yes", "if_harmless", "no"]

_KNOCK_SECONDS: Final = 1.0
_DELIVERED: Final = {word.encode(): word for word in ("hit", "partial", "miss")}


@dataclass(slots=True)
class Answer:
    """A complete answer of an encoder. ``lines``: its end-to-end headers, composed; ``tagged``: x-request-id is among
    them; ``delivered``: what its cache had of the request, ``hit``, ``partial`` or ``miss``, empty when it does not
    say."""

    status: int
    lines: bytes
    body: bytes
    tagged: bool = False
    delivered: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that brought no usable answer.

    ``cause``: short word for counters. ``report``: what the fleet is told, or None. ``retry``: may the call go to
    another encoder: ``yes``, ``no``, or ``if_harmless`` (one part, or the encoder is dead). ``status``: what the
    caller gets if not. ``blame``: whether to look for another encoder rather than try this one again at once.
    """

    cause: str
    report: str | None
    retry: Retry
    status: int
    message: str
    blame: bool = True
    answer: Answer | None = None


def with_id(answer: Answer, told: str, known: str) -> Answer:
    """``answer`` to a part that the encoder was ``told`` under another id than the caller has ``known`` it by."""
    if told == known:
        return answer
    old, new = (msgspec.json.encode(one)[1:-1] for one in (told, known))
    if old not in answer.body:
        return answer
    return replace(answer, body=answer.body.replace(old, new))


def answer_of(response: UpstreamResponse, body: bytes) -> Answer:
    """The answer, once its body is read."""
    tagged = response.get(b"x-request-id") is not None
    delivered = _DELIVERED.get(response.get(b"x-fullhit-cache") or b"", "")
    return Answer(response.status, response.forwarded(), body, tagged, delivered)


def failure_of(error: UpstreamError) -> Failure:
    """Sort a failed call; see the table above."""
    text = str(error)
    stale = error.reused and getattr(error, "received", 0) == 0
    if isinstance(error, UpstreamTimeout):
        if error.stage == "pool":
            return Failure("pool", None, "yes", 503, text)
        if error.not_processed:
            return Failure("timeout", "connect" if error.stage == "connect" else "timeout", "yes", 504, text)
        return Failure("timeout", "timeout", "no", 504, text)
    if isinstance(error, NotAccepted):
        return Failure("not_accepted", None if stale else "reset", "yes", 502, text, blame=not stale)
    if error.not_processed:
        return Failure("connect", "connect", "yes", 502, text)
    if isinstance(error, LostAfterSend):
        if stale:
            return Failure("stale", None, "yes", 502, text, blame=False)
        return Failure("reset", "reset", "if_harmless", 502, text)
    if isinstance(error, BadReply):
        return Failure("garbage", "garbage", "if_harmless", 502, text)
    return Failure(error.kind, "reset", "if_harmless", 502, text)


def refusal_of(answer: Answer) -> Failure | None:
    """The failure that an answer to ``/encode`` amounts to, or None if it is to be passed on."""
    if answer.status == 503:
        return Failure("busy", "busy", "yes", 503, "the encoder has no room (503)", answer=answer)
    if answer.status in (404, 405):
        message = f"the server has no /encode ({answer.status}): is it an encoder?"
        return Failure("garbage", "garbage", "yes", 502, message)
    if 200 <= answer.status < 300 and answer.body and not _is_json(answer.body):
        return Failure("garbage", "garbage", "if_harmless", 502, "the answer is not JSON: is it an encoder?")
    return None


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


async def is_listening(origin: Origin) -> bool:
    """False only when a fresh TCP connect is refused: no process listens on that port."""
    try:
        async with asyncio.timeout(_KNOCK_SECONDS):
            _, writer = await asyncio.open_connection(origin.host, origin.port)
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError):
        return True
    writer.transport.abort()
    return True
