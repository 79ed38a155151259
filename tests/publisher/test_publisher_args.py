"""Arguments of an encoder: defaults, environment, and mistakes that are named."""

from __future__ import annotations

import argparse

import pytest

from fullhit_publisher import add_cli_args, from_args

URL = "http://127.0.0.1:30002"
CAPACITY = "DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB"
PUBLISHER = "DYN_MULTIMODAL_EMBEDDING_CACHE_PUBLISHER"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CAPACITY, PUBLISHER, "FULLHIT_EVENT_PLANE", "FULLHIT_EVENT_PLANE_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    add_cli_args(parser)
    return parser.parse_args(words)


def test_nothing_is_on_by_default() -> None:
    args = parse()
    assert args.event_plane == "nats://127.0.0.1:4222"
    assert from_args(args, url=URL) == (None, None)


def test_a_capacity_makes_a_cache_and_the_flag_a_publisher() -> None:
    cache, publisher = from_args(parse("--multimodal-embedding-cache-capacity-gb", "0.5"), url=URL)
    assert cache is not None and cache.capacity_bytes == 2**29 and publisher is None
    args = parse(
        "--multimodal-embedding-cache-capacity-gb=2",
        "--multimodal-embedding-cache-publisher",
        "--event-plane=nats://user:hunter2@10.0.0.1:4333,tls://b",
    )
    cache, publisher = from_args(args, url="HTTP://Host:1/", device="cuda:3", pool="vl")
    assert cache is not None and publisher is not None
    assert (publisher.url, publisher.pool) == ("http://host:1", "vl")
    assert "10.0.0.1:4333,b:4222" in repr(publisher) and "hunter2" not in repr(publisher)
    cache.put("a", b"1")
    assert publisher.keys() == ["a"]


def test_the_environment_sets_defaults_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPACITY, "1.5")
    monkeypatch.setenv(PUBLISHER, "true")
    monkeypatch.setenv("FULLHIT_EVENT_PLANE", "nats://broker:4222")
    args = parse()
    assert args.multimodal_embedding_cache_capacity_gb == 1.5
    assert args.multimodal_embedding_cache_publisher is True
    assert args.event_plane == "nats://broker:4222"
    args = parse("--no-multimodal-embedding-cache-publisher", "--multimodal-embedding-cache-capacity-gb", "0")
    assert args.multimodal_embedding_cache_publisher is False
    assert args.multimodal_embedding_cache_capacity_gb == 0


def test_a_publisher_without_a_cache_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="--multimodal-embedding-cache-capacity-gb"):
        from_args(parse("--multimodal-embedding-cache-publisher"), url=URL)


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "much", "1e9"])
def test_a_capacity_must_be_a_number_of_gigabytes(
    value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        parse(f"--multimodal-embedding-cache-capacity-gb={value}")
    assert "gigabytes" in capsys.readouterr().err
    monkeypatch.setenv(CAPACITY, value)
    with pytest.raises(SystemExit):
        parse()
    assert "gigabytes" in capsys.readouterr().err


def test_a_malformed_flag_in_the_environment_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PUBLISHER, "perhaps")
    with pytest.raises(SystemExit):
        parse()
    assert PUBLISHER in capsys.readouterr().err


@pytest.mark.parametrize("plane", ["http://broker", "nats://", "nats://a/b", "nats://h:0", ",", "nats://h:x"])
def test_a_malformed_event_plane_is_refused_without_repeating_it(plane: str) -> None:
    args = parse(
        "--multimodal-embedding-cache-capacity-gb=1",
        "--multimodal-embedding-cache-publisher",
        f"--event-plane={plane}",
    )
    with pytest.raises(ValueError, match=r"NATS|event plane"):
        from_args(args, url=URL)


def test_a_missing_credentials_file_is_named() -> None:
    args = parse(
        "--multimodal-embedding-cache-capacity-gb=1",
        "--multimodal-embedding-cache-publisher",
        "--event-plane-credentials=/nonexistent/x.creds",
    )
    with pytest.raises(ValueError, match="/nonexistent/x"):
        from_args(args, url=URL)
