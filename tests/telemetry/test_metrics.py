"""Metrics: fixed names, bounded labels, gauges read from the pools."""

from __future__ import annotations

import asyncio
import io
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fullhit.core import Pool, SelectRequest, WorkerSpec
from fullhit.telemetry import Log, LoopLag, Metrics, Telemetry, UnknownMetric
from fullhit.telemetry.metrics import COUNTERS, MAX_VALUES

A, B = "http://127.0.0.1:1001", "http://127.0.0.1:1002"
KEYS = [bytes([n]) * 16 for n in range(5)]


@pytest.fixture
def pools() -> dict[str, Pool]:
    pool = Pool("default", clock=lambda: 0.0)
    for url in (A, B):
        pool.add_worker(WorkerSpec(url, url))
        pool.set_ready(url, True)
    return {"default": pool}


@pytest.fixture
def metrics(pools) -> Metrics:
    return Metrics(pools, strict=True)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get((name, tuple(sorted(labels.items()))))


def test_the_names_that_are_promised_exist(metrics):
    metrics.request_done("default", "miss", 200, 0.1)
    metrics.observe_select("default", 1e-5)
    metrics.gauge("queue_depth", "Waiting", lambda: 3)
    for definition in COUNTERS:
        metrics.count(definition.name, **dict.fromkeys(definition.labels, "x"))
    families = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    promised = """requests request_seconds select_seconds worker_inflight worker_up index_keys index_entries events
        events_rejected event_gaps resyncs digest_mismatch event_lag_seconds hit_mispredictions retries bad_images
        queue_depth registrations rejected build_info cache_reports blind_decisions"""
    assert {f"fullhit_{name}" for name in promised.split()} <= families


@pytest.mark.parametrize("name", ["retries", "retries_total", "fullhit_retries", "fullhit_retries_total"])
def test_a_counter_may_be_called_by_its_long_or_short_name(metrics, name):
    metrics.count(name, cause="connect")
    metrics.count(name, 2, cause="connect")
    assert value(metrics, "fullhit_retries_total", cause="connect") == 3


def test_requests_are_counted_by_pool_reason_and_code(metrics):
    metrics.request_done("default", "full_hit", 200, 0.02)
    metrics.request_done("default", "full_hit", 200, 0.03)
    metrics.request_done("nowhere", "whim", 99999, 0.03)
    assert value(metrics, "fullhit_requests_total", pool="default", reason="full_hit", code="200") == 2
    assert value(metrics, "fullhit_requests_total", pool="other", reason="other", code="other") == 1
    assert value(metrics, "fullhit_request_seconds_count", pool="default") == 2


def test_gauges_follow_the_pools_without_being_told(metrics, pools):
    pool = pools["default"]
    pool.apply_delta(A, KEYS, [])
    ticket = pool.select(SelectRequest(keys=tuple(KEYS[:2]), items=2)).ticket
    pool.set_ready(B, False)
    assert value(metrics, "fullhit_worker_inflight", worker=A) == 1
    assert value(metrics, "fullhit_worker_encoding", worker=A) == 0
    assert value(metrics, "fullhit_worker_up", worker=A) == 1
    assert value(metrics, "fullhit_worker_up", worker=B) == 0
    assert value(metrics, "fullhit_index_keys", pool="default") == 5
    assert value(metrics, "fullhit_index_entries", worker=A) == 5
    ticket.release()
    pool.remove_worker(A)
    assert value(metrics, "fullhit_worker_inflight", worker=A) is None


def test_a_worker_in_two_pools_is_one_series(pools):
    other = Pool("other", clock=lambda: 0.0)
    other.add_worker(WorkerSpec(A, A))
    pools["other"] = other
    metrics = Metrics(pools)
    text = metrics.render().decode()
    assert text.count(f'fullhit_worker_inflight{{worker="{A}"}}') == 1


def test_only_known_workers_become_label_values_and_they_go_with_the_worker(metrics, pools):
    metrics.count("events", worker=A, kind="delta")
    for number in range(500):
        metrics.count("events", worker=f"http://forged:{number}", kind="delta")
    assert value(metrics, "fullhit_events_total", worker=A, kind="delta") == 1
    assert value(metrics, "fullhit_events_total", worker="other", kind="delta") == 500
    pools["default"].remove_worker(A)
    metrics.forget_worker(A)
    assert value(metrics, "fullhit_events_total", worker=A, kind="delta") is None
    metrics.count("events", worker=A, kind="delta")
    assert value(metrics, "fullhit_events_total", worker="other", kind="delta") == 501


def test_free_labels_keep_a_bounded_number_of_values(metrics):
    for number in range(10_000):
        metrics.count("rejected", cause=f"cause_{number}")
    metrics.count("rejected", cause='Ünïcode \n"')
    kept = [key for key in samples(metrics) if key[0] == "fullhit_rejected_total"]
    assert len(kept) == MAX_VALUES + 1
    assert value(metrics, "fullhit_rejected_total", cause="other") == 10_001 - MAX_VALUES
    assert len(metrics._children) <= 8192


