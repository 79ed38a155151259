"""Packed keys mean what their texts mean."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit.events.keybatch import FoldedKeys, KeyBatch, PackedKeys, TextKeys
from fullhit_publisher.keys import fold

HEX32 = "0123456789abcdef0123456789abcdef"
strange = st.sampled_from(["g" * 32, HEX32.upper(), " " * 32, "\u00d9" * 16, "é" * 16, "@" * 64, "\u0659" * 16])
digests = st.binary(min_size=16, max_size=16).map(bytes.hex)
texts = st.lists(st.one_of(digests, digests.map(lambda text: text * 2), strange, st.text(max_size=40)), max_size=40)
regular = st.one_of(
    st.lists(st.one_of(digests, strange.filter(lambda text: len(text.encode()) == 32)), min_size=1, max_size=70),
    st.lists(st.one_of(digests.map(lambda text: text * 2), st.just("@" * 64)), min_size=1, max_size=40),
)


def joined(batch: KeyBatch, size: int) -> list[bytes]:
    runs = list(batch.slices(size))
    assert all(0 < len(run) <= size for run in runs)
    return [key for run in runs for key in run]


@given(regular, st.integers(1, 100))
def test_packed_keys_fold_like_their_texts(keys, size):
    batch = PackedKeys.parse(msgspec.msgpack.encode(keys))
    assert batch is not None
    assert len(batch) == len(keys)
    assert joined(batch, size) == [fold(key) for key in keys]
    assert list(batch.all()) == [fold(key) for key in keys]


@given(texts)
def test_what_is_taken_for_packed_is_never_read_wrongly(keys):
    batch = PackedKeys.parse(msgspec.msgpack.encode(keys))
    if batch is not None:
        assert joined(batch, 7) == [fold(key) for key in keys]


@given(st.one_of(st.binary(max_size=200), st.lists(st.integers(0, 255)).map(msgspec.msgpack.encode)))
def test_any_other_bytes_are_not_taken(data):
    batch = PackedKeys.parse(data)
    if batch is not None:
        assert len(data) in {1 + 34 * len(batch), 1 + 66 * len(batch)}


@pytest.mark.parametrize("count", [1, 15, 16, 70_000])
def test_arrays_of_every_length_form_are_read(count):
    keys = [f"{n:032x}" for n in range(count)]
    batch = PackedKeys.parse(msgspec.msgpack.encode(keys))
    assert batch is not None
    assert len(batch.all()) == count
    assert sum(len(run) for run in batch.slices(10**9)) == count


@given(st.lists(digests, max_size=50), st.integers(1, 60))
def test_the_other_batches_give_the_same(keys, size):
    folded = [fold(key) for key in keys]
    assert joined(TextKeys(keys), size) == joined(FoldedKeys(folded), size) == folded
    assert list(TextKeys(keys).all()) == list(FoldedKeys(folded).all()) == folded
