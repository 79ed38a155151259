"""What users of a pool rely on, one promise a test."""

import gc
import json
import random
from itertools import count

import pytest

from fullhit.core import (
    DecisionLog,
    DeviceClass,
    NoEligibleWorker,
    Pool,
    PoolFull,
    PoolSettings,
    Reason,
    SelectRequest,
    WorkerSpec,
    device_class,
    parse_ratio,
)

K = [random.Random(i).randbytes(16) for i in range(10)]


def pool_of(*devices, settings=None, **spec):
    pool = Pool("p", settings, clock=lambda: 12.5, rng=random.Random(1))
    for i, device in enumerate(devices):
        pool.add_worker(WorkerSpec(f"{device}{i}", f"http://{device}{i}.invalid", device, **spec))
        pool.set_ready(f"{device}{i}", True)
    return pool


def ask(*keys, **more):
    return SelectRequest(tuple(keys), len(keys) + more.get("unkeyed", 0), **more)


def test_the_least_loaded_gpu_that_holds_everything_wins_over_idle_workers_and_over_cpus():
    pool = pool_of("cuda", "cuda", "cuda", "cpu")
    for id in ("cuda0", "cuda1", "cpu3"):
        pool.apply_delta(id, K[:3], [])
    chosen = [pool.select(ask(*K[:3])) for _ in range(4)]
    assert [d.worker.id for d in chosen] == ["cuda0", "cuda1", "cuda0", "cuda1"]
    assert {d.reason for d in chosen} == {Reason.FULL_HIT}
    assert [w.encoding for w in pool.workers()] == [0, 0, 0, 0]
    assert [w.inflight for w in pool.workers()] == [2, 2, 0, 0]


def test_decisions_taken_while_a_worker_is_in_doubt_are_counted_unless_they_are_hits_all_the_same():
    pool = pool_of("cuda", "cuda")
    for id in ("cuda0", "cuda1"):
        pool.set_publishing(id, True)
        pool.apply_delta(id, [K[0] if id == "cuda0" else K[1]], [])
    pool.select(ask(K[2]))
    assert pool.blind == 0
    pool.set_doubtful("cuda1", True)
    pool.select(ask(K[0]))  # a full hit on the other one
    pool.select(ask())
    pool.select(ask(K[1], dry_run=True))
    pool.select(ask(K[1], exclude=frozenset(["cuda1"])))
    assert pool.blind == 0
    pool.select(ask(K[1]))
    pool.select(ask(K[2]))
    assert pool.blind == 2
    pool.set_doubtful("cuda1", False)
    assert pool.select(ask(K[1])).reason is Reason.FULL_HIT and pool.blind == 2


def test_a_cpu_that_holds_everything_wins_over_gpus_that_do_not():
    pool = pool_of("cuda", "cpu")
    pool.apply_delta("cpu1", K[:2], [])
    pool.apply_delta("cuda0", K[:1], [])
    assert pool.select(ask(*K[:2])).worker.id == "cpu1"


def test_prefer_any_takes_the_least_loaded_holder_whatever_its_class():
    pool = pool_of("cuda", "cpu", settings=PoolSettings(full_hit_prefer="any"))
    for id in ("cuda0", "cpu1"):
        pool.apply_delta(id, K[:2], [])
    assert [pool.select(ask(*K[:2])).worker.id for _ in range(4)] == ["cuda0", "cpu1", "cuda0", "cpu1"]


@pytest.mark.parametrize(
    ("ratio", "order"),
    [(8, "GGGGGGGGCGGG"), (2, "GGCGGCGGCGGC"), (1, "GCGCGCGCGCGC"), (16, "GGGGGGGGGGGG")],
)
def test_the_device_ratio_gives_the_order_that_was_seen_on_the_reference(ratio, order):
    pool = pool_of("cuda", "cpu", settings=PoolSettings(ratio=ratio))
    seen = [pool.select(ask(random.Random(i).randbytes(16))).worker.device_class[0].upper() for i in range(12)]
    assert "".join(seen) == order


