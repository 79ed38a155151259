"""The embedding cache: least recently used leaves first, and every change is reported in order."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit_publisher import EmbeddingCache, PutResult


class Tensor:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Listener:
    """What somebody believes who hears only the changes."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], list[str]]] = []
        self.keys: set[str] = set()

    def __call__(self, added: list[str], removed: list[str]) -> None:
        assert not set(added) & self.keys, "a key that was there already was reported as added"
        assert set(removed) <= self.keys, "a key that was not there was reported as removed"
        self.keys = (self.keys - set(removed)) | set(added)
        self.calls.append((added, removed))


def test_the_least_recently_used_entries_make_room() -> None:
    listener = Listener()
    cache: EmbeddingCache[bytes] = EmbeddingCache(10, on_change=listener)
    assert cache.put("a", b"1234") == PutResult(True, ["a"], [])
    assert cache.put("b", b"1234") == PutResult(True, ["b"], [])
    assert cache.get("a") == b"1234"
    assert cache.put("c", b"1234") == PutResult(True, ["c"], ["b"])
    assert cache.put("d", b"1234567890") == PutResult(True, ["d"], ["a", "c"])
    assert repr(cache) == "<EmbeddingCache 1 keys, 10 of 10 bytes>"
    assert listener.calls == [(["a"], []), (["b"], []), (["c"], ["b"]), (["d"], ["a", "c"])]


def test_a_value_larger_than_the_cache_is_not_stored() -> None:
    listener = Listener()
    cache: EmbeddingCache[bytes] = EmbeddingCache(4, listener)
    cache.put("a", b"12")
    assert cache.put("b", b"12345") == PutResult(False, [], [])
    assert cache.put("a", b"12345") == PutResult(False, [], [])
    assert cache.keys() == ["a"] and cache.get("a") == b"12" and cache.used_bytes == 2
    assert listener.calls == [(["a"], [])]


def test_replacing_a_value_adds_nothing_but_may_evict() -> None:
    listener = Listener()
    cache: EmbeddingCache[bytes] = EmbeddingCache(10, listener)
    cache.put("a", b"1")
    cache.put("b", b"1")
    assert cache.put("a", b"12") == PutResult(True, [], [])
    assert cache.put("a", b"1234567890") == PutResult(True, [], ["b"])
    assert listener.calls == [(["a"], []), (["b"], []), ([], ["b"])]
    assert (cache.used_bytes, len(cache)) == (10, 1)


def test_hits_and_misses_are_counted_and_not_reported() -> None:
    listener = Listener()
    cache: EmbeddingCache[bytes] = EmbeddingCache(10, listener)
    cache.put("a", b"1")
    assert cache.get("a") == b"1" and cache.get("b") is None and "a" in cache and "b" not in cache
    assert (cache.hits, cache.misses) == (1, 1)
    assert len(listener.calls) == 1


def test_pop_and_clear_report_what_left() -> None:
    listener = Listener()
    cache: EmbeddingCache[bytes] = EmbeddingCache(10, listener)
    for name in "abc":
        cache.put(name, b"12")
    assert cache.pop("b") == b"12" and cache.pop("b") is None
    cache.clear()
    cache.clear()
    assert listener.calls[3:] == [([], ["b"]), ([], ["a", "c"])]
    assert (cache.used_bytes, cache.capacity_bytes, listener.keys) == (0, 10, set())


def test_sizes_come_from_nbytes_or_from_the_function_given() -> None:
    tensors: EmbeddingCache[Tensor] = EmbeddingCache(100)
    tensors.put("a", Tensor(60))
    assert tensors.used_bytes == 60
    assert tensors.put("b", Tensor(60)).removed == ["a"]
    handles: EmbeddingCache[int] = EmbeddingCache(100, size_of=lambda value: value)
    handles.put("a", 99)
    assert handles.used_bytes == 99
    views: EmbeddingCache[memoryview] = EmbeddingCache(100)
    views.put("a", memoryview(b"123"))
    assert views.used_bytes == 3


