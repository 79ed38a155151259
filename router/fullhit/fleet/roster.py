"""Who belongs to the fleet, and the one place where facts about a worker become what its pool is told. Pure.

Adding, finding, draining and removing workers is here; judging whether they are well is in `registry`. Both change
facts of a `Member` and end in `Roster._settle`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fullhit.core.pool import Pool
from fullhit.core.types import WorkerSpec
from fullhit.fleet.breaker import Breaker, BreakerState
from fullhit.fleet.member import Member, Source, State, checked_labels
from fullhit.fleet.types import FleetObserver, FleetSettings, Heartbeat, UnknownWorker
from fullhit_publisher.identity import normalize_url

__all__ = ["Roster"]

MAX_BANNED = 10_000
"""Removed workers whose heartbeats are ignored; the oldest is forgotten first."""
LEAVE_SECONDS = 30.0
"""How long the heartbeats of a worker that took its leave are ignored: its publisher stops after it has said so."""
REFUSAL_SECONDS = 300.0


class Roster:
    """Members of all pools.

    ``pools`` is the live mapping of pools, ``clock`` monotonic seconds, ``observer`` is told what happens.
    """

    def __init__(
        self,
        pools: Mapping[str, Pool],
        settings: FleetSettings | None = None,
        *,
        clock: Callable[[], float],
        observer: FleetObserver | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._pools = pools
        self.settings = settings or FleetSettings()
        self._clock = clock
        self._observer = observer
        self._rng = rng or random.Random()
        self._members: dict[str, Member] = {}
        self._numbers: dict[int, Member] = {}
        self._held: dict[str, Member] = {}
        self._usable: dict[str, int] = {}
        self._alive: dict[str, int] = {}
        self._banned: dict[str, float] = {}
        self._next_sweep = float("-inf")
        self._ages: Mapping[str, float] = {}
        self._refused_at: dict[str, float] = {}
        self.oldest_inflight: Callable[[], Mapping[str, float]] | None = None
        """Age in seconds of each worker's oldest request, from whoever keeps count; sharpens the notion of stuck."""
        self.on_added: list[Callable[[str, str], None]] = []
        """Called with (pool, worker id) after a worker joined; the event plane begins to listen to it."""
        self.on_returned: list[Callable[[str, str], None]] = []
        """Called with (pool, worker id) when a known worker registered again: doubt its events until it speaks."""
        self.on_removed: list[Callable[[str, str], None]] = []
        """Called with (pool, worker id) after a worker left and its entries went out of the index."""
        self.on_contradiction: list[Callable[[str, str, float], None]] = []
        """Called with (pool, worker id, seconds) when what a worker publishes is not what its cache has."""
        self.wake: Callable[[], None] = lambda: None
        """Called when the next `tick` should come earlier than the last one asked for."""

    # -- who there is ------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def get(self, id: str) -> Member | None:
        """The worker of this normalised URL."""
        return self._members.get(id)

    def find(self, text: str) -> Member:
        """The worker meant by a URL in any spelling or by its number as decimal text; raises `UnknownWorker`."""
        member = self._members.get(text)
        if member is None and len(text) <= 20 and text.isascii() and text.isdigit():
            member = self._numbers.get(int(text))
        if member is None:
            try:
                member = self._members.get(normalize_url(text))
            except ValueError:
                pass
        if member is None:
            raise UnknownWorker(f"no worker {text[:200]!r}; GET /workers lists the ids")
        return member

    def usable(self, pool: str) -> int:
        """How many workers of ``pool`` may be chosen; some of them may be at their in-flight cap."""
        return self._usable.get(pool, 0)

    def add(
        self,
        url: str,
        *,
        source: Source = Source.STATIC,
        pool: str | None = None,
        device: str | None = None,
        weight: float | None = None,
        max_inflight: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Member:
        """Add a worker, or return the one that is there already (a repeated registration is harmless) with its device,
        weight, cap and labels changed where given.

        Raises ValueError, with the reason, for a URL that is no http origin, an unknown pool, a pool whose workers have
        none, a worker that sits in another pool, labels, a weight or a cap out of range, or a full fleet.
        """
        id = normalize_url(url)
        pool_name = pool or self.settings.default_pool
        if pool_name in self.settings.leased_pools:
            raise ValueError(f"pool {pool_name!r} has Dynamo workers: they come from its discovery, not by URL")
        checked_labels(labels)
        member = self._known(id, pool_name)
        if member is not None:
            self._restate(member, device, weight, max_inflight, labels)
            self._seen_again(member, source)
            return member
        spec = WorkerSpec(
            id=id,
            url=id,
            device=device or "cuda",
            weight=1.0 if weight is None else weight,
            max_inflight=self.settings.max_inflight.get(pool_name) if max_inflight is None else max_inflight,
            labels=dict(labels or {}),
        )
        now = self._clock()
        member = Member(spec, pool_name, source, Breaker(self.settings.breaker, self._rng), now)
        member.device_given = device is not None
        member.retry_delay = self.settings.first_retry
        member.probe_due = now
        member.answered = not self.settings.probe
        self._join(member, now)
        self._banned.pop(id, None)
        return member

    def discover(self, pool: str, heartbeat: Heartbeat) -> Member | None:
        """A publisher that nobody told us about; None when discovery is off or its heartbeat names no usable URL."""
        url = heartbeat.url
        if not self.settings.discover or not url or pool not in self._pools:
            return None
        try:
            if self._clock() < self._banned.get(normalize_url(url), float("-inf")):
                return None
            return self.add(url, source=Source.DISCOVERED, pool=pool, device=heartbeat.device)
        except ValueError as error:
            self._refuse(pool, url[:200], str(error))
            return None

    def add_leased(
        self, id: str, *, pool: str, device: str = "cuda", labels: Mapping[str, str] | None = None
    ) -> Member:
        """Add a worker without URL whose life is known from elsewhere; or bring its device and labels up to date.

        It is ready at once and never probed; failures that are reported hold it back for a while like any other.
        Raises ValueError for an unknown pool, a worker of another pool, or a full fleet.
        """
        member = self._known(id, pool)
        if member is not None:
            self._restate(member, device, None, None, labels)
            return member
        cap = self.settings.max_inflight.get(pool)
        spec = WorkerSpec(id=id, url="", device=device, max_inflight=cap, labels=dict(labels or {}))
        now = self._clock()
        member = Member(spec, pool, Source.LEASED, Breaker(self.settings.breaker, self._rng), now)
        member.device_given = member.answered = True
        member.probe_due = float("inf")
        self._join(member, now)
        return member

    def remove_leased(self, id: str, *, cause: str) -> bool:
        """Its lease is over: it leaves, with everything it holds. False when there is no such leased worker."""
        member = self._members.get(id)
        if member is None or not member.leased:
            return False
        self._drop(member, cause)
        return True

    def remove(self, id: str, *, cause: str, drain_seconds: float = 0.0) -> bool:
        """Take a worker out, with everything it holds. False when it is unknown.

        With ``drain_seconds`` it first gets no new requests and leaves when its last one is finished, or then.
        """
        member = self._members.get(id)
        if member is None:
            return False
        if drain_seconds > 0 and self._inflight(member):
            member.remove_at = self._clock() + drain_seconds
            self.drain(id)
            self.wake()
            return True
        self._drop(member, cause, ban=float("inf"))
        return True

    def drain(self, id: str) -> None:
        """No new requests; those in flight finish. Raises `UnknownWorker`."""
        self._set_draining(id, True)

    def resume(self, id: str) -> None:
        """Undo `drain`, and a removal that waits for it. Raises `UnknownWorker`."""
        self._members_or_raise(id).remove_at = None
        self._set_draining(id, False)

    # -- within ------------------------------------------------------------------------------------------------

    def _known(self, id: str, pool: str) -> Member | None:
        """The worker, if it is there. Raises ValueError where it could not be in this pool."""
        if pool not in self._pools:
            raise ValueError(f"unknown pool {pool!r}; the pools are {', '.join(sorted(self._pools))}")
        member = self._members.get(id)
        if member is not None and member.pool != pool:
            raise ValueError(f"worker {id} belongs to pool {member.pool!r}; remove it there first")
        return member

    def _join(self, member: Member, now: float) -> None:
        """Take a worker in. Raises ValueError when there is no room for it."""
        if len(self._members) >= self.settings.max_workers:
            raise ValueError(f"the fleet is full: {self.settings.max_workers} workers")
        id, pool, spec = member.id, member.pool, member.spec
        self._pools[pool].add_worker(spec)  # may refuse: the pool has a limit of its own
        self._members[id] = self._numbers[member.worker_id] = member
        self._tell(
            "worker_added", worker=id, pool=pool, source=str(member.source), device=spec.device, weight=spec.weight
        )
        for callback in self.on_added:
            callback(pool, id)
        self._settle(member, now)
        self.wake()

    def _settle(self, member: Member, now: float) -> None:
        """Turn facts into what the pool is told. The only place that does."""
        if member.gone:
            return
        breaker = member.breaker
        breaker.poll(now)
        alive = member.answered and not member.down
        ready = alive and not breaker.holds(now)
        trial = ready and breaker.state is BreakerState.HALF_OPEN
        if breaker.state is not BreakerState.CLOSED or breaker.holds(now):
            self._held[member.id] = member
        else:
            self._held.pop(member.id, None)
        self._tally(member, alive=alive, usable=ready and not member.draining)
        pool = self._pools[member.pool]
        worker = pool.get(member.id)
        if worker is not None:
            cap = self._trial_cap(member, worker.inflight) if trial else member.spec.max_inflight
            member.trial_cap = cap if trial else None
            if worker.max_inflight != cap:
                pool.add_worker(replace(member.spec, max_inflight=cap))
            pool.set_ready(member.id, ready)
        self._announce(member)

    def _tally(self, member: Member, *, alive: bool, usable: bool) -> None:
        self._alive[member.pool] = self._alive.get(member.pool, 0) + alive - member.alive
        self._usable[member.pool] = self._usable.get(member.pool, 0) + usable - member.usable
        member.alive, member.usable = alive, usable

    @staticmethod
    def _trial_cap(member: Member, inflight: int) -> int:
        """Room for one request beside those left from before."""
        if member.trial_cap is not None:
            return member.trial_cap
        cap = member.spec.max_inflight
        return inflight + 1 if cap is None else min(inflight + 1, cap)

    def _announce(self, member: Member) -> None:
        state = member.state
        if state is member.shown:
            return
        before, member.shown = member.shown, state
        self._count("worker_changes", state=str(state))
        bad = state is State.UNHEALTHY
        self._tell(
            f"worker_{state}",
            "warning" if bad else "debug" if state is State.PROBING else "info",
            worker=member.id,
            pool=member.pool,
            was=str(before),
            cause=(member.down or f"breaker open after {member.last_failure_kind}") if bad else None,
        )

    def _drop(self, member: Member, cause: str, *, ban: float = 0.0) -> None:
        """Take a member out. For ``ban`` seconds its heartbeats do not bring it back; being named again does."""
        cut = self._inflight(member)
        member.gone = True
        self._members.pop(member.id, None)
        if self._numbers.get(member.worker_id) is member:
            del self._numbers[member.worker_id]
        self._held.pop(member.id, None)
        self._tally(member, alive=False, usable=False)
        self._pools[member.pool].remove_worker(member.id)
        if ban:
            self._banned.pop(member.id, None)
            self._banned[member.id] = self._clock() + ban
            if len(self._banned) > MAX_BANNED:
                del self._banned[next(iter(self._banned))]
        member.shown = State.GONE
        self._tell("worker_gone", worker=member.id, pool=member.pool, cause=cause, requests_in_flight=cut)
        for callback in self.on_removed:
            callback(member.pool, member.id)

    def _restate(
        self,
        member: Member,
        device: str | None,
        weight: float | None,
        max_inflight: int | None,
        labels: Mapping[str, str] | None,
    ) -> None:
        changes: dict[str, Any] = {"device": device, "weight": weight, "max_inflight": max_inflight, "labels": labels}
        changes = {name: value for name, value in changes.items() if value is not None}
        spec = replace(member.spec, **changes)
        member.device_given = member.device_given or device is not None
        if spec == member.spec:
            return
        member.spec = spec
        cap = spec.max_inflight if member.trial_cap is None else member.trial_cap
        self._pools[member.pool].add_worker(replace(spec, max_inflight=cap))
        self._tell("worker_changed", worker=member.id, pool=member.pool, **{k: str(v) for k, v in changes.items()})

    def _refuse(self, pool: str, url: str, cause: str) -> None:
        """Its heartbeats go on, so it is mentioned once in a while."""
        now = self._clock()
        if now - self._refused_at.get(url, float("-inf")) >= REFUSAL_SECONDS:
            if len(self._refused_at) >= MAX_BANNED:
                self._refused_at.clear()
            self._refused_at[url] = now
            self._tell("discovery_refused", "warning", pool=pool, url=url, cause=cause)

    def _seen_again(self, member: Member, source: Source) -> None:
        """A worker that is known is named again: its process may be new, so look at it soon."""
        now = self._clock()
        if source.lasting and not member.source.lasting:
            member.source = source
        if source is not Source.REGISTERED:
            return
        # Encoders register once in a life, so this may be a new process whose cache is empty.
        worker = self._pools[member.pool].get(member.id)
        if worker is not None and not worker.publishing:
            self._pools[member.pool].clear(member.id)
        for callback in self.on_returned:
            callback(member.pool, member.id)
        if member.down or member.misses or member.id in self._held:
            member.retry_delay = self.settings.first_retry
            member.probe_due = now
            self.wake()

    def _up(self, member: Member) -> None:
        member.down = ""
        member.down_since = None

    def _unregister(self, url: str, pool: str) -> bool:
        id = normalize_url(url)
        member = self._members.get(id)
        if member is None or member.pool != pool:
            return False
        if member.source.lasting:
            self._tell("unregister_refused", "warning", worker=id, source=str(member.source))
            return False
        self._drop(member, "unregistered", ban=LEAVE_SECONDS)
        return True

    def _urls(self, pool: str) -> list[str]:
        return [member.id for member in self._members.values() if member.pool == pool]

    def _set_draining(self, id: str, draining: bool) -> None:
        member = self._members_or_raise(id)
        member.draining = draining
        self._pools[member.pool].set_draining(id, draining)
        self._settle(member, self._clock())

    def _members_or_raise(self, id: str) -> Member:
        member = self._members.get(id)
        if member is None:
            raise UnknownWorker(f"no worker {id!r}")
        return member

    def _inflight(self, member: Member) -> int:
        worker = self._pools[member.pool].get(member.id)
        return worker.inflight if worker is not None else 0

    def _tell(self, kind: str, level: str = "info", **fields: object) -> None:
        if self._observer is not None:
            self._observer.event(kind, level, **fields)

    def _count(self, name: str, **labels: object) -> None:
        if self._observer is not None:
            self._observer.count(name, **labels)
