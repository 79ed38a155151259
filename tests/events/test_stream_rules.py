"""One test for each rule of a worker's stream, through real wire bytes."""

from __future__ import annotations

from collections.abc import Callable

from fullhit.events import TRANSITIONS, Input, State
from fullhit.events.transitions import Action

A, B, C, D = (letter * 32 for letter in "abcd")
ALL = (A, B, C, D)


# Beginnings.


def test_a_worker_that_was_added_is_unknown_and_asked_for_a_snapshot_at_once(desk):
    desk.ingest.plane_up()
    desk.add()
    requests = desk.ingest.tick(desk.now)
    assert desk.state() == "unknown"
    assert [request.subject for request in requests] == [f"fullhit.v1.default.{requests[0].worker_id}.snapshot"]


def test_no_request_leaves_while_there_is_no_plane(desk):
    desk.add()
    assert desk.wait(5) == []
    desk.ingest.plane_up()
    assert len(desk.wait(0.1)) == 1


def test_delta_one_onto_an_empty_set_is_live_without_a_snapshot(desk):
    desk.ingest.plane_up()
    desk.add()
    desk.hear(desk.delta(1, [A, B]))
    assert desk.state() == "live"
    assert desk.full_hit(A, B)
    assert desk.wait(3) == []


def test_a_heartbeat_of_an_empty_new_cache_is_live_without_a_snapshot(desk):
    desk.ingest.plane_up()
    desk.add()
    desk.hear(desk.beat(0))
    assert desk.state() == "live"
    assert desk.wait(3) == []


def test_a_worker_first_heard_in_the_middle_is_asked_and_filled(desk):
    desk.ingest.plane_up()
    desk.add()
    [request] = desk.wait(0.2)
    desk.hear(desk.beat(5, [A, B]), desk.delta(6, [C]))
    assert desk.state() == "unknown"
    assert not desk.full_hit(C)
    desk.receive(*desk.parts(request, [A, B], 5))
    assert desk.state() == "live"
    assert desk.full_hit(A, B, C)


def test_delta_one_that_comes_second_still_makes_the_beginning(desk):
    desk.ingest.plane_up()
    desk.add()
    late = desk.delta(1, [A])
    desk.hear(desk.delta(2, [B]), late)
    assert desk.state() == "live"
    assert desk.full_hit(A, B)


# Order.


def test_removed_keys_leave_before_added_ones_enter(desk):
    desk.go_live(A)
    desk.hear(desk.delta(2, [A, B], [A]))
    assert desk.held(ALL) == {A, B}


def test_a_repeated_delta_is_dropped(desk):
    desk.go_live(A)
    again = desk.delta(2, [B])
    desk.hear(again, desk.delta(3, [], [B]), again)
    assert desk.held(ALL) == {A}
    assert desk.state() == "live"
    assert desk.counted("fullhit_events_rejected_total{cause=duplicate}") == 1


def test_a_gap_makes_doubtful_and_asks_for_one_snapshot_after_a_short_random_wait(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.delta(3, [C]))
    assert desk.state() == "doubtful"
    assert not desk.full_hit(A)
    assert desk.ingest.tick(desk.now) == []
    assert len(desk.wait(desk.settings.stream.request_delay)) == 1
    desk.hear(desk.delta(5, [D]))
    assert desk.wait(1) == []
    assert desk.counted("fullhit_event_gaps_total") == 1


