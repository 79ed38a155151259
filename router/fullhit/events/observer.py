"""What the event plane tells the outside: counters, lag, log lines. The plane itself keeps no metrics library."""

from __future__ import annotations

from typing import Protocol

__all__ = ["EventLog", "EventMetrics", "NullMetrics"]


class EventMetrics(Protocol):
    """Where counters go. Names are those of the Prometheus metrics:

    ``fullhit_events_total`` (worker, kind), ``fullhit_events_rejected_total`` (cause),
    ``fullhit_event_gaps_total``, ``fullhit_resyncs_total`` (cause, outcome),
    ``fullhit_digest_mismatch_total``; lag goes to ``fullhit_event_lag_seconds``.
    """

    def count(self, name: str, /, **labels: str) -> None: ...

    def observe_lag(self, seconds: float, /) -> None: ...


class EventLog(Protocol):
    """``log(level, event, **fields)``; ``level`` is debug, info, warning or error. Already rate-limited."""

    def __call__(self, level: str, event: str, /, **fields: object) -> None: ...


class NullMetrics:
    """Counts nothing."""

    def count(self, name: str, /, **labels: str) -> None:
        """Do nothing."""

    def observe_lag(self, seconds: float, /) -> None:
        """Do nothing."""
