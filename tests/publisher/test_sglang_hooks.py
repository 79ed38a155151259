"""Hanging the plugin into SGLang's of several shapes: what is missing is named, and an encoder never fails for it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fullhit_publisher.cache import EmbeddingCache
from fullhit_publisher.sglang import activate
from fullhit_publisher.sglang.children import RANK, launch_dp_worker
from fullhit_publisher.sglang.hooks import (
    _args_read,
    _encoder_made,
    _flags_added,
    _mark_replies,
    _publish,
    activate_encoder,
)
from fullhit_publisher.sglang.replies import CacheHeader
from fullhit_publisher.sglang.settings import PluginSettings

CAPACITY = "DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB"
PUBLISHER = "DYN_MULTIMODAL_EMBEDDING_CACHE_PUBLISHER"
GUARD = "FULLHIT_SURVIVE_FAILED_ENCODES"
METHODS = (
    "batch_encode",
    "slice_embedding",
    "_compute_direct_embedding",
    "_encode_missing",
    "_validate_embedding_token_count",
)


class Registry:
    registered: list[tuple[str, str]]
    applied = 0

    def __init__(self) -> None:
        self.registered = []

    def register(self, target: str, hook: Any, kind: str) -> None:
        self.registered.append((target.rpartition(".srt.")[2], kind))

    def apply_hooks(self) -> None:
        self.applied += 1


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang as far as the plugin looks at it, as release 0.5.23 has it."""
    for name in (CAPACITY, GUARD, "DYN_MULTIMODAL_EMBEDDING_CACHE_PUBLISHER"):
        monkeypatch.delenv(name, raising=False)
    registry = Registry()
    encoder = type("MMEncoder", (), dict.fromkeys(METHODS, lambda self: None))
    receiver = type("MMReceiverBase", (), {"create_req": lambda self: None})
    runtime = ModuleType("sglang.srt.disaggregation.encoder.runtime")
    runtime.launch_dp_worker = print  # type: ignore[attr-defined]
    contents: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": registry,
            "HookType": SimpleNamespace(AFTER="after", AROUND="around"),
        },
        "sglang.srt.disaggregation": {},
        "sglang.srt.disaggregation.encoder": {"runtime": runtime},
        "sglang.srt.disaggregation.encoder.server": {"MMEncoder": encoder},
        "sglang.srt.disaggregation.encoder.receiver": {"MMReceiverBase": receiver},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
    return SimpleNamespace(registry=registry, encoder=encoder, receiver=receiver, runtime=runtime)


def test_without_sglang_it_stays_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    activate()
    assert not activate_encoder()
    assert "stays out" in caplog.text and "stays off" in caplog.text


def test_unless_asked_for_it_adds_flags_and_nothing_else(sglang: SimpleNamespace) -> None:
    activate()
    assert sglang.registry.registered == [
        ("server_args.ServerArgs.add_cli_args", "after"),
        ("server_args.ServerArgs.from_cli_args", "around"),
    ]
    namespace = argparse.Namespace(encoder_only=True)
    assert _args_read(lambda cls, args: ("made", args), "cls", namespace) == ("made", namespace)
    assert len(sglang.registry.registered) == 2


def test_an_encoder_with_a_capacity_gets_the_hooks(sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPACITY, "0")  # put back afterwards, whatever is written there
    _args_read(
        lambda *_: None, "cls", argparse.Namespace(encoder_only=True, multimodal_embedding_cache_capacity_gb=1.0)
    )
    prefix = "disaggregation.encoder.server.MMEncoder"
    assert sglang.registry.registered == [
        (f"{prefix}.__init__", "after"),
        (f"{prefix}.batch_encode", "around"),
        (f"{prefix}._compute_direct_embedding", "around"),
    ]
    assert sglang.registry.applied == 1
    assert sglang.runtime.launch_dp_worker.__module__ == "fullhit_publisher.sglang.children"


