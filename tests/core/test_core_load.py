"""Order by load and the ring."""

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from fullhit.core import WorkerSpec
from fullhit.core.load import Group, LevelBuckets, WeightedOrder, levels_of
from fullhit.core.ring import Ring
from fullhit.core.worker import Worker


def place_of(key):
    return (xxh3_64_intdigest(key) >> 11) * 2.0**-53


def crew(n, weight=lambda i: 1.0):
    workers = [Worker(WorkerSpec(f"w{i}", f"w{i}", weight=weight(i)), "gpu", i) for i in range(n)]
    return workers, list(workers)


def group_of(workers):
    group = Group("gpu", 1, count())
    for worker in workers:
        group.enroll(worker.weight)
    for worker in workers:
        group.join(worker)
    return group


def move(worker, by):
    worker.inflight += by
    worker.group.inflight += by
    worker.group.order.shift(worker)


@pytest.mark.parametrize("weight", [lambda i: 1.0, lambda i: (1.0, 2.0, 0.5)[i % 3]], ids=["levels", "weights"])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 19), st.sampled_from([1, 1, -1])), max_size=120), st.integers(1, 2**20 - 1))
def test_both_orders_find_the_least_loaded_of_any_subset(weight, steps, mask):
    workers, by_slot = crew(20, weight)
    group = group_of(workers)
    for i, by in steps:
        if workers[i].inflight + by >= 0:
            move(workers[i], by)

    def load(worker):
        return worker.inflight / worker.weight

    members = [w for w in workers if mask >> w.slot & 1]
    least = min(map(load, members))
    tied = [w for w in members if load(w) == least]
    assert group.order.least(mask, by_slot) == sum(w.bit for w in tied)
    assert group.pick(mask, by_slot) is min(tied, key=lambda w: w.stamp)
    assert group.order.first() is min(workers, key=lambda w: (load(w), w.stamp))
    assert group.order.lowest() == sum(w.bit for w in workers if load(w) == min(map(load, workers)))
    for bound in (0.0, 0.5, 1.0, 3.0):
        assert group.order.below(bound) == sum(w.bit for w in workers if load(w) < bound)
    pictured = {w: n for n, part in levels_of(group.order.picture()) for w in workers if part & w.bit}
    assert all(pictured[w] == w.inflight for w in pictured)
    assert len(pictured) >= 16


def test_ties_are_taken_in_turn():
    workers, _ = crew(5)
    group = group_of(workers)
    taken = []
    for _ in range(12):
        worker = group.order.first()
        taken.append(worker.id)
        move(worker, 1)
        move(worker, -1)
    assert taken == [f"w{i % 5}" for i in range(12)]


def test_levels_do_not_outlive_the_load_that_made_them():
    workers, _ = crew(2)
    group = group_of(workers)
    for _ in range(200):
        move(workers[0], 1)
    assert workers[0].inflight == 200
    assert len(list(levels_of(group.order.picture()))) <= 64
    for _ in range(200):
        move(workers[0], -1)
    assert len(group.order.picture()) == 1
    group.leave(workers[0])
    group.leave(workers[1])
    assert (group.n, group.mask, group.inflight, list(group.order)) == (0, 0, 0, [])


def test_the_kind_of_order_follows_all_members_even_those_that_cannot_be_chosen_now():
    workers, _ = crew(3)
    group = group_of(workers)
    assert isinstance(group.order, LevelBuckets)
    group.enroll(4.0)
    assert isinstance(group.order, WeightedOrder)
    assert [w.id for w in group.order] == ["w0", "w1", "w2"]
    group.dismiss(4.0)
    assert isinstance(group.order, LevelBuckets)
    assert [w.id for w in group.order] == ["w0", "w1", "w2"]


def ring_of(workers):
    ring = Ring(16)
    for worker in workers:
        ring.add(worker)
    return ring


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**60 - 1), st.integers(0, 2**60 - 1))
def test_the_ring_gives_a_key_the_same_place_by_walking_and_by_asking(key, some, more):
    workers, by_slot = crew(60)
    ring = ring_of(workers)
    wide = some | more | 1
    chosen = ring.nearest(key, wide, by_slot)
    assert chosen.bit & wide
    # whoever else is taken out of the subset, the choice stays
    for narrow in (wide & some | chosen.bit, chosen.bit | 1, chosen.bit):
        assert ring.nearest(key, narrow, by_slot) is chosen


def test_a_key_behind_the_last_point_goes_round_to_the_first():
    workers, by_slot = crew(40)
    ring = ring_of(workers)
    ends = sorted((point, w) for w in workers for point in list(w.places)[:-1])
    first, last = ends[0][1], ends[-1][0]
    keys = (i.to_bytes(16, "big") for i in count())
    behind = next(key for key in keys if place_of(key) > last)
    assert ring.nearest(behind, 2**40 - 1, by_slot) is first
    other = next(w for w in workers if w is not first)
    pair = first.bit | other.bit
    nearest = min((first, other), key=lambda w: min((p - place_of(behind)) % 1.0 for p in list(w.places)[:-1]))
    assert ring.nearest(behind, pair, by_slot) is nearest


def test_removing_a_worker_moves_only_its_own_keys_and_adding_it_again_brings_them_back():
    workers, by_slot = crew(40)
    ring = ring_of(workers)
    everybody = 2**40 - 1
    keys = [random.Random(i).randbytes(16) for i in range(300)]
    before = [ring.nearest(key, everybody, by_slot) for key in keys]
    gone = workers[:15]
    for worker in gone:
        everybody ^= worker.bit
        worker.bit = 0
        ring.remove(worker)
    for key, owner in zip(keys, before, strict=True):
        now = ring.nearest(key, everybody, by_slot)
        assert now is owner if owner not in gone else now not in gone
    for worker in gone:
        worker.bit = 1 << worker.slot
        everybody |= worker.bit
        ring.add(worker)
    assert [ring.nearest(key, everybody, by_slot) for key in keys] == before
    assert len(ring) == 40


def test_a_heavier_worker_gets_more_of_the_ring():
    workers, by_slot = crew(20)
    ring = ring_of(workers)
    keys = [random.Random(i).randbytes(16) for i in range(2000)]

    def share():
        return sum(ring.nearest(key, 2**20 - 1, by_slot) is workers[0] for key in keys)

    light = share()
    workers[0].weight = 8.0
    ring.reweigh(workers[0])
    heavy = share()
    assert heavy > 2 * light
    workers[0].weight = 1.0
    ring.reweigh(workers[0])
    assert share() == light
