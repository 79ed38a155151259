"""The table of parts: who belongs together, what is replayed, what is forgotten. Fake clock, no sockets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fullhit.http.encoder.media import FollowUp, Registration
from fullhit.http.encoder.parts import (
    AmbiguousPart,
    InconsistentCount,
    Part,
    PartLimits,
    PartState,
    PartTable,
    Registered,
    TooManyRegistrations,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


A, B, W = "10.0.0.1", "10.0.0.2", "http://w:1"


class Table:
    """A table with short words for what happens."""

    def __init__(self, **limits: float) -> None:
        self.clock = Clock()
        self.table = PartTable(PartLimits(**limits), clock=self.clock)  # type: ignore[arg-type]

    def register(
        self, req_id: str = "r", url: str = f"{A}:5", count: int = 1, *, alias: str = "", peer: str = A
    ) -> tuple[Part, Registered | None]:
        host = url.rpartition(":")[0]
        return self.table.register(alias, Registration(req_id, url, count, host), url.encode(), (), peer)

    def encode(self, req_id: str = "r", host: str = A, *, alias: str = "", peer: str | None = None) -> Part:
        return self.table.open_encode(alias, req_id, host, peer if peer is not None else host)

    def sent(self, part: Part, worker: str = W) -> list[str]:
        attempt = self.table.chosen(part, worker)
        return [r.receive_url for r in self.table.sent(part, attempt)]


def test_a_registration_that_overtakes_its_encode_is_replayed_once_the_encode_is_on_the_wire() -> None:
    t = Table()
    early, now = t.register()
    assert (early.state, now) == (PartState.EARLY, None)
    part = t.encode()
    assert repr(part) == f"<Part /r@{A} choosing copies=1 registrations=1/1>"
    assert t.sent(part) == [f"{A}:5"]
    assert repr(part) == f"<Part /r@{A} sent -> {W} (attempt 1) copies=1 registrations=1/1>"
    assert len(t.table) == 1


def test_a_registration_during_the_choice_waits_and_one_after_it_is_delivered_at_once() -> None:
    t = Table()
    part = t.encode()
    assert t.register(count=2)[1] is None
    attempt = t.table.chosen(part, W)
    assert t.register(url=f"{A}:6", count=2)[1] is None
    assert [r.receive_url for r in t.table.sent(part, attempt)] == [f"{A}:5", f"{A}:6"]
    u = Table()
    part = u.encode()
    assert u.sent(part) == []
    same, now = u.register()
    assert same is part
    assert now is not None


def test_the_same_receive_url_twice_changes_nothing() -> None:
    t = Table()
    part = t.encode()
    t.sent(part)
    assert t.register()[1] is not None
    assert t.register() == (part, None)
    assert len(part.registrations) == 1
    assert t.table.counters["registration_repeated"] == 1


def test_a_registration_which_counts_differently_is_refused_like_the_encoder_does() -> None:
    t = Table()
    t.register(count=2)
    with pytest.raises(InconsistentCount, match="Inconsistent receive_count"):
        t.register(url=f"{A}:6", count=3)
    assert t.register(url=f"{A}:6", count=2)[0].complete


def test_after_a_failover_everything_is_replayed_to_the_new_encoder() -> None:
    t = Table()
    part = t.encode()
    t.register(count=2)
    assert t.sent(part, "http://w:1") == [f"{A}:5"]
    t.register(url=f"{A}:6", count=2)
    assert t.table.back(part, 1, sent=True)
    assert part.state is PartState.CHOOSING
    assert t.register(url=f"{A}:6", count=2)[1] is None
    assert t.sent(part, "http://w:2") == [f"{A}:5", f"{A}:6"]
    assert (part.worker, part.attempt) == ("http://w:2", 2)


def test_copies_of_a_part_share_one_choice_and_stay_together() -> None:
    t = Table()
    part = t.encode()
    assert t.encode() is part
    assert part.copies == 2
    attempt = t.table.chosen(part, W)
    t.table.sent(part, attempt)
    assert t.table.sent(part, attempt) == []
    assert not t.table.back(part, attempt, sent=True), "the other copy is being worked on"
    assert part.state is PartState.SENT
    t.table.close_ok(part, keep=True)
    assert part.state is PartState.ENCODED
    assert not t.table.back(part, attempt, sent=False)
    t.table.close_failed(part, 502, "lost")
    assert part.state is PartState.ENCODED
    assert t.encode() is part, "a late copy goes to the same encoder"


def test_copies_which_all_fail_to_reach_the_encoder_move_together() -> None:
    t = Table()
    part = t.encode()
    t.encode()
    attempt = t.table.chosen(part, W)
    assert t.table.back(part, attempt, sent=False)
    assert t.table.back(part, attempt, sent=False), "somebody is choosing already"
    assert t.table.chosen(part, "http://w:2") == 2
    assert t.table.back(part, attempt, sent=False), "news about an old attempt"
    assert part.state is PartState.CHOSEN


def test_parts_of_the_first_generation_are_told_apart_by_the_alias() -> None:
    t = Table()
    first, second = t.encode(alias="v0"), t.encode(alias="v1")
    assert first is not second
    assert t.register(alias="v1")[0] is second
    assert t.table.find("v0", "r", "", A) is first


def test_the_same_id_from_two_language_servers_is_kept_apart_by_the_host() -> None:
    t = Table()
    a, b = t.encode(host=A), t.encode(host=B)
    t.sent(a, "http://w:1")
    t.sent(b, "http://w:2")
    assert t.register(url=f"{B}:5", peer=B)[0] is b
    assert t.register(url=f"{A}:5", peer=A)[0] is a
    assert t.table.find("", "r", B, A) is b
    assert t.table.find("", "r", "", B) is b
    with pytest.raises(AmbiguousPart):
        t.table.find("", "r", "", "10.9.9.9")


def test_the_registration_of_a_second_server_with_the_same_id_waits_for_its_own_encode() -> None:
    t = Table()
    a = t.encode(host=A)
    t.sent(a)
    t.register(url=f"{A}:5", peer=A)
    early, now = t.register(url=f"{B}:5", peer=B)
    assert (early.state, now) == (PartState.EARLY, None)
    b = t.encode(host=B)
    assert t.sent(b, "http://w:2") == [f"{B}:5"]


def test_a_host_name_beside_an_address_is_matched_by_the_caller_or_by_being_the_only_one() -> None:
    t = Table()
    part = t.encode(host="prefill-0.svc", peer=A)
    assert t.register(url=f"{A}:5", peer=A)[0] is part
    u = Table()
    u.register(url=f"{A}:5", peer="10.0.0.9")
    part = u.encode(host="prefill-0.svc", peer=A)
    assert u.sent(part) == [f"{A}:5"]


def test_ranks_on_several_machines_belong_to_one_part() -> None:
    t = Table()
    t.register(url=f"{B}:5", count=2, peer=B)
    part = t.encode(host=A)
    t.register(url=f"{A}:5", count=2)
    assert t.sent(part) == [f"{B}:5", f"{A}:5"]
    u = Table()
    part = u.encode(host=A)
    u.sent(part)
    assert u.register(url=f"{B}:5", count=2, peer=B)[0] is part


def test_a_registration_which_fits_two_parts_and_names_neither_is_ambiguous() -> None:
    t = Table()
    t.encode(host=A)
    t.encode(host=B)
    with pytest.raises(AmbiguousPart):
        t.register(url="10.0.0.3:5", count=2, peer="10.0.0.3")
    assert t.register(url="10.0.0.4:5", count=1, peer="10.0.0.4")[0].state is PartState.EARLY


def test_a_straggler_of_a_finished_part_is_kept_a_short_while_and_never_passed_on() -> None:
    t = Table(stray_ttl=30.0)
    part = t.encode()
    t.sent(part)
    t.register()
    t.table.close_ok(part, keep=False)
    assert part.state is PartState.DONE
    assert part.registrations == {}
    stray, now = t.register(url=f"{A}:6")
    assert (stray.state, now) == (PartState.STRAY, None)
    assert t.table.counters["registration_late"] == 1
    t.clock.now += 31
    t.table.expire()
    assert repr(t.table) == "<PartTable 1 done=1>"


def test_an_id_that_is_used_again_at_once_still_gets_its_early_registration() -> None:
    t = Table()
    part = t.encode()
    t.sent(part)
    t.register()
    t.table.close_ok(part, keep=False)
    t.register()
    again = t.encode()
    assert again is not part
    assert t.sent(again) == [f"{A}:5"]


def test_a_failed_part_remembers_why_and_starts_afresh_with_the_next_encode() -> None:
    t = Table()
    part = t.encode()
    t.register()
    t.sent(part)
    t.table.close_failed(part, 502, "the encoder died")
    assert t.table.find("", "r", "", A) is part
    assert part.failure == (502, "the encoder died")
    assert part.registrations == {}
    fresh = t.encode()
    assert (fresh.state, fresh.failure) == (PartState.CHOOSING, None)


def test_a_caller_who_leaves_before_the_choice_takes_the_part_along() -> None:
    t = Table()
    t.table.abandon(t.encode())
    assert len(t.table) == 0
    part = t.encode()
    t.register()
    t.table.abandon(part)
    assert part.state is PartState.STRAY
    assert t.sent(t.encode()) == [f"{A}:5"]


def test_a_mooncake_part_lives_until_its_last_send() -> None:
    t = Table(encoded_ttl=600.0)
    part = t.encode()
    t.sent(part)
    t.table.close_ok(part, keep=True)
    assert not t.table.send_done(part, FollowUp("r", A, f"{A}:1", 2))
    assert not t.table.send_done(part, FollowUp("r", A, f"{A}:1", 2)), "the same destination counts once"
    t.clock.now += 590
    assert t.table.find("", "r", "", A) is part
    assert t.table.send_done(part, FollowUp("r", A, f"{A}:2", 2))
    assert part.state is PartState.DONE
    u = Table(encoded_ttl=600.0)
    part = u.encode()
    u.sent(part)
    u.table.close_ok(part, keep=True)
    assert not u.table.send_done(part, FollowUp("r", A, f"{A}:1", None))
    u.clock.now += 601
    assert u.table.find("", "r", "", A) is None
    assert u.table.counters["expired_encoded"] == 1


def test_early_registrations_are_kept_for_longer_than_a_language_server_waits() -> None:
    t = Table()
    t.register()
    t.clock.now += 185
    assert t.encode().registrations
    u = Table()
    u.register()
    u.clock.now += 300
    assert not u.encode().registrations
    assert u.table.counters["expired_early"] == 1


def test_the_table_is_bounded_and_drops_what_is_over_first() -> None:
    t = Table(max_parts=3, max_registrations=2)
    done = t.encode("done")
    t.sent(done)
    t.table.close_ok(done, keep=False)
    t.register("early")
    live = t.encode("live")
    t.encode("live2")
    assert repr(t.table) == "<PartTable 3 choosing=2 early=1>"
    t.register("early2")
    assert t.table.counters["parts_full"] == 2
    for n in range(5):
        t.encode(f"more{n}")
    assert all(part.state is PartState.CHOOSING for part in t.table.parts())
    assert live in t.table.parts()
    t.register("live", f"{A}:1", 9)
    t.register("live", f"{A}:2", 9)
    with pytest.raises(TooManyRegistrations):
        t.register("live", f"{A}:3", 9)


def test_the_bytes_of_kept_registrations_are_bounded_and_the_longest_waiting_go_first() -> None:
    t = Table(max_bytes=1_000)
    for n in range(10):
        t.register(f"r{n}")
    assert t.table.bytes <= 1_000
    assert [part.req_id for part in t.table.parts()] == ["r7", "r8", "r9"]
    assert t.table.counters["bytes_full"] == 7
    live = t.encode("r9")
    for n in range(20):
        try:
            t.register("r9", f"{A}:{n}", 1)
        except TooManyRegistrations:
            break
    else:
        raise AssertionError
    assert live.registrations
    t.table.close_failed(live, 500, "x")
    assert t.table.bytes == 0


def test_only_the_latest_finished_parts_are_remembered() -> None:
    t = Table(max_over=3)
    for n in range(10):
        part = t.encode(f"r{n}")
        t.sent(part)
        t.table.close_ok(part, keep=False)
    assert [part.req_id for part in t.table.parts()] == ["r7", "r8", "r9"]


def test_nobody_has_heard_of_an_attempt_until_a_registration_is_offered() -> None:
    t = Table()
    part = t.encode("r_local_part_0")
    t.register("r_local_part_0")
    assert not t.table.offer(part, 1), "nothing was chosen yet"
    t.sent(part)
    assert t.table.unheard(part, 1)
    assert t.table.offer(part, 1)
    assert not t.table.unheard(part, 1)
    assert t.table.back(part, 1, sent=True)
    assert not t.table.offer(part, 1), "the attempt is over"
    t.sent(part)
    assert t.table.unheard(part, 2), "the next encoder has been told nothing"
    assert not t.table.unheard(part, 1)
    t.encode("r_local_part_0")
    assert not t.table.unheard(part, 2), "what a copy has come to nobody knows"


def test_a_fresh_id_ends_in_what_a_language_server_strips_and_is_never_used_twice() -> None:
    t = Table()
    part = t.encode("a_local_part_0_local_part_3")
    ids = [t.table.fresh_id(part) for _ in range(3)]
    assert len(set(ids)) == 3
    assert {one.rpartition("_local_part_")[0] for one in ids} == {"a_local_part_0"}
    assert t.table.fresh_id(t.encode("rid")) == "", "the first generation compares whole ids"
    assert part.wire_id == part.req_id
    part.alias_id = ids[0]
    assert part.wire_id == ids[0]
    assert t.table.find("", "a_local_part_0_local_part_3", "", A) is part, "here it keeps its name"


def test_an_id_that_was_refused_is_not_told_to_an_encoder_again() -> None:
    t = Table(over_ttl=60.0)
    part = t.encode("r_local_part_0")
    t.sent(part)
    part.alias_id = t.table.fresh_id(part)
    t.table.close_ok(part, keep=False)
    again = t.encode("r_local_part_0")
    assert again is not part
    assert again.wire_id not in ("r_local_part_0", part.alias_id)
    t.table.abandon(again)
    assert t.encode("r_local_part_0", B).alias_id == "", "another language server's"


HOSTS = st.sampled_from([A, B])
IDS = st.sampled_from(["r1", "r2_local_part_0"])
ALIASES = st.sampled_from(["", "v0"])


class Life(RuleBasedStateMachine):
    """Any order of events: nothing is delivered twice to one attempt, nothing is lost, all is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = PartTable(PartLimits(max_parts=12), clock=self.clock)
        self.open: list[Part] = []
        self.delivered: dict[tuple[int, int], list[str]] = {}
        self.keep_alive: list[Part] = []
        self.ports = 0
        self.ids: set[str] = set()

    def deliver(self, part: Part, urls: list[str]) -> None:
        told = self.delivered.setdefault((id(part), part.attempt), [])
        assert not set(told) & set(urls)
        told += urls
        assert sorted(told) == sorted(part.registrations)

    @rule(alias=ALIASES, req_id=IDS, host=HOSTS)
    def encode(self, alias: str, req_id: str, host: str) -> None:
        part = self.table.open_encode(alias, req_id, host, host)
        assert (part.alias, part.req_id, part.host) == (alias, req_id, host)
        self.open.append(part)
        self.keep_alive.append(part)

    @rule(alias=ALIASES, req_id=IDS, host=HOSTS, same=st.booleans())
    def register(self, alias: str, req_id: str, host: str, same: bool) -> None:
        self.ports += not same
        url = f"{host}:{self.ports}"
        try:
            part, now = self.table.register(alias, Registration(req_id, url, 2, host), b"", (), host)
        except AmbiguousPart:
            return
        # A part with one good answer is over, even while a copy of it is still open.
        live = [
            p
            for p in self.table.parts()
            if (p.alias, p.req_id, p.host) == (alias, req_id, host) and p in self.open and p.state is not PartState.DONE
        ]
        if live:
            assert part is live[0]
        if now is not None:
            self.deliver(part, [now.receive_url])

    @precondition(lambda self: any(p.state is PartState.CHOOSING for p in self.open))
    @rule(data=st.data())
    def choose(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from([p for p in self.open if p.state is PartState.CHOOSING]))
        self.table.chosen(part, W)

    @precondition(lambda self: any(p.state in (PartState.CHOSEN, PartState.SENT) for p in self.open))
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from([p for p in self.open if p.state in (PartState.CHOSEN, PartState.SENT)]))
        first = part.state is PartState.CHOSEN
        urls = [r.receive_url for r in self.table.sent(part, part.attempt)]
        if first:
            self.deliver(part, urls)
        else:
            assert urls == []

    @precondition(lambda self: self.open)
    @rule(data=st.data(), sent=st.booleans())
    def turned_away(self, data: st.DataObject, sent: bool) -> None:
        part = data.draw(st.sampled_from(self.open))
        self.table.back(part, part.attempt, sent=sent and part.on_wire > 0)
        assert part.on_wire >= 0

    @precondition(lambda self: any(p.state is PartState.SENT for p in self.open))
    @rule(data=st.data(), offered=st.booleans())
    def fails(self, data: st.DataObject, offered: bool) -> None:
        """The encoder refuses; if nobody has heard of it the part goes on under another id."""
        part = data.draw(st.sampled_from([p for p in self.open if p.state is PartState.SENT]))
        attempt = part.attempt
        if offered:
            assert self.table.offer(part, attempt)
        unheard = self.table.unheard(part, attempt)
        assert unheard == (part.copies == 1 and part.on_wire <= 1 and part.offered != attempt)
        fresh = self.table.fresh_id(part)
        if unheard and fresh:
            assert fresh not in self.ids
            self.ids.add(fresh)
            part.alias_id = fresh
            assert self.table.back(part, attempt, sent=True)
            assert part.state is PartState.CHOOSING
            assert not self.table.offer(part, attempt)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from(["ok", "keep", "failed", "abandon"]))
    def close(self, data: st.DataObject, how: str) -> None:
        part = data.draw(st.sampled_from(self.open))
        self.open.remove(part)
        if how in ("ok", "keep") and part.state in (PartState.CHOOSING, PartState.CHOSEN):
            how = "failed"  # Nobody has had the body yet, so nobody can have answered well.
        if how in ("ok", "keep"):
            self.table.close_ok(part, keep=how == "keep")
        elif how == "failed":
            self.table.close_failed(part, 502, "x")
        else:
            self.table.abandon(part)

    @rule(seconds=st.sampled_from([1, 40, 300]))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        self.table.expire()

    @invariant()
    def counts_are_right(self) -> None:
        parts = self.table.parts()
        assert len(self.table) == len(parts) == len(set(map(id, parts)))
        assert len(parts) <= max(12, len(self.open) + 1)
        assert self.table.bytes == sum(r.size for part in parts for r in part.registrations.values())
        for part in set(self.open):
            assert part.copies == self.open.count(part)

    def teardown(self) -> None:
        while self.open:
            self.table.close_ok(self.open.pop(), keep=True)
        self.clock.now += 10_000
        self.table.expire()
        assert len(self.table) == 0
        assert self.table._names == {}
        assert self.table.bytes == 0


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLife = Life.TestCase