def test_full_hits_do_not_count_against_the_device_ratio():
    pool = pool_of("cuda", "cpu", settings=PoolSettings(ratio=1))
    pool.apply_delta("cuda0", K[:1], [])
    for _ in range(5):
        assert pool.select(ask(K[0])).reason == Reason.FULL_HIT
    decision = pool.select(ask(K[1]))
    assert decision.worker.id == "cuda0"
    assert decision.record()["groups"] == [
        {"class": "gpu", "ratio": 1, "workers": 1, "encoding": 0, "allowed": None},
        {"class": "cpu", "ratio": 1, "workers": 1, "encoding": 0, "allowed": 0},
    ]


def test_three_device_classes_each_with_its_own_ratio():
    classes = (DeviceClass("cpu", 6, ("cpu",)), DeviceClass("big", 1, ("cuda",)), DeviceClass("mid", 2, ("xpu",)))
    pool = pool_of("cuda", "xpu", "cpu", settings=PoolSettings(classes=classes))
    seen = [pool.select(ask(random.Random(i).randbytes(16))).worker.device for i in range(9)]
    assert seen == ["cuda", "cuda", "xpu", "cuda", "cuda", "xpu", "cuda", "cuda", "xpu"]
    assert pool.select(ask(K[0])).worker.device == "cpu"


def test_an_item_without_a_key_makes_the_request_a_partial_hit_at_best():
    pool = pool_of("cuda")
    pool.apply_delta("cuda0", K[:2], [])
    assert pool.select(ask(*K[:2], unkeyed=1)).reason == Reason.PARTIAL_HIT
    assert pool.select(ask(unkeyed=1)).reason == Reason.MISS
    assert pool.select(SelectRequest()).reason == Reason.NO_MEDIA


def test_doubtful_entries_break_ties_but_never_make_a_full_hit():
    pool = pool_of("cuda", "cuda", "cuda")
    pool.apply_delta("cuda1", K[:2], [])
    pool.set_doubtful("cuda1", True)
    decision = pool.select(ask(*K[:2]))
    assert (decision.worker.id, decision.reason) == ("cuda1", Reason.PARTIAL_HIT)
    assert decision.ticket.encoding
    assert decision.record()["candidates"][0]["doubtful"]
    pool.set_doubtful("cuda1", False)
    assert pool.select(ask(*K[:2])).reason == Reason.FULL_HIT


def test_a_confirmed_holder_wins_over_a_predicted_one_and_a_predicted_one_over_nothing():
    pool = pool_of("cuda", "cuda", "cuda")
    pool.record_encoded("cuda0", [(K[0], 100)])
    decision = pool.select(ask(K[0]))
    assert (decision.worker.id, decision.reason, decision.ticket.encoding) == ("cuda0", Reason.PREDICTED, False)
    pool.apply_delta("cuda1", [K[0]], [])
    for _ in range(3):
        decision = pool.select(ask(K[0]))
        assert (decision.worker.id, decision.reason) == ("cuda1", Reason.FULL_HIT)


def test_predictions_go_when_the_worker_is_cleared_or_starts_to_publish():
    pool = pool_of("cuda")
    pool.record_encoded("cuda0", [(K[0], 1), (K[1], 1)])
    assert pool.key_count("cuda0") == 2
    pool.clear("cuda0")
    assert pool.key_count("cuda0") == 0
    pool.record_encoded("cuda0", [(K[0], 1)])
    pool.apply_delta("cuda0", [K[2]], [])
    assert [pool.holds("cuda0", key) for key in K[:3]] == [False, False, True]
    pool.record_encoded("cuda0", [(K[0], 1)])
    assert not pool.holds("cuda0", K[0])


def test_a_pool_that_does_not_predict_forgets_what_was_encoded():
    pool = pool_of("cuda", settings=PoolSettings(predict=False))
    pool.record_encoded("cuda0", [(K[0], 1)])
    assert pool.select(ask(K[0])).reason == Reason.MISS


def test_misses_of_one_picture_gather_on_one_worker_in_every_replica():
    devices = ["cuda"] * 30
    replicas = [pool_of(*devices), pool_of(*devices)]
    for pool in replicas[1:]:
        pool.remove_worker("cuda7")
        pool.add_worker(WorkerSpec("cuda7", "http://cuda7.invalid"))
        pool.set_ready("cuda7", True)
    for key in K:
        chosen = set()
        for pool in replicas:
            for _ in range(3):
                decision = pool.select(ask(key))
                decision.ticket.release()
                chosen.add(decision.worker.id)
        assert len(chosen) == 1


