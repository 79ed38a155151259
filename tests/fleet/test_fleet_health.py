"""Which workers may be trusted: probes, answered and failed requests, time. Simulated clock, real pools."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullhit.core import NoEligibleWorker, SelectRequest
from fullhit.fleet import BreakerState, ProbeResult, Source, State

A, B, C = "http://127.0.0.1:1001", "http://127.0.0.1:1002", "http://127.0.0.1:1003"
OK = ProbeResult("ok")
REFUSED = ProbeResult("refused", "connection refused")
TIMEOUT = ProbeResult("timeout", "no answer within 30 s")
KEY = bytes(range(16))


def send(world, url: str):
    """Take a slot at ``url`` in particular."""
    others = frozenset(worker.id for worker in world.pool.workers()) - {url}
    return world.pool.select(SelectRequest(exclude=others)).ticket


def trip(world, url: str, kind: str) -> None:
    for _ in range(3):
        world.fleet.report_failure(url, kind)
    assert world.fleet.get(url).breaker.state is BreakerState.OPEN


# -- probes ----------------------------------------------------------------------------------------------------


def test_case_e5_probes_are_rare_and_never_parallel(world):
    world.add_ready(A)
    world.probed.clear()
    world.run(100)
    assert 8 <= len(world.probed) <= 12
    world.hold_probes = True
    world.run(200)
    assert len(world.waiting) == 1


def test_case_e5_no_probe_while_traffic_proves_life(world):
    world.add_ready(A)
    world.probed.clear()
    for _ in range(60):
        world.run(2)
        world.fleet.report_success(A)
    assert world.probed == []
    world.run(15)
    assert len(world.probed) == 1


def test_no_probe_while_heartbeats_come_but_a_failing_worker_is_asked_all_the_same(world):
    world.add_ready(A, B)
    world.probed.clear()
    for _ in range(60):
        world.run(1)
        world.fleet.heartbeat(A)
        world.fleet.heartbeat(B)
    assert world.probed == []
    world.fleet.report_failure(A, "connect")
    world.run(0.01)
    assert [url for _, url in world.probed] == [A]


def test_case_e6_one_missed_probe_does_not_evict(world):
    world.add_ready(A)
    for misses in (1, 2):
        world.health[A] = ProbeResult("status", "HTTP 503")
        while world.fleet.get(A).misses < misses:
            world.run(0.5)
        assert world.fleet.get(A).state is State.READY
    world.health[A] = OK
    world.run(15)
    assert world.fleet.get(A).misses == 0


def test_case_e6_an_evicted_worker_is_probed_on_and_readmitted_by_one_answer(world):
    world.add_ready(A)
    world.health[A] = REFUSED
    world.run(30)
    assert world.fleet.get(A).state is State.UNHEALTHY and not world.pool.get(A).ready
    world.run(3600)
    world.probed.clear()
    world.run(60)
    assert 5 <= len(world.probed) <= 7, "for ever, at the interval"
    world.health[A] = OK
    world.run(12)
    assert world.fleet.get(A).state is State.READY and world.pool.get(A).ready


def test_case_e6_an_answered_request_counts_as_a_probe(world):
    world.add_ready(A)
    ticket = send(world, A)
    world.health[A] = REFUSED
    world.run(30)
    assert world.fleet.get(A).state is State.UNHEALTHY
    world.fleet.report_success(A)
    ticket.release()
    assert world.fleet.get(A).state is State.READY and world.pool.get(A).ready


def test_case_e7_a_good_health_route_does_not_clear_a_worker_whose_encodes_fail(world):
    world.add_ready(A, B, C)
    trip(world, A, "5xx")
    world.run(0.5)
    assert world.fleet.get(A).state is State.UNHEALTHY
    before = len(world.probed)
    trials = 0
    for _ in range(1200):
        world.run(0.1)
        if world.pool.get(A).eligible:
            trials += 1
            world.fleet.report_failure(A, "5xx")
    assert len(world.probed) > before, "and /health was fine all the time"
    assert trials <= 10, "windows of 1, 2, 4 ... 30 s in 120 s"


def test_case_e7_and_e2_a_worker_whose_requests_stand_still_is_unhealthy_whatever_health_says(make_world):
    world = make_world(stuck_after=300)
    world.add_ready(A, B)
    ticket = send(world, A)
    world.run(290)
    assert world.fleet.get(A).state is State.READY
    assert 285 < world.fleet.stalled(world.fleet.get(A)) < 292
    world.run(15)
    assert world.fleet.get(A).state is State.UNHEALTHY
    assert world.witness.events[-1][1]["cause"] == "stuck"
    world.run(120)
    assert world.fleet.get(A).state is State.UNHEALTHY, "probes go well, nothing moves"
    ticket.release()
    world.run(15)
    member = world.fleet.get(A)
    assert member.state is State.READY and member.breaker.state is BreakerState.HALF_OPEN
    ticket = send(world, A)
    with pytest.raises(NoEligibleWorker):
        send(world, A)
    world.fleet.report_success(A)
    ticket.release()
    assert member.breaker.state is BreakerState.CLOSED
    send(world, A), send(world, A)


def test_a_slow_worker_that_finishes_something_now_and_then_is_not_stuck(make_world):
    world = make_world(stuck_after=300)
    world.add_ready(A)
    send(world, A)
    for _ in range(10):
        world.run(200)
        world.fleet.report_success(A)
    assert world.fleet.get(A).state is State.READY


def test_requests_that_come_and_go_without_success_are_not_stuck(make_world):
    """A client which sends nothing but bad requests gets 400 at once, which is neither success nor failure."""
    world = make_world(stuck_after=300)
    world.add_ready(A)
    world.fleet.oldest_inflight = lambda: {A: 2.5}
    send(world, A)
    world.run(1000)
    assert world.fleet.get(A).state is State.READY
    world.fleet.oldest_inflight = lambda: {A: 301.0}
    world.run(2)
    assert world.fleet.get(A).state is State.UNHEALTHY


def test_case_e8_probes_are_patient_and_one_at_a_time(world):
    world.hold_probes = True
    world.fleet.add(A)
    world.run(100)
    (probe,) = world.waiting
    assert probe.timeout >= 30 and probe.url == A + "/health"


def test_case_g41_a_timed_out_probe_is_no_miss_while_requests_progress(world):
    world.add_ready(A)
    world.health[A] = TIMEOUT
    ticket = send(world, A)
    world.run(120)
    assert world.fleet.get(A).state is State.READY and world.fleet.get(A).misses == 0
    ticket.release()
    world.run(60)
    assert world.fleet.get(A).state is State.UNHEALTHY, "idle and silent is another matter"


def test_case_b39_start_up_probes_are_repeated_quickly(world):
    world.health[A] = REFUSED
    world.fleet.add(A)
    world.fleet.add(B)
    world.run(3)
    assert world.pool.get(B).ready, "one that is not up does not hold up another"
    assert len([url for _, url in world.probed if url == A]) >= 2
    world.health[A] = OK
    world.run(10)
    assert world.pool.get(A).ready


def test_the_number_of_probes_started_at_once_is_bounded(world):
    world.hold_probes = True
    for port in range(100):
        world.fleet.add(f"http://127.0.0.1:{2000 + port}")
    assert len(world.fleet.tick(room=8).probes) == 8
    assert len(world.fleet.tick(room=1000).probes) == 92


# -- what a worker holds ---------------------------------------------------------------------------------------


def test_going_down_empties_what_we_only_predicted(world):
    world.add_ready(A, B)
    world.pool.record_encoded(A, [(KEY, 1000)])
    world.health[A] = REFUSED
    world.run(30)
    assert world.pool.key_count(A) == 0


def test_a_publisher_that_is_unreachable_for_us_but_alive_keeps_its_entries(world):
    world.add_ready(A, B)
    world.pool.apply_delta(A, [KEY], [])
    world.health[A] = TIMEOUT
    for _ in range(150):
        world.run(1)
        world.fleet.heartbeat(A)
        world.fleet.get(A).probe_due = min(world.fleet.get(A).probe_due, world.clock())
    world.fleet.report_failure(A, "timeout")
    world.run(60)
    assert world.pool.key_count(A) == 1


def test_a_publisher_whose_process_is_gone_loses_its_entries(world):
    world.add_ready(A, B)
    world.pool.apply_delta(A, [KEY], [])
    world.fleet.heartbeat(A)
    world.health[A] = REFUSED
    world.run(60)
    assert world.pool.key_count(A) == 0


def test_a_worker_that_registers_anew_after_trouble_starts_empty_and_is_probed_at_once(world):
    world.fleet.register_url(A)
    world.run()
    world.pool.record_encoded(A, [(KEY, 1000)])
    world.health[A] = REFUSED
    world.fleet.report_failure(A, "connect")
    world.run(0.5)
    world.health[A] = OK
    world.probed.clear()
    world.fleet.register_url(A)
    world.run(0.01)
    assert [url for _, url in world.probed] == [A]
    assert world.pool.key_count(A) == 0


# -- failures of requests --------------------------------------------------------------------------------------


def test_a_refused_connection_takes_the_worker_out_for_a_moment_and_has_it_probed(world):
    world.add_ready(A, B)
    world.probed.clear()
    world.health[A] = REFUSED
    world.fleet.report_failure(A, "connect")
    assert not world.pool.get(A).ready
    world.run(20)
    assert world.fleet.get(A).state is State.UNHEALTHY
    assert world.witness.counts.count(("worker_failures", {"worker": A, "kind": "connect"})) == 1


def test_a_dead_process_that_is_back_gets_one_request_first(world):
    world.add_ready(A, B)
    world.health[A] = REFUSED
    trip(world, A, "reset")
    world.run(20)
    world.health[A] = OK
    world.run(12)
    member = world.fleet.get(A)
    assert member.breaker.state is BreakerState.HALF_OPEN and world.pool.get(A).ready
    ticket = send(world, A)
    with pytest.raises(NoEligibleWorker):
        send(world, A)
    ticket.release()
    world.fleet.report_success(A)
    assert member.breaker.state is BreakerState.CLOSED and world.pool.get(A).max_inflight is None


def test_the_trial_leaves_room_beside_requests_from_before(make_world):
    world = make_world(max_inflight={"default": 8})
    world.add_ready(A, B)
    old = [send(world, A) for _ in range(5)]
    trip(world, A, "reset")
    world.run(1.5)
    trial = send(world, A)
    with pytest.raises(NoEligibleWorker):
        send(world, A)
    world.fleet.report_success(A)
    for ticket in [*old, trial]:
        ticket.release()
    assert world.pool.get(A).max_inflight == 8


def test_a_full_worker_is_left_alone_for_a_moment_and_stays_healthy(world):
    world.add_ready(A)
    for _ in range(50):
        world.fleet.report_failure(A, "busy")
    assert world.fleet.get(A).state is State.READY
    assert not world.pool.get(A).ready
    woken = []
    world.pool.on_capacity.append(lambda: woken.append(world.clock()))
    world.run(0.3)
    assert world.pool.get(A).ready and woken


def test_one_poisonous_picture_does_not_take_every_encoder_out(world):
    world.add_ready(A, B, C)
    for _ in range(20):
        for url in (A, B, C):
            world.fleet.report_failure(url, "5xx")
            world.fleet.report_failure(url, "timeout")
    assert world.fleet.usable("default") >= 1
    world.pool.select(SelectRequest())


def test_the_only_worker_is_not_shut_out_for_its_answers_but_for_its_absence(world):
    world.add_ready(A)
    for _ in range(10):
        world.fleet.report_failure(A, "5xx")
    assert world.pool.get(A).ready
    trip(world, A, "connect")
    assert not world.pool.get(A).ready


def test_dead_workers_do_not_protect_a_failing_one(world):
    world.add_ready(A, B, C)
    world.add_ready("http://127.0.0.1:1004")
    for url in (C, "http://127.0.0.1:1004"):
        world.health[url] = REFUSED
    world.run(60)
    trip(world, A, "5xx")
    assert not world.pool.get(A).ready and world.pool.get(B).ready


def test_reports_about_strangers_are_ignored(world):
    world.fleet.report_success(A)
    world.fleet.report_failure(A, "connect")
    world.fleet.heartbeat(A)


def test_case_b23_health_never_writes_load(world):
    world.add_ready(A, B)
    tickets = [send(world, A) for _ in range(7)]
    for cycle in range(20):
        world.health[A] = [OK, TIMEOUT, REFUSED, ProbeResult("status", "HTTP 500")][cycle % 4]
        world.run(15)
        if cycle % 5 == 0:
            world.fleet.report_failure(A, "reset")
    assert (world.pool.get(A).inflight, world.pool.get(A).encoding) == (7, 7)
    for ticket in tickets:
        ticket.release()
    assert world.pool.get(A).inflight == 0


def play(world, seconds: float, rate: float, answer) -> dict[str, int]:
    """Requests come evenly; ``answer(url)`` gives (seconds, outcome). Returns how many each worker got."""
    got: dict[str, int] = {}
    running: list[tuple[float, int, str, str, object]] = []
    start, number, rng = world.clock(), 0, random.Random(5)
    while world.clock() < start + seconds:
        at = start + number / rate
        while running and running[0][0] <= at:
            done, _, url, outcome, ticket = heapq.heappop(running)
            world.run(max(0.0, done - world.clock()))
            ticket.release()
            if outcome == "ok":
                world.fleet.report_success(url)
            else:
                world.fleet.report_failure(url, outcome)
        world.run(max(0.0, at - world.clock()))
        number += 1
        try:
            decision = world.pool.select(SelectRequest())
        except NoEligibleWorker:
            continue
        url = decision.worker.id
        got[url] = got.get(url, 0) + 1
        took, outcome = answer(url)
        heapq.heappush(running, (world.clock() + took * rng.uniform(0.5, 1.5), number, url, outcome, decision.ticket))
    return got


@pytest.mark.parametrize("kind", ["5xx", "reset"])
def test_case_b43a_a_fast_failing_worker_does_not_swallow_the_traffic(world, kind):
    world.add_ready(A, B, C)
    got = play(world, 60, 100, lambda url: (0.001, kind) if url == A else (0.05, "ok"))
    share = got.get(A, 0) / sum(got.values())
    assert share < 0.02, got
    assert got.get(A, 0) >= 3, "and it keeps getting the chance to prove itself"


def test_case_b43a_a_worker_that_recovers_gets_its_share_back(world):
    world.add_ready(A, B, C)
    play(world, 20, 100, lambda url: (0.001, "5xx") if url == A else (0.05, "ok"))
    play(world, 40, 100, lambda url: (0.05, "ok"))
    got = play(world, 20, 100, lambda url: (0.05, "ok"))
    assert min(got.values()) > 0.25 * sum(got.values()), got


# -- the law behind it -----------------------------------------------------------------------------------------

STEP = st.tuples(
    st.sampled_from(
        ["ok", "connect", "reset", "timeout", "5xx", "garbage", "busy", "up", "down", "slow", "drain", "resume",
         "register", "unregister", "remove", "send", "release", "heartbeat"]
    ),
    st.integers(0, 2),
    st.floats(0, 20),
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEP, max_size=40))
def test_whatever_happens_counts_agree_and_living_workers_come_back(make_world, steps):
    world = make_world()
    urls = [A, B, C]
    tickets = []
    for what, which, pause in steps:
        url = urls[which]
        match what:
            case "ok":
                world.fleet.report_success(url)
            case "up" | "down" | "slow":
                world.health[url] = {"up": OK, "down": REFUSED, "slow": TIMEOUT}[what]
            case "drain" | "resume":
                if world.fleet.get(url):
                    getattr(world.fleet, what)(url)
            case "register":
                world.fleet.register_url(url)
            case "unregister":
                world.fleet.unregister_url(url)
            case "remove":
                world.fleet.remove(url, cause="test", drain_seconds=pause)
            case "send":
                try:
                    tickets.append(world.pool.select(SelectRequest()).ticket)
                except NoEligibleWorker:
                    pass
            case "release":
                if tickets:
                    tickets.pop().release()
            case "heartbeat":
                world.fleet.heartbeat(url)
            case _:
                world.fleet.report_failure(url, what)
        world.run(pause)
        members = list(world.fleet)
        assert world.fleet.usable("default") == sum(m.usable for m in members)
        for member in members:
            worker = world.pool.get(member.id)
            assert member.usable == (worker.ready and not worker.draining)
            assert worker.ready <= member.answered
        assert {w.id for w in world.pool.workers()} == {m.id for m in members}
    for ticket in tickets:
        ticket.release()
    for url in urls:
        world.health[url] = OK
        world.fleet.add(url, source=Source.ADMIN)
        world.fleet.resume(url)
    world.run(90)
    for url in urls:
        assert world.pool.get(url).ready, world.fleet.get(url)
        world.fleet.report_success(url)
        assert world.fleet.get(url).breaker.state is BreakerState.CLOSED
        assert world.pool.get(url).max_inflight is None
