"""One worker's event stream: from messages as a lossy network delivers them to a trustworthy set of entries.

A pure machine: no I/O, time and randomness from outside. Each public method takes something that happened and
returns what to do about it (``effects.py``), in order; the states and their transitions are the table in
``transitions.py``. This module holds the judgements and the actions.

Theory of operation
-------------------
1.  The *position* is the last delta whose effect is in the index (``applied``); there is none (``None``) until the
    worker's history is known from its beginning or from a snapshot. ``head`` is the highest delta known to exist.
2.  A delta that is next in order is applied. One beyond a hole is kept, and the hole is a doubt: a snapshot is
    wanted, after a short random wait. If the missing delta comes after all (reordering), the kept ones follow it,
    the doubt is gone and with it the wish.
3.  A loss that no later delta reveals is revealed by the next heartbeat: it names the last delta, and the number and
    digest of the keys a reader must have by then. Equal digest at equal position removes every doubt but a hole.
    Silence is a doubt; it counts from the first heartbeat, or from the snapshot that came before it.
4.  A snapshot is true as of some delta S. It is gathered beside the present entries and takes their place in one
    step; then kept deltas after S are applied. From the moment a request leaves, every delta is kept even if it is
    applied too: a snapshot overtakes deltas on its own path, and its S may lie before what the old entries contain.
    Deltas handled before the request left are all contained in the answer.
5.  There is at most one wish for a snapshot, whatever the number of causes. Tries are spaced by a backoff that a
    finished snapshot does not reset, only a heartbeat which agrees: a publisher whose digest never agrees costs one
    snapshot per ``backoff_max``, not a loop. After a loss on the way the next snapshot may come sooner: the pause is
    by the size of the last one, so that a network which goes on losing costs so many keys a second and no more.
6.  Entries of a past incarnation leave at once, before anything of the new one is taken (``incarnation.py``).
7.  Publishers which answer no snapshot requests (Dynamo's) count from where we first heard them: what they add from
    then on is true, so the entries are a subset of the cache and safe to act on. After a hole they are doubtful
    until ``doubt_ttl``, then start again from nothing. What such a publisher loses before it counts leaves no hole;
    two things speak for such a loss. It adds keys that it ought to hold already and for which it was just sent a
    request as for a full hit: that was encoded after all. Or it has not been heard for very long. Several such
    publishers of one worker count apart.
8.  A worker whose cache is found, again and again, not to have what it publishes is asked for a snapshot and doubted
    for a while whatever it answers: digest and snapshot only say what it *believes* to hold.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, cast

from fullhit_publisher.keys import Key

from . import effects as fx
from .effects import Changes, Effect
from .incarnation import Incarnation, Origin, Verdict
from .keybatch import KeyBatch
from .resync import Resync, backoff
from .settings import StreamSettings
from .transitions import TRANSITIONS, Action, Input, State

__all__ = ["Entries", "WorkerStream"]

# Doubts that the next delta in order disproves: it shows that nothing was missed meanwhile.
_DISPROVED_BY_NEXT = frozenset(("plane", "silence", "age"))
# Doubts that may well be unfounded: worth waiting for a heartbeat before a million keys are asked for.
_WORTH_A_HEARTBEAT = frozenset(("plane", "silence", "slow_consumer"))
# Losses of the network's, which say nothing against the publisher: the next snapshot is as good as the last one was.
_LOST = frozenset(("gap", "mark"))
_DEFAULT_INTERVAL = 1.0
_LONGEST_INTERVAL = 60.0
"""Seconds; a publisher that promises less often is taken at this, or its silence would never be noticed."""
# Keys of one message that are compared with what is held already.
_COMPARED = 64


class Entries(Protocol):
    """What the index holds of this worker."""

    def digest(self) -> int: ...
    def key_count(self) -> int: ...
    def truncated(self) -> bool: ...
    def contradicts(self, added: Sequence[Key]) -> bool:
        """Whether a request was promised a full hit on one of these keys, which are held, and is answered by them."""
        ...


class _Kept(NamedTuple):
    changes: Changes
    resync: bool


class WorkerStream:
    """See the module text. ``answers`` tells whether the present publisher answers snapshot requests."""

    def __init__(self, entries: Entries, settings: StreamSettings, rng: random.Random) -> None:
        self._entries = entries
        self._settings = settings
        self._rng = rng
        self._who = Incarnation(settings)
        self.state = State.UNKNOWN
        self.applied: int | None = None
        self.head = 0
        self.answers = True
        self.doubts: set[str] = set()
        self.verified = False
        """Whether a heartbeat has agreed since the last snapshot or new beginning."""
        self._doubtful_since = 0.0
        self._kept: dict[int, _Kept] = {}
        self._kept_keys = 0
        self._resync: Resync | None = None
        self._fruitless = 0  # snapshots taken since a heartbeat last agreed
        self._not_before = 0.0  # no new wish is granted before
        self._gap_not_before = 0.0  # nor one for messages that were lost, before this
        self._interval: float | None = None  # of heartbeats, once one was heard
        self._last_heard = 0.0
        self._verify_by = math.inf
        self._plane_down_since: float | None = None
        self._quarantines = 0
        self._quarantined_until = 0.0
        self.quarantine_cause = ""
        self.routine = False
        """The last message was a delta in order, which moves no deadline nearer."""
        self._told_doubtful = False
        self._told_publishing = False
        self._now = 0.0
        self._cause = ""
        self._changes: Changes | None = None
        self._seq = 0
        self._marked = False
        self._overflow = False
        self._out: list[Effect] = []
        self._apart: dict[int, tuple[int | None, int]] = {}  # rule 7: publisher -> its position and head
        self._contradictions = 0
        self._contradicted_at = -math.inf
        self._below_head = 0  # heartbeats that denied the head
        self._held_until = -math.inf  # rule 8

    def __repr__(self) -> str:
        wish = self._resync
        parts = [f"{self.state}", f"applied={self.applied}", f"head={self.head}"]
        if self.doubts:
            parts.append(f"doubts={','.join(sorted(self.doubts))}")
        if self._kept:
            parts.append(f"kept={len(self._kept)}")
        if wish is not None:
            parts.append(f"resync={wish.cause}/{'out' if wish.outstanding else 'due'}/{wish.attempts}")
        return f"<WorkerStream {' '.join(parts)}>"

    @property
    def epoch(self) -> int | None:
        return self._who.epoch

    @property
    def resync_cause(self) -> str:
        """Why a snapshot is wanted; empty when none is."""
        return self._resync.cause if self._resync is not None else ""

    @property
    def outstanding(self) -> bool:
        """A snapshot request is out."""
        return self._resync is not None and self._resync.outstanding

    @property
    def doubtful(self) -> bool:
        """The worker publishes, and its entries are not to be trusted for a full hit."""
        return self._told_publishing and self.state is not State.LIVE

    @property
    def last_heard(self) -> float:
        return self._last_heard

    # What happens to a stream.

    def start(self, now: float) -> list[Effect]:
        """The worker was added: its cache is unknown, so ask."""
        self._begin(now)
        self._last_heard = now
        self._want("start")
        return self._finish()

    def delta(
        self, origin: Origin, seq: int, resync: bool, changes: Changes, now: float, whole: bool = False
    ) -> list[Effect]:
        """A delta arrived. ``resync``: the publisher says that changes before it may be lost. ``whole``: what it adds
        is everything there is (only from publishers without epochs)."""
        self._begin(now)
        if self.state is State.QUARANTINED:
            return self._drop("quarantined")
        if not self._admit(origin, now):
            return self._finish()
        if self._who.regressed(origin, seq - 1):
            self._restart(origin, "regress")
        self._who.heard(seq)
        self._last_heard = now
        if not self.answers and self.applied is None:
            self.applied = seq - 1  # rule 7
        if self._entries.key_count() + len(changes.added) > self._settings.max_keys:
            return self._conflict("too_many_keys")
        self.head = max(self.head, seq)
        base = self.applied if self.applied is not None else 0
        if seq <= base or seq in self._kept:
            return self._drop("duplicate")
        if not self.answers:
            if whole:
                self._step(Input.NEW, "whole")
                self.applied = base = seq - 1
                self.head = seq
            elif seq > base + 1:
                # Nobody will fill this hole: go on behind it.
                self._count("fullhit_event_gaps_total")
                self._step(Input.LOSS, "hole")
                self.applied = base = seq - 1
            elif self._contradicts(changes):
                self._step(Input.LOSS, "contradiction")
        self._seq, self._changes, self._marked = seq, changes, resync
        if self.state is State.LIVE and seq == base + 1 and not resync:
            self.routine = True
            self._step(Input.NEXT)
        elif resync:
            self._step(Input.MARKED, "mark")
        elif seq == base + 1:
            self._step(Input.NEXT)
        else:
            if self.state is State.LIVE:
                self._count("fullhit_event_gaps_total")
            self._step(Input.AHEAD, "gap" if self.applied is not None else "start")
        self._changes = None
        return self._finish()

    def heartbeat(self, origin: Origin, seq: int, keys: int, digest: int, interval: float, now: float) -> list[Effect]:
        """A heartbeat arrived: after delta ``seq`` there are ``keys`` keys with this ``digest``. ``interval``:
        seconds to the next one."""
        self._begin(now)
        if self.state is State.QUARANTINED:
            return self._drop("quarantined")
        if not self._admit(origin, now):
            return self._finish()
        if self._who.regressed(origin, seq):
            self._restart(origin, "regress")
        self._who.heard(seq)
        self._last_heard = now
        self._interval = min(interval, _LONGEST_INTERVAL) if interval > 0 else None
        if self._resync is not None:
            self._resync.heard_since = True
        self.head = max(self.head, seq)
        if keys > self._settings.max_keys:
            return self._conflict("too_many_keys")
        if self.applied is None:
            empty = seq == 0 and keys == 0 and digest == 0
            self._step(Input.EMPTY if empty else Input.BEHIND, "start")
        elif seq > self.applied:
            if self.state is State.LIVE:
                self._count("fullhit_event_gaps_total")
            self._step(Input.BEHIND, "gap")
        elif seq == self.applied and self.state in (State.LIVE, State.DOUBTFUL):
            # Entries cut short by a cap of the index are true but not all: there only the position speaks.
            if self._entries.truncated() or (keys == self._entries.key_count() and digest == self._entries.digest()):
                self._doubt_head(seq)
                self._step(Input.AGREES)
            else:
                if "digest" not in self.doubts:
                    self._count("fullhit_digest_mismatch_total")
                self._step(Input.DIFFERS, "digest")
        return self._finish()

    def part(
        self, origin: Origin, request_id: int, seq: int, part: int, parts: int, keys: KeyBatch, now: float
    ) -> list[Effect]:
        """Part ``part`` of ``parts`` of a snapshot arrived, true as of delta ``seq``."""
        self._begin(now)
        wish = self._resync
        if self.state is State.QUARANTINED or wish is None or request_id != wish.request_id:
            return self._drop("unwanted_snapshot")
        if origin.epoch != self._who.epoch:
            if self._who.judge(origin, now, self._overdue(now)) is not Verdict.NEW:
                return self._drop("stale_epoch")
            between_parts = self.state is State.FILLING
            self._restart(origin, "epoch")
            if between_parts:
                self._want("epoch")
                return self._finish()
        result = wish.accept(origin.epoch, seq, part, parts, len(keys), now, self._settings)
        if result == "duplicate":
            return self._drop("duplicate")
        if result == "inconsistent":
            self._drop("inconsistent_snapshot")
            self._fail("broken")
            return self._finish()
        if result == "too_many_keys":
            return self._conflict("too_many_keys")
        self._last_heard = now
        self._publishes()
        self._step(Input.PART)
        self._out.append(fx.Fill(keys))
        if result == "last":
            self._step(Input.FULL)
        return self._finish()

    def loss(self, cause: str, now: float) -> list[Effect]:
        """Messages of this worker may have been lost on our side."""
        self._begin(now)
        self._step(Input.LOSS, cause)
        return self._finish()

    def contradicted(self, seconds: float, now: float) -> list[Effect]:
        """What the worker publishes was found not to be in its cache; doubt it for so long (rule 8)."""
        self._begin(now)
        if self.answers:
            self._held_until = max(self._held_until, now + seconds)
        self._step(Input.LOSS, "contradiction")
        return self._finish()

    def plane_down(self, now: float) -> list[Effect]:
        """The event plane was lost. Answers on their way are lost with it."""
        self._begin(now)
        if self._plane_down_since is None:
            self._plane_down_since = now
        self._verify_by = math.inf
        if self.outstanding:
            self._fail("plane")
        return self._finish()

    def plane_up(self, now: float) -> list[Effect]:
        """The event plane is (back) in reach. What was published meanwhile did not reach us: a heartbeat must
        confirm the entries soon."""
        self._begin(now)
        self._plane_down_since = None
        self._last_heard = now
        soon = now + self._verify_wait()
        if self.state is State.LIVE and self.answers:
            self._verify_by = soon
        if self._resync is not None:
            self._resync.postpone(now + self._jitter() if self.state is State.UNKNOWN else soon)
        return self._finish()

    def tick(self, now: float) -> list[Effect]:
        """Act on the clock. Cheap when nothing is due."""
        self._begin(now)
        if self.state is State.QUARANTINED:
            if now >= self._quarantined_until:
                self._who.forget()
                self._step(Input.RELEASE, "quarantine")
            return self._finish()
        wish = self._resync
        if wish is not None and wish.outstanding and now >= wish.deadline:
            self._out.append(fx.TimedOut(wish.heard_since))
            self._fail("timeout")
        if self._plane_down_since is not None:
            if now - self._plane_down_since >= self._settings.plane_grace and self.state is State.LIVE:
                self._step(Input.LOSS, "plane")
        elif self._beats:
            silent = now - self._last_heard
            if silent >= self._gone_after() and self._who.epoch is not None:
                self._note("warning", "worker_silent", seconds=round(silent, 1))
                self._step(Input.GONE)
                # Whoever speaks next is new. Else an impostor's one message could make the true incarnation a past one.
                self._who.forget()
                if self._resync is not None:
                    self._end_resync("abandoned")
                self._interval = None
                self._told_publishing = False
                self._out.append(fx.Publishing(False))
            elif silent >= self._silence() and self.state is State.LIVE:
                self._step(Input.LOSS, "silence")
        if now >= self._verify_by:
            self._verify_by = math.inf
            if self.state is State.LIVE:
                self._step(Input.LOSS, "plane")
        if not self.answers:
            if self.state is State.LIVE and now - self._last_heard >= self._settings.silent_ttl:
                self._step(Input.LOSS, "age")
            if self.doubts and now - self._doubtful_since >= self._settings.doubt_ttl:
                self._step(Input.AGED)
        elif now >= self._hold_ends:
            self.doubts.discard("contradiction")
            self._settle()
        return self._finish()

    def poll(self, now: float) -> int | None:
        """The id of a snapshot request to send now, None when there is none to send. Calling it is a promise
        to send."""
        wish = self._resync
        if wish is None or wish.outstanding or now < wish.due or self._plane_down_since is not None:
            return None
        request_id = self._rng.getrandbits(63) | 1
        wish.sent(request_id, now, self._settings, (self._who.epoch, self.applied or 0))
        return request_id

    @property
    def request_due(self) -> float:
        """When ``poll`` will have something to send; infinity when it will not."""
        wish = self._resync
        return math.inf if wish is None or wish.outstanding or self._plane_down_since is not None else wish.due

    @property
    def deadline(self) -> float:
        """When ``tick`` has something to do."""
        if self.state is State.QUARANTINED:
            return self._quarantined_until
        times = [self._verify_by]
        if self.outstanding and self._resync is not None:
            times.append(self._resync.deadline)
        if self._plane_down_since is not None:
            if self.state is State.LIVE:
                times.append(self._plane_down_since + self._settings.plane_grace)
        elif self._beats:
            times.append(self._last_heard + (self._silence() if self.state is State.LIVE else self._gone_after()))
        if not self.answers:
            if self.state is State.LIVE:
                times.append(self._last_heard + self._settings.silent_ttl)
            if self.doubts:
                times.append(self._doubtful_since + self._settings.doubt_ttl)
        else:
            times.append(self._hold_ends)
        return min(times)

    # Judgements.

    @property
    def _hold_ends(self) -> float:
        """When the doubt of rule 8 is over; not while the snapshot that it wished for has not come."""
        held = "contradiction" in self.doubts and self.answers and self._resync is None
        return self._held_until if held else math.inf

    def _doubt_head(self, seq: int) -> None:
        """The publisher says, again and again and truly otherwise, that ``seq`` is its last delta: a later one that was
        named before does not exist."""
        if seq >= self.head:
            self._below_head = 0
            return
        self._below_head += 1
        if self._below_head >= self._settings.head_denials:
            self._below_head = 0
            self.head = seq
            self._drop_kept()
            self._count("fullhit_events_rejected_total", cause="false_head")

    def _admit(self, origin: Origin, now: float) -> bool:
        """Whether the message speaks for the present incarnation; a new one is installed on the way."""
        verdict = self._who.judge(origin, now, self._overdue(now))
        if verdict is Verdict.NEW:
            self._restart(origin, "epoch")
        elif verdict is Verdict.APART:
            if self._who.epoch is not None:
                self._apart[self._who.epoch] = (self.applied, self.head)
            self.applied, self.head = self._apart.pop(origin.epoch, (None, 0))
            self._who.turn(origin)
        elif verdict is Verdict.SWITCHED:
            self._step(Input.LOSS, "publisher")
        elif verdict is Verdict.CONFLICT:
            self._conflict("identity_conflict")
            return False
        elif verdict is Verdict.SUSPECT:
            self._step(Input.LOSS, "incarnation")
            self._drop("suspect_epoch")
            return False
        elif verdict is Verdict.STALE:
            self._drop("stale_epoch")
            return False
        self._publishes()
        return True

    def _publishes(self) -> None:
        """The worker has spoken for itself: its entries are its own word from now on, and may be doubted."""
        if not self._told_publishing:
            self._told_publishing = True
            self._out.append(fx.Publishing(True))

    def _restart(self, origin: Origin, cause: str) -> None:
        """A new incarnation begins: nothing of the old one stays."""
        if self._who.epoch is not None:
            self._note("info", "worker_restarted", cause=cause, epoch=origin.epoch)
        self._who.adopt(origin, self._now)
        self.answers = origin.ordered
        self._step(Input.NEW, cause)
        self._interval = None

    def _contradicts(self, changes: Changes) -> bool:
        """Whether it is time to doubt: the worker encoded what it was believed to hold, not for the first time."""
        if self._apart or not 0 < len(changes.added) <= _COMPARED:
            return False
        try:
            removed = frozenset(changes.removed.all())
            added = [key for key in changes.added.all() if key not in removed]
        except ValueError:
            return False  # said of keys that are none, when they are applied
        if not self._entries.contradicts(added):
            return False
        if self._now - self._contradicted_at > self._settings.doubt_ttl:
            self._contradictions = 0
        self._contradicted_at = self._now
        self._contradictions += 1
        if self._contradictions < self._settings.contradictions:
            return False
        self._contradictions = 0
        return True

    def _overdue(self, now: float) -> bool:
        return now - self._last_heard > self._settings.takeover_beats * (self._interval or _DEFAULT_INTERVAL)

    @property
    def _beats(self) -> bool:
        """Heartbeats are to be expected: one was heard, or a snapshot, for who answers those sends heartbeats too."""
        return self._interval is not None or self._fruitless > 0

    def _silence(self) -> float:
        settings = self._settings
        if self._interval is not None:
            return max(settings.silence_grace, settings.silence_beats * self._interval)
        # It owes its first heartbeat, and we do not know when. Each snapshot that it answers meanwhile wins it time.
        grace = settings.silence_grace * 2.0 ** min(max(self._fruitless - 1, 0), 16)
        return min(grace, max(settings.silence_grace, settings.silence_beats * _LONGEST_INTERVAL))

    def _gone_after(self) -> float:
        silence = self._silence()
        return max(self._settings.gone_after, silence if self._interval is not None else 2 * silence)

    def _verify_wait(self) -> float:
        return self._settings.verify_beats * (self._interval or _DEFAULT_INTERVAL) + self._jitter()

    def _jitter(self) -> float:
        return self._rng.uniform(0.0, self._settings.request_delay)

    # The table at work.

    def _step(self, what: Input, cause: str = "") -> None:
        """Take one transition. Inputs which the state has no row for mean nothing in it."""
        step = TRANSITIONS[self.state].get(what)
        if step is None:
            return
        self._cause = cause
        settle = False
        for action in step.actions:
            if action is Action.SETTLE:
                settle = True
            else:
                _DO[action](self)
        self.state = step.state
        if settle:
            self._settle()

    def _apply(self) -> None:
        changes = self._changes
        if changes is None:
            return
        self.applied = self._seq
        self._out.append(fx.Apply(changes))
        if self.doubts and not self._apart:
            self.doubts -= _DISPROVED_BY_NEXT
        if self.outstanding:
            self._keep()

    def _keep(self) -> None:
        changes = self._changes
        if changes is None or self._seq in self._kept:
            return
        settings = self._settings
        if len(self._kept) >= settings.max_buffered_deltas or (
            self._kept_keys + changes.size > settings.max_buffered_keys
        ):
            self._drop_kept()
            self._count("fullhit_events_rejected_total", cause="buffer_full")
            if self.outstanding:
                self._overflow = True
            return
        self._kept[self._seq] = _Kept(changes, self._marked)
        self._kept_keys += changes.size

    def _start_empty(self) -> None:
        self.applied = 0
        self.verified = True

    def _confirm(self) -> None:
        self.doubts &= {"gap", "contradiction"}
        self.verified = True
        self._fruitless = 0
        self._not_before = 0.0
        self._verify_by = math.inf
        if self._quarantines and self._now > self._quarantined_until + self._settings.quarantine_max:
            self._quarantines = 0

    def _doubt(self) -> None:
        if not self.doubts:
            self._doubtful_since = self._now
        self.doubts.add(self._cause)
        self._want(self._cause)

    def _begin_fill(self) -> None:
        self._out.append(fx.FillBegin())

    def _commit_fill(self) -> None:
        wish = self._resync
        if wish is None:
            return
        self._out.append(fx.FillCommit())
        self._note("debug", "snapshot_taken", cause=wish.cause, keys=wish.keys, seq=wish.seq)
        self.applied = wish.seq
        self.head = max(self.head, wish.seq)
        self.doubts = {"contradiction"} if self._now < self._held_until else set()
        self.verified = False
        self._verify_by = math.inf
        self._fruitless += 1
        self._not_before = self._now + (
            backoff(self._fruitless, self._settings, self._rng) if self._fruitless > 1 else 0
        )
        cost = wish.keys / self._settings.gap_keys_per_second
        self._gap_not_before = self._now + min(max(self._settings.gap_pause, cost), self._settings.backoff_max)
        self._end_resync("completed")

    def _abort_fill(self) -> None:
        self._out.append(fx.FillAbort())

    def _forget(self) -> None:
        if self.state is State.FILLING:
            self._out.append(fx.FillAbort())
            self._end_resync("abandoned")
        elif self._resync is not None and not self._resync.outstanding:
            self._resync = None
        self._out.append(fx.Clear())
        self.applied = None
        self.head = 0
        self._apart.clear()
        self._contradictions = 0
        self._held_until = -math.inf
        self.verified = False
        self.doubts.clear()
        self._verify_by = math.inf
        self._fruitless = 0
        self._not_before = self._gap_not_before = 0.0
        self._drop_kept()

    def _confine(self) -> None:
        if self._resync is not None:
            self._end_resync("abandoned")
        length = min(self._settings.quarantine * 2.0 ** min(self._quarantines, 16), self._settings.quarantine_max)
        self._quarantines += 1
        self._quarantined_until = self._now + length
        self.quarantine_cause = self._cause
        self._count("fullhit_events_rejected_total", cause=self._cause)
        self._note("error", "worker_quarantined", cause=self._cause, seconds=length)

    def _want(self, cause: str = "") -> None:
        """Wish for a snapshot, unless one is wished for already or nobody would answer."""
        if not self.answers or self._resync is not None:
            return
        cause = cause or self._cause
        now = self._now
        if cause in _WORTH_A_HEARTBEAT:
            due = now + self._verify_wait()
        elif cause == "start":
            due = now
        else:
            due = now + self._jitter()
        self._resync = Resync(cause, max(due, self._gap_not_before if cause in _LOST else self._not_before))

    def _settle(self) -> None:
        """Take kept deltas that are in order now; then see whether anything is left to doubt."""
        applied = self.applied
        if applied is None:
            return
        while (kept := self._kept.get(applied + 1)) is not None:
            applied += 1
            self._out.append(fx.Apply(kept.changes))
            if kept.resync and "mark" not in self.doubts:
                self.applied = applied
                self._step(Input.LOSS, "mark")
        self.applied = applied
        if applied < self.head:
            self._step(Input.HOLE, "gap")
        else:
            self.doubts.discard("gap")
            if not self.doubts:
                if self._resync is not None:
                    self._end_resync("healed")
                self._step(Input.WHOLE)
            elif self.state is State.LIVE:
                self._step(Input.HELD)
        if not self.outstanding:
            for seq in [seq for seq in self._kept if seq <= applied]:
                self._kept_keys -= self._kept.pop(seq).changes.size

    # Small things.

    def _begin(self, now: float) -> None:
        self._now = now
        self.routine = False
        self._out = []

    def _finish(self) -> list[Effect]:
        out = self._out
        if self._overflow:
            self._overflow = False
            self._fail("overflow")
        doubtful = self.doubtful
        if doubtful != self._told_doubtful:
            self._told_doubtful = doubtful
            # Doubt before anything else, trust after everything else.
            out.insert(0 if doubtful else len(out), fx.Doubt(doubtful))
        return out

    def _fail(self, outcome: str) -> None:
        """The snapshot under way came to nothing: count it, and try again later."""
        wish = self._resync
        if wish is None:
            return
        self._count("fullhit_resyncs_total", cause=wish.cause, outcome=outcome)
        if outcome == "plane":
            wish.postpone(self._now)
        else:
            wish.retry(self._now, self._settings, self._rng)
        self._step(Input.BROKEN if self.applied is not None else Input.BROKEN_BLANK)

    def _end_resync(self, outcome: str) -> None:
        if self._resync is not None and (self._resync.attempts or outcome == "completed"):
            self._count("fullhit_resyncs_total", cause=self._resync.cause, outcome=outcome)
        self._resync = None

    def _drop_kept(self) -> None:
        self._kept.clear()
        self._kept_keys = 0

    def _conflict(self, cause: str) -> list[Effect]:
        self._step(Input.CONFLICT, cause)
        return self._finish()

    def _drop(self, cause: str) -> list[Effect]:
        self._count("fullhit_events_rejected_total", cause=cause)
        return self._finish()

    def _count(self, name: str, **labels: str) -> None:
        self._out.append(fx.Count(name, labels))

    def _note(self, level: str, event: str, **fields: object) -> None:
        self._out.append(fx.Note(level, event, fields))


_DO: Final = {
    action: cast("Callable[[WorkerStream], None]", getattr(WorkerStream, f"_{action}"))
    for action in Action
    if action is not Action.SETTLE
}
