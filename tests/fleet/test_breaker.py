"""The breaker of one worker, by outcomes and a clock."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from fullhit.fleet.breaker import Breaker, BreakerSettings, BreakerState

EXACT = BreakerSettings(jitter=0.0)


def make(settings: BreakerSettings = EXACT) -> Breaker:
    return Breaker(settings, random.Random(3))


def fail(breaker: Breaker, now: float, times: int = 3) -> None:
    for _ in range(times):
        breaker.failure(now)


def test_one_failure_costs_a_pause_and_opens_nothing():
    breaker = make()
    assert breaker.failure(10.0) is False
    assert breaker.state is BreakerState.CLOSED
    assert breaker.holds(10.2) and not breaker.holds(10.25)


def test_each_failure_in_a_row_pauses_longer_and_the_third_opens():
    breaker = make()
    breaker.failure(10.0)
    breaker.failure(11.0)
    assert breaker.held_until(11.0) == 11.5
    assert breaker.failure(12.0) is True
    assert repr(breaker) == "<Breaker open row=3 window=1 held=13>"


def test_a_success_between_failures_starts_the_row_anew():
    breaker = make()
    for at in range(9):
        breaker.failure(float(at)) if at % 3 else breaker.success(float(at))
    assert breaker.state is BreakerState.CLOSED


def test_a_worker_that_fails_every_other_request_is_opened_by_its_rate():
    breaker = make()
    for at in range(30):
        breaker.success(at) if at % 2 else breaker.failure(at)
        if breaker.state is BreakerState.OPEN:
            break
    else:
        raise AssertionError(breaker)


def test_windows_double_up_to_thirty_seconds_while_trials_fail():
    breaker, now, windows = make(), 0.0, []
    fail(breaker, now)
    for _ in range(8):
        windows.append(breaker.held_until(now) - now)
        now = breaker.held_until(now)
        assert not breaker.holds(now)
        assert breaker.poll(now)
        assert breaker.state is BreakerState.HALF_OPEN
        assert breaker.failure(now)
    assert windows == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_successful_trial_closes():
    breaker = make()
    fail(breaker, 0.0)
    assert breaker.poll(0.5) is False
    assert breaker.poll(1.0) is True
    assert breaker.success(1.1) is True
    assert breaker.state is BreakerState.CLOSED and not breaker.holds(1.1)


def test_opening_again_soon_after_closing_resumes_the_row_of_windows():
    breaker = make()
    fail(breaker, 0.0)
    breaker.poll(1.0)
    breaker.success(1.0)
    fail(breaker, 5.0)
    assert breaker.held_until(5.0) == 7.0


def test_a_calm_minute_starts_with_the_shortest_window_again():
    breaker = make()
    fail(breaker, 0.0)
    breaker.poll(1.0)
    breaker.success(1.0)
    fail(breaker, 100.0)
    assert breaker.held_until(100.0) == 101.0


def test_answers_to_requests_sent_before_it_opened_change_nothing():
    breaker = make()
    fail(breaker, 0.0)
    assert breaker.success(0.1) is False and breaker.failure(0.2) is False
    assert repr(breaker) == "<Breaker open row=3 window=1 held=1>"


def test_busy_pauses_without_a_stain():
    breaker = make()
    for at in range(100):
        breaker.busy(float(at))
    assert breaker.state is BreakerState.CLOSED and breaker.failures_in_row == 0
    assert breaker.held_until(99.0) == 99.25


def test_a_full_worker_may_ask_for_a_longer_pause_within_reason():
    breaker = make()
    breaker.busy(0.0, retry_after=2.0)
    assert breaker.held_until(0.0) == 2.0
    breaker.busy(0.0, retry_after=86_400.0)
    assert breaker.held_until(0.0) == 5.0
    breaker.busy(0.0, retry_after=-3.0)
    assert breaker.held_until(0.0) == 5.0


def test_windows_are_jittered():
    held = set()
    for seed in range(20):
        breaker = Breaker(BreakerSettings(), random.Random(seed))
        fail(breaker, 0.0)
        held.add(breaker.held_until(0.0))
    assert len(held) == 20 and all(0.8 <= at <= 1.2 for at in held)


def test_a_good_probe_cuts_the_window_short():
    breaker = make()
    fail(breaker, 0.0)
    breaker.half_open(0.3)
    assert breaker.state is BreakerState.HALF_OPEN and not breaker.holds(0.3)


def test_reset_forgets_everything():
    breaker = make()
    fail(breaker, 0.0)
    breaker.reset()
    assert repr(breaker) == "<Breaker closed row=0 window=0 held=0>"


@given(st.lists(st.tuples(st.sampled_from("sfbp"), st.floats(0, 40)), max_size=200))
def test_whatever_happens_a_worker_that_works_again_is_back_within_two_windows(steps):
    breaker, now = Breaker(BreakerSettings(), random.Random(1)), 0.0
    for what, pause in steps:
        now += pause
        match what:
            case "s":
                breaker.success(now)
            case "f":
                breaker.failure(now)
            case "b":
                breaker.busy(now)
            case "p":
                breaker.poll(now)
        assert breaker.held_until(now) - now <= 36.0
        assert (breaker.state is BreakerState.OPEN) <= (breaker.held_until(now) > 0)
    now = max(now, breaker.held_until(now))
    breaker.poll(now)
    breaker.success(now)
    assert breaker.state is BreakerState.CLOSED and not breaker.holds(now)
