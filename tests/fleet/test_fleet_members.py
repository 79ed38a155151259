"""How workers come, stay and go. Simulated time, real pools."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fullhit.core import NoEligibleWorker, Pool, SelectRequest
from fullhit.fleet import ProbeResult, Source, State, UnknownWorker

A, B, C = "http://127.0.0.1:1001", "http://127.0.0.1:1002", "http://127.0.0.1:1003"
REFUSED = ProbeResult("refused", "connection refused")
KEY = bytes(range(16))


def beat(url: str, device: str = "cuda") -> SimpleNamespace:
    return SimpleNamespace(url=url, device=device)


def test_a_worker_is_seen_then_probing_then_ready(world):
    member = world.fleet.add(A)
    assert member.state is State.SEEN and not world.pool.get(A).ready
    world.hold_probes = True
    world.run()
    assert member.state is State.PROBING and not world.pool.get(A).ready
    world.fleet.probe_done(world.waiting[0], ProbeResult("ok"))
    assert member.state is State.READY and world.pool.get(A).ready
    assert world.witness.kinds() == ["worker_added", "worker_probing", "worker_ready"]


def test_the_url_is_the_identity_in_whatever_spelling(world):
    first = world.fleet.add("HTTP://LocalHost:1001/")
    again = world.fleet.add("http://localhost:1001")
    assert again is first and len(world.fleet) == 1
    assert world.fleet.find("HTTP://LOCALHOST:1001/") is first
    assert world.fleet.find(str(first.worker_id)) is first


def test_an_unknown_worker_is_an_error_that_says_where_to_look(world):
    with pytest.raises(UnknownWorker, match="GET /workers"):
        world.fleet.find("http://nobody.invalid:1")


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("ftp://host", {}, "http"),
        ("http://user:secret@host:1", {}, "user name or password"),
        (A, {"pool": "nowhere"}, "unknown pool 'nowhere'; the pools are default"),
        (A, {"weight": 0.0}, "weight"),
        (A, {"weight": float("nan")}, "weight"),
        (A, {"max_inflight": 0}, "max_inflight"),
    ],
)
def test_a_worker_that_makes_no_sense_is_refused_and_leaves_no_trace(world, url, options, message):
    with pytest.raises(ValueError, match=message):
        world.fleet.add(url, **options)
    assert len(world.fleet) == 0 and world.pool.workers() == []


def test_a_fleet_has_a_bound(make_world):
    world = make_world(max_workers=2)
    world.fleet.add(A)
    world.fleet.register_url(B)
    with pytest.raises(ValueError, match="full"):
        world.fleet.register_url(C)
    world.fleet.register_url(B)


def test_a_worker_belongs_to_one_pool(world):
    world.pools["other"] = Pool("other", clock=world.clock)
    world.fleet.add(A)
    with pytest.raises(ValueError, match="belongs to pool 'default'"):
        world.fleet.add(A, pool="other")


def test_case_e15_repeated_registration_is_accepted(world):
    world.fleet.register_url(A)
    world.run()
    for _ in range(30):
        world.fleet.register_url(A)
        world.fleet.register_url(A + "/")
    assert world.fleet.urls() == [A]
    assert world.pool.get(A).ready
    assert world.fleet.unregister_url(A) is True
    assert world.fleet.unregister_url(A) is False
    assert world.fleet.urls() == []


def test_an_encoder_cannot_unregister_what_an_operator_named(world):
    world.fleet.add(A, source=Source.STATIC)
    world.fleet.add(B, source=Source.ADMIN)
    world.fleet.register_url(A)
    assert not world.fleet.unregister_url(A)
    assert not world.fleet.unregister_url(B)
    assert world.fleet.urls() == [A, B]
    assert world.witness.kinds().count("unregister_refused") == 2


def test_an_operator_takes_over_a_registered_worker(world):
    world.fleet.register_url(A)
    world.fleet.add(A, source=Source.ADMIN)
    assert not world.fleet.unregister_url(A)


def test_a_removed_workers_entries_leave_at_once_and_the_others_hear_of_it(world):
    gone = []
    world.fleet.on_removed.append(lambda pool, id: gone.append((pool, id)))
    world.add_ready(A, B)
    world.pool.apply_delta(A, [KEY], [])
    assert world.pool.select(SelectRequest(keys=(KEY,), items=1, dry_run=True)).reason == "full_hit"
    assert world.fleet.remove(A, cause="test")
    assert gone == [("default", A)]
    assert world.pool.select(SelectRequest(keys=(KEY,), items=1, dry_run=True)).reason == "miss"
    assert not world.fleet.remove(A, cause="test")


def test_the_result_of_a_probe_of_a_removed_worker_does_not_touch_its_successor(world):
    world.hold_probes = True
    world.fleet.add(A)
    world.run()
    world.fleet.remove(A, cause="test")
    assert not world.fleet.probing(world.waiting[0])
    successor = world.fleet.add(A)
    world.fleet.probe_done(world.waiting[0], ProbeResult("ok"))
    assert successor.state is State.SEEN and not world.pool.get(A).ready


def test_requests_in_flight_survive_the_removal_of_their_worker(world):
    world.add_ready(A)
    decision = world.pool.select(SelectRequest())
    world.fleet.remove(A, cause="test")
    world.add_ready(A)
    decision.ticket.release()
    assert world.pool.get(A).inflight == 0


def test_a_drained_worker_gets_nothing_new_until_it_is_resumed(world):
    world.add_ready(A, B)
    world.fleet.drain(A)
    assert world.fleet.get(A).state is State.DRAINING
    assert {world.pool.select(SelectRequest()).worker.id for _ in range(4)} == {B}
    world.fleet.resume(A)
    assert world.fleet.get(A).state is State.READY
    assert world.pool.select(SelectRequest()).worker.id == A


def test_removal_with_drain_waits_for_the_last_request(world):
    world.add_ready(A, B)
    tickets = [world.pool.select(SelectRequest()).ticket for _ in range(2)]
    assert world.fleet.remove(A, cause="test", drain_seconds=60)
    world.run(10)
    assert world.fleet.get(A).state is State.DRAINING
    for ticket in tickets:
        ticket.release()
    world.run(2)
    assert world.fleet.get(A) is None
    assert world.witness.events[-1] == (
        "worker_gone",
        {"worker": A, "pool": "default", "cause": "drained", "requests_in_flight": 0},
    )


def test_removal_with_drain_has_an_end_and_tells_what_was_cut(world):
    world.add_ready(A)
    world.pool.select(SelectRequest())
    world.fleet.remove(A, cause="test", drain_seconds=5)
    world.run(7)
    assert world.witness.events[-1] == (
        "worker_gone",
        {"worker": A, "pool": "default", "cause": "drain time over", "requests_in_flight": 1},
    )


def test_resume_calls_a_waiting_removal_off(world):
    world.add_ready(A)
    world.pool.select(SelectRequest())
    world.fleet.remove(A, cause="test", drain_seconds=5)
    world.fleet.resume(A)
    world.run(20)
    assert world.fleet.get(A).state is State.READY


def test_a_publisher_nobody_named_is_discovered_and_probed(world):
    member = world.fleet.discover("default", beat(A, "cpu"))
    world.run()
    assert member.source is Source.DISCOVERED and member.state is State.READY
    assert world.pool.get(A).device_class == "cpu"


def test_discovery_refuses_nonsense_and_can_be_off(make_world):
    world = make_world()
    assert world.fleet.discover("default", beat("gopher://x")) is None
    assert world.fleet.discover("default", beat("")) is None
    assert world.fleet.discover("nowhere", beat(A)) is None
    for _ in range(100):
        world.fleet.discover("default", beat("gopher://x"))
    assert world.witness.kinds() == ["discovery_refused"], "once in five minutes"
    assert make_world(discover=False).fleet.discover("default", beat(A)) is None


def test_what_an_operator_removed_does_not_come_back_by_its_heartbeats(world):
    world.fleet.discover("default", beat(A))
    world.fleet.remove(A, cause="removed by admin")
    assert world.fleet.discover("default", beat(A)) is None
    world.fleet.register_url(A)
    assert world.fleet.urls() == [A]


def test_an_encoder_that_registers_again_may_be_a_new_process_with_an_empty_cache(world):
    key = b"k" * 16
    returned = []
    world.fleet.on_returned.append(lambda pool, worker: returned.append((pool, worker)))
    world.fleet.register_url(A)
    assert returned == []
    world.pool.record_encoded(A, [(key, 100)])
    assert world.pool.holds(A, key)
    world.fleet.register_url(A)
    assert not world.pool.holds(A, key), "what was predicted of the old process is not believed of the new one"
    world.pool.apply_delta(A, [key], [])
    world.fleet.register_url(A)
    assert world.pool.holds(A, key), "a publisher says itself what it holds; until then it is in doubt"
    assert returned == [("default", A)] * 2


def test_an_encoder_that_took_its_leave_is_not_brought_back_by_its_last_heartbeats(world):
    world.fleet.register_url(A)
    assert world.fleet.unregister_url(A)
    assert world.fleet.discover("default", beat(A)) is None
    world.fleet.register_url(A)
    assert world.fleet.urls() == [A]
    assert world.fleet.unregister_url(A)
    world.clock.now += 31
    assert world.fleet.discover("default", beat(A)) is not None, "it went on publishing: it is there after all"


def test_dead_workers_are_forgotten_unless_an_operator_named_them(make_world):
    world = make_world(forget_after=600)
    for url in (A, B, C):
        world.health[url] = REFUSED
    world.fleet.add(A, source=Source.STATIC)
    world.fleet.register_url(B)
    world.health[C] = ProbeResult("ok")
    world.fleet.register_url(C)
    world.run(300)
    world.health[C] = REFUSED
    world.run(350)
    assert world.fleet.urls() == [A, C], "B never answered for 600 s"
    world.run(300)
    assert world.fleet.urls() == [A], "C was dead for 600 s"
    world.health[A] = ProbeResult("ok")
    world.run(15)
    assert world.pool.get(A).ready


def test_without_probing_a_worker_is_trusted_from_the_start(make_world):
    world = make_world(probe=False)
    assert world.fleet.add(A).state is State.READY
    assert world.fleet.tick().probes == []
    assert world.pool.select(SelectRequest()).worker.id == A


def test_a_worker_that_never_answered_is_not_chosen(world):
    world.health[A] = ProbeResult("status", "HTTP 503")
    world.fleet.add(A)
    world.run(60)
    with pytest.raises(NoEligibleWorker) as caught:
        world.pool.select(SelectRequest())
    assert caught.value.kind == "all_down"


def test_views_register_into_their_own_pool(world):
    world.pools["other"] = Pool("other", clock=world.clock)
    view = world.fleet.view("other")
    view.register_url(A)
    world.fleet.register_url(B)
    assert view.urls() == [A] and world.fleet.urls() == [B]
    assert world.fleet.unregister_url(A) is False
    assert view.unregister_url(A) is True


def test_a_worker_named_again_with_other_facts_takes_them_on(world):
    world.add_ready(A)
    world.fleet.add(A, source=Source.ADMIN, weight=3.0, device="cpu", max_inflight=5)
    worker = world.pool.get(A)
    assert (worker.weight, worker.device_class, worker.max_inflight, worker.ready) == (3.0, "cpu", 5, True)
    with pytest.raises(ValueError, match="weight"):
        world.fleet.add(A, weight=-1.0)
    assert world.pool.get(A).weight == 3.0


def test_a_heartbeat_names_the_device_of_a_worker_that_only_registered(world):
    world.fleet.register_url(A)
    world.fleet.add(B, device="cuda")
    world.fleet.heartbeat(A, "cpu")
    world.fleet.heartbeat(B, "cpu")
    assert world.pool.get(A).device_class == "cpu"
    assert world.pool.get(B).device_class == "gpu", "an operator said otherwise"


def test_a_description_is_json_ready(world):
    import msgspec

    world.add_ready(A, weight=2.0)
    world.clock.move(5)
    told = msgspec.json.decode(msgspec.json.encode(world.fleet.get(A).describe(world.clock())))
    assert told["state"] == "ready" and told["weight"] == 2.0 and told["source"] == "static"
    assert told["age_seconds"]["answer"] == 5.0 and told["age_seconds"]["success"] is None
    assert told["worker_id"].isdigit() and told["breaker"]["state"] == "closed"


def test_workers_are_found_by_number_among_many_and_no_more_once_gone(world):
    urls = [f"http://127.0.0.1:{port}" for port in range(2000, 2100)]
    members = [world.fleet.add(url) for url in urls]
    assert [world.fleet.find(str(member.worker_id)) for member in members] == members
    world.fleet.remove(urls[0], cause="test")
    for text in (str(members[0].worker_id), "9" * 5_000):
        with pytest.raises(UnknownWorker):
            world.fleet.find(text)


def test_a_pool_of_leased_workers_takes_none_by_url(make_world):
    world = make_world(leased_pools=frozenset({"default"}))
    with pytest.raises(ValueError, match="come from its discovery, not by URL"):
        world.fleet.add("http://127.0.0.1:1")
    assert len(world.fleet) == 0
    assert world.fleet.add_leased("dynamo:1", pool="default").leased