def test_empty_values_cannot_pile_up() -> None:
    cache: EmbeddingCache[bytes] = EmbeddingCache(3)
    for name in "abcdef":
        cache.put(name, b"")
    assert cache.keys() == ["d", "e", "f"]


def test_a_cache_without_capacity_stores_nothing() -> None:
    assert not EmbeddingCache[bytes](0).put("a", b"").stored
    with pytest.raises(ValueError, match="negative"):
        EmbeddingCache(-1)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        (5, b"", TypeError),
        (b"k", b"", TypeError),
        ("k" * 1025, b"", ValueError),
        ("\ud800", b"", ValueError),
        ("k", "text has no size", TypeError),
        ("k", Tensor(-1), ValueError),
    ],
)
def test_what_cannot_be_cached_is_refused_and_changes_nothing(key: str, value: object, error: type) -> None:
    cache: EmbeddingCache[object] = EmbeddingCache(10)
    cache.put("a", b"1")
    with pytest.raises(error):
        cache.put(key, value)
    assert (cache.keys(), cache.used_bytes) == (["a"], 1)


def test_a_listener_hears_what_is_held_and_then_every_change() -> None:
    cache: EmbeddingCache[bytes] = EmbeddingCache(10)
    cache.put("a", b"1")
    listener = Listener()
    cache.add_listener(listener)
    cache.put("b", b"1")
    cache.remove_listener(listener)
    cache.remove_listener(listener)
    cache.put("c", b"1")
    assert listener.calls == [(["a"], []), (["b"], [])]


def test_a_failing_listener_does_not_fail_the_encode(caplog: pytest.LogCaptureFixture) -> None:
    def broken(added: list[str], removed: list[str]) -> None:
        raise RuntimeError("boom")

    listener = Listener()
    cache: EmbeddingCache[bytes] = EmbeddingCache(10, broken)
    cache.add_listener(listener)
    assert cache.put("a", b"1").stored
    assert listener.keys == {"a"}
    assert "listener of the embedding cache failed" in caplog.text


operations = st.lists(
    st.tuples(st.sampled_from(["put", "get", "pop"]), st.sampled_from("abcdef"), st.integers(0, 7)),
    max_size=40,
)


@given(st.integers(0, 12), operations)
def test_it_behaves_as_a_naive_lru(capacity: int, steps: list[tuple[str, str, int]]) -> None:
    listener = Listener()
    cache: EmbeddingCache[Tensor] = EmbeddingCache(capacity, listener)
    model: OrderedDict[str, int] = OrderedDict()
    for what, key, number in steps:
        if what == "put":
            result = cache.put(key, Tensor(number))
            size = max(number, 1)
            assert result.stored == (size <= capacity)
            if result.stored:
                model.pop(key, None)
                while sum(model.values()) + size > capacity:
                    model.popitem(last=False)
                model[key] = size
        elif what == "get":
            assert (cache.get(key) is not None) == (key in model)
            if key in model:
                model.move_to_end(key)
        else:
            assert (cache.pop(key) is not None) == (model.pop(key, None) is not None)
        assert cache.keys() == list(model)
        assert cache.used_bytes == sum(model.values())
        assert listener.keys == set(model)


def test_threads_cannot_reorder_what_listeners_hear() -> None:
    listener = Listener()  # asserts on each call that the change fits what it heard before
    cache: EmbeddingCache[bytes] = EmbeddingCache(20, listener)
    barrier = threading.Barrier(8)

    def work(seed: int) -> None:
        barrier.wait()
        for step in range(400):
            key = str((step * 7 + seed * 13) % 40)
            if step % 5 == 0:
                cache.pop(key)
            else:
                cache.put(key, b"x")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert listener.keys == set(cache.keys())
    assert cache.used_bytes == len(cache) <= 20
