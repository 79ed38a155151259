"""The fleet: which workers exist, and which of them may get traffic. Pure; `health` does the I/O.

Every path (a probe's result, an answered request, a failure, a heartbeat, an operator, time) changes facts of one
`Member` and then calls `Fleet._settle`, the one place that turns facts into what the `Pool` is told. `Fleet.tick`
returns what has to be done next, probes to start and when to be called again, and does none of it itself.

Rules worth knowing:

* A worker gets its first request after it answered a probe. Later, answered requests and heartbeats prove life as
  well as a probe does, and probes are left out while they come.
* A probe that times out is no miss while requests are in flight and their oldest is not stuck: a long encode may
  hold up ``/health``. Conversely a good ``/health`` does not clear a worker whose requests stand still.
* Answers 5xx, garbage and time-outs hold a worker back only while half of its pool's living workers stay usable. One
  poisonous picture sent again and again must not take every encoder out; a dead process may.
* Nothing here writes load: in-flight counts belong to the requests' tickets.
"""

from __future__ import annotations

from typing import Any

from fullhit.fleet.member import Member, Source
from fullhit.fleet.roster import Roster
from fullhit.fleet.types import Probe, ProbeResult, Turn

__all__ = ["Fleet", "PoolView"]

SWEEP_SECONDS = 1.0
"""How often all workers are looked at; holds of the breaker end on their own, finer, schedule."""
_DEAD = frozenset({"connect", "reset"})  # nobody is there: no need to spare such a worker


