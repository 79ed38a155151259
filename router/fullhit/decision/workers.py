"""Workers as the decision API shows them, and what changed among them since somebody looked.

A watcher keeps what it was told last and compares it with what is, so it needs no queue: one that reads slowly gets
fewer and later changes, and always the latest state. Load and the number of keys move with every request; they are
told along with a change and are no change themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fullhit.core.pool import Pool
from fullhit.fleet.member import Member
from fullhit.fleet.registry import Fleet

__all__ = ["WorkerFeed", "WorkerRow", "WorkerWatch", "WorkersChange", "worker_rows"]


class WorkerRow(NamedTuple):
    """One worker. ``id`` is its name in the router, ``worker_id`` its number on the wire.

    ``usable``: may be chosen unless it is at its cap. ``inflight`` counts what this router sent and is not finished,
    ``encoding`` those of it that really encode.
    """

    id: str
    worker_id: int
    url: str
    pool: str
    device: str
    device_class: str
    weight: float
    max_inflight: int | None
    state: str
    source: str
    labels: tuple[tuple[str, str], ...]
    draining: bool
    usable: bool
    doubtful: bool
    publishing: bool
    keys: int
    inflight: int
    encoding: int

    def lasting(self) -> tuple[object, ...]:
        """Everything whose change is worth telling: all but the figures at the end."""
        return self[:-3]


class WorkersChange(NamedTuple):
    """``changed``: workers that came or are different; ``gone``: as they were told last."""

    changed: list[WorkerRow]
    gone: list[WorkerRow]


def worker_rows(pools: Mapping[str, Pool], fleet: Fleet, pool: str = "") -> list[WorkerRow]:
    """The fleet's workers, all or those of one pool, in the order of joining."""
    return [_row(pools[m.pool], m) for m in fleet if not pool or m.pool == pool]


def _row(pool: Pool, member: Member) -> WorkerRow:
    spec, worker = member.spec, pool.get(member.id)
    return WorkerRow(
        id=member.id,
        worker_id=member.worker_id,
        url=spec.url,
        pool=member.pool,
        device=spec.device,
        device_class=worker.device_class if worker is not None else pool.settings.class_of(spec.device),
        weight=spec.weight,
        max_inflight=spec.max_inflight,
        state=str(member.state),
        source=str(member.source),
        labels=tuple(sorted((spec.labels or {}).items())),
        draining=member.draining,
        usable=worker is not None and worker.fit,
        doubtful=worker is not None and worker.doubtful,
        publishing=worker is not None and worker.publishing,
        keys=worker.key_count if worker is not None else 0,
        inflight=worker.inflight if worker is not None else 0,
        encoding=worker.encoding if worker is not None else 0,
    )


class WorkerFeed:
    """The workers as they were looked at last, each with the number of the look that found it changed.

    Looking costs a few microseconds a worker, so all watchers share one: it is taken again when it is ``max_age``
    seconds old, or when somebody knows that it is out of date (`touch`).
    """

    def __init__(self, look: Callable[[], list[WorkerRow]], clock: Callable[[], float], max_age: float = 0.1) -> None:
        self.rows: dict[tuple[str, str], tuple[int, WorkerRow]] = {}
        self.version = 0
        """Grows with each look that found a change."""
        self._look = look
        self._clock = clock
        self._max_age = max_age
        self._fresh_until = float("-inf")

    def touch(self) -> None:
        """Somebody came or went."""
        self._fresh_until = float("-inf")

    def refresh(self) -> None:
        """Look, unless the last look will do."""
        now = self._clock()
        if now < self._fresh_until:
            return
        self._fresh_until = now + self._max_age
        before, rows, version = self.rows, {}, self.version + 1
        news = False
        for row in self._look():
            name = (row.pool, row.id)
            known = before.get(name)
            if known is not None and known[1].lasting() == row.lasting():
                rows[name] = (known[0], row)
            else:
                rows[name] = (version, row)
                news = True
        if news or len(rows) < len(before):
            self.version = version
        self.rows = rows


class WorkerWatch:
    """What one watcher was told, and what is news to it. ``pool``: empty for all."""

    def __init__(self, feed: WorkerFeed, pool: str = "") -> None:
        self._feed = feed
        self._pool = pool
        self._seen = -1
        self._told: dict[tuple[str, str], WorkerRow] = {}

    def news(self) -> WorkersChange:
        """Changes since the last call; the first call gives all workers. Both lists are empty when nothing changed."""
        feed, seen, told = self._feed, self._seen, self._told
        feed.refresh()
        if feed.version == seen:
            return WorkersChange([], [])
        now: dict[tuple[str, str], WorkerRow] = {}
        changed: list[WorkerRow] = []
        for name, (version, row) in feed.rows.items():
            if not self._pool or row.pool == self._pool:
                now[name] = row
                if version > seen:
                    changed.append(row)
        gone = [row for name, row in told.items() if name not in now]
        self._seen, self._told = feed.version, now
        return WorkersChange(changed, gone)