def test_the_first_missing_key_decides_not_the_first_key():
    pool = pool_of(*["cuda"] * 12)
    alone = [pool.select(ask(key, dry_run=True)).worker.id for key in K]
    known, missing = next((a, b) for a in range(9) for b in range(9) if alone[a] != alone[b])
    for worker in pool.workers():
        pool.apply_delta(worker.id, [K[known]], [])
    decision = pool.select(ask(K[known], K[missing]))
    assert (decision.worker.id, decision.reason) == (alone[missing], Reason.PARTIAL_HIT)


# -- tickets


def test_a_ticket_gives_its_slot_back_once_whatever_happens():
    pool = pool_of("cuda")
    decision = pool.select(ask(K[0]))
    worker, ticket = decision.worker, decision.ticket
    assert repr(ticket) == "<Ticket cuda0 encoding>"
    assert (worker.inflight, worker.encoding) == (1, 1)
    with pytest.raises(RuntimeError), ticket:
        raise RuntimeError
    assert (worker.inflight, worker.encoding) == (0, 0)
    assert ticket.release() is False
    assert (worker.inflight, worker.encoding) == (0, 0)
    assert repr(ticket) == "<Ticket cuda0 encoding released>"


def test_a_ticket_of_a_removed_worker_does_not_touch_the_one_that_came_back_under_its_id():
    pool = pool_of("cuda", "cuda")
    old = pool.select(ask(K[0])).ticket
    id = old.worker.id
    assert pool.remove_worker(id)
    pool.add_worker(WorkerSpec(id, "http://again.invalid"))
    pool.set_ready(id, True)
    new = pool.get(id)
    assert new is not old.worker
    decision = next(d for d in iter(lambda: pool.select(ask(K[1])), None) if d.worker is new)
    before = new.inflight
    assert old.release()
    assert (new.inflight, new.encoding) == (before, before)
    decision.ticket.release()
    assert new.inflight == before - 1


def test_a_ticket_taken_while_draining_starts_is_released_into_a_worker_that_stays_out():
    pool = pool_of("cuda")
    decision = pool.select(ask(K[0]))
    pool.set_draining("cuda0", True)
    decision.ticket.release()
    assert decision.worker.inflight == 0
    assert not decision.worker.eligible
    pool.set_draining("cuda0", False)
    assert pool.select(ask(K[0])).worker.inflight == 1


def test_a_dry_run_takes_nothing_and_changes_no_turn():
    pool = pool_of("cuda", "cuda", settings=PoolSettings(policy="round-robin"))
    dry = [pool.select(ask(dry_run=True)) for _ in range(3)]
    assert {d.worker.id for d in dry} == {"cuda0"}
    assert all(d.ticket is None for d in dry)
    assert pool.select(ask()).worker.id == "cuda0"
    assert pool.select(ask()).worker.id == "cuda1"


# -- who can be chosen


def test_each_way_of_having_nobody_is_told_apart_and_says_what_to_do():
    pool = pool_of()
    with pytest.raises(NoEligibleWorker, match="register one") as caught:
        pool.select(ask(K[0]))
    assert (caught.value.kind, caught.value.retryable) == ("empty_pool", False)

    pool.add_worker(WorkerSpec("a", "http://a.invalid", max_inflight=1))
    with pytest.raises(NoEligibleWorker, match="no worker is ready") as caught:
        pool.select(ask(K[0]))
    assert (caught.value.kind, caught.value.retryable) == ("all_down", True)

    pool.set_ready("a", True)
    with pytest.raises(NoEligibleWorker, match="already failed") as caught:
        pool.select(ask(K[0], exclude=frozenset({"a"})))
    assert caught.value.kind == "all_excluded"

    pool.select(ask(K[0]))
    with pytest.raises(NoEligibleWorker, match="max_inflight") as caught:
        pool.select(ask(K[0]))
    assert caught.value.kind == "all_busy"