def test_a_reordered_delta_closes_the_gap_and_withdraws_the_wish(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    late = desk.delta(2, [B])
    desk.hear(desk.delta(3, [C]), desk.delta(4, [D]))
    desk.hear(late)
    assert desk.state() == "live"
    assert desk.full_hit(*ALL)
    assert desk.wait(3) == []


def test_the_loss_of_the_last_delta_is_found_by_the_heartbeat(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.delta(2, [B])  # lost
    desk.hear(desk.beat(2, [A, B]))
    assert desk.state() == "doubtful"
    [request] = desk.wait(0.2)
    desk.receive(*desk.parts(request, [A, B], 2))
    assert desk.state() == "live"
    assert desk.full_hit(A, B)


def test_a_late_heartbeat_says_nothing(desk):
    desk.go_live(A)
    old = desk.beat(1, [A])
    desk.hear(desk.delta(2, [B]), old)
    assert desk.state() == "live"


def test_equal_seq_with_another_digest_asks_for_a_snapshot(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.beat(1, [A], wrong_digest=True))
    assert desk.state() == "doubtful"
    assert desk.counted("fullhit_digest_mismatch_total") == 1
    assert len(desk.wait(0.2)) == 1


def test_equal_seq_with_another_number_of_keys_asks_for_a_snapshot(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.beat(1, [A, B]))
    assert desk.state() == "doubtful"


def test_a_heartbeat_that_agrees_heals_a_doubt_before_the_snapshot_is_asked_for(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.beat(1, [B]))
    desk.hear(desk.beat(1, [A]))
    assert desk.state() == "live"
    assert desk.wait(3) == []


def test_a_heartbeat_that_agrees_does_not_hide_a_hole_behind_it(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    beat = desk.beat(1, [A])
    desk.hear(desk.delta(3, [C]), beat)
    assert desk.state() == "doubtful"


def test_the_digest_of_a_worker_cut_short_by_a_cap_is_not_compared(desk):
    desk.go_live(A)
    worker = desk.pool.get("http://encoder-1.invalid:30002")
    worker.truncated = True
    desk.hear(desk.beat(1, [A, B]))
    assert desk.state() == "live"


def test_a_resync_mark_makes_doubtful_although_nothing_is_missing(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.delta(2, [B], resync=True))
    assert desk.state() == "doubtful"
    assert desk.held(ALL) == {A, B}
    [request] = desk.wait(0.2)
    desk.receive(*desk.parts(request, [B, C], 2))
    assert desk.state() == "live"
    assert desk.held(ALL) == {B, C}


# Snapshots.


def gap(desk):
    """A live worker with A, then delta 3 with C while 2 is missing; returns the request."""
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.missing = desk.delta(2, [B])
    desk.hear(desk.delta(3, [C]))
    [request] = desk.wait(0.2)
    return request


def beat_for(desk, seconds, *beat):
    """Time passes with a heartbeat every second; returns the requests sent."""
    sent = []
    for _ in range(seconds):
        sent += desk.wait(1)
        desk.hear(desk.beat(*beat))
    return sent


def test_readers_see_nothing_of_a_snapshot_before_its_last_part(desk):
    request = gap(desk)
    first, second = desk.parts(request, [B, C], 3, parts=2)
    desk.receive(first)
    assert desk.state() == "filling"
    assert desk.held(ALL) == {A}
    desk.receive(second)
    assert desk.state() == "live"
    assert desk.held(ALL) == {B, C}


def test_parts_may_come_in_any_order(desk):
    request = gap(desk)
    desk.receive(*reversed(desk.parts(request, ALL, 3, parts=4)))
    assert desk.held(ALL) == set(ALL)


def test_deltas_after_the_snapshot_are_applied_to_it_and_those_before_are_not(desk):
    request = gap(desk)
    first, second = desk.parts(request, [A, B], 4, parts=2)
    desk.receive(first)
    desk.hear(desk.delta(4, [D]), desk.delta(5, [C], [A]))
    desk.receive(second)
    assert desk.state() == "live"
    assert desk.held(ALL) == {B, C}, "4 is in the snapshot, which does not hold D any more"


def test_a_snapshot_that_overtakes_deltas_does_not_lose_them(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.beat(1, [B]))
    [request] = desk.wait(0.2)
    desk.hear(desk.delta(2, [D], [A]))
    assert desk.held(ALL) == {D}, "in order, so applied to the old entries"
    desk.receive(*desk.parts(request, [A, B], 1))
    assert desk.held(ALL) == {B, D}, "2 is not in the snapshot and must not get lost with the old entries"
    assert desk.state() == "live"


def test_a_hole_behind_the_snapshot_is_a_new_gap(desk):
    request = gap(desk)
    desk.hear(desk.delta(6, [D]))
    desk.receive(*desk.parts(request, [A, B, C], 3))
    assert desk.state() == "doubtful"
    [again] = desk.wait(1)
    assert again.request_id != request.request_id


def test_a_snapshot_with_another_request_id_is_ignored(desk):
    request = gap(desk)
    wrong = desk.parts(request, [B], 3)[0]
    assert beat_for(desk, 20, 3)  # that request has timed out; another one is out
    desk.receive(wrong)
    assert desk.held(ALL) == {A}
    assert desk.counted("fullhit_events_rejected_total{cause=unwanted_snapshot}") == 1


def test_a_repeated_part_is_counted_and_harmless(desk):
    request = gap(desk)
    first, second = desk.parts(request, [B, C], 3, parts=2)
    desk.receive(first, first)
    assert desk.state() == "filling"
    desk.receive(second)
    assert desk.held(ALL) == {B, C}
    assert desk.counted("fullhit_events_rejected_total{cause=duplicate}") == 1


def test_parts_that_do_not_belong_together_start_the_snapshot_anew(desk):
    request = gap(desk)
    first = desk.parts(request, [B, C], 3, parts=2)[0]
    other = desk.parts(request, [B, C], 4, parts=2)[1]
    desk.receive(first, other)
    assert desk.state() == "doubtful"
    assert desk.held(ALL) == {A}
    assert desk.counted("fullhit_resyncs_total{cause=gap,outcome=broken}") == 1
    assert len(desk.wait(2)) == 1


def test_a_snapshot_older_than_what_we_hold_is_refused(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.delta(2, [B]), desk.beat(2, [A]))
    [request] = desk.wait(0.2)
    desk.receive(*desk.parts(request, [A], 1))
    assert desk.held(ALL) == {A, B}
    assert desk.counted("fullhit_resyncs_total{cause=digest,outcome=broken}") == 1


def test_a_snapshot_of_a_past_incarnation_is_ignored(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.beat(3, [B], epoch=2_000_000))
    [request] = desk.wait(0.2)
    desk.receive(*desk.parts(request, [A], 1))
    assert desk.held(ALL) == set()
    desk.receive(*desk.parts(request, [B], 3, epoch=2_000_000))
    assert desk.held(ALL) == {B}


def test_a_snapshot_that_never_comes_is_asked_for_again_ever_more_slowly(desk):
    gap(desk)
    sent = len(beat_for(desk, 60, 3))
    assert 3 <= sent <= 8
    later = len(beat_for(desk, 600, 3))
    assert 15 <= later <= 32, "every 20 to 35 s"
    assert desk.counted("fullhit_resyncs_total{cause=gap,outcome=timeout}") >= sent + later - 1


def test_a_snapshot_that_stops_half_way_is_dropped_and_asked_for_again(desk):
    request = gap(desk)
    desk.receive(desk.parts(request, [B, C], 3, parts=2)[0])
    assert desk.wait(desk.settings.stream.request_timeout - 0.5) == []
    assert desk.state() == "filling"
    assert len(desk.wait(3)) == 1
    assert desk.state() == "doubtful"
    assert desk.held(ALL) == {A}


def test_too_many_kept_deltas_start_the_snapshot_anew(make_desk):
    desk = make_desk(max_buffered_deltas=3)
    gap(desk)
    desk.hear(*[desk.delta(seq, [D]) for seq in range(4, 10)])
    assert desk.counted("fullhit_resyncs_total{cause=gap,outcome=overflow}") >= 1
    [request] = desk.wait(4)[-1:]
    desk.receive(*desk.parts(request, [B, D], 9))
    assert desk.state() == "live"
    assert desk.held(ALL) == {B, D}


def test_a_new_incarnation_in_the_middle_of_a_snapshot_drops_it(desk):
    request = gap(desk)
    first, second = desk.parts(request, [B, C], 3, parts=2)
    desk.receive(first)
    desk.hear(desk.delta(1, [D], epoch=2_000_000))
    assert desk.held(ALL) == {D}
    desk.receive(second)
    assert desk.held(ALL) == {D}
    assert desk.state() == "live"


def test_a_marked_delta_that_came_during_the_snapshot_is_a_doubt_after_it(desk):
    request = gap(desk)
    first, second = desk.parts(request, [B, C], 3, parts=2)
    desk.receive(first)
    desk.hear(desk.delta(4, [D], resync=True))
    desk.receive(second)
    assert desk.held(ALL) == {B, C, D}
    assert desk.state() == "doubtful"
    assert desk.stream().doubts == {"mark"}


def test_kept_deltas_of_the_old_incarnation_are_not_applied_to_the_new_one(desk):
    gap(desk)
    desk.hear(desk.delta(1, [A], epoch=2_000_000), desk.delta(2, [B], epoch=2_000_000))
    assert desk.held(ALL) == {A, B}
    assert desk.state() == "live"


def test_a_plane_lost_in_the_middle_of_a_snapshot_ends_it_and_its_return_begins_another(desk):
    request = gap(desk)
    first, second = desk.parts(request, [B, C], 3, parts=2)
    desk.receive(first)
    desk.ingest.plane_lost()
    assert desk.state() == "doubtful"
    desk.ingest.plane_up()
    [again] = desk.wait(3)
    desk.receive(second)
    assert desk.held(ALL) == {A}
    desk.receive(*desk.parts(again, [B, C], 3, parts=2))
    assert desk.held(ALL) == {B, C}
    assert desk.state() == "live"


# A network that goes on losing.


def test_gap_after_gap_costs_a_small_cache_one_snapshot_each_and_no_more_doubt_than_that(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    for seq in range(3, 43, 2):
        desk.hear(desk.delta(seq, [B]))
        assert desk.state() == "doubtful"
        [request] = desk.wait(0.2)
        desk.receive(*desk.parts(request, [A, B], seq))
        assert desk.full_hit(A, B)


def test_gap_after_gap_of_a_large_cache_is_paced_by_its_size(make_desk):
    desk = make_desk(gap_keys_per_second=10.0)
    many = [f"{number:032x}" for number in range(80)]
    desk.ingest.plane_up()
    desk.go_live(*many)
    desk.hear(desk.delta(3, [A]))
    [request] = desk.wait(0.2)
    desk.receive(*desk.parts(request, [*many, A], 3))
    desk.hear(desk.delta(5, [B]))
    assert desk.wait(7.5) == [], "80 keys at 10 keys a second"
    [request] = desk.wait(1.0)
    desk.receive(*desk.parts(request, [*many, A, B], 5))
    assert desk.full_hit(A, B)


# Silence.


def test_silence_makes_doubtful_and_long_silence_clears(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.wait(4.9)
    assert desk.state() == "live"
    desk.wait(0.2)
    assert desk.state() == "doubtful"
    assert desk.held(ALL) == {A}
    desk.wait(25)
    assert desk.state() == "unknown"
    assert desk.held(ALL) == set()
    assert desk.wait(600) == [], "nobody asks a worker that is gone"


def test_one_forged_message_of_a_later_life_does_not_silence_a_worker_for_good(desk):
    """Its epoch became a past one, and the time stamp of the forgery kept its messages from ever counting as live."""
    desk.ingest.plane_up()
    desk.go_live(A)
    true, desk.now = desk.now, 2.0**52
    forged = desk.beat(0, epoch=2**64 - 1)
    desk.now = true
    desk.hear(forged)
    for _ in range(60):
        desk.hear(desk.beat(1, [A]))
        for request in desk.wait(1):
            desk.receive(*desk.parts(request, [A], 1))
    assert desk.state() == "live"
    assert desk.full_hit(A)


def test_a_delta_that_never_existed_does_not_leave_a_worker_doubtful_for_good(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    sequence, desk.sequence = desk.sequence, 2**63
    forged = desk.beat(2**63)
    desk.sequence = sequence
    desk.hear(forged)
    assert desk.state() == "doubtful"
    for _ in range(10):
        for request in desk.wait(1):
            desk.receive(*desk.parts(request, [A], 1))
        desk.hear(desk.beat(1, [A]))
    assert desk.state() == "live"
    assert desk.full_hit(A)
    assert desk.counted("fullhit_events_rejected_total{cause=false_head}") == 1
    desk.hear(desk.delta(2, [B]))
    assert desk.full_hit(A, B)


def test_slow_heartbeats_are_given_five_of_their_intervals(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.beat(1, [A], interval_ms=4000))
    desk.wait(19)
    assert desk.state() == "live"
    desk.wait(2)
    assert desk.state() == "doubtful"


def test_a_publisher_without_heartbeats_is_not_called_silent(desk):
    desk.ingest.plane_up()
    desk.add()
    desk.hear(desk.delta(1, [A]))
    desk.wait(1000)
    assert desk.state() == "live"


def test_a_worker_that_falls_silent_between_its_snapshot_and_its_first_heartbeat_is_not_believed_for_ever(desk):
    """Discovery ate the first heartbeat, the snapshot came, and then its way to the broker was cut."""
    desk.ingest.plane_up()
    desk.add()
    [request] = desk.wait(0.2)
    desk.receive(*desk.parts(request, [A], 1))
    assert desk.full_hit(A)
    desk.wait(5.1)
    assert desk.state() == "doubtful"
    assert not desk.full_hit(A)
    desk.wait(30)
    assert desk.held(ALL) == set()


def test_a_worker_whose_first_heartbeat_is_minutes_away_is_asked_less_and_less_often(desk):
    desk.ingest.plane_up()
    desk.add()
    asked = 0
    for _ in range(900):
        for request in desk.wait(1):
            asked += 1
            desk.receive(*desk.parts(request, [A], 1))
            assert desk.full_hit(A)
    assert 4 < asked < 10
    assert desk.held(ALL) == {A}


def test_the_next_delta_in_order_disproves_silence(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.wait(6)
    desk.hear(desk.delta(2, [B]))
    assert desk.state() == "live"


def test_a_worker_that_returns_after_a_long_silence_is_filled_again(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.wait(40)
    desk.hear(desk.beat(1, [A]))
    [request] = desk.wait(1)
    desk.receive(*desk.parts(request, [A], 1))
    assert desk.full_hit(A)


# The plane.


def test_a_lost_plane_leaves_entries_trusted_for_the_grace_and_no_longer(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.ingest.plane_lost()
    desk.wait(4.9)
    assert desk.full_hit(A)
    desk.wait(0.2)
    assert not desk.full_hit(A)
    assert desk.wait(600) == []
    assert desk.held(ALL) == {A}, "good for tie-breaks still"


def test_a_worker_known_by_its_snapshot_alone_can_be_doubted_like_any_other(desk):
    desk.ingest.plane_up()
    desk.add()
    [request] = desk.wait(0.1)
    desk.receive(*desk.parts(request, [A], 1))
    assert desk.full_hit(A)
    desk.ingest.plane_lost()
    desk.wait(6)
    assert desk.state() == "doubtful"
    assert not desk.full_hit(A)


def test_the_first_heartbeat_after_a_plane_failure_is_enough_when_nothing_was_missed(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.ingest.plane_lost()
    desk.wait(60)
    desk.ingest.plane_up()
    desk.hear(desk.beat(1, [A]))
    assert desk.full_hit(A)
    assert desk.wait(3) == []


def test_a_worker_not_heard_after_a_plane_failure_becomes_doubtful_and_is_asked(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.ingest.plane_lost()
    desk.ingest.plane_up()
    desk.wait(1.4)
    assert desk.state() == "live"
    assert len(desk.wait(4)) == 1
    assert desk.state() == "doubtful"


def test_a_request_whose_answer_was_lost_with_the_plane_is_sent_again(desk):
    gap(desk)
    desk.ingest.plane_lost()
    desk.ingest.plane_up()
    assert len(desk.wait(3)) == 1


# Publishers without snapshots.


def test_a_dynamo_publisher_is_believed_from_where_it_was_first_heard(desk):
    desk.ingest.plane_up()
    desk.add()
    desk.wait(0.1)
    desk.hear(desk.delta(40, [A], epoch=None), desk.delta(41, [B], [A], epoch=None))
    assert desk.state() == "live"
    assert desk.held(ALL) == {B}


def test_a_gap_of_a_dynamo_publisher_is_doubtful_until_it_ages_out(desk):
    desk.ingest.plane_up()
    desk.add()
    desk.hear(desk.delta(0, [A], epoch=None), desk.delta(2, [B], epoch=None), desk.delta(3, [C], epoch=None))
    assert desk.held(ALL) == {A, B, C}
    assert not desk.full_hit(A)
    desk.wait(599)
    assert desk.state() == "doubtful"
    desk.wait(2)
    assert desk.held(ALL) == set()
    desk.hear(desk.delta(4, [D], epoch=None))
    assert desk.full_hit(D)


def test_a_new_dynamo_publisher_clears_what_the_old_one_said(desk):
    desk.add()
    desk.hear(desk.delta(0, [A], epoch=None))
    old = desk.delta(1, [D], epoch=None)
    desk.publisher_id = 8
    desk.hear(desk.delta(0, [B], epoch=None), old)
    assert desk.held(ALL) == {B}


# The table.


def test_every_action_of_the_table_is_one_the_stream_can_do():
    from fullhit.events import WorkerStream

    for row in TRANSITIONS.values():
        for step in row.values():
            assert all(hasattr(WorkerStream, f"_{action}") for action in step.actions)


def test_trust_is_gained_in_the_places_where_it_may_be_and_nowhere_else():
    gains = {
        (state, what)
        for state, row in TRANSITIONS.items()
        for what, step in row.items()
        if step.state is State.LIVE and state is not State.LIVE
    }
    assert gains == {
        (State.UNKNOWN, Input.NEXT),
        (State.UNKNOWN, Input.EMPTY),
        (State.DOUBTFUL, Input.WHOLE),
        (State.FILLING, Input.FULL),
    }


def test_only_a_new_beginning_forgets_entries():
    forgets = {what for row in TRANSITIONS.values() for what, step in row.items() if Action.FORGET in step.actions}
    assert forgets == {Input.NEW, Input.GONE, Input.CONFLICT, Input.AGED}


def test_the_repr_of_a_stream_tells_its_state(desk: object, make_desk: Callable[..., object]) -> None:
    desk = make_desk()
    gap(desk)
    assert repr(desk.stream()) == "<WorkerStream doubtful applied=1 head=3 doubts=gap kept=1 resync=gap/out/1>"


# A cache that has not what is published.

URL = "http://encoder-1.invalid:30002"


def test_a_worker_whose_cache_contradicts_is_asked_and_doubted_for_a_while_whatever_it_says(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.ingest.worker_contradicts("default", URL, 20.0)
    assert desk.state() == "doubtful" and not desk.full_hit(A)
    desk.hear(desk.beat(1, [A]))
    assert desk.state() == "doubtful", "that it believes so is no news"
    [request] = desk.wait(0.2)
    desk.receive(*desk.parts(request, [A], 1))
    assert desk.state() == "doubtful" and desk.held(ALL) == {A}
    for _ in range(19):
        desk.hear(desk.beat(1, [A]))
        assert desk.wait(1) == [], "asked once"
    assert desk.state() == "doubtful"
    desk.hear(desk.delta(2, [B]), desk.beat(2, [A, B]))
    desk.wait(1)
    assert desk.state() == "live" and desk.full_hit(A, B)


def test_the_doubt_of_a_contradiction_lasts_until_the_snapshot_has_come(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.ingest.worker_contradicts("default", URL, 1.0)
    [request] = desk.wait(0.2)
    for _ in range(3):
        desk.hear(desk.beat(1, [A]))
        desk.wait(1)
    assert desk.state() == "doubtful"
    desk.receive(*desk.parts(request, [B], 1))
    assert desk.state() == "live" and desk.held(ALL) == {B}


def test_a_contradiction_ends_with_its_incarnation(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.ingest.worker_contradicts("default", URL, 600.0)
    desk.hear(desk.delta(1, [B], epoch=2_000_000))
    assert desk.state() == "live" and desk.held(ALL) == {B}


def test_a_hole_behind_a_contradiction_is_a_doubt_of_its_own(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.ingest.worker_contradicts("default", URL, 2.0)
    [request] = desk.wait(0.2)
    desk.hear(desk.delta(3, [C]))
    desk.receive(*desk.parts(request, [A], 1))
    desk.hear(desk.beat(3, [A, B, C]))
    requests = desk.wait(4)
    assert len(requests) == 1 and desk.state() == "doubtful", "the hold is over, the hole is not"
    desk.receive(*desk.parts(requests[0], [A, B, C], 3))
    assert desk.state() == "live" and desk.full_hit(A, B, C)