class Fleet(Roster):
    """All workers of all pools, judged. A worker id (its normalised URL) lives in one pool at a time.

    Usage::

        fleet = Fleet({"default": pool}, FleetSettings(), clock=time.monotonic)
        fleet.add("http://127.0.0.1:30000", source=Source.STATIC, device="cuda")
        turn = fleet.tick()                    # the prober sends turn.probes ...
        fleet.probe_done(turn.probes[0], ProbeResult("ok"))
        fleet.report_failure("http://127.0.0.1:30000", "reset")
    """

    # -- what the gateway reports (FleetView, for the default pool) --------------------------------------------

    def view(self, pool: str) -> PoolView:
        """The same face, registering into ``pool``."""
        return PoolView(self, pool)

    def report_success(self, worker_id: str) -> None:
        """A request was answered (anything but a failure of the worker)."""
        member = self._members.get(worker_id)
        if member is None:
            return
        now = self._clock()
        member.last_success = now
        member.breaker.success(now)
        if member.misses or member.down or worker_id in self._held:
            member.misses = 0
            self._up(member)
            self._settle(member, now)

    def report_failure(self, worker_id: str, kind: str, retry_after: float | None = None) -> None:
        """A request failed at the worker: connect, reset, timeout, 5xx, garbage; or ``busy`` for a 503.

        A client's mistake or departure is not a failure and must not be reported. ``retry_after`` in seconds.
        """
        member = self._members.get(worker_id)
        if member is None:
            return
        now = self._clock()
        if kind in ("busy", "503"):
            member.breaker.busy(now, retry_after)
            self._settle(member, now)
            self.wake()
            return
        member.last_failure = now
        member.last_failure_kind = kind
        self._count("worker_failures", worker=worker_id, kind=kind)
        if kind in _DEAD:
            if not member.leased:
                member.probe_due = now  # ask at once whether anybody is there
        elif not self._expendable(member):
            self._settle(member, now)
            return
        member.breaker.failure(now)
        self._settle(member, now)
        self.wake()

    def report_promise(self, worker_id: str, kept: bool) -> None:
        """A request was sent there as a full hit, and the worker has told whether its cache had all of it."""
        member = self._members.get(worker_id)
        if member is None:
            return
        hold = member.promises.report(kept)
        if hold:
            self._tell("worker_contradicts", "warning", worker=worker_id, pool=member.pool, doubted_seconds=hold)
            for callback in self.on_contradiction:
                callback(member.pool, worker_id, hold)

    def register_url(self, url: str) -> None:
        """An encoder announces itself. Raises ValueError with the reason."""
        self.add(url, source=Source.REGISTERED)

    def unregister_url(self, url: str) -> bool:
        """An encoder says goodbye. False for an unknown one and for one that an operator named. Raises ValueError."""
        return self._unregister(url, self.settings.default_pool)

    def urls(self) -> list[str]:
        """URLs of the default pool's workers, in the order of joining."""
        return self._urls(self.settings.default_pool)

    def heartbeat(self, worker_id: str, device: str | None = None) -> None:
        """The worker's publisher is alive. ``device``, as it says itself, counts where nobody has named one."""
        member = self._members.get(worker_id)
        if member is None:
            return
        member.last_heartbeat = self._clock()
        if device and not member.device_given:
            self._restate(member, device, None, None, None)

    # -- time and probes ---------------------------------------------------------------------------------------

    def tick(self, room: int = 1 << 30) -> Turn:
        """Let time pass: end holds, find stuck and forgotten workers, pick at most ``room`` probes to start."""
        now = self._clock()
        for member in list(self._held.values()):
            if member.breaker.poll(now) or not member.breaker.holds(now):
                self._settle(member, now)
        probes: list[Probe] = []
        wake_at = now + SWEEP_SECONDS
        if now >= self._next_sweep:
            self._next_sweep = wake_at
            if self.oldest_inflight is not None:
                self._ages = self.oldest_inflight()
            for member in list(self._members.values()):
                self._age(member, now)
        wake_at = min(wake_at, self._next_sweep)
        if self.settings.probe:
            for member in self._members.values():
                if member.probe_started is None:
                    if member.probe_due <= now and len(probes) < room and not self._excused(member, now):
                        probes.append(self._start_probe(member, now))
                    elif now < member.probe_due < wake_at:
                        wake_at = member.probe_due
        for member in self._held.values():
            if member.breaker.holds(now):
                wake_at = min(wake_at, member.breaker.held_until(now))
        return Turn(probes, wake_at)

    def probe_done(self, probe: Probe, result: ProbeResult) -> None:
        """Hand in the result of a probe that `tick` asked for. Results for workers gone since are ignored."""
        member = self._members.get(probe.id)
        if member is None or member is not probe.token:
            return
        now = self._clock()
        member.probe_started = None
        self._count("probes", outcome=result.outcome)
        if result.outcome == "ok":
            self._probe_answered(member, now)
        else:
            self._probe_failed(member, result, now)
        self._settle(member, now)
        self.wake()

    def probe_cancelled(self, probe: Probe) -> None:
        """The probe was given up without a verdict (shutdown)."""
        member = self._members.get(probe.id)
        if member is not None and member is probe.token:
            member.probe_started = None

    def probing(self, probe: Probe) -> bool:
        """Whether anybody still waits for this probe."""
        return self._members.get(probe.id) is probe.token

    def stalled(self, member: Member) -> float:
        """Seconds for which requests have been in flight there and none has succeeded; 0 when it is idle."""
        return self._stalled(member, self._clock()) if self._inflight(member) else 0.0

    # -- within ------------------------------------------------------------------------------------------------

    def _probe_answered(self, member: Member, now: float) -> None:
        member.misses = 0
        member.last_answer = now
        member.last_probe_error = ""
        member.retry_delay = self.settings.first_retry
        member.probe_due = now + self._jittered(self.settings.interval)
        member.answered = True
        if member.down != "stuck" or not self._inflight(member):
            self._up(member)
        # A process that could not be reached is there again: let one request prove it at once. Where /health was
        # fine all along it says nothing about the failures, and the breaker keeps its window.
        if member.unreachable:
            member.unreachable = False
            member.breaker.half_open(now)

    def _probe_failed(self, member: Member, result: ProbeResult, now: float) -> None:
        member.last_probe_error = f"{result.outcome}: {result.detail}"[:300] if result.detail else result.outcome
        if result.outcome == "timeout":
            member.probe_due = now + self._jittered(self.settings.interval)
            if self._progressing(member, now):
                return
        else:
            member.probe_due = now + self._jittered(member.retry_delay)
            member.retry_delay = min(member.retry_delay * 2, self.settings.interval)
        member.misses += 1
        member.unreachable = member.unreachable or result.outcome == "refused"
        if member.answered and not member.down and member.misses >= self.settings.misses:
            self._down(member, f"{member.misses} probes failed, last {member.last_probe_error}", now)
            if result.outcome == "refused":
                self._forget_entries(member, now)

    def _progressing(self, member: Member, now: float) -> bool:
        return self._inflight(member) > 0 and not self._stuck(member, now)

    def _stuck(self, member: Member, now: float) -> bool:
        return self._stalled(member, now) > self.settings.stuck_after

    def _stalled(self, member: Member, now: float) -> float:
        since = member.idle_at if member.last_success is None else max(member.idle_at, member.last_success)
        if self.oldest_inflight is None:
            return now - since
        # Requests may come and go without a success to report: then the oldest one is young.
        return min(now - since, self._ages.get(member.id, 0.0))

    def _excused(self, member: Member, now: float) -> bool:
        """Whether a due probe may be left out because life shows without it; moves it on if so."""
        life = member.last_life()
        if not member.usable or member.misses or life is None or now - life >= self.settings.interval:
            return False
        if member.last_failure is not None and member.last_failure > life:
            return False
        member.probe_due = life + self._jittered(self.settings.interval)
        return member.probe_due > now

    def _start_probe(self, member: Member, now: float) -> Probe:
        member.probe_started = now
        member.probes += 1
        self._announce(member)
        return Probe(member.id, member.spec.url + self.settings.path, self.settings.timeout, member)

    def _age(self, member: Member, now: float) -> None:
        inflight = self._inflight(member)
        if not inflight:
            member.idle_at = now
        elif member.usable and not member.leased and self._stuck(member, now):
            member.breaker.trip(now)
            self._down(member, "stuck", now)
            self._settle(member, now)
        if member.remove_at is not None and (not inflight or now >= member.remove_at):
            self._drop(member, "drained" if not inflight else "drain time over", ban=float("inf"))
            return
        if member.source.lasting or member.leased:
            return
        silent_since = member.down_since if member.answered else member.added_at
        if silent_since is not None and now - silent_since > self.settings.forget_after:
            self._drop(member, "forgotten: no sign of life")

    def _down(self, member: Member, why: str, now: float) -> None:
        member.down = why
        member.down_since = now
        pool = self._pools[member.pool]
        worker = pool.get(member.id)
        if worker is not None and not worker.publishing:
            pool.clear(member.id)  # only our own belief, and the process behind it may be another one next time

    def _forget_entries(self, member: Member, now: float) -> None:
        """Nobody listens there any more. Without recent heartbeats the cache is gone too; if it is not, the digest of
        the next heartbeat differs from our empty index and brings a snapshot."""
        if member.last_heartbeat is None or now - member.last_heartbeat > self.settings.interval:
            self._pools[member.pool].clear(member.id)

    def _expendable(self, member: Member) -> bool:
        """Whether, without this worker, at least half of the pool's living workers stay usable."""
        others = self._usable.get(member.pool, 0) - (1 if member.usable else 0)
        return others > 0 and others * 2 >= self._alive.get(member.pool, 0)

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + self._rng.uniform(-self.settings.jitter, self.settings.jitter))


class PoolView:
    """The fleet as the gateway of one pool sees it."""

    def __init__(self, fleet: Fleet, pool: str) -> None:
        self._fleet = fleet
        self.pool = pool
        self.report_success = fleet.report_success
        self.report_failure = fleet.report_failure
        self.report_promise = fleet.report_promise

    def register_url(self, url: str) -> None:
        """An encoder announces itself. Raises ValueError with the reason."""
        self._fleet.add(url, source=Source.REGISTERED, pool=self.pool)

    def unregister_url(self, url: str) -> bool:
        """An encoder says goodbye; see `Fleet.unregister_url`."""
        return self._fleet._unregister(url, self.pool)

    def urls(self) -> list[str]:
        """URLs of this pool's workers, in the order of joining."""
        return self._fleet._urls(self.pool)

    def describe(self) -> list[dict[str, Any]]:
        """Facts about each of them, JSON-ready."""
        now = self._fleet._clock()
        return [member.describe(now) for member in self._fleet if member.pool == self.pool]
