"""Whether a worker's word can be relied on: full hits that were promised on it, and what its cache really had.

Some promises are broken in good faith: a picture may be evicted while the request for it is on its way, the more the
longer requests wait. A worker whose promises are broken for the most part publishes something else than it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PromiseSettings", "Promises"]


@dataclass(frozen=True, slots=True)
class PromiseSettings:
    """A worker is doubted when of its last ``window`` promises at least ``least`` and a ``share`` of all were broken.

    ``hold``: seconds of the first doubt; each one that follows before a whole window was kept lasts twice as long, at
    most ``hold_max``.
    """

    window: int = 64
    least: int = 8
    share: float = 0.5
    hold: float = 10.0
    hold_max: float = 600.0


class Promises:
    """The record of one worker. Pure."""

    __slots__ = ("_doubts", "_kept", "_recent", "_seen", "_settings")

    def __init__(self, settings: PromiseSettings) -> None:
        self._settings = settings
        self._recent = 0  # a bit for each promise of the window, set when it was broken
        self._seen = 0  # promises in the window
        self._kept = 0  # since the last doubt
        self._doubts = 0

    def report(self, kept: bool) -> float:
        """One more promise was kept or broken. Returns for how many seconds to doubt the worker from now on; mostly
        0."""
        settings = self._settings
        self._recent = (self._recent << 1 | (not kept)) & ((1 << settings.window) - 1)
        self._seen = min(self._seen + 1, settings.window)
        if kept:
            self._kept += 1
            if self._kept >= settings.window:
                self._doubts = 0
            return 0.0
        broken = self._recent.bit_count()
        if broken < settings.least or broken < settings.share * self._seen:
            return 0.0
        hold = min(settings.hold * 2.0 ** min(self._doubts, 16), settings.hold_max)
        self._doubts += 1
        self._recent = self._seen = self._kept = 0
        return hold