def test_waiters_hear_when_a_worker_becomes_eligible_again():
    pool = pool_of("cuda", max_inflight=1)
    heard = []
    pool.on_capacity.append(lambda: heard.append(pool.select(ask(K[1]))))
    first = pool.select(ask(K[0]))
    first.ticket.release()  # the waiter takes the slot in the very same moment
    assert len(heard) == 1
    assert first.worker.inflight == 1
    assert first.ticket.release() is False


def test_a_worker_added_again_keeps_its_load_and_keys_and_takes_the_new_settings():
    pool = pool_of("cuda", max_inflight=1)
    pool.apply_delta("cuda0", K[:2], [])
    decision = pool.select(ask(K[5]))
    heard = []
    pool.on_capacity.append(lambda: heard.append(1))
    again = pool.add_worker(WorkerSpec("cuda0", "http://new.invalid", "cpu", 2.0, 3))
    assert again is decision.worker
    assert (again.url, again.device_class, again.inflight, again.key_count) == ("http://new.invalid", "cpu", 1, 2)
    assert heard == [1]
    assert pool.select(ask(*K[:2])).reason == Reason.FULL_HIT


# -- keys


def test_nobody_sees_half_a_fill_and_everybody_sees_all_of_it_at_once():
    pool = pool_of("cuda", "cuda")
    pool.apply_delta("cuda0", K[:3], [])
    fill = pool.begin_fill("cuda0")
    fill.add(K[2:5])
    assert [pool.holds("cuda0", key) for key in K[:5]] == [True, True, True, False, False]
    assert pool.select(ask(*K[:3])).reason == Reason.FULL_HIT
    pool.apply_delta("cuda0", [], [K[0]])
    fill.add(K[5:6])
    assert fill.key_count == 4
    digest = fill.digest
    assert fill.commit()
    assert [pool.holds("cuda0", key) for key in K[:6]] == [False, False, True, True, True, True]
    assert (pool.digest("cuda0"), pool.key_count("cuda0")) == (digest, 4)
    assert pool.select(ask(*K[2:6])).worker.id == "cuda0"
    assert pool.select(ask(K[1])).reason == Reason.MISS
    while pool.sweep(10):
        pass
    assert pool.index_keys == 4


@pytest.mark.parametrize("end", ["clear", "remove", "another"])
def test_a_fill_ends_with_what_it_was_for(end):
    pool = pool_of("cuda")
    fill = pool.begin_fill("cuda0")
    fill.add(K[:3])
    {
        "clear": lambda: pool.clear("cuda0"),
        "remove": lambda: pool.remove_worker("cuda0"),
        "another": lambda: pool.begin_fill("cuda0"),
    }[end]()
    fill.add(K[3:4])
    assert not fill.commit()
    fill.abort()
    while pool.sweep(100):
        pass
    assert pool.index_keys == 0


def test_feeding_an_unknown_worker_is_counted_not_raised():
    pool = pool_of()
    pool.apply_delta("x", K[:1], [])
    pool.clear("x")
    pool.set_doubtful("x", True)
    pool.record_encoded("x", [(K[0], 1)])
    fill = pool.begin_fill("x")
    fill.add(K)
    assert not fill.commit()
    assert (fill.key_count, fill.digest, pool.digest("x"), pool.key_count("x")) == (0, 0, 0, 0)
    assert pool.counters["unknown_worker"] == 5
    assert pool.index_keys == 0
    assert not pool.remove_worker("x")


def test_a_worker_over_its_cap_is_marked_and_what_it_has_still_counts():
    pool = pool_of("cuda", settings=PoolSettings(max_keys_per_worker=2))
    pool.apply_delta("cuda0", K[:4], [])
    worker = pool.get("cuda0")
    assert worker.truncated and not worker.doubtful
    assert pool.counters["refused_worker_cap"] == 2
    assert pool.select(ask(*K[:2])).reason == Reason.FULL_HIT
    assert pool.select(ask(*K[:3])).reason == Reason.PARTIAL_HIT
    pool.clear("cuda0")
    assert not worker.truncated
    fill = pool.begin_fill("cuda0")
    fill.add(K[:3])
    fill.commit()
    assert worker.truncated


