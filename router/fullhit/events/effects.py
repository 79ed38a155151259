"""What a stream asks the rest of the router to do. Carried out by ``lane.py``, in the order given."""

from __future__ import annotations

from typing import NamedTuple

from .keybatch import KeyBatch

__all__ = ["Apply", "Changes", "Clear", "Count", "Doubt", "Effect", "Fill", "FillAbort", "FillBegin", "FillCommit",
           "Note", "Publishing", "TimedOut"]  # fmt: skip


class Changes:
    """What one delta changes; removals come first."""

    __slots__ = ("added", "removed", "size")

    def __init__(self, added: KeyBatch, removed: KeyBatch) -> None:
        self.added = added
        self.removed = removed
        self.size = len(added) + len(removed)


class Apply(NamedTuple):
    """Apply a delta to the worker's entries."""

    changes: Changes


class Clear(NamedTuple):
    """All the worker's entries leave the index."""


class Doubt(NamedTuple):
    """The worker's entries are (not) to be trusted for a full hit."""

    doubtful: bool


class Publishing(NamedTuple):
    """The worker publishes its cache, or has ceased to."""

    publishing: bool


class FillBegin(NamedTuple):
    """Open a fresh set of entries beside the present one."""


class Fill(NamedTuple):
    """Keys for the fresh set."""

    keys: KeyBatch


class FillCommit(NamedTuple):
    """The fresh set takes the place of the old one."""


class FillAbort(NamedTuple):
    """The fresh set is dropped."""


class Count(NamedTuple):
    """Raise a counter."""

    name: str
    labels: dict[str, str]


class Note(NamedTuple):
    """A line for the log."""

    level: str
    event: str
    fields: dict[str, object]


class TimedOut(NamedTuple):
    """A snapshot request got no answer. ``alive``: the worker was heard meanwhile, so the way back is suspect."""

    alive: bool


Effect = Apply | Clear | Doubt | Publishing | FillBegin | Fill | FillCommit | FillAbort | Count | Note | TimedOut
