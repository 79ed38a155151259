"""One object through which the rest of the router tells what happens: metrics, log lines, decisions.

The parts it joins stay independent: `Metrics` counts, `Log` writes, a `DecisionLog` per pool remembers. Everybody
else holds a `Telemetry` (or a protocol that it satisfies) and knows nothing of Prometheus or streams.

Each finished request leaves one ``decision`` line that joins with the caller's own log by ``request_id``; a client
needs no debug level to learn why a request went where it went. What happened to it in the end (status, time, retries)
is kept beside the decision and shown by ``GET /decisions``.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Literal

from fullhit.core.decision import Decision, DecisionLog
from fullhit.core.types import Key, Reason
from fullhit.telemetry.log import Log
from fullhit.telemetry.metrics import Metrics

__all__ = ["DecisionLines", "Telemetry"]

DecisionLines = Literal["all", "errors", "off"]


class Telemetry:
    """``decisions``: which decisions get a log line: all, those that ended in an error (status from 400), or none.

    ``kept`` decisions per pool stay readable. Usage::

        telemetry = Telemetry(metrics, log)
        telemetry.count("retries", cause="connect")
        telemetry.event("plane_lost", "warning", plane="nats")
        telemetry.decision(decision, code=200, ms=12.5)
    """

    def __init__(
        self,
        metrics: Metrics,
        log: Log,
        *,
        decisions: DecisionLines = "all",
        kept: int = 1000,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if decisions not in ("all", "errors", "off"):
            raise ValueError(f"decisions is {decisions!r}; use all, errors or off")
        self.metrics = metrics
        self.log = log
        self._decisions = decisions
        self._kept = kept
        self._clock = clock
        self._wall = wall
        self._logs: dict[str, DecisionLog] = {}
        self._outcomes: OrderedDict[tuple[str, int], dict[str, object]] = OrderedDict()
        # Bound once: these are called for every request.
        self.count = metrics.count
        self.request_done = metrics.request_done
        self.observe_select = metrics.observe_select
        self.observe_lag = metrics.observe_lag
        metrics.total("log_lines_dropped", "Log lines that never reached the stream", lambda: log.dropped)

    def event(self, kind: str, /, level: str = "info", **fields: object) -> None:
        """Write a log line."""
        self.log.event(kind, level, **fields)

    def limited(self, key: str, kind: str, /, every: float = 60.0, level: str = "warning", **fields: object) -> None:
        """Write a log line at most once in ``every`` seconds for each ``key``."""
        self.log.limited(key, kind, every, level, **fields)

    def event_line(self, level: str, kind: str, /, **fields: object) -> None:
        """The same as `event` in the argument order of the event plane's log hook."""
        self.log.event(kind, level, **fields)

    def decision(self, decision: Decision, **outcome: object) -> None:
        """Keep a decision and write its line. Called again for the same one, it adds to the outcome.

        ``code`` (status), ``ms`` and ``error`` are the usual fields of ``outcome``.
        """
        known = self._outcomes.get((decision.pool, decision.id))
        if known is None:
            self.remember(decision, **outcome)
        else:
            known.update(outcome)
        if self._decisions == "off" or not self.log.enabled("info"):
            return
        code = outcome.get("code")
        failed = "error" in outcome or (isinstance(code, int) and code >= 400)
        if failed or self._decisions == "all":
            self.log.write("decision", "warning" if failed else "info", _line(decision) | outcome)

    def remember(self, decision: Decision, **outcome: object) -> None:
        """Keep a decision now; its line comes when `decision` tells how it ended."""
        key = (decision.pool, decision.id)
        if key not in self._outcomes:
            self._log_of(decision.pool).add(decision)
            self._outcomes[key] = outcome
            if len(self._outcomes) > self._kept * max(1, len(self._logs)):
                self._outcomes.popitem(last=False)

    def promised(self, pool: str, worker: str, keys: Sequence[Key]) -> bool:
        """Whether a kept decision sent a request to the worker as a full hit on one of these keys."""
        log = self._logs.get(pool)
        if log is None:
            return False
        wanted = frozenset(keys)

        def does(decision: Decision) -> bool:
            if decision.reason is not Reason.FULL_HIT or decision.worker.id != worker:
                return False
            request = decision.request
            return not wanted.isdisjoint(request.keys) or not wanted.isdisjoint(chain(*request.alternatives))

        return bool(log.latest(1, does))

    def find_decision(self, id: int, pool: str | None = None) -> dict[str, Any] | None:
        """The record of one decision with its outcome; ids are per pool, the first pool that knows it wins."""
        for name, log in self._logs.items():
            if pool is None or name == pool:
                decision = log.get(id)
                if decision is not None:
                    return self._record(name, decision)
        return None

    def latest_decisions(
        self, limit: int, *, pool: str | None = None, wanted: Callable[[Decision], bool] | None = None
    ) -> list[dict[str, Any]]:
        """Records of the latest decisions that are ``wanted``, newest first."""
        found: list[tuple[float, str, Decision]] = []
        for name, log in self._logs.items():
            if pool is None or name == pool:
                found.extend((decision.at, name, decision) for decision in log.latest(limit, wanted))
        found.sort(key=lambda row: (row[0], row[2].id), reverse=True)
        return [self._record(name, decision) for _, name, decision in found[:limit]]

    def worker_removed(self, pool: str, worker: str) -> None:
        """A worker is gone: its series go too. Fits `Fleet.on_removed`."""
        self.metrics.forget_worker(worker)

    def account(self, decision: Decision) -> dict[str, Any]:
        """The decision's record for people and other programs: ``at`` as UTC time, not as seconds of our clock."""
        at = datetime.fromtimestamp(self._wall() - (self._clock() - decision.at), UTC)
        return {**decision.record(), "at": at.isoformat(timespec="milliseconds")}

    def _record(self, pool: str, decision: Decision) -> dict[str, Any]:
        return {**self.account(decision), "outcome": dict(self._outcomes.get((pool, decision.id), {}))}

    def _log_of(self, pool: str) -> DecisionLog:
        log = self._logs.get(pool)
        if log is None:
            log = self._logs[pool] = DecisionLog(self._kept)
        return log


def _line(decision: Decision) -> dict[str, object]:
    # Not from `decision.record()`: rendering all of it would cost more than the request did.
    return {
        "request_id": decision.request_id or None,
        "decision": decision.id,
        "pool": decision.pool,
        "reason": str(decision.reason),
        "worker": decision.worker.id,
        "keys": len(decision.request.keys),
        "held": decision.keys_held,
        "inflight": decision.inflight,
        "candidates": decision.eligible.bit_count(),
    }
