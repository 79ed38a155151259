"""What an answer of a Dynamo frontend says about the worker that it was pinned to. Pure.

Observed on a real frontend of release 1.6.1 in direct mode, with workers that were made to fail (the first line of each
pair without streaming, the second with; "event" is the first ``data:`` line of an answer with status 200):

| what happened at the worker                 | status and message                        | what is done              |
|---------------------------------------------|-------------------------------------------|---------------------------|
| killed while idle; until its lease ends     | 503 Service temporarily unavailable       | another worker, blamed    |
|                                             | the same                                  |                           |
| killed, or shut down, before the 1st token  | 503 Service temporarily unavailable       | another worker, blamed    |
|                                             | event: the same, code 503                 |                           |
| killed after the first token                | 503 Service temporarily unavailable       | another worker, blamed    |
|                                             | tokens, then event code 503, [DONE]       | passed on: bytes are out  |
| lease over, or not registered               | 400 Invalid request                       | asked (below)             |
|                                             | the same                                  |                           |
| exception before the first token            | 500 Internal server error                 | another worker, suspected |
|                                             | event: the same, code 500                 |                           |
| exception after the first token             | 500 Internal server error                 | another worker, suspected |
|                                             | tokens, then event code 500, [DONE]       | passed on                 |
| ValueError or InvalidArgument: the client's | 400 Invalid request, or the text of it    | passed on                 |
|                                             | event: the same, code 400                 |                           |
| cancelled by the worker itself              | 499 Request cancelled                     | another worker, suspected |
|                                             | event: the same, code 499                 |                           |
| stopped (SIGSTOP): no sign of life          | 504 Request deadline exceeded, after 5 s  | another worker, suspected |
| stream closed early, without an error       | 200, no finish_reason                     | passed on                 |
| no worker named, or an id that is no number | 400 Invalid request                       | cannot come from here     |

In ``device-aware-weighted`` mode a frontend leaves an instance that failed alone for 5 s and answers 500 "Failed to
generate completions" to what is pinned to it meanwhile. Its code also knows 529 or a configured status with "Service
temporarily overloaded", which could not be provoked: another worker, a short pause for this one.

*Another worker*: only while no byte has reached the client. A generation that was begun in vain costs compute and
nothing else. *Blamed*: counted against the worker at once. *Suspected*: an exception may be the doing of the request
(a picture that cannot be fetched), so it counts only when another worker then answers the same request; a client alone
can thus eject nobody. *Asked*: the same 400 also means a bad request. The frontend's own ``/health`` lists the
instances it knows; only when the worker is not among them (or could not be reached a moment ago) is it taken for
unknown: then the request was never sent anywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

__all__ = ["Verdict", "error_event", "instances_in", "judge", "settled"]

Blame = Literal["now", "suspect", "pause", "ask", "frontend"]

_GONE: Final = "Service temporarily unavailable"
_NO_MODEL: Final = "Model not found"
_UNKNOWN: Final = "Invalid request"
_DATA: Final = b"data:"
_FAULTS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MAX_EVENT: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer is no success of the worker's. ``cause``: a short word for counters; ``kind``: what the fleet is told
    (`report_failure`); ``blame``: when: ``now``, ``suspect`` (see the module text), ``pause`` (now, as a short pause),
    ``ask`` (undecided until the frontend has been asked), ``frontend`` (it may be behind; see `forwarding`)."""

    cause: str
    kind: str
    blame: Blame


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    error: _Error


class _Instance(msgspec.Struct):
    instance_id: int


class _Health(msgspec.Struct):
    instances: list[_Instance]


_event = msgspec.json.Decoder(_Event)
_error = msgspec.json.Decoder(_Error)
_health = msgspec.json.Decoder(_Health)


def judge(status: int, payload: bytes, *, sse: bool) -> Verdict | None:
    """What the head of an answer and the beginning of its body, chunks undone, say. None: it is for the client."""
    if status < 400:
        found = error_event(payload) if sse else None
        return None if found is None else _verdict(*found)
    return _verdict(status, _message(payload))


def settled(status: int, payload: bytes, *, sse: bool) -> bool:
    """Whether more of the body could change what `judge` says: a stream's first event is there, an error body is not
    before its end. Events and bodies come in pieces of any size."""
    if len(payload) >= _MAX_EVENT:
        return True
    if status >= 400 or not sse:
        return False
    *whole, rest = re.split(rb"\r\n|\n|\r", payload)
    if any(line and not line.startswith(b"event:") for line in whole):
        return True
    return not any(rest.startswith(name) or name.startswith(rest) for name in (_DATA, b"event:", b":"))


def error_event(payload: bytes) -> tuple[int, str] | None:
    """(code, message) when a stream begins with an error event; None for anything else."""
    for line in payload[:_MAX_EVENT].splitlines():
        if not line or line.startswith(b":"):
            continue
        if not line.startswith(_DATA):
            if line.startswith(b"event:"):
                continue
            return None
        try:
            error = _event.decode(line[len(_DATA) :]).error
        except _FAULTS:
            return None
        return (error.code, error.message) if isinstance(error.code, int) else None
    return None


def instances_in(health: bytes) -> frozenset[int] | None:
    """The instances that a frontend's ``/health`` lists; None when it cannot be read."""
    try:
        return frozenset(instance.instance_id for instance in _health.decode(health).instances)
    except _FAULTS:
        return None


def _verdict(status: int, message: str) -> Verdict | None:
    if status == 503:
        return Verdict("unavailable", "5xx", "now") if message == _GONE else Verdict("busy", "busy", "pause")
    if status == 529 or (status >= 429 and "overloaded" in message):
        return Verdict("busy", "busy", "pause")
    if status in (500, 502):
        return Verdict("worker_error", "5xx", "suspect")
    if status == 504:
        return Verdict("worker_timeout", "timeout", "suspect")
    if status == 499:
        return Verdict("cancelled", "5xx", "suspect")
    if status == 400 and message == _UNKNOWN:
        return Verdict("unknown_instance", "busy", "ask")
    if status == 404 and message == _NO_MODEL:
        return Verdict("unknown_model", "", "frontend")
    return None


def _message(payload: bytes) -> str:
    try:
        return _error.decode(payload).message
    except _FAULTS:
        return ""