def test_a_full_index_takes_no_new_keys_until_it_is_swept():
    pool = pool_of("cuda", "cuda", settings=PoolSettings(max_keys=3))
    pool.apply_delta("cuda0", K[:3], [])
    pool.apply_delta("cuda1", K[2:6], [])
    assert pool.key_count("cuda1") == 1
    assert pool.counters["refused_pool_cap"] == 3
    pool.remove_worker("cuda0")
    while pool.sweep(100):
        pass
    pool.apply_delta("cuda1", K[3:6], [])
    assert pool.key_count("cuda1") == 3


def test_a_pool_takes_no_more_workers_than_it_may():
    pool = pool_of("cuda", settings=PoolSettings(max_workers=1))
    with pytest.raises(PoolFull, match="max_workers"):
        pool.add_worker(WorkerSpec("other", "http://other.invalid"))
    assert pool.counters["refused_worker"] == 1
    pool.remove_worker("cuda0")
    pool.add_worker(WorkerSpec("other", "http://other.invalid"))


def test_a_caller_who_never_sweeps_does_not_make_the_masks_grow_for_ever():
    pool = pool_of("cuda", settings=PoolSettings(max_workers=2))
    for i in range(500):
        pool.apply_delta("cuda0", [i.to_bytes(16, "big")], [])
        pool.clear("cuda0")
    assert pool._index.slots < 100
    assert pool.counters["forced_sweep"] > 0


def test_the_index_is_invisible_to_the_garbage_collector():
    pool = pool_of("cuda")
    gc.collect()
    before = len(gc.get_objects())
    pool.apply_delta("cuda0", [random.Random(i).randbytes(16) for i in range(5000)], [])
    gc.collect()
    assert len(gc.get_objects()) - before < 500


# -- decisions


def test_a_record_is_json_and_shows_the_state_of_the_moment_it_was_made():
    pool = pool_of("cuda", "cuda", "cpu")
    pool.apply_delta("cuda1", K[:2], [])
    pool.apply_delta("cpu2", K[:1], [])
    pool.select(ask(*K[:2]))
    decision = pool.select(ask(*K[:2], request_id="r7", exclude=frozenset({"cpu2"})))
    pool.remove_worker("cuda1")
    pool.add_worker(WorkerSpec("newcomer", "http://n.invalid"))
    record = json.loads(json.dumps(decision.record()))
    assert {name: record[name] for name in ("id", "pool", "request_id", "at", "worker", "reason", "policy")} == {
        "id": 2,
        "pool": "p",
        "request_id": "r7",
        "at": 12.5,
        "worker": "cuda1",
        "reason": "full_hit",
        "policy": "device-aware-weighted",
    }
    assert record["inputs"] == {
        "keys": [K[0].hex(), K[1].hex()],
        "items": 2,
        "unkeyed": 0,
        "exclude": ["cpu2"],
        "dry_run": False,
    }
    first, second = record["candidates"]
    assert first == {
        "worker": "cuda1",
        "class": "gpu",
        "inflight": 1,
        "keys_held": 2,
        "doubtful": False,
        "predicted": False,
        "chosen": True,
    }
    assert (second["worker"], second["inflight"], second["keys_held"]) == ("cuda0", 0, 0)
    assert record["ineligible_holders"] == ["cpu2"]
    assert record["holders"] == [
        {"key": K[0].hex(), "workers": ["cuda1", "cpu2"], "doubtful": [], "more": 0},
        {"key": K[1].hex(), "workers": ["cuda1"], "doubtful": [], "more": 0},
    ]
    pool.set_doubtful("cpu2", True)
    doubted = pool.select(ask(K[0], dry_run=True)).record()["holders"]
    assert doubted == [{"key": K[0].hex(), "workers": ["cpu2"], "doubtful": ["cpu2"], "more": 0}]
    assert "hold all 2 keys" in record["why"]


def test_a_record_shows_at_most_sixteen_candidates():
    pool = pool_of(*["cuda"] * 40)
    assert len(pool.select(ask(K[0])).record()["candidates"]) == 16


