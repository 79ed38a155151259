"""Which encoder serves which part: the memory that keeps all calls of one part together.

A part is one ``/encode`` call of a language server. Its state lives in the memory of one encoder process, so
the registrations (``/scheduler_receive_url``), the question for sizes (``/scheduler_receive_meta_data``) and the
transfer (``/send``) must reach the same process, although only ``/encode`` carries what the choice is made by
and any of them may arrive first. This module decides; it does no I/O, and the clock is given.

Identity is (alias, req_id, prefill host). The alias (``/v0`` ...) belongs to it because the first generation of
the wire gives all parts of a request the same ``req_id`` and tells them apart by the URL alone. The host belongs
to it because a client may choose its own request id, so two language servers may use the same one at once.
``/encode`` and ``/send`` name the host, a registration names the host of its ``receive_url`` (another one when
the ranks sit on several machines), the question for sizes names none; what does not match exactly is matched
by the address of the caller, then by being the only candidate, and otherwise refused as ambiguous.

    EARLY ---encode---> CHOOSING --chosen--> CHOSEN --sent--> SENT ---ok---> ENCODED --all sends / time--> DONE
      ^                  ^  |                  |               |  \\------------ok, nothing follows-----> DONE
      | registration     |  | client left      +----retry------+   \\-----------error------------------> FAILED
    (none)               +--|------------------+               |
                            +--> STRAY <--registration-- DONE, FAILED;   STRAY --encode--> CHOOSING

* EARLY, STRAY: registrations that wait for their ``/encode``. They were answered at once, because a scheduler of
  older SGLang stops for all its requests while it waits for that answer. STRAY ones belong to a part that is
  over (or whose caller left); they are kept a short while only, in case the client uses its id again, and never
  passed on: an encoder would keep the connection open for three minutes.
* CHOOSING to SENT: as long as the ``/encode`` call lasts; no time limit of its own.
* SENT: the whole body is on the wire; now, and again after a change of encoder, registrations are replayed
  (`delivery` says when exactly). Not earlier: an encoder with ``--dp-size`` answers 404 to those it knows no
  ``/encode`` for.
* ENCODED: answered, ``/send`` may follow (mooncake). DONE, FAILED: what is over, for stragglers.

An encoder that has refused a part keeps the refusal for whoever registers there under its id. So before a part is
sent again whose refusal nobody has heard of yet (`Part.offered`), it gets a fresh id: ``<rid>_local_part_0r1``. A
language server strips the last ``_local_part_`` and what follows and takes the numbers of the part from fields of
their own, so to it nothing has changed. From then on that id goes to encoders, the old one stays the name here.

Several open ``/encode`` calls of one identity are copies of one part (G1 with mooncake posts one per rank): one
choice, and all of them go to the encoder chosen.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from .media import FollowUp, Registration

__all__ = [
    "AmbiguousPart",
    "InconsistentCount",
    "Part",
    "PartLimits",
    "PartState",
    "PartTable",
    "Registered",
    "TooManyRegistrations",
]

Headers = Sequence[tuple[bytes, bytes]]


class PartState(StrEnum):
    """See the picture above."""

    EARLY = "early"
    STRAY = "stray"
    CHOOSING = "choosing"
    CHOSEN = "chosen"
    SENT = "sent"
    ENCODED = "encoded"
    DONE = "done"
    FAILED = "failed"


_SUFFIX: Final = "_local_part_"
"""What comes before the number of a part in its id since the second generation of the wire."""

_NEVER: Final = float("inf")
_WAITING: Final = (PartState.EARLY, PartState.STRAY)
_ACTIVE: Final = (PartState.CHOOSING, PartState.CHOSEN, PartState.SENT)
_LIVE: Final = (*_ACTIVE, PartState.ENCODED)
_OVER: Final = (PartState.DONE, PartState.FAILED)


class AmbiguousPart(Exception):
    """Several parts fit and nothing tells them apart; answer 409."""


class InconsistentCount(Exception):
    """Two registrations of a part disagree about how many there will be; answer 400, as an encoder does."""


class TooManyRegistrations(Exception):
    """More registrations than `PartLimits` lets one part or all of them keep; answer 400."""


@dataclass(frozen=True, slots=True)
class PartLimits:
    """Bounds of the table. Seconds, counts; ``max_bytes`` is for the bodies and headers of kept registrations.

    ``early_ttl`` is a little more than the 180 s for which a language server waits for its embeddings;
    ``encoded_ttl`` is for mooncake, whose ``/send`` follows after the prefill found room.
    """

    max_parts: int = 200_000
    max_over: int = 10_000
    """Finished parts remembered, and failed ones: enough for stragglers, little at thousands of parts a second."""
    max_registrations: int = 1_024
    max_bytes: int = 256 << 20
    early_ttl: float = 200.0
    stray_ttl: float = 30.0
    encoded_ttl: float = 600.0
    over_ttl: float = 60.0


@dataclass(slots=True)
class Registered:
    """One registration as received. ``delivered`` is the attempt (see `Part`) whose encoder has taken it."""

    receive_url: str
    body: bytes
    headers: Headers
    delivered: int = 0

    @property
    def size(self) -> int:
        """Bytes, roughly."""
        return 256 + len(self.body) + sum(len(name) + len(value) for name, value in self.headers)


@dataclass(slots=True, eq=False)
class Part:
    """One part. ``attempt`` counts the choices made for it; ``copies`` the open ``/encode`` calls; ``on_wire``
    those which the chosen encoder has got in full and did not turn away; ``offered`` is the last attempt whose
    encoder may know a destination to push to; ``alias_id`` the id under which encoders know it, if not ``req_id``.
    """

    alias: str
    req_id: str
    host: str
    peer: str
    state: PartState
    since: float
    worker: str = ""
    attempt: int = 0
    copies: int = 0
    on_wire: int = 0
    receive_count: int | None = None
    part_idx: int = 0
    offered: int = 0
    alias_id: str = ""
    registrations: dict[str, Registered] = field(default_factory=dict)
    sends: frozenset[str] = frozenset()
    failure: tuple[int, str] | None = None
    """Status and message with which the part failed."""
    listed: bool = False
    """Whether the table knows it."""

    def __repr__(self) -> str:
        where = f" -> {self.worker} (attempt {self.attempt})" if self.worker else ""
        return (
            f"<Part {self.alias}/{self.req_id}@{self.host} {self.state}{where} copies={self.copies} "
            f"registrations={len(self.registrations)}/{self.receive_count}>"
        )

    @property
    def wire_id(self) -> str:
        """The ``req_id`` that encoders are told."""
        return self.alias_id or self.req_id

    @property
    def complete(self) -> bool:
        """As many registrations as announced are there."""
        return self.receive_count is not None and len(self.registrations) >= self.receive_count


class PartTable:
    """All parts. ``counters``: how often a bound or an oddity was met, by name."""

    def __init__(self, limits: PartLimits | None = None, *, clock: Callable[[], float]) -> None:
        self.limits = limits or PartLimits()
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._names: dict[tuple[str, str], list[Part]] = {}
        # Parts that end by time, oldest first; every state has one time limit, so this is also their order of end.
        self._ageing: dict[PartState, OrderedDict[int, Part]] = {
            state: OrderedDict() for state in (*_OVER, PartState.STRAY, PartState.EARLY, PartState.ENCODED)
        }
        self._ttl = {
            PartState.EARLY: self.limits.early_ttl,
            PartState.STRAY: self.limits.stray_ttl,
            PartState.ENCODED: self.limits.encoded_ttl,
            PartState.DONE: self.limits.over_ttl,
            PartState.FAILED: self.limits.over_ttl,
        }
        self._count = 0
        self._due = _NEVER  # nothing ends by time before then
        self._fresh_ids = 0
        self.bytes = 0
        """Bytes of all kept registrations."""

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        states = Counter(str(part.state) for parts in self._names.values() for part in parts)
        return f"<PartTable {self._count}{''.join(f' {name}={states[name]}' for name in sorted(states))}>"

    def parts(self) -> list[Part]:
        """All parts, for tests and status pages."""
        return [part for parts in self._names.values() for part in parts]

    # --- registrations

    def register(
        self, alias: str, registration: Registration, body: bytes, headers: Headers, peer: str
    ) -> tuple[Part, Registered | None]:
        """Keep a registration. The second value is what must be delivered to ``part.worker`` now, if anything.

        The same ``receive_url`` again changes nothing. Raises AmbiguousPart, InconsistentCount,
        TooManyRegistrations; nothing is kept then.
        """
        self.expire()
        part = self._owner_of(alias, registration, peer)
        if part is None:
            part = self._hold(alias, registration, peer)
        if part.receive_count is None:
            part.receive_count = registration.receive_count
        elif part.receive_count != registration.receive_count:
            raise InconsistentCount(
                f"Inconsistent receive_count for {registration.req_id}: "
                f"{part.receive_count} before, {registration.receive_count} now"
            )
        known = part.registrations.get(registration.receive_url)
        if known is not None:
            self.counters["registration_repeated"] += 1
            return part, None
        if len(part.registrations) >= self.limits.max_registrations:
            self.counters["registrations_full"] += 1
            raise TooManyRegistrations(f"more than {self.limits.max_registrations} registrations of one part")
        fresh = Registered(registration.receive_url, body, headers)
        if not self._fits(fresh.size, part):
            self.counters["registrations_full"] += 1
            raise TooManyRegistrations("the registrations that wait for their /encode have used up max_bytes")
        self.bytes += fresh.size
        part.registrations[registration.receive_url] = fresh
        return part, fresh if part.state in (PartState.SENT, PartState.ENCODED) else None

    def offer(self, part: Part, attempt: int) -> bool:
        """A registration is about to go to the encoder of ``attempt``; False when it must not any more."""
        if attempt != part.attempt or part.state not in (PartState.SENT, PartState.ENCODED):
            return False
        part.offered = attempt
        return True

    def delivered(self, part: Part, registered: Registered, attempt: int) -> None:
        """The encoder of ``attempt`` has taken the registration."""
        registered.delivered = max(registered.delivered, attempt)

    # --- /encode

    def open_encode(self, alias: str, req_id: str, host: str, peer: str) -> Part:
        """An ``/encode`` arrived. Its part: a new one, or that of an open or kept copy.

        Waiting registrations that belong to it are taken along. Every call must be matched by one of
        ``close_ok``, ``close_failed``, ``abandon``.
        """
        self.expire()
        host = host.lower()
        name = (alias, req_id)
        known = self._names.get(name)
        if known is None:  # as nearly always
            return self._add(Part(alias, req_id, host, peer, PartState.CHOOSING, self._clock(), copies=1))
        part = next((p for p in known if p.host == host and p.state in _LIVE), None)
        if part is None:
            over = [p for p in known if p.host == host and p.state in _OVER]
            for old in over:
                self._remove(old)
            claimed = self._claim(name, host, peer)
            part = self._add(Part(alias, req_id, host, peer, PartState.CHOOSING, self._clock()))
            for early in claimed:
                part.receive_count = part.receive_count or early.receive_count
                moved = dict(early.registrations)
                self._remove(early)
                part.registrations.update(moved)
            if any(old.alias_id for old in over):
                part.alias_id = self.fresh_id(part)  # A refusal may lie in wait under the client's own id.
            self.bytes += sum(registered.size for registered in part.registrations.values())
        part.copies += 1
        return part

    def chosen(self, part: Part, worker: str) -> int:
        """An encoder was chosen; returns the number of the attempt."""
        assert part.state is PartState.CHOOSING, part
        part.worker = worker
        part.attempt += 1
        part.on_wire = 0
        self._move(part, PartState.CHOSEN)
        return part.attempt

    def sent(self, part: Part, attempt: int) -> list[Registered]:
        """One copy is on the wire in full. Returns the registrations to deliver now."""
        if attempt != part.attempt or part.state not in _LIVE:
            return []
        part.on_wire += 1
        if part.state is not PartState.CHOSEN:
            return []
        self._move(part, PartState.SENT)
        return list(part.registrations.values())

    def back(self, part: Part, attempt: int, *, sent: bool) -> bool:
        """A copy was not taken by the encoder of ``attempt`` and may go elsewhere.

        ``sent``: `sent` had been called for it. True: the part needs a new choice (or somebody else has made or
        is making one). False: another copy is being worked on there, so this one has to stay with it.
        """
        if attempt != part.attempt or part.state is PartState.CHOOSING:
            return True
        if sent:
            part.on_wire -= 1
        if part.on_wire > 0 or part.state not in _ACTIVE:
            return False
        self._move(part, PartState.CHOOSING)
        return True

    def fresh_id(self, part: Part) -> str:
        """An id for ``part`` that no encoder has heard of; "" when ids of its generation cannot be changed."""
        if _SUFFIX not in part.req_id:
            return ""
        self._fresh_ids += 1
        return f"{part.req_id}r{self._fresh_ids}"

    def unheard(self, part: Part, attempt: int) -> bool:
        """The encoder of ``attempt`` got one copy and knows no destination: nothing of it has reached anybody."""
        return max(part.copies, part.on_wire) == 1 and attempt == part.attempt and part.offered != attempt

    def close_ok(self, part: Part, *, keep: bool) -> None:
        """A copy was answered well. ``keep``: a ``/send`` may follow."""
        self._close(part)
        if part.state in _ACTIVE:
            if keep:
                self._move(part, PartState.ENCODED)
            else:
                self._finish(part, PartState.DONE)

    def close_failed(self, part: Part, status: int, message: str) -> None:
        """A copy failed for good. The part has failed when no other copy is open and none did well."""
        self._close(part)
        if part.copies == 0 and part.state in _ACTIVE:
            part.failure = (status, message)
            self._finish(part, PartState.FAILED)

    def abandon(self, part: Part) -> None:
        """The caller of a copy left before anything was sent for it."""
        self._close(part)
        if part.copies == 0 and part.state in _ACTIVE:
            if part.registrations:
                part.worker = ""
                self._move(part, PartState.STRAY)
            else:
                self._remove(part)

    # --- follow-ups

    def find(self, alias: str, req_id: str, host: str, peer: str) -> Part | None:
        """The part a follow-up belongs to; None when no ``/encode`` was seen (yet). ``host`` may be "".

        Raises AmbiguousPart.
        """
        self.expire()
        parts = [p for p in self._names.get((alias, req_id), ()) if p.state not in _WAITING]
        if host:
            exact = [p for p in parts if p.host == host.lower()]
            if exact:
                return exact[0]
        for candidates in ([p for p in parts if p.state in _LIVE], parts):
            if len(candidates) == 1:
                return candidates[0]
            if candidates:
                near = [p for p in candidates if p.peer == peer]
                if len(near) == 1:
                    return near[0]
                self.counters["ambiguous"] += 1
                raise AmbiguousPart(f"{req_id} is in use by {len(candidates)} language servers at once")
        return None

    def send_done(self, part: Part, follow_up: FollowUp) -> bool:
        """A ``/send`` was answered 200. True when it was the last one announced: the part is over."""
        part.sends |= {follow_up.destination}
        if follow_up.receive_count is None or len(part.sends) < follow_up.receive_count:
            return False
        if part.state is PartState.ENCODED and part.copies == 0:
            self._finish(part, PartState.DONE)
        return True

    def expire(self) -> int:
        """Drop what has outlived its time; called by every other method, cheap when there is nothing."""
        now = self._clock()
        dropped = 0
        if now < self._due:
            return dropped
        self._due = _NEVER
        for state, parts in self._ageing.items():
            ttl = self._ttl[state]
            while parts:
                part = next(iter(parts.values()))
                if part.since + ttl > now:
                    self._due = min(self._due, part.since + ttl)
                    break
                self._remove(part)
                dropped += 1
                if state not in _OVER:
                    self.counters[f"expired_{state}"] += 1
        return dropped

    # --- internals

    def _owner_of(self, alias: str, registration: Registration, peer: str) -> Part | None:
        """The part with an ``/encode`` that a registration belongs to, or the waiting one of its host."""
        parts = self._names.get((alias, registration.req_id), ())
        exact = [p for p in parts if p.host == registration.host]
        for part in exact:
            if part.state in _LIVE or part.state in _WAITING:
                return part
        # A part that has all it was promised is not short of this one.
        open_ = [
            p for p in parts if p.state in _LIVE and (not p.complete or registration.receive_url in p.registrations)
        ]
        near = [p for p in open_ if p.peer == peer]
        if len(near) == 1:
            return near[0]
        if len(open_) == 1:
            return open_[0]
        if open_ and registration.receive_count > 1:
            self.counters["ambiguous"] += 1
            raise AmbiguousPart(f"{registration.req_id} is in use by {len(open_)} language servers at once")
        return None

    def _hold(self, alias: str, registration: Registration, peer: str) -> Part:
        over = [
            p
            for p in self._names.get((alias, registration.req_id), ())
            if p.state in _OVER and (p.host == registration.host or p.peer == peer)
        ]
        if over:
            self.counters["registration_late"] += 1
        state = PartState.STRAY if over else PartState.EARLY
        return self._add(Part(alias, registration.req_id, registration.host, peer, state, self._clock()))

    def _claim(self, name: tuple[str, str], host: str, peer: str) -> list[Part]:
        """The waiting registrations that belong to an ``/encode`` of ``host`` which is just arriving."""
        parts = self._names.get(name, ())
        waiting = [p for p in parts if p.state in _WAITING]
        claimed = [p for p in waiting if p.host == host]
        claimed += [p for p in waiting if p not in claimed and p.peer == peer]
        if any(p.state in _LIVE for p in parts):
            return claimed
        others = [p for p in waiting if p not in claimed]
        if not claimed and len(others) == 1:
            return others
        return claimed + [p for p in others if (p.receive_count or 0) > 1]

    def _add(self, part: Part) -> Part:
        self._make_room()
        self._names.setdefault((part.alias, part.req_id), []).append(part)
        self._count += 1
        part.listed = True
        ageing = self._ageing.get(part.state)
        if ageing is not None:
            self._age(part, ageing)
        return part

    def _age(self, part: Part, ageing: OrderedDict[int, Part]) -> None:
        ageing[id(part)] = part
        due = part.since + self._ttl[part.state]
        if due < self._due:
            self._due = due

    def _make_room(self) -> None:
        if self._count < self.limits.max_parts:
            return
        for parts in self._ageing.values():
            if parts:
                self.counters["parts_full"] += 1
                self._remove(next(iter(parts.values())))
                return
        # All of them are open calls, which the listener's limits bound.

    def _fits(self, size: int, part: Part) -> bool:
        """Make room for ``size`` more bytes at the cost of the registrations that wait longest."""
        for state in _WAITING[::-1]:
            waiting = self._ageing[state]
            while self.bytes + size > self.limits.max_bytes and waiting:
                oldest = next(iter(waiting.values()))
                if oldest is part:
                    break
                self.counters["bytes_full"] += 1
                self._remove(oldest)
        return self.bytes + size <= self.limits.max_bytes

    def _remove(self, part: Part) -> None:
        if not part.listed:
            return
        part.listed = False
        name = (part.alias, part.req_id)
        parts = self._names[name]
        parts.remove(part)
        if not parts:
            del self._names[name]
        self._count -= 1
        self._drop_registrations(part)
        ageing = self._ageing.get(part.state)
        if ageing is not None:
            ageing.pop(id(part), None)

    def _drop_registrations(self, part: Part) -> None:
        if part.registrations:
            self.bytes -= sum(registered.size for registered in part.registrations.values())
            part.registrations = {}

    def _move(self, part: Part, state: PartState) -> None:
        ageing = self._ageing.get(part.state)
        if ageing is not None:
            ageing.pop(id(part), None)
        part.state = state
        part.since = self._clock()
        ageing = self._ageing.get(state)
        if ageing is not None and part.listed:
            self._age(part, ageing)
            if state in _OVER and len(ageing) > self.limits.max_over:
                self._remove(next(iter(ageing.values())))

    def _finish(self, part: Part, state: PartState) -> None:
        self._drop_registrations(part)
        part.sends = frozenset()
        self._move(part, state)

    def _close(self, part: Part) -> None:
        assert part.copies > 0, part
        part.copies -= 1
