from __future__ import annotations

import base64
import io
import itertools

import pytest
from PIL import Image

from fullhit.lab.images import PictureSize, Undecodable, data_uri, decode_picture, draw_jpeg, from_base64
from fullhit.lab.workload import SlidingWindow


def test_the_same_number_draws_the_same_picture_and_another_one_another() -> None:
    size = PictureSize(200, 100)
    assert draw_jpeg(7, size) == draw_jpeg(7, size)
    assert draw_jpeg(7, size) != draw_jpeg(8, size)


def test_a_drawn_picture_is_a_real_jpeg_of_tens_of_kilobytes() -> None:
    content = draw_jpeg(1)
    with Image.open(io.BytesIO(content)) as picture:
        assert (picture.format, picture.size) == ("JPEG", (1200, 540))
    assert 20_000 < len(content) < 150_000
    assert decode_picture(content) == (1200, 540)


def test_data_uri_and_bare_base64_come_back_as_the_same_bytes() -> None:
    assert from_base64(data_uri(b"abc")) == b"abc"
    assert from_base64(base64.b64encode(b"abc").decode()) == b"abc"


@pytest.mark.parametrize(
    "text", ["data:image/png,abc", "data:image/png;base64,***", "not base64 at all", "data:;base64"]
)
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(Undecodable):
        from_base64(text)


def test_a_truncated_picture_is_undecodable() -> None:
    content = draw_jpeg(1, PictureSize(200, 100))
    with pytest.raises(Undecodable, match="cannot decode"):
        decode_picture(content[: len(content) // 2])
    with pytest.raises(Undecodable, match="no known image format"):
        decode_picture(b"GIF87 but not really")


@pytest.mark.parametrize("text", ["12x", "x12", "axb", "1200", "8x8", "20000x100", "-5x100"])
def test_picture_sizes_are_checked(text: str) -> None:
    with pytest.raises(ValueError, match="picture"):
        PictureSize.parse(text)


def test_the_window_slides_by_one_picture_a_turn() -> None:
    load = SlidingWindow(users=30, turns=8, window=5)
    shown = [load.pictures(3, turn) for turn in range(8)]
    for before, after in itertools.pairwise(shown):
        assert before[1:] == after[:-1]
    everything = {number for user in range(30) for turn in range(8) for number in load.pictures(user, turn)}
    assert len(everything) == load.distinct_images == 360
    assert (load.requests, load.images) == (240, 1200)


def test_another_seed_shows_other_pictures() -> None:
    assert not set(SlidingWindow(seed=1).pictures(0, 0)) & set(SlidingWindow(seed=2).pictures(0, 0))
