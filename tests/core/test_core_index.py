"""The index: holder sets, digests, limits, and sweeping while everything moves."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from fullhit.core.index import Index, key_hash
from fullhit.core.look import most_held
from fullhit.core.predicted import PredictedCache
from fullhit_publisher import keys as publisher_keys

KEYS = [random.Random(i).randbytes(16) for i in range(12)]


def digest(keys):
    out = 0
    for key in keys:
        out ^= xxh3_64_intdigest(key)
    return out


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.lists(st.sampled_from(KEYS), max_size=6)),
        st.tuples(st.just("remove"), st.integers(0, 3), st.lists(st.sampled_from(KEYS), max_size=6)),
        st.tuples(st.just("replace"), st.integers(0, 3), st.just([])),
        st.tuples(st.just("sweep"), st.integers(1, 200), st.just([])),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(operations)
def test_owners_that_move_between_slots_hold_exactly_what_they_were_given(steps):
    index = Index(1000, 1000)
    slots = [index.allocate() for _ in range(4)]
    model = [set() for _ in slots]
    for kind, n, keys in steps:
        if kind == "add":
            index.add(slots[n], keys)
            model[n] |= set(keys)
        elif kind == "remove":
            index.remove(slots[n], keys)
            model[n] -= set(keys)
        elif kind == "replace":
            index.retire(slots[n])
            slots[n] = index.allocate()
            model[n] = set()
        else:
            index.sweep(n)
        for slot, held in zip(slots, model, strict=True):
            assert index.counts[slot] == len(held)
            assert index.digests[slot] == digest(held)
            assert {key for key in KEYS if index.holds(slot, key)} == held
        assert index.entries == sum(map(len, model))
    while index.sweep(7):
        pass
    assert index.retired == 0
    assert index.keys == len(set().union(*model))
    assert index.slots <= 4 + len(steps)


def test_a_slot_is_not_given_out_again_before_a_whole_sweep_has_passed():
    index = Index(10_000, 10_000)
    slot = index.allocate()
    index.add(slot, [random.Random(i).randbytes(16) for i in range(2000)])
    index.retire(slot)
    more = index.sweep(10)
    seen = set()
    while more:
        fresh = index.allocate()
        seen.add(fresh)
        index.retire(fresh)  # empty, so free at once
        more = index.sweep(500)
    assert slot not in seen
    assert index.keys == 0
    assert index.allocate() == slot


def test_a_slot_retired_in_the_middle_of_a_sweep_waits_for_the_next_one():
    index = Index(10_000, 10_000)
    first, second = index.allocate(), index.allocate()
    keys = [random.Random(i).randbytes(16) for i in range(1000)]
    index.add(first, keys)
    index.add(second, keys)
    index.retire(first)
    assert index.sweep(400)
    index.retire(second)
    while index.sweep(400) and index.retired & index.bits[first]:
        assert index.allocate() not in (first, second)
    assert index.keys <= 1000
    while index.sweep(400):
        pass
    assert index.keys == 0


def test_keys_over_the_limit_of_one_slot_are_left_out_and_counted():
    index = Index(100, 3)
    slot = index.allocate()
    index.add(slot, KEYS[:5])
    assert index.counts[slot] == 3
    assert index.truncated[slot]
    assert index.refused_slot == 2
    index.remove(slot, KEYS[:2])
    index.add(slot, KEYS[5:7])
    assert index.counts[slot] == 3
    assert index.digests[slot] == digest([KEYS[2], *KEYS[5:7]])


def test_keys_over_the_limit_of_the_index_are_left_out_but_known_ones_get_more_holders():
    index = Index(3, 100)
    first, second = index.allocate(), index.allocate()
    index.add(first, KEYS[:3])
    index.add(second, KEYS[:5])
    assert index.counts[second] == 3
    assert index.refused_total == 2
    assert index.truncated[second] and not index.truncated[first]
    assert index.keys == 3


def test_equal_holder_sets_share_one_integer_and_colliding_ones_stay_apart():
    index = Index(10_000, 10_000)
    slots = [index.allocate() for _ in range(200)]
    for slot in (150, 180):
        index.add(slots[slot], KEYS)
    masks = [index.mask(key) for key in KEYS]
    assert all(mask is masks[0] for mask in masks)
    for a in range(0, 200, 61):  # bits 61 apart have the same Python hash
        index.add(slots[a], [KEYS[0]])
    assert index.mask(KEYS[0]) == sum({1 << a for a in (0, 61, 122, 183, 150, 180)})


def test_the_digest_is_the_one_the_publisher_computes():
    assert all(key_hash(key) == publisher_keys.key_hash(key) for key in KEYS)
    index = Index(100, 100)
    slot = index.allocate()
    index.add(slot, KEYS)
    assert index.digests[slot] == publisher_keys.digest(KEYS)


@given(st.lists(st.integers(0, 2**9 - 1), max_size=20), st.integers(1, 2**9 - 1))
def test_most_held_counts_all_workers_at_once(masks, tied):
    counts = {bit: sum(1 for mask in masks if mask >> bit & 1) for bit in range(9) if tied >> bit & 1}
    most = max(counts.values())
    assert most_held(masks, tied) == sum(1 << bit for bit, count in counts.items() if count == most)


@given(st.lists(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 12)), max_size=5), max_size=12))
def test_the_predicted_cache_is_an_lru_bounded_by_bytes_and_entries(batches):
    cache = PredictedCache(max_bytes=20, max_entries=4)
    model = {}
    held = set()
    for batch in batches:
        for key, size in batch:
            if size > 20:
                continue
            model.pop(key, None)
            model[key] = size
            while sum(model.values()) > 20 or len(model) > 4:
                del model[next(iter(model))]
        added, removed = cache.admit(batch)
        held -= set(removed)
        held |= set(added)
        assert held == set(model)
        assert len(cache) == len(model)
        assert cache.used_bytes == sum(model.values())


def test_an_item_larger_than_the_predicted_cache_is_not_kept():
    cache = PredictedCache(max_bytes=20, max_entries=4)
    assert cache.admit([(KEYS[0], 21), (KEYS[1], 20)]) == ([KEYS[1]], [])
    assert KEYS[0] not in cache
