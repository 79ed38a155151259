"""The intake: what it refuses, what it bounds, and that work is put off rather than done at once."""

from __future__ import annotations

import os
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit.core import Pool, Reason, SelectRequest, WorkerSpec
from fullhit.events import Ingest
from fullhit_publisher import wire
from fullhit_publisher.identity import worker_id_for
from fullhit_publisher.keys import fold

A, B, C, D = (letter * 32 for letter in "abcd")
ALL = (A, B, C, D)
URL = "http://encoder-1.invalid:30002"
OTHER = "http://encoder-2.invalid:30002"


def many(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [rng.randbytes(16).hex() for _ in range(count)]


# Refusals.


@pytest.mark.parametrize("data", [b"", b"\xc1", b"hello", b"\x80", os.urandom(200), b"\x93" * 1000])
def test_bytes_that_are_no_envelope_are_counted_and_survived(desk, data):
    desk.go_live(A)
    desk.hear(data)
    assert desk.counted("fullhit_events_rejected_total{cause=envelope}") == 1
    assert desk.state() == "live"


def test_bad_messages_are_logged_once_in_a_while_and_counted_each(desk):
    desk.go_live(A)
    for _ in range(1000):
        desk.hear(b"nonsense")
    assert desk.counted("fullhit_events_rejected_total{cause=envelope}") == 1000
    assert len([event for _, event, _ in desk.log if event == "event_rejected"]) == 1


def test_a_message_that_speaks_for_another_worker_is_refused(desk):
    desk.go_live(A)
    desk.add(OTHER)
    desk.hear(desk.delta(1, [B], url=OTHER))
    assert desk.counted("fullhit_events_rejected_total{cause=identity}") == 1
    assert desk.held(ALL, OTHER) == set()
    assert desk.state() == "live"


def test_a_message_that_speaks_for_another_pool_is_refused(desk):
    desk.go_live(A)
    desk.hear(desk.delta(2, [B], pool="other"))
    assert desk.counted("fullhit_events_rejected_total{cause=identity}") == 1


def test_a_heartbeat_whose_url_is_not_that_of_its_worker_is_refused(desk):
    desk.go_live(A)
    desk.hear(desk.beat(1, [A], shown_url=OTHER), desk.beat(1, [A], shown_url="ftp://nowhere.invalid"))
    assert desk.counted("fullhit_events_rejected_total{cause=identity}") == 2


def test_subjects_and_pools_that_nobody_has_are_counted(desk):
    desk.ingest.feed("fullhit.v1.nowhere.12.events", desk.delta(1, [A]))
    desk.ingest.feed("something.else", b"")
    assert desk.counted("fullhit_events_rejected_total{cause=pool}") == 1
    assert desk.counted("fullhit_events_rejected_total{cause=subject}") == 1


def test_a_key_of_ten_megabytes_is_refused(desk):
    desk.go_live(A)
    desk.hear(desk.delta(2, ["k" * 10_000_000]))
    assert desk.counted("fullhit_events_rejected_total{cause=key_too_long}") == 1


def test_a_message_over_the_limit_is_refused(desk):
    desk.go_live(A)
    desk.hear(b"\x00" * (17 * 1024 * 1024))
    assert desk.counted("fullhit_events_rejected_total{cause=too_large}") == 1


def test_snapshots_among_the_events_and_events_in_the_inbox_are_refused(desk):
    desk.ingest.plane_up()
    desk.add()
    [request] = desk.wait(0.1)
    desk.hear(*desk.parts(request, [A], 1))
    desk.receive(desk.delta(1, [A]))
    assert desk.held(ALL) == set()
    assert desk.counted("fullhit_events_rejected_total{cause=topic}") == 2


@given(st.binary(max_size=300))
def test_no_bytes_make_the_intake_raise(data):
    pool = Pool("default", clock=lambda: 0.0)
    pool.add_worker(WorkerSpec(id=URL, url=URL))
    ingest = Ingest({"default": pool})
    ingest.worker_added("default", URL)
    subject = wire.events_subject("default", worker_id_for(URL))
    for topic in (wire.TOPIC_DELTA, wire.TOPIC_HEARTBEAT, wire.TOPIC_SNAPSHOT):
        ingest.feed(subject, data)
        ingest.feed(subject, wire.encode_envelope(wire.Envelope(1, 1, 1, topic, data)))
        ingest.feed_snapshot(wire.encode_envelope(wire.Envelope(1, 1, 1, topic, data)))
    ingest.run_slices()


# Strangers.


def test_an_unknown_workers_heartbeat_is_passed_on_seldom_and_its_deltas_are_counted(desk):
    for _ in range(10):
        desk.hear(desk.delta(1, [A]), desk.beat(1, [A]))
        desk.now += 1
    assert [beat.url for _, beat in desk.strangers] == [URL, URL]
    assert desk.counted("fullhit_events_rejected_total{cause=unknown_worker}") == 12


def test_an_unknown_worker_with_a_url_that_is_not_its_own_is_not_passed_on(desk):
    desk.hear(desk.beat(1, [A], shown_url=OTHER))
    assert desk.strangers == []
    assert desk.counted("fullhit_events_rejected_total{cause=identity}") == 1


def test_a_listener_that_fails_does_not_stop_the_stream(desk):
    def fail(*_: object) -> None:
        raise RuntimeError("listener")

    desk.ingest._on_heartbeat = fail
    desk.go_live(A)
    assert [event for _, event, _ in desk.log] == ["event_listener_failed"]


def test_heartbeats_of_known_workers_reach_the_listener(desk):
    desk.go_live(A)
    assert [beat.device for beat in desk.beats] == ["cuda"]


def test_a_worker_the_pool_does_not_have_cannot_be_followed(desk):
    with pytest.raises(KeyError):
        desk.ingest.worker_added("default", URL)


# Slices.


def test_a_large_delta_is_applied_in_slices_and_what_follows_waits_its_turn(desk):
    keys = many(5000)
    desk.go_live(A)
    desk.hear(desk.delta(2, keys), desk.delta(3, [B], keys[:10]), desk.beat(3, [A, B, *keys[10:]]))
    assert desk.ingest.has_work
    desk.ingest.run_slices()
    held = desk.pool.key_count(URL)
    assert 1 < held < 5001
    assert not desk.full_hit(B), "later deltas wait"
    desk.work()
    assert desk.held([A, B, *keys]) == {A, B, *keys[10:]}
    assert desk.state() == "live"
    assert desk.ingest.backlog_bytes == 0


def test_no_slice_works_off_more_than_it_should(desk):
    desk.go_live(A)
    desk.hear(desk.delta(2, many(20_000)))
    before = desk.pool.key_count(URL)
    while desk.ingest.run_slices():
        now = desk.pool.key_count(URL)
        assert now - before <= desk.settings.slice_keys
        before = now


def test_a_doubt_does_not_wait_behind_a_delta_that_is_half_applied(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.delta(2, many(5000)))
    desk.ingest.run_slices()
    assert desk.full_hit(A)
    desk.ingest.messages_lost("slow_consumer")
    assert not desk.full_hit(A)
    desk.work()
    assert not desk.full_hit(A)
    assert desk.state() == "doubtful"
    desk.hear(desk.beat(2, [A, *many(5000)]))
    assert desk.full_hit(A)


def test_a_worker_that_came_back_is_in_doubt_until_its_heartbeat_agrees(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    assert desk.full_hit(A)
    desk.ingest.worker_returned("default", URL)
    assert not desk.full_hit(A)
    desk.hear(desk.beat(1, [A]))
    assert desk.full_hit(A)


def test_large_messages_of_several_workers_take_turns(desk):
    desk.go_live(A)
    desk.go_live(B, url=OTHER)
    for url, seed in ((URL, 1), (OTHER, 2)):
        desk.hear(desk.delta(2, many(6000, seed), url=url), url=url)
    for _ in range(4):
        desk.ingest.run_slices()
    assert desk.pool.key_count(URL) == desk.pool.key_count(OTHER) == 1 + 2 * desk.settings.slice_keys


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("how", ["delta", "snapshot"])
def test_bulk_and_ordinary_decoding_give_the_same_keys(desk, width, how):
    keys = [text * (width // 32) for text in many(3000)]
    desk.ingest.plane_up()
    desk.add()
    [request] = desk.wait(0.1)
    if how == "delta":
        desk.hear(desk.delta(1, keys, [A]))
    else:
        desk.receive(*desk.parts(request, keys, 9, parts=3))
    desk.work()
    assert desk.pool.key_count(URL) == 3000
    assert desk.held(keys) == set(keys)
    assert desk.state() == "live"


def test_bulk_messages_really_take_the_short_way(desk, monkeypatch):
    desk.ingest.plane_up()
    desk.add()
    [request] = desk.wait(0.1)
    monkeypatch.setattr(wire, "decode_message", None)
    desk.receive(*desk.parts(request, many(3000), 9, parts=2))
    desk.hear(desk.delta(10, many(3000, 5), many(3000)), desk.delta(11, many(3000, 6), [A]))
    desk.work()
    assert desk.counted("fullhit_events_rejected_total") == 0
    assert desk.pool.key_count(URL) == 6000


def test_large_irregular_messages_take_the_long_way_with_the_same_result(desk):
    keys = [*many(2000), "short", "K" * 32, "g" * 32, "x" * 200]
    desk.go_live(A)
    desk.hear(desk.delta(2, keys))
    desk.work()
    assert desk.held(keys) == set(keys)


def test_keys_that_turn_out_bad_half_way_make_the_worker_doubtful_and_asked(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.delta(2, many(3000)).replace(many(3000)[2000].encode(), b"\xff" * 32))
    desk.work()
    assert desk.counted("fullhit_events_rejected_total{cause=payload}") == 1
    assert desk.state() == "doubtful"
    [request] = desk.wait(0.2)
    desk.receive(*desk.parts(request, [A, B], 2))
    assert desk.full_hit(A, B)
    assert desk.pool.key_count(URL) == 2


@pytest.mark.parametrize(
    "change",
    [{"seq": 0}, {"epoch": -1}, {"pool": "p" * 300}, {"worker_id": 1}, {"seq": "x"}, {"part": 3}, {"parts": 0}],
)
def test_bulk_messages_with_bad_fields_are_refused_like_small_ones(desk, change):
    desk.ingest.plane_up()
    desk.add()
    [request] = desk.wait(0.1)
    fields = {"worker_id": worker_id_for(URL), "epoch": 1_000_000, "seq": 1, "pool": "default", **change}
    delta = {**fields, "update": {"added_keys": many(3000), "removed_keys": []}}
    part = {"request_id": request.request_id, "part": 0, "parts": 1, "keys": many(3000), **fields}
    if "part" in change or "parts" in change:
        desk.receive(wire.encode_envelope(wire.Envelope(7, 1, 1, wire.TOPIC_SNAPSHOT, msgspec.msgpack.encode(part))))
    else:
        desk.hear(wire.encode_envelope(wire.Envelope(7, 1, 1, wire.TOPIC_DELTA, msgspec.msgpack.encode(delta))))
    desk.work()
    assert desk.pool.key_count(URL) == 0
    assert desk.counted("fullhit_events_rejected_total") == 1


# Bounds.


def test_what_waits_for_one_worker_is_bounded_and_overflow_is_a_doubt(make_desk):
    desk = make_desk({"max_lane_bytes": 1_000_000})
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(*[desk.delta(seq, many(5000, seq)) for seq in range(2, 12)])
    assert desk.counted("fullhit_events_rejected_total{cause=backlog_full}") > 0
    assert desk.ingest.backlog_bytes <= 1_000_000
    desk.work()
    assert desk.state() == "doubtful"
    assert desk.ingest.backlog_bytes == 0


def test_what_waits_for_all_workers_is_bounded(make_desk):
    desk = make_desk({"max_backlog_bytes": 400_000})
    for url in (URL, OTHER):
        desk.go_live(A, url=url)
        desk.hear(*[desk.delta(seq, many(5000, seq), url=url) for seq in range(2, 5)], url=url)
    assert desk.ingest.backlog_bytes <= 400_000
    assert desk.counted("fullhit_events_rejected_total{cause=backlog_full}") > 0


def test_snapshot_requests_outstanding_are_bounded_over_all_workers(make_desk):
    desk = make_desk({"max_snapshots": 2})
    desk.ingest.plane_up()
    urls = [f"http://encoder-{n}.invalid:1" for n in range(5)]
    for url in urls:
        desk.add(url)
    asked = desk.wait(1)
    assert len(asked) == 2
    assert (desk.ingest.snapshots_outstanding, desk.ingest.snapshots_waiting) == (2, 3)
    answered = next(url for url in urls if worker_id_for(url) == asked[0].worker_id)
    desk.receive(*desk.parts(asked[0], [A], 1))
    assert desk.state(answered) == "live"
    assert len(desk.wait(1)) == 1


def test_missing_replies_are_counted_only_when_the_worker_was_heard_meanwhile(desk):
    desk.ingest.plane_up()
    desk.add()
    desk.wait(6)
    assert desk.ingest.replies_missing == 0, "a worker that is simply not there"
    for _ in range(20):
        desk.wait(1)
        desk.hear(desk.beat(3, [A]))
    assert desk.ingest.replies_missing >= 2
    request = desk.requests[-1]
    desk.receive(*desk.parts(request, [A], 3))
    assert desk.ingest.replies_missing == 0


# Cases.


def test_case_a2_events_of_a_removed_worker_that_still_wait_do_not_bring_keys_back(desk):
    desk.go_live(A)
    desk.hear(desk.delta(2, many(5000)), desk.delta(3, [B]))
    assert desk.ingest.has_work
    desk.remove()
    desk.work()
    assert desk.pool.index_entries == 0
    desk.hear(desk.delta(4, [C]))
    assert desk.pool.get(URL) is None
    assert desk.counted("fullhit_events_rejected_total{cause=unknown_worker}") == 1


def test_case_a2_nor_do_they_when_the_worker_came_back_meanwhile(desk):
    desk.go_live(A)
    desk.hear(desk.delta(2, many(5000)), desk.delta(3, [B]))
    desk.pool.remove_worker(URL)  # nobody has told the intake
    desk.pool.add_worker(WorkerSpec(id=URL, url=URL))
    desk.work()
    assert desk.pool.index_entries == 0
    desk.ingest.worker_added("default", URL)
    assert desk.state() == "unknown"


def test_case_a2_a_snapshot_half_taken_goes_with_its_worker(desk):
    desk.ingest.plane_up()
    desk.add()
    [request] = desk.wait(0.1)
    desk.receive(desk.parts(request, many(5000), 1, parts=2)[0])
    desk.remove()
    desk.work()
    assert desk.pool.index_entries == 0


def test_case_a4_a_worker_that_lost_everything_and_says_so_holds_nothing(desk):
    desk.go_live(A, B)
    desk.hear(desk.delta(2, [], [A, B]))
    assert desk.held(ALL) == set()


def test_case_a4_a_worker_that_lost_everything_in_silence_is_found_out_by_its_heartbeat(desk):
    desk.ingest.plane_up()
    desk.go_live(A, B)
    desk.hear(desk.beat(1))
    assert not desk.full_hit(A)
    [request] = desk.wait(0.2)
    desk.receive(*desk.parts(request, [], 1))
    assert desk.held(ALL) == set()
    assert desk.state() == "live"


def test_case_a5_a_restarted_router_is_unknown_not_empty_until_the_snapshots_are_in(desk):
    desk.ingest.plane_up()
    for url in (URL, OTHER):
        desk.add(url)
        desk.hear(desk.beat(50, [A], url=url), url=url)
    requests = {request.worker_id: request for request in desk.wait(0.2)}
    assert {row.state for row in desk.ingest.status()} == {"unknown"}
    for url in (URL, OTHER):
        desk.receive(*desk.parts(requests[worker_id_for(url)], [A], 50))
    assert {row.state for row in desk.ingest.status()} == {"live"}
    assert desk.full_hit(A)


def test_case_a6_a_snapshot_ahead_of_the_stream_ends_the_gap_and_nothing_loops(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    behind = [desk.delta(seq, [B]) for seq in range(2, 20)]
    desk.hear(behind[-1])
    [request] = desk.wait(0.2)
    desk.receive(*desk.parts(request, [A, B, C], 25))
    desk.hear(*behind, *[desk.delta(seq, [D]) for seq in range(20, 28)])
    assert desk.state() == "live"
    assert desk.held(ALL) == {A, B, C, D}
    for _ in range(60):
        desk.hear(desk.beat(27, ALL))
        assert desk.wait(1) == []


def test_case_a6_a_digest_that_never_agrees_costs_ever_fewer_snapshots(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    asked = []
    for second in range(600):
        desk.hear(desk.beat(1, [A], wrong_digest=True))
        for request in desk.wait(1):
            asked.append(second)
            desk.receive(*desk.parts(request, [A], 1))
    assert len([second for second in asked if second < 60]) <= 8
    assert len([second for second in asked if second >= 300]) <= 22, "not more than one in 15 s in the end"


def test_case_a7_a_restarted_router_serves_at_once_while_large_snapshots_come_in_by_turns(make_desk):
    desk = make_desk({"max_snapshots": 3})
    desk.ingest.plane_up()
    urls = [f"http://encoder-{n}.invalid:1" for n in range(8)]
    keys = {url: many(2000, n) for n, url in enumerate(urls)}
    for url in urls:
        desk.add(url)
    filled = 0
    for _ in range(8):
        outstanding = desk.wait(0.3)
        assert len(outstanding) <= 3
        for request in outstanding:
            url = next(url for url in urls if worker_id_for(url) == request.worker_id)
            desk.receive(*desk.parts(request, keys[url], 5, parts=4))
            filled += 1
            while desk.ingest.run_slices():
                decision = desk.pool.select(SelectRequest(keys=(fold(keys[url][0]),), items=1))
                decision.ticket.release()
            states = [row.state for row in desk.ingest.status()]
            assert states.count("live") == filled, "progress can be seen worker by worker"
    assert filled == 8
    assert all(desk.pool.key_count(url) == 2000 for url in urls)


def test_case_a8_a_worker_that_never_publishes_is_mentioned_once_in_a_while(desk):
    desk.ingest.plane_up()
    desk.add()
    desk.go_live(A, url=OTHER)
    desk.wait(1000)
    said = [fields["worker"] for _, event, fields in desk.log if event == "worker_never_published"]
    assert said == [URL, URL]
    assert desk.ingest.silent_workers == [URL]


def test_case_a9_a_worker_that_speaks_on_the_channel_of_another_is_refused_and_named(desk):
    desk.go_live(A)
    desk.hear(desk.delta(2, [B], url=OTHER))
    [line] = [fields for _, event, fields in desk.log if event == "event_rejected"]
    assert line["cause"] == "identity"
    assert URL in str(line["detail"])


def test_a_worker_that_publishes_nothing_keeps_its_predictions_trusted(desk):
    desk.ingest.plane_up()
    desk.add()
    desk.pool.record_encoded(URL, [(fold(A), 100)])
    desk.wait(100)
    decision = desk.pool.select(SelectRequest(keys=(fold(A),), items=1, dry_run=True))
    assert decision.reason is Reason.PREDICTED


def test_status_tells_what_each_stream_is_about(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.delta(3, [C]))
    [row] = desk.ingest.status()
    assert (row.worker, row.state, row.applied, row.head, row.doubts, row.resync) == (
        URL,
        "doubtful",
        1,
        3,
        ["gap"],
        "gap",
    )
