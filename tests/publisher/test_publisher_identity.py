"""A worker has one spelling and one number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit_publisher import device_name, normalize_url, worker_id_for
from fullhit_publisher.identity import MAX_WORKER_ID, dynamo_instance, dynamo_name


@pytest.mark.parametrize(
    ("given_url", "normal"),
    [
        ("http://127.0.0.1:30002", "http://127.0.0.1:30002"),
        ("HTTP://Encoder-1.Example:30002/", "http://encoder-1.example:30002"),
        ("https://host", "https://host"),
        ("http://host:80", "http://host:80"),
        ("http://host:0080", "http://host:80"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://[2001:DB8:0::1]", "http://[2001:db8::1]"),
        ("http://my_pod.ns.svc", "http://my_pod.ns.svc"),
    ],
)
def test_a_url_has_one_spelling(given_url: str, normal: str) -> None:
    assert normalize_url(given_url) == normal
    assert normalize_url(normal) == normal


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "host:80",
        "127.0.0.1",
        "ftp://host",
        "http://",
        "http://:80",
        "http://host:0",
        "http://host:",
        "http://host:65536",
        "http://host:x",
        "http://host/path",
        "http://host//",
        "http://host?x=1",
        "http://host?",
        "http://host#f",
        "http://ho st",
        "http://host\n",
        "http://hőst",
        "http://[::1",
        "http://[zz]",
        "http://a..b:-1",
        "http://-x",
        "http://" + "h" * 3000,
    ],
)
def test_what_cannot_be_a_worker_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        normalize_url(bad)


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="password") as caught:
        normalize_url("http://user:hunter2@host")
    assert "hunter2" not in str(caught.value)


@given(st.text(max_size=60))
def test_no_text_does_more_than_raise_value_error(text: str) -> None:
    for url in (text, "http://" + text):
        try:
            normal = normalize_url(url)
        except ValueError:
            continue
        assert normalize_url(normal) == normal


@given(st.text())
def test_a_worker_id_is_a_safe_integer_and_never_zero(name: str) -> None:
    assert 1 <= worker_id_for(name) <= MAX_WORKER_ID


def test_a_worker_id_is_the_same_in_every_program() -> None:
    assert worker_id_for("http://127.0.0.1:30002") == 5605997103259074


@pytest.mark.parametrize(("device", "kind"), [("cuda:0", "cuda"), ("CPU", "cpu"), ("xpu", "xpu"), (" hpu:1 ", "hpu")])
def test_devices_are_known_by_their_kind(device: str, kind: str) -> None:
    assert device_name(device) == kind


@pytest.mark.parametrize("device", ["", ":0", "0", "a b", "x" * 40, None.__class__])
def test_a_device_needs_a_kind(device: object) -> None:
    with pytest.raises(ValueError, match="device"):
        device_name(device)


@pytest.mark.parametrize("number", [0, 1, 2**53 + 1, 2**64 - 1])
def test_a_dynamo_instance_keeps_all_64_bits_of_its_number(number: int) -> None:
    assert dynamo_instance(dynamo_name(number)) == worker_id_for(dynamo_name(number)) == number


@pytest.mark.parametrize(
    "text", ["dynamo:", "dynamo:01", "dynamo:-1", "dynamo:18446744073709551616", "dynamo:٣", "x:1"]
)
def test_other_texts_are_no_dynamo_instance(text: str) -> None:
    assert dynamo_instance(text) is None
    assert 0 < worker_id_for(text) <= MAX_WORKER_ID
    for number in (-1, 2**64):
        with pytest.raises(ValueError, match="64-bit"):
            dynamo_name(number)
