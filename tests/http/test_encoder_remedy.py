"""What can be mended and how: whose fault a refusal is, which picture it was, and the id under which to try again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit.http.encoder.media import parse_encode
from fullhit.http.encoder.remedy import brief, is_media_fault, suspects
from fullhit.http.encoder.rewrite import CannotRewrite, renamed
from fullhit.http.encoder.upstream import Answer, with_id

BROKEN = "data:image/png;base64,aGVsbG8gd29ybGQsIHRoaXMgaXMgbm8gcGljdHVyZQ=="
LOADING = "Bad request error: Failed to process mm items: Error while loading data "


def body_of(*items: object, **fields: object) -> bytes:
    base = {"req_id": "a_local_part_0", "mm_items": items, "num_parts": 1, "part_idx": 0, "modality": "IMAGE"}
    return json.dumps({name: value for name, value in {**base, **fields}.items() if value is not ...}).encode()


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (400, LOADING + "http://h/x.png: 404", True),
        (400, "Encoder media content hash mismatch: expected sha256:0, got sha256:1", True),
        (400, "mock encoder: cannot decode image", True),
        (400, "some other words of another release", True),
        (400, "", True),
        (400, LOADING + "http://h/missing modality?Encoder request is not active: num_parts must be", True),
        (400, "Bad request error: User-supplied hashes length 2 != grid count 1", False),
        (400, "missing or invalid req_id", False),
        (400, "missing or invalid modality", False),
        (400, "unsupported modality: SMELL", False),
        (400, "missing or empty mm_items", False),
        (400, "num_parts must be a positive integer", False),
        (400, "part_idx must be in [0, 2)", False),
        (400, "hashes must be list/scalar, got dict", False),
        (400, "User-supplied hashes length 2 != grid count 1 for req x", False),
        (400, "Encoder request is not active: x", False),
        (500, "Internal encoding error: Failed to process mm items: Error while loading data http://h/x: bomb", True),
        (500, "CUDA out of memory", False),
        (504, LOADING, False),
        (409, LOADING, False),
    ],
)
def test_whose_fault_a_refusal_is(status: int, message: str, expected: bool) -> None:
    assert is_media_fault(status, message, parse_encode(body_of("http://h/x.png"))) is expected


def test_only_pictures_in_a_complete_call_can_be_mended() -> None:
    for body in (
        body_of("http://h/x.mp4", modality="VIDEO"),
        body_of("http://h/x.wav", modality="AUDIO"),
        body_of(),
        body_of("http://h/x.png", num_parts=...),
        body_of("http://h/x.png", part_idx=...),
    ):
        assert not is_media_fault(400, LOADING, parse_encode(body))


@pytest.mark.parametrize(
    ("items", "message", "expected"),
    [
        (["http://h/only.png"], "?", [0]),
        (["http://h/1.png", "http://h/2.png", "http://h/3.png"], "?", [0, 1, 2]),
        (["http://h/1.png", "http://h/2.png", "http://h/3.png"], LOADING + "http://h/2.png: 404", [1]),
        (["http://h/2.png", {"url": "http://h/2.png", "detail": "low"}], LOADING + "http://h/2.png: 404", [0, 1]),
        (["http://h/pic", "http://h/pic2"], LOADING + "http://h/pic2: 404", [1]),
        (["http://h/pic", "http://h/pic2"], LOADING + "http://h/pic: 404", [0]),
        (["http://h/1.png", BROKEN], LOADING + BROKEN + ": cannot identify image file", [1]),
        (["http://h/1.png", BROKEN, {"url": BROKEN}], "?", [1, 2]),
        (["AAAA", "http://h/1.png"], "AAAA is what it said", [0, 1]),
        ([{"pixels": [1]}, "http://h/1.png"], "?", [0, 1]),
    ],
)
def test_which_picture_it_was(items: list[object], message: str, expected: list[int]) -> None:
    assert suspects(body_of(*items), message) == expected


def test_at_the_second_complaint_every_picture_is_suspect() -> None:
    body = body_of("http://h/1.png", "http://h/2.png", "http://h/3.png")
    assert suspects(body, LOADING + "http://h/3.png", {1}, again=True) == [0, 2]
    assert suspects(body, "?", {0, 1, 2}, again=True) == []
    assert suspects(body, LOADING + "http://h/3.png", {1}) == [2], "found by the router itself, no complaint yet"
    assert suspects(body, "?", {1}) == [0, 2]


TEXT = st.text(max_size=8) | st.sampled_from(["req_id", '"req_id":', "a\\", "[", '{"req_id":"x"}'])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXT, VALUES, max_size=4), st.dictionaries(TEXT, VALUES, max_size=4), TEXT, st.booleans())
def test_another_id_changes_nothing_else(
    before: dict[str, object], after: dict[str, object], req_id: str, indent: bool
) -> None:
    fields = {**before, "req_id": req_id, **{name: value for name, value in after.items() if name != "req_id"}}
    body = json.dumps(fields, indent=1 if indent else None).encode()
    new = renamed(body, "fresh_local_part_0r1")
    assert json.loads(new) == fields | {"req_id": "fresh_local_part_0r1"}
    assert len(new) - len(body) == len('"fresh_local_part_0r1"') - len(json.dumps(req_id))


def test_every_req_id_of_a_body_with_several_is_changed() -> None:
    body = b'{"req_id":7, "req_id" :\n"a", "x":{"req_id":"b"}, "y":["req_id","c"], "req_id":"d"}'
    assert renamed(body, "n") == b'{"req_id":7, "req_id" :\n"n", "x":{"req_id":"b"}, "y":["req_id","c"], "req_id":"n"}'


@pytest.mark.parametrize("body", [b'{"x":"req_id"}', b'{"req\\u005fid":"a"}', b'{"x":{"req_id":"a"}}'])
def test_a_body_whose_id_is_not_found_is_left_alone(body: bytes) -> None:
    with pytest.raises(CannotRewrite):
        renamed(body, "n")


def test_answers_come_back_under_the_id_that_the_caller_knows() -> None:
    answer = Answer(400, b"", b'{"req_id":"\\"a_local_part_0r12","message":"\\"a_local_part_0r12 failed"}')
    back = with_id(answer, '"a_local_part_0r12', '"a_local_part_0')
    assert back.body == b'{"req_id":"\\"a_local_part_0","message":"\\"a_local_part_0 failed"}'
    assert with_id(Answer(200, b"", b"null"), "x", "y").body == b"null"


def test_what_an_encoder_says_is_logged_without_pictures_and_secrets() -> None:
    assert brief(LOADING + "data:image/png;base64," + "A" * 5_000_000 + "==: cannot identify image file") == (
        LOADING + "data:image/png;base64,...: cannot identify image file"
    )
    said = brief(
        "loading data https://user:secret@h.invalid:8443/a/b.png?X-Signature=abc#f: 403, http://h2.invalid: no"
    )
    assert said == "loading data https://h.invalid:8443/a/b.png 403, http://h2.invalid: no"
    assert len(brief("x y " * 1_000)) == 300
