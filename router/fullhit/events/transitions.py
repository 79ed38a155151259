"""The states of a worker's stream, as a table. Every change of state in this package is a row of ``TRANSITIONS``.

The machine in ``stream.py`` first says what a message or a moment *means* (an ``Input``), judged against the
stream's position. The table then says what happens: the actions, in order, and the state afterwards. Actions that
find out more (the hole is closed, the snapshot is complete) feed another input.

What a state promises to the rest of the router:

* UNKNOWN: the index holds nothing of this worker, and that says nothing about its cache.
* LIVE: the index equals the worker's cache as of the last delta.
* DOUBTFUL: the index holds what we last knew, and we have reason to think it wrong. Never a full hit.
* FILLING: as DOUBTFUL, while the parts of a snapshot gather beside it.
* QUARANTINED: nothing held, nothing taken, for a while.

A new incarnation, a long silence, and a contradiction about who speaks lead to the same place from every state,
so they are written once.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

__all__ = ["TRANSITIONS", "Action", "Input", "State", "Step"]


class State(StrEnum):
    """Where a stream stands."""

    UNKNOWN = "unknown"
    LIVE = "live"
    DOUBTFUL = "doubtful"
    FILLING = "filling"
    QUARANTINED = "quarantined"


class Input(StrEnum):
    """What a message, or a moment, means to the stream."""

    NEXT = "next delta in order"
    AHEAD = "delta beyond a hole"
    MARKED = "delta that says changes were lost"
    EMPTY = "heartbeat of an empty new cache"
    AGREES = "heartbeat agrees"
    DIFFERS = "heartbeat differs at equal seq"
    BEHIND = "heartbeat knows later deltas"
    WHOLE = "no doubt is left"
    HOLE = "a delta is still missing"
    LOSS = "something may have been lost"
    HELD = "a doubt outlasts the snapshot"
    PART = "part of the snapshot asked for"
    FULL = "last part of the snapshot"
    BROKEN = "snapshot failed, old entries remain"
    BROKEN_BLANK = "snapshot failed, there were no entries"
    AGED = "doubtful for too long"
    NEW = "new incarnation"
    GONE = "silent for too long"
    CONFLICT = "worker id claimed twice, or lies"
    RELEASE = "quarantine is over"


class Action(StrEnum):
    """What to do; each is the method of that name in ``stream.WorkerStream``."""

    APPLY = "apply"
    KEEP = "keep"
    START_EMPTY = "start_empty"
    CONFIRM = "confirm"
    DOUBT = "doubt"
    BEGIN_FILL = "begin_fill"
    COMMIT_FILL = "commit_fill"
    ABORT_FILL = "abort_fill"
    SETTLE = "settle"
    FORGET = "forget"
    CONFINE = "confine"
    WANT = "want"


class Step(NamedTuple):
    """One row: the state afterwards and the actions on the way."""

    state: State
    actions: tuple[Action, ...] = ()


_A = Action
_I = Input
_S = State

_EVERYWHERE: Final = {
    _I.NEW: Step(_S.UNKNOWN, (_A.FORGET,)),
    _I.GONE: Step(_S.UNKNOWN, (_A.FORGET,)),
    _I.CONFLICT: Step(_S.QUARANTINED, (_A.FORGET, _A.CONFINE)),
}

TRANSITIONS: Final = MappingProxyType(
    {
        _S.UNKNOWN: {
            **_EVERYWHERE,
            _I.NEXT: Step(_S.LIVE, (_A.APPLY, _A.SETTLE)),
            _I.AHEAD: Step(_S.UNKNOWN, (_A.KEEP, _A.WANT)),
            _I.MARKED: Step(_S.UNKNOWN, (_A.KEEP, _A.WANT)),
            _I.EMPTY: Step(_S.LIVE, (_A.START_EMPTY, _A.SETTLE)),
            _I.BEHIND: Step(_S.UNKNOWN, (_A.WANT,)),
            _I.LOSS: Step(_S.UNKNOWN, (_A.WANT,)),
            _I.PART: Step(_S.FILLING, (_A.BEGIN_FILL,)),
        },
        _S.LIVE: {
            **_EVERYWHERE,
            _I.NEXT: Step(_S.LIVE, (_A.APPLY,)),
            _I.AHEAD: Step(_S.DOUBTFUL, (_A.KEEP, _A.DOUBT)),
            _I.MARKED: Step(_S.DOUBTFUL, (_A.KEEP, _A.DOUBT, _A.SETTLE)),
            _I.AGREES: Step(_S.LIVE, (_A.CONFIRM,)),
            _I.DIFFERS: Step(_S.DOUBTFUL, (_A.DOUBT,)),
            _I.BEHIND: Step(_S.DOUBTFUL, (_A.DOUBT,)),
            _I.HOLE: Step(_S.DOUBTFUL, (_A.DOUBT,)),
            _I.LOSS: Step(_S.DOUBTFUL, (_A.DOUBT,)),
            _I.HELD: Step(_S.DOUBTFUL),
        },
        _S.DOUBTFUL: {
            **_EVERYWHERE,
            _I.NEXT: Step(_S.DOUBTFUL, (_A.APPLY, _A.SETTLE)),
            _I.AHEAD: Step(_S.DOUBTFUL, (_A.KEEP, _A.DOUBT)),
            _I.MARKED: Step(_S.DOUBTFUL, (_A.KEEP, _A.DOUBT, _A.SETTLE)),
            _I.AGREES: Step(_S.DOUBTFUL, (_A.CONFIRM, _A.SETTLE)),
            _I.DIFFERS: Step(_S.DOUBTFUL, (_A.DOUBT,)),
            _I.BEHIND: Step(_S.DOUBTFUL, (_A.DOUBT,)),
            _I.HOLE: Step(_S.DOUBTFUL, (_A.DOUBT,)),
            _I.LOSS: Step(_S.DOUBTFUL, (_A.DOUBT,)),
            _I.WHOLE: Step(_S.LIVE),
            _I.PART: Step(_S.FILLING, (_A.BEGIN_FILL,)),
            _I.AGED: Step(_S.UNKNOWN, (_A.FORGET,)),
        },
        _S.FILLING: {
            **_EVERYWHERE,
            _I.NEXT: Step(_S.FILLING, (_A.KEEP,)),
            _I.AHEAD: Step(_S.FILLING, (_A.KEEP,)),
            _I.MARKED: Step(_S.FILLING, (_A.KEEP,)),
            _I.PART: Step(_S.FILLING),
            _I.FULL: Step(_S.LIVE, (_A.COMMIT_FILL, _A.SETTLE)),
            _I.BROKEN: Step(_S.DOUBTFUL, (_A.ABORT_FILL, _A.SETTLE)),
            _I.BROKEN_BLANK: Step(_S.UNKNOWN, (_A.ABORT_FILL,)),
        },
        _S.QUARANTINED: {
            _I.RELEASE: Step(_S.UNKNOWN, (_A.WANT,)),
        },
    }
)
"""Inputs missing from a state's row mean nothing there."""