def test_the_log_keeps_the_latest_and_finds_by_id_and_filters():
    ids = count(1)
    pools = [Pool(name, clock=lambda: 0.0, ids=ids) for name in ("one", "two")]
    log = DecisionLog(5)
    for n in range(4):
        for pool in pools:
            pool.add_worker(WorkerSpec("a", "http://a.invalid"))
            pool.set_ready("a", True)
            log.add(pool.select(ask(K[n], request_id=f"r{n}")))
    assert len(log) == 5
    assert [d.id for d in log] == [4, 5, 6, 7, 8]
    assert log.get(3) is None
    assert log.get(8).request_id == "r3"
    assert [d.id for d in log.latest(2)] == [8, 7]
    assert [d.id for d in log.latest(9, {"pool": "one"})] == [7, 5]
    assert [d.id for d in log.latest(9, {"request_id": "r2", "reason": "miss"})] == [6, 5]
    assert [d.id for d in log.latest(9, lambda d: d.id == 4)] == [4]
    with pytest.raises(ValueError, match="filtered by colour"):
        log.latest(1, {"colour": "red"})


def test_the_log_keeps_a_bounded_number_of_keys():
    pool = pool_of("cuda")
    log = DecisionLog(100, max_keys=6)
    for n in range(1, 4):
        log.add(pool.select(ask(*K[:n])))
    assert [d.id for d in log] == [1, 2, 3], "1 + 2 + 3 keys"
    log.add(pool.select(ask(K[0])))
    assert [d.id for d in log] == [2, 3, 4]
    many = tuple(n.to_bytes(16, "big") for n in range(20))
    log.add(pool.select(ask(*many)))
    assert [d.id for d in log] == [5], "the latest is always there"


# -- settings


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda", "gpu"),
        ("cuda:3", "gpu"),
        ("", "gpu"),
        ("xpu", "gpu"),
        ("cpu", "cpu"),
        ("CPU:0", "cpu"),
        ("cpux", "gpu"),
    ],
)
def test_a_device_is_a_cpu_only_if_it_says_so(device, expected):
    assert device_class(device) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [(None, 8), ("", 8), ("0", 8), ("abc", 8), ("2.5", 8), ("-3", 8), ("1", 1), (" 16 ", 16)]
)
def test_the_ratio_of_the_environment_is_read_as_the_reference_reads_it(text, expected):
    assert parse_ratio(text) == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ratio": 0}, "ratio"),
        ({"full_hit_prefer": "cpu"}, "prefer"),
        ({"bounded_load": 1.0}, "bounded_load"),
        ({"max_keys": 0}, "max_keys"),
        ({"ring_points": 0}, "ring_points"),
        ({"parity": "sglang"}, "neither"),
        ({"classes": (DeviceClass("a", 0, ()),)}, "classes.a.ratio"),
        ({"classes": (DeviceClass("a", 1, ()), DeviceClass("a", 2, ()))}, "twice"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        PoolSettings(**wrong)


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="device-aware-weighted"):
        Pool("p", PoolSettings(policy="best"), clock=lambda: 0.0)


@pytest.mark.parametrize("wrong", [{"id": ""}, {"weight": 0}, {"weight": float("nan")}, {"max_inflight": 0}])
def test_a_worker_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError):
        WorkerSpec(**{"id": "a", "url": "http://a.invalid", **wrong})


def test_a_request_whose_encoding_is_over_keeps_its_slot_but_not_its_place_in_the_budget():
    pool = pool_of("cuda", "cpu", settings=PoolSettings(ratio=2))
    held = [pool.select(ask()) for _ in range(2)]
    assert [d.worker.device for d in held] == ["cuda", "cuda"]
    gpu = pool.get("cuda0")
    assert [d.ticket.encoded() for d in held] == [True, True] and not held[0].ticket.encoded()
    assert (gpu.inflight, gpu.encoding) == (2, 0)
    assert pool.select(ask()).worker is gpu, "nothing encodes there, so the CPU is not needed"
    assert held[0].ticket.release() and not held[0].ticket.encoded()
    assert (gpu.inflight, gpu.encoding) == (2, 1)


def test_the_end_of_an_encoding_on_a_removed_worker_touches_nobody_else():
    pool = pool_of("cuda")
    old = pool.select(ask()).ticket
    pool.remove_worker("cuda0")
    pool.add_worker(WorkerSpec("cuda0", "", "cuda"))
    pool.set_ready("cuda0", True)
    new = pool.select(ask()).ticket
    assert old.encoded() and old.release() and (new.worker.inflight, new.worker.encoding) == (1, 1)