def test_a_metric_that_does_not_exist_is_our_mistake_in_tests_and_a_count_in_production(metrics, pools):
    with pytest.raises(UnknownMetric, match="no metric is named 'nonsense'"):
        metrics.count("nonsense")
    with pytest.raises(UnknownMetric, match="labels"):
        metrics.count("retries", color="red")
    lenient = Metrics(pools)
    lenient.count("nonsense")
    lenient.count("retries", color="red")
    assert value(lenient, "fullhit_telemetry_errors_total") == 2
    assert value(lenient, "fullhit_retries_total", cause="other") == 1


def test_two_routers_in_one_process_share_nothing(pools):
    one, two = Metrics(pools), Metrics(pools)
    one.count("event_gaps")
    assert value(one, "fullhit_event_gaps_total") == 1 and value(two, "fullhit_event_gaps_total") == 0


def test_a_broken_source_costs_its_own_series_only(metrics):
    metrics.gauge("queue_depth", "Waiting", lambda: 1 / 0)
    metrics.total("things", "Things", lambda: 7)
    assert value(metrics, "fullhit_things_total") == 7
    assert value(metrics, "fullhit_queue_depth") is None


def test_lag_below_zero_is_clock_skew(metrics):
    metrics.observe_lag(-5.0)
    assert value(metrics, "fullhit_event_lag_seconds_sum") == 0
    assert value(metrics, "fullhit_event_lag_seconds_count") == 1


def test_counting_is_cheap(metrics):
    metrics.count("retries", cause="connect")
    metrics.request_done("default", "miss", 200, 0.1)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(1000):
            metrics.count("retries", cause="connect")
            metrics.request_done("default", "miss", 200, 0.1)
        best = min(best, time.perf_counter() - started)
    assert best / 1000 < 100e-6  # a few microseconds; the bound only catches a lookup gone wrong


# -- the facade ------------------------------------------------------------------------------------------------


def told(stream: io.StringIO, telemetry: Telemetry) -> list[dict]:
    import json

    assert telemetry.log.flush(10)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def make(pools, decisions="all", kept=1000) -> tuple[Telemetry, io.StringIO]:
    stream = io.StringIO()
    log = Log(stream, format="json")
    return Telemetry(Metrics(pools, strict=True), log, decisions=decisions, kept=kept), stream


def test_a_decision_leaves_one_line_that_joins_by_request_id(pools):
    telemetry, stream = make(pools)
    pools["default"].apply_delta(A, KEYS[:1], [])
    decision = pools["default"].select(SelectRequest(keys=tuple(KEYS[:2]), items=2, request_id="req-7"))
    telemetry.decision(decision, code=200, ms=1.5)
    (line,) = told(stream, telemetry)
    del line["time"]
    assert line == {
        "level": "info", "event": "decision", "request_id": "req-7", "decision": decision.id, "pool": "default",
        "reason": "partial_hit", "worker": A, "keys": 2, "held": 1, "inflight": 0, "candidates": 2,
        "code": 200, "ms": 1.5,
    }  # fmt: skip


@pytest.mark.parametrize(("mode", "lines"), [("all", 3), ("errors", 2), ("off", 0)])
def test_which_decisions_get_a_line_can_be_chosen(pools, mode, lines):
    telemetry, stream = make(pools, mode)
    for outcome in ({"code": 200}, {"code": 502}, {"error": "client went away"}):
        telemetry.decision(pools["default"].select(SelectRequest()), **outcome)
    assert len(told(stream, telemetry)) == lines
    assert len(telemetry.latest_decisions(10)) == 3


def test_decisions_are_kept_with_their_outcome_in_a_bounded_ring(pools):
    telemetry, _ = make(pools, "off", kept=10)
    decisions = [pools["default"].select(SelectRequest(request_id=f"r{n}")) for n in range(50)]
    for decision in decisions:
        telemetry.decision(decision, code=200)
    telemetry.decision(decisions[-1], retried=1)
    latest = telemetry.latest_decisions(100)
    assert [row["request_id"] for row in latest] == [f"r{n}" for n in range(49, 39, -1)]
    assert latest[0]["outcome"] == {"code": 200, "retried": 1}
    assert telemetry.find_decision(decisions[0].id) is None
    assert telemetry.find_decision(decisions[-1].id)["request_id"] == "r49"
    assert len(telemetry._outcomes) <= 10


def test_decisions_can_be_picked(pools):
    telemetry, _ = make(pools, "off")
    for n in range(6):
        telemetry.decision(pools["default"].select(SelectRequest(request_id=f"r{n}")))
    rows = telemetry.latest_decisions(2, wanted=lambda d: d.worker.id == B)
    assert [row["worker"] for row in rows] == [B, B]
    assert telemetry.latest_decisions(5, pool="nowhere") == []


def test_unknown_mode_is_refused(pools):
    with pytest.raises(ValueError, match="all, errors or off"):
        make(pools, "some")


# -- the loop --------------------------------------------------------------------------------------------------


async def test_a_blocked_loop_is_seen_and_fades():
    lag = LoopLag(interval=0.01, window=0.2)
    lag.start()
    await asyncio.sleep(0.03)
    time.sleep(0.1)  # noqa: ASYNC251
    await asyncio.sleep(0.02)
    assert lag.worst >= 0.08
    deadline = time.monotonic() + 20
    while lag.worst >= 0.08:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    lag.stop()
    lag.stop()
