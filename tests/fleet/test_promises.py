"""Full hits that were promised on a worker's word, and what became of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit.fleet.promises import Promises, PromiseSettings

A = "http://127.0.0.1:1001"


def test_a_worker_that_never_has_what_it_publishes_is_doubted_ever_longer():
    record = Promises(PromiseSettings())
    holds = [record.report(False) for _ in range(80)]
    assert [hold for hold in holds if hold] == [10, 20, 40, 80, 160, 320, 600, 600, 600, 600]
    assert holds.index(10) == 7, "at the eighth"


def test_evictions_on_the_way_are_no_lies():
    record = Promises(PromiseSettings())
    assert not any(record.report(number % 3 != 0) for number in range(1_000)), "a third"


def test_a_window_without_doubt_forgives():
    record = Promises(PromiseSettings())
    assert [record.report(False) for _ in range(16)].count(20) == 1
    for _ in range(64):
        record.report(True)
    holds = [record.report(False) for _ in range(40)]
    assert [hold for hold in holds if hold] == [10, 20] and holds.index(10) == 31, "half of a window"


@given(st.lists(st.booleans(), max_size=400), st.integers(1, 20), st.integers(1, 100))
def test_no_doubt_without_enough_broken_promises(kept, least, window):
    settings = PromiseSettings(window=window, least=least, share=0.5)
    record, since = Promises(settings), []
    for one in kept:
        since.append(one)
        if record.report(one):
            recent = since[-window:]
            assert recent.count(False) >= least and recent.count(False) * 2 >= len(recent) and not one
            since.clear()


def test_the_fleet_tells_of_a_contradiction_and_forgets_it_with_the_worker(world):
    told: list[tuple[str, str, float]] = []
    world.fleet.on_contradiction.append(lambda *news: told.append(news))
    world.fleet.add(A)
    for _ in range(8):
        world.fleet.report_promise(A, False)
        world.fleet.report_promise("http://127.0.0.1:9", False)
    assert told == [("default", A, 10.0)]
    world.fleet.remove(A, cause="test")
    world.fleet.report_promise(A, False)
    world.fleet.add(A)
    for _ in range(7):
        world.fleet.report_promise(A, False)
    assert len(told) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_one_report_is_no_news(world, kept):
    world.fleet.add(A)
    world.fleet.report_promise(A, kept)
    assert not [event for event in world.witness.events if event[0] == "worker_contradicts"]