def test_replies_are_marked_where_the_application_can_be_reached(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layers: list[Any] = []
    server = ModuleType("sglang.srt.disaggregation.encoder.http_server")
    server.app = SimpleNamespace(add_middleware=layers.append)  # type: ignore[attr-defined]
    sglang.runtime.execute_encode_pipeline = print
    monkeypatch.setitem(sys.modules, server.__name__, server)
    monkeypatch.setattr(sys.modules["sglang.srt.disaggregation.encoder"], "http_server", server, raising=False)
    _mark_replies()
    assert layers == [CacheHeader] and not caplog.text
    assert sglang.registry.registered == [("disaggregation.encoder.runtime.execute_encode_pipeline", "around")]
    del sglang.runtime.execute_encode_pipeline
    _mark_replies()
    assert layers == [CacheHeader] and "execute_encode_pipeline" in caplog.text


def test_an_encoder_with_several_processes_publishes_what_they_have_in_common(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (CAPACITY, PUBLISHER, "FULLHIT_EVENT_PLANE", "FULLHIT_RANKS_SOCKET", "FULLHIT_RANKS_KEY"):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever is written there
    made = SimpleNamespace(dp_size=2, host="127.0.0.1", port=30000, ssl_certfile=None)
    asked = argparse.Namespace(
        encoder_only=True, multimodal_embedding_cache_capacity_gb=1.0, multimodal_embedding_cache_publisher=True
    )
    assert _args_read(lambda *_: made, "cls", asked) is made
    environ = dict(os.environ)
    assert len(bytes.fromhex(environ["FULLHIT_RANKS_KEY"])) == 32
    assert os.stat(os.path.dirname(environ["FULLHIT_RANKS_SOCKET"])).st_mode & 0o777 == 0o700
    monkeypatch.setenv(RANK, "1")
    reporters: list[Any] = []
    monkeypatch.setattr("fullhit_publisher.sglang.hooks.RankReporter", lambda *told: reporters.append(told))
    cache: EmbeddingCache[Any] = EmbeddingCache(100)
    settings = PluginSettings(1, True)
    _publish(settings, cache, SimpleNamespace(device="cuda:1"), made)
    ((rank, reported, device, _),) = reporters
    assert (rank, reported, device) == (1, cache, "cuda:1")


def test_a_spawned_process_knows_which_one_it_is(sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK, "")
    started: list[Any] = []
    sglang.runtime.launch_dp_worker = lambda *args, **kwargs: started.append((args, kwargs))
    launch_dp_worker("args", 3, 0, "a", "b", "c")
    assert os.environ[RANK] == "3" and started[-1] == (("args", 3, 0, "a", "b", "c"), {})
    sglang.runtime.launch_dp_worker = lambda *args, **kwargs: started.append((args, kwargs))
    launch_dp_worker("args", dp_rank=4)
    assert os.environ[RANK] == "4"
    sglang.runtime.launch_dp_worker = lambda *args, **kwargs: started.append((args, kwargs))
    launch_dp_worker("args")  # of another release: it starts all the same
    assert started[-1] == (("args",), {})


def test_another_server_with_a_capacity_is_told_and_left_alone(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CAPACITY, "1")
    _args_read(lambda *_: None, "cls", argparse.Namespace(encoder_only=False))
    assert not sglang.registry.registered and "no --encoder-only" in caplog.text


@pytest.mark.parametrize("name", METHODS)
def test_a_release_without_one_of_the_internals_is_left_alone(
    name: str, sglang: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    delattr(sglang.encoder, name)
    assert not activate_encoder()
    assert not sglang.registry.registered and f"encoder has no {name}" in caplog.text


def test_a_release_without_the_spawned_function_is_left_alone(
    sglang: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    del sglang.runtime.launch_dp_worker
    assert not activate_encoder() and "launch_dp_worker" in caplog.text


def test_a_malformed_setting_does_not_stop_the_server(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CAPACITY, "plenty")
    activate()
    assert _args_read(lambda *_: "made", "cls", argparse.Namespace(encoder_only=True)) == "made"
    _encoder_made(None, SimpleNamespace(), SimpleNamespace(tp_size=1))
    assert "'plenty' is no number of gigabytes" in caplog.text


def test_with_tensor_parallelism_there_is_no_cache(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CAPACITY, "1")
    encoder = SimpleNamespace()
    _encoder_made(None, encoder, SimpleNamespace(tp_size=2))
    assert not vars(encoder) and "--tp-size" in caplog.text


def test_the_guard_is_for_those_who_ask(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv(GUARD, "1")
    activate()
    assert sglang.registry.registered[-1] == ("disaggregation.encoder.receiver.MMReceiverBase.create_req", "after")
    del sglang.receiver.create_req
    before = len(sglang.registry.registered)
    activate()
    assert len(sglang.registry.registered) == before + 2 and "no create_req" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [(CAPACITY, "plenty"), ("DYN_MULTIMODAL_EMBEDDING_CACHE_PUBLISHER", "maybe")],
)
def test_a_malformed_variable_costs_the_flags_and_nothing_else(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    _flags_added(None, parser)
    assert vars(parser.parse_args([])) == {}
    assert "adds no flags" in caplog.text
    assert value in caplog.text or name in caplog.text


def test_a_flag_that_is_there_already_costs_the_flags_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--event-plane", default="theirs")
    _flags_added(None, parser)
    assert vars(parser.parse_args([])) == {"event_plane": "theirs"}
    assert "--event-plane" in caplog.text


def test_otherwise_the_flags_are_there() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--port", type=int)
    _flags_added(None, parser)
    told = parser.parse_args(["--multimodal-embedding-cache-capacity-gb", "2", "--port", "3"])
    assert (told.multimodal_embedding_cache_capacity_gb, told.port) == (2.0, 3)
