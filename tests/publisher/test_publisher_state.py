"""The pure state: a reader who follows its messages holds what the cache holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fullhit_publisher import CacheStats, PublisherState, wire
from fullhit_publisher.keys import digest, fold, text_key
from fullhit_publisher.wire import Delta


class Clock:
    def __init__(self, now: int = 1000) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def make(**options: int) -> PublisherState:
    return PublisherState(7, clock_ns=Clock(), pool="p", **options)


def drain(state: PublisherState, limit: int | None = None) -> list[Delta]:
    deltas = []
    while (delta := state.next_delta(limit)) is not None:
        deltas.append(delta)
    return deltas


def names(count: int) -> list[str]:
    return [text_key(str(number)).hex() for number in range(count)]


def test_a_new_state_has_said_nothing() -> None:
    state = make()
    assert repr(state) == "<PublisherState worker=7 epoch=1000 seq=0 keys=0 pending=+0-0>"
    assert state.next_delta() is None
    beat = state.heartbeat()
    assert (beat.epoch, beat.seq, beat.keys, beat.digest) == (1000, 0, 0, 0)


def test_changes_coalesce_until_they_are_asked_for() -> None:
    state = make()
    state.apply(["a", "b"], [])
    state.apply(["c"], ["a"])
    assert drain(state) == [Delta(7, wire.Update(["b", "c"], []), 1000, 1, "p")]
    state.apply(["d"], ["b"])
    assert drain(state) == [Delta(7, wire.Update(["d"], ["b"]), 1000, 2, "p")]
    assert state.next_delta() is None


def test_a_key_added_and_removed_in_one_call_ends_as_removed() -> None:
    state = make()
    state.apply(["a", "b"], [])
    drain(state)
    assert state.apply(["a", "c"], ["a", "c"])
    assert sorted(state.keys()) == ["b"]
    assert drain(state) == [Delta(7, wire.Update([], ["a"]), 1000, 2, "p")]


def test_what_is_held_already_is_not_added_again_and_what_is_not_held_not_removed() -> None:
    state = make()
    assert state.apply(["a"], [])
    drain(state)
    assert not state.apply(["a"], ["b"])
    assert state.next_delta() is None


def test_a_change_undone_before_it_was_sent_costs_nothing() -> None:
    state = make()
    state.apply(["a"], [])
    state.apply([], ["a"])
    assert drain(state) == []
    state.apply(["a"], [])
    drain(state)
    state.apply([], ["a"])
    state.apply(["a"], [])
    assert drain(state) == []
    assert state.keys() == ["a"]


def test_two_spellings_of_one_key_are_one_key() -> None:
    digits = "00112233445566778899aabbccddeeff"
    state = make()
    state.apply([digits], [])
    state.apply([digits + "0" * 32], [])
    assert len(state) == 1
    drain(state)
    state.apply([], [digits + "0" * 32])
    assert drain(state)[0].removed == [digits]
    assert state.digest == 0


def test_an_overflow_drops_what_waits_and_says_so() -> None:
    state = make(max_pending_keys=3)
    state.apply(["a", "b", "c"], [])
    assert (state.pending_keys, state.overflows) == (3, 0)
    state.apply(["d"], [])
    assert (state.pending_keys, state.overflows, state.lost_marks) == (0, 1, 1)
    assert "resync" in repr(state)
    state.apply(["e"], ["a"])
    (delta,) = drain(state)
    assert (delta.seq, delta.resync, delta.added, delta.removed) == (1, True, ["e"], ["a"])
    assert sorted(state.snapshot().keys) == sorted(state.keys()) == ["b", "c", "d", "e"]
    assert state.heartbeat().digest == digest(map(fold, state.keys()))
    state.apply(["f"], [])
    assert [delta.resync for delta in drain(state)] == [False]


def test_a_lost_mark_without_changes_makes_an_empty_delta() -> None:
    state = make()
    state.mark_lost()
    state.mark_lost()
    assert drain(state) == [Delta(7, wire.Update([], []), 1000, 1, "p", resync=True)]
    assert state.lost_marks == 1


def test_a_large_change_is_split_into_messages_under_the_limit() -> None:
    state = make(max_message_bytes=8192)
    keys = [*names(1000), "é" * 1024]
    state.apply(keys, [])
    state.mark_lost()
    first = drain(state)
    assert [delta.seq for delta in first] == list(range(1, len(first) + 1))
    assert [delta.resync for delta in first] == [True] + [False] * (len(first) - 1)
    state.apply(["one more"], keys)
    second = drain(state)
    for deltas, expected in ((first, keys), (second, ["one more", *keys])):
        assert len(deltas) > 4
        sizes = [len(wire.encode(delta, publisher_id=2**53, sequence=2**63, published_at=2**42)) for delta in deltas]
        assert max(sizes) <= 8192
        # ... and well filled, but for the last one of each kind and the one before the long key.
        assert sorted(sizes)[3] > 7000
        assert sorted(key for delta in deltas for key in delta.added + delta.removed) == sorted(expected)


def test_a_smaller_limit_of_the_transport_is_kept() -> None:
    state = make()
    state.apply(names(1000), [])
    deltas = drain(state, 4096)
    assert len(deltas) > 8
    assert max(len(wire.encode(one, publisher_id=1, sequence=1, published_at=1)) for one in deltas) <= 4096


def test_a_key_larger_than_a_tiny_limit_still_leaves() -> None:
    state = make()
    state.apply(["k" * 1024], [])
    assert len(drain(state, 100)) == 1


def test_a_snapshot_comes_in_parts_under_the_limit() -> None:
    state = make()
    keys = names(2000)
    state.apply(keys, [])
    drain(state)
    parts = list(state.snapshot().parts(99, 8192))
    assert len(parts) > 8
    assert [(part.part, part.parts, part.request_id, part.seq, part.epoch) for part in parts] == [
        (number, len(parts), 99, 1, 1000) for number in range(len(parts))
    ]
    assert [key for part in parts for key in part.keys] == keys
    sizes = [len(wire.encode(part, publisher_id=2**53, sequence=1, published_at=2**42)) for part in parts]
    assert max(sizes) <= 8192 and min(sizes[:-1]) > 7000


def test_a_snapshot_of_nothing_is_one_part_without_keys() -> None:
    (part,) = make().snapshot().parts(1, 8192)
    assert (part.part, part.parts, part.keys, part.seq) == (0, 1, [], 0)


def test_a_snapshot_is_true_as_of_its_sequence_number_while_changes_wait() -> None:
    state = make()
    state.apply(["a", "b"], [])
    drain(state)
    state.apply(["c"], ["a"])
    view = state.snapshot()
    assert (view.seq, sorted(view.keys)) == (1, ["a", "b"])
    beat = state.heartbeat()
    assert (beat.seq, beat.keys, beat.digest) == (1, 2, digest([fold("a"), fold("b")]))


def test_a_reset_begins_a_newer_epoch_even_when_the_clock_goes_back() -> None:
    clock = Clock(1000)
    state = PublisherState(7, clock_ns=clock)
    state.apply(["a", "b"], [])
    drain(state)
    state.apply(["c"], ["a"])
    clock.now = 500
    state.reset()
    assert (state.epoch, state.seq, len(state), state.digest, state.has_news) == (1001, 0, 0, 0, False)
    state.apply(["a"], [])
    assert drain(state) == [Delta(7, wire.Update(["a"], []), 1001, 1, "default")]
    clock.now = 5000
    state.reset()
    assert state.epoch == 5000


def test_figures_travel_in_the_heartbeat() -> None:
    state = PublisherState(7, clock_ns=Clock(), url="http://h:1", device="cpu", interval_ms=250)
    state.set_stats(CacheStats(capacity_bytes=10, used_bytes=5, inflight=2, hits=8, misses=9))
    beat = state.heartbeat()
    assert (beat.url, beat.device, beat.interval_ms) == ("http://h:1", "cpu", 250)
    assert (beat.capacity_bytes, beat.used_bytes, beat.inflight, beat.hits, beat.misses) == (10, 5, 2, 8, 9)


@pytest.mark.parametrize(
    ("added", "removed", "error"),
    [
        (["good", 5], [], TypeError),
        ([], [b"x"], TypeError),
        ("abc", [], TypeError),
        (b"abc", [], TypeError),
        (["good"], ["x" * 1025], ValueError),
        (["\ud800"], [], ValueError),
    ],
)
def test_a_bad_key_is_refused_and_nothing_taken(added: list[str], removed: list[str], error: type) -> None:
    state = make()
    with pytest.raises(error):
        state.apply(added, removed)
    assert repr(state) == "<PublisherState worker=7 epoch=1000 seq=0 keys=0 pending=+0-0>"


@pytest.mark.parametrize("options", [{"max_pending_keys": 0}, {"max_message_bytes": 100}])
def test_impossible_limits_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        make(**options)


key_lists = st.lists(st.sampled_from("abcdefgh"), max_size=5)


class ReaderFollowsState(RuleBasedStateMachine):
    """A reader that applies deltas, and takes a snapshot when told to, against a plain set."""

    @initialize(limit=st.integers(2, 8))
    def begin(self, limit: int) -> None:
        self.state = make(max_pending_keys=limit)
        self.cache: set[str] = set()
        self.copy: set[str] = set()
        self.next_seq = 1

    @rule(added=key_lists, removed=key_lists)
    def change(self, added: list[str], removed: list[str]) -> None:
        self.cache = (self.cache | set(added)) - set(removed)
        self.state.apply(added, removed)

    @rule()
    def lose(self) -> None:
        self.state.mark_lost()

    @rule()
    def restart(self) -> None:
        self.state.reset()
        self.cache.clear()
        # The reader hears of it by a heartbeat.
        self.copy.clear()
        self.next_seq = 1

    @rule(deliver=st.booleans())
    def one_delta(self, deliver: bool) -> None:
        delta = self.state.next_delta()
        if delta is None:
            return
        if not deliver:
            self.state.mark_lost()
            self.next_seq += 1
            return
        assert delta.seq == self.next_seq
        self.next_seq += 1
        assert not set(delta.added) & set(delta.removed)
        if delta.resync:
            self.copy = set(self.state.snapshot().keys)
        self.copy = (self.copy - set(delta.removed)) | set(delta.added)

    @rule()
    def all_deltas(self) -> None:
        while self.state.has_news:
            self.one_delta(True)
        assert self.copy == self.cache == set(self.state.snapshot().keys)
        beat = self.state.heartbeat()
        assert (beat.seq, beat.epoch) == (self.next_seq - 1, self.state.epoch)
        assert beat.digest == digest(map(fold, self.copy)) and beat.keys == len(self.copy)

    @invariant()
    def the_mirror_is_the_cache(self) -> None:
        assert set(self.state.keys()) == self.cache
        assert self.state.digest == digest(map(fold, self.cache))
        # Heartbeat and snapshot agree at all times.
        beat, view = self.state.heartbeat(), self.state.snapshot()
        assert (beat.seq, beat.keys, beat.digest) == (view.seq, len(view.keys), digest(map(fold, view.keys)))


TestReaderFollowsState = ReaderFollowsState.TestCase
TestReaderFollowsState.settings = settings(max_examples=60, stateful_step_count=30)


@given(st.lists(st.tuples(key_lists, key_lists), max_size=12))
def test_following_all_deltas_gives_the_mirror(changes: list[tuple[list[str], list[str]]]) -> None:
    state = make()
    copy: set[str] = set()
    for number, (added, removed) in enumerate(changes):
        state.apply(added, removed)
        if number % 3 == 0:
            for delta in drain(state):
                copy = (copy - set(delta.removed)) | set(delta.added)
    for delta in drain(state):
        copy = (copy - set(delta.removed)) | set(delta.added)
    assert copy == set(state.keys())
