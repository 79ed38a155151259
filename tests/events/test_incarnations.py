"""Restarts, impostors and clocks that jump: who speaks for a worker id."""

from __future__ import annotations

A, B, C, D = (letter * 32 for letter in "abcd")
ALL = (A, B, C, D)
OLD, NEW = 1_000_000, 2_000_000


def test_everything_of_the_old_incarnation_leaves_with_the_first_word_of_the_new_one(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.beat(4, [A, B], epoch=NEW))
    assert desk.held(ALL) == set()
    assert desk.state() == "unknown"


def test_late_messages_of_a_past_incarnation_are_dropped(desk):
    desk.go_live(A)
    late_delta, late_beat = desk.delta(2, [B]), desk.beat(2, [A, B])
    desk.hear(desk.delta(1, [C], epoch=NEW), late_delta, late_beat)
    assert desk.held(ALL) == {C}
    assert desk.state() == "live"
    assert desk.counted("fullhit_events_rejected_total{cause=stale_epoch}") == 2


def test_an_incarnation_in_the_middle_of_its_life_is_asked_for_a_snapshot(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.delta(9, [B], epoch=NEW))
    [request] = desk.wait(0.2)
    desk.receive(*desk.parts(request, [B, C], 9, epoch=NEW))
    assert desk.held(ALL) == {B, C}


def test_case_a1_numbers_that_begin_again_drop_all_keys_even_when_the_epoch_does_not_change(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    for seq in range(2, 101):
        desk.hear(desk.delta(seq, [B]))
    desk.hear(desk.delta(1, [C]))
    assert desk.held(ALL) == {C}
    assert desk.state() == "live"


def test_case_a1_a_restarted_worker_with_another_publisher_and_numbers_from_the_start_drops_all_keys(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.delta(2, [B]))
    desk.publisher_id, desk.sequence = 8, 0
    desk.hear(desk.delta(1, [C]))
    assert desk.held(ALL) == {C}


def test_a_clock_set_back_is_suspected_at_once_and_believed_when_the_old_one_stays_silent(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    older = OLD - 500
    desk.hear(desk.beat(1, [B], epoch=older))
    assert desk.state() == "doubtful"
    assert not desk.full_hit(A)
    for _ in range(4):
        desk.wait(1)
        desk.hear(desk.beat(1, [B], epoch=older))
    assert desk.stream().epoch == older
    assert desk.held(ALL) == set()


def test_a_past_incarnation_heard_for_the_first_time_does_not_displace_the_living_one(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.delta(7, [B], epoch=OLD - 500))
    desk.hear(desk.beat(1, [A]))
    assert desk.full_hit(A)
    assert desk.held(ALL) == {A}


def test_one_change_of_publisher_within_an_epoch_is_a_restart_and_is_verified(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.publisher_id, desk.sequence = 8, 0
    desk.hear(desk.delta(2, [B]))
    assert desk.state() == "doubtful"
    desk.hear(desk.beat(2, [A, B]))
    assert desk.full_hit(A, B)


def test_case_a9_two_publishers_that_both_move_are_a_conflict_and_quarantined(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    sequences = {7: desk.sequence, 8: 0}
    for seq, publisher in ((2, 8), (3, 7), (4, 8)):
        desk.publisher_id, desk.sequence = publisher, sequences[publisher]
        desk.hear(desk.delta(seq, [B]))
        sequences[publisher] = desk.sequence
    assert desk.state() == "quarantined"
    assert desk.held(ALL) == set()
    assert desk.ingest.status()[0].quarantine == "identity_conflict"
    assert desk.counted("fullhit_events_rejected_total{cause=identity_conflict}") == 1
    assert [event for _, event, _ in desk.log].count("worker_quarantined") == 1


def test_case_a9_two_workers_with_one_url_and_different_epochs_are_a_conflict(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    sequences = {7: desk.sequence, 8: 0}
    for second in range(8):
        for publisher, epoch, keys in ((7, OLD, [A]), (8, NEW, [B])):
            desk.publisher_id, desk.sequence = publisher, sequences[publisher]
            desk.hear(desk.beat(second + 1, keys, epoch=epoch))
            sequences[publisher] = desk.sequence
        desk.wait(1)
    assert desk.state() == "quarantined"


def test_two_workers_of_which_the_later_one_heard_has_the_smaller_epoch_are_a_conflict_too(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    for _ in range(20):
        desk.hear(desk.beat(1, [A]), desk.beat(1, [B], epoch=OLD - 500))
        desk.wait(1)
    assert desk.state() == "quarantined"


def test_messages_in_quarantine_are_counted_and_dropped_and_its_end_is_a_fresh_start(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.envelope(lying_beat()))
    assert desk.state() == "quarantined"
    desk.hear(desk.delta(2, [B]), desk.beat(2, [A, B]))
    assert desk.held(ALL) == set()
    assert desk.counted("fullhit_events_rejected_total{cause=quarantined}") == 2
    [request] = desk.wait(desk.settings.stream.quarantine + 1)
    desk.receive(*desk.parts(request, [A, B], 2))
    assert desk.full_hit(A, B)


def test_a_second_quarantine_lasts_twice_as_long(desk):
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.envelope(lying_beat()))
    desk.wait(61)
    desk.hear(desk.envelope(lying_beat()))
    desk.wait(100)
    assert desk.state() == "quarantined"
    desk.wait(25)
    assert desk.state() == "unknown"


def lying_beat():
    from fullhit_publisher import wire
    from fullhit_publisher.identity import worker_id_for

    return wire.Heartbeat(worker_id_for("http://encoder-1.invalid:30002"), OLD, 1, "default", keys=10**9, digest=1)


def test_a_worker_that_claims_more_keys_than_any_cache_holds_is_quarantined(make_desk):
    desk = make_desk(max_keys=3)
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.delta(2, [B, C, D]))
    assert desk.state() == "quarantined"
    assert desk.ingest.status()[0].quarantine == "too_many_keys"


def test_an_incarnation_that_restarts_with_the_same_epoch_after_a_reset_of_its_clock_is_taken_over(desk):
    """The publisher raises its epoch above the last one; one that forgot it has to be believed by its numbers."""
    desk.ingest.plane_up()
    desk.go_live(A)
    desk.hear(desk.delta(2, [B]), desk.delta(3, [C]))
    desk.publisher_id, desk.sequence = 9, 0
    desk.hear(desk.beat(0))
    assert desk.held(ALL) == set()
    assert desk.state() == "live"
