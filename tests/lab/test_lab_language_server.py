from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit.lab.embedding import PartHeader, base_request_id, decode_header
from fullhit.lab.language_server import Aggregation, LanguageServerSettings, RequestFailed, split

COUNTS = st.dictionaries(st.sampled_from(["IMAGE", "VIDEO", "AUDIO"]), st.integers(0, 9), min_size=1)


@given(counts=COUNTS, urls=st.integers(1, 7), seed=st.integers())
def test_split_loses_nothing_keeps_the_order_and_numbers_parts_by_url(
    counts: dict[str, int], urls: int, seed: int
) -> None:
    items = {modality: [f"{modality}-{index}" for index in range(count)] for modality, count in counts.items()}
    parts = split(items, urls, random.Random(seed))
    assert [part.part_idx for part in parts] == list(range(len(parts)))
    for modality, media in items.items():
        mine = [part for part in parts if part.modality == modality]
        assert [item for part in mine for item in part.items] == media
        assert [part.url_index for part in mine] == sorted({part.url_index for part in mine})
        sizes = [len(part.items) for part in mine]
        assert not sizes or max(sizes) - min(sizes) <= 1
    modalities = [part.modality for part in parts]
    assert modalities == sorted(modalities, key=["IMAGE", "VIDEO", "AUDIO"].index)


def test_with_one_url_all_images_are_one_part() -> None:
    (part,) = split({"IMAGE": ["a", "b", "c"]}, 1, random.Random(0))
    assert (part.part_idx, part.items) == (0, ("a", "b", "c"))


def test_with_enough_aliases_each_image_is_a_part_and_the_set_of_aliases_varies() -> None:
    rng = random.Random(0)
    chosen = set()
    for _ in range(50):
        parts = split({"IMAGE": ["a", "b"]}, 5, rng)
        assert [part.items for part in parts] == [("a",), ("b",)]
        chosen.add(tuple(part.url_index for part in parts))
    assert len(chosen) > 5


def test_parts_in_any_order_of_arrival_make_the_embedding_in_prompt_order() -> None:
    aggregation = Aggregation("r")
    assert not aggregation.add(PartHeader("r_local_part_2", 2, 3), b"C")
    assert not aggregation.add(PartHeader("r_local_part_0", 0, 3), b"A")
    assert repr(aggregation) == "<Aggregation r [0, 2] of 3>"
    assert aggregation.add(PartHeader("r_local_part_1", 1, 3), b"B")
    assert aggregation.embedding() == b"ABC"


def test_a_second_copy_of_a_part_fails_the_request() -> None:
    aggregation = Aggregation("r")
    aggregation.add(PartHeader("r_local_part_0", 0, 2), b"A")
    with pytest.raises(RequestFailed, match="duplicate embedding part 0") as failure:
        aggregation.add(PartHeader("r_local_part_0", 0, 2), b"A")
    assert failure.value.would_stop_server


def test_an_error_part_fails_the_request_with_its_code() -> None:
    with pytest.raises(RequestFailed, match="bad picture") as failure:
        Aggregation("r").add(PartHeader("r_local_part_0", 0, 1, error_message="bad picture", error_code=400), b"")
    assert failure.value.status == 400


@pytest.mark.parametrize("header", [PartHeader("r", 2, 2), PartHeader("r", -1, 2), PartHeader("r", 1, 3)])
def test_a_part_that_does_not_fit_fails_the_request(header: PartHeader) -> None:
    aggregation = Aggregation("r")
    aggregation.add(PartHeader("r", 0, 2), b"A")
    with pytest.raises(RequestFailed, match="does not fit"):
        aggregation.add(header, b"B")


def test_headers_survive_the_wire_and_foreign_frames_are_refused() -> None:
    header = PartHeader("r_local_part_1", 1, 2, shape=(64, 512), item_rows=(64,))
    frames = header.frames(b"payload")
    assert decode_header(frames[0]) == header
    assert frames[1] == b"payload"
    for frame in (b"", b"\x80\x04pickle", b"\x81\xa1a\x01"):
        with pytest.raises(ValueError, match="not a part header"):
            decode_header(frame)


def test_the_request_id_is_what_stands_before_the_last_part_mark() -> None:
    assert base_request_id("abc_local_part_3") == "abc"
    assert base_request_id("a_local_part_b_local_part_0") == "a_local_part_b"
    assert base_request_id("first-generation") == "first-generation"


@pytest.mark.parametrize(
    "settings", [{"encoder_urls": ()}, {"encoder_urls": ("http://x.invalid",), "backend": "carrier-pigeon"}]
)
def test_impossible_settings_say_what_is_wrong(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"encoder_urls|backend"):
        LanguageServerSettings(**settings)  # type: ignore[arg-type]
