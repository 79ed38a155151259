from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullhit.config import Address, Config, ConfigError, effective, load_config, parse_address


def load(tmp_path: Path, text: str, **kwargs: object) -> Config:
    file = tmp_path / "fullhit.toml"
    file.write_text(text)
    return load_config(file, environ={}, **kwargs)  # type: ignore[arg-type]


def test_defaults_need_no_file() -> None:
    config = load_config(environ={})
    assert config.pool["default"].policy == "device-aware-weighted"
    assert config.server.listen == "127.0.0.1:8780"
    assert config.events.plane == "embedded"


def test_flags_win_over_environment_and_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text('[server]\nlisten = "127.0.0.1:1"\nadmin_listen = "127.0.0.1:2"\n[log]\nlevel = "error"\n')
    config = load_config(
        file,
        environ={"FULLHIT_LISTEN": "127.0.0.1:3", "FULLHIT_ADMIN_LISTEN": "127.0.0.1:4"},
        flags={"server.listen": "127.0.0.1:5"},
    )
    assert (config.server.listen, config.server.admin_listen) == ("127.0.0.1:5", "127.0.0.1:4")
    assert config.log.level == "error"


def test_numbers_from_flags_and_environment_are_converted() -> None:
    config = load_config(environ={"FULLHIT_MAX_BODY_BYTES": "1024"}, flags={"pool.default.ratio": "3"})
    assert config.server.max_body_bytes == 1024
    assert config.pool["default"].ratio == 3


@pytest.mark.parametrize(
    ("environ", "flags", "source"),
    [
        ({"FULLHIT_RATIO": "abc"}, {}, "FULLHIT_RATIO needs a whole number, got 'abc'"),
        ({}, {"pool.default.ratio": "2.5"}, "--ratio needs a whole number"),
        ({}, {"server.max_body_bytes": "1G"}, "--max-body-bytes needs a whole number"),
        ({}, {"server.drain_timeout": "soon"}, "--drain-timeout needs a number"),
    ],
)
def test_a_wrong_flag_or_variable_is_named_itself(environ: dict[str, str], flags: dict[str, str], source: str) -> None:
    with pytest.raises(ConfigError, match=source):
        load_config(environ=environ, flags=flags)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[server]\nlistn = 1\n", "server"),
        ("[pool.default]\nratio = 0\n", "pool.default.ratio"),
        ("[pool.default]\nratio = 'abc'\n", "pool"),
        ("[pool.default]\npolicy = 'fastest'\n", "pool.default.policy"),
        ("[pool.default.full_hit]\nprefer = 'tpu'\n", "pool.default.full_hit.prefer"),
        ("[pool.default]\nworkers = ['ftp://x']\n", "pool.default.workers.0"),
        ("[pool.default]\nworkers = ['http://a:1', 'http://A:1/']\n", "pool.default.workers.1"),
        ("[pool.default]\nworkers = ['http://a:1']\n[pool.x]\nworkers = ['http://a:1']\n", "pool.x.workers.0"),
        ("[server]\nlisten = '127.0.0.1:1'\nadmin_listen = '127.0.0.1:1'\n", "server.admin_listen"),
        ("[server]\nlisten = '8780'\n", "server.listen"),
        ("[server]\nlisten = 'localhost:99999'\n", "server.listen"),
        ("[server]\nadmin_listen = '0.0.0.0:8781'\n", "server.admin_listen"),
        ("[events]\nplane = 'kafka://x'\n", "events.plane"),
        ("[events]\nplane = 'embedded:x'\n", "events.plane"),
        ("[encoder_gateway]\npool = 'other'\n", "encoder_gateway.pool"),
        ("[encoder_gateway]\nencode_timeout = 10\n", "encoder_gateway.encode_timeout"),
        ("[encoder_gateway]\nbad_image = 'burn'\n", "encoder_gateway.bad_image"),
        ("[health]\nmisses = 0\n", "health.misses"),
        ("[server]\nadmin_key_file = '/nonexistent/key'\n", "server.admin_key_file"),
    ],
)
def test_a_mistake_is_named_with_its_key_path(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert caught.value.key.startswith(key), str(caught.value)


@pytest.mark.parametrize("text", ["[server", "= 1", "\x00"])
def test_broken_toml_is_reported_with_the_file_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"fullhit\.toml"):
        load(tmp_path, text)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.toml", environ={})


def test_admin_off_loopback_is_allowed_with_a_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    text = f"[server]\nadmin_listen = '0.0.0.0:8781'\nadmin_key_file = '{tmp_path / 'key'}'\n"
    config = load(tmp_path, text)
    assert config.server.admin_key == "s3cret"
    assert effective(config)["server"]["admin_key"] == "***"


def test_the_event_plane_password_is_masked_in_the_printed_config() -> None:
    config = load_config(
        environ={"FULLHIT_EVENT_PLANE": "nats://user:pa55@127.0.0.1:4222,nats://u:pa55@127.0.0.1:4223"}
    )
    assert "pa55" not in str(effective(config))


@pytest.mark.parametrize(("value", "ratio"), [("2", 2), ("0", 8), ("abc", 8), ("2.5", 8), ("-1", 8)])
def test_the_references_ratio_variable_is_honoured_as_the_reference_reads_it(value: str, ratio: int) -> None:
    warnings: list[str] = []
    config = load_config(environ={"DYN_ENCODER_CUDA_TO_CPU_RATIO": value}, warn=warnings)
    assert config.pool["default"].ratio == ratio
    assert bool(warnings) == (value != "2")


def test_a_configured_ratio_wins_over_the_references_variable(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text("[pool.default]\nratio = 5\n")
    assert load_config(file, environ={"DYN_ENCODER_CUDA_TO_CPU_RATIO": "2"}).pool["default"].ratio == 5


def test_encoder_urls_from_the_environment_and_flags_join_the_default_pool() -> None:
    config = load_config(
        environ={"FULLHIT_ENCODER_URLS": "http://127.0.0.1:1, http://127.0.0.1:2"},
        encoder_urls=["http://127.0.0.1:3"],
    )
    urls = [w if isinstance(w, str) else w.url for w in config.pool["default"].workers]
    assert urls == ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"]


def test_a_misspelt_environment_variable_is_pointed_out() -> None:
    warnings: list[str] = []
    load_config(environ={"FULLHIT_LISTNE": "x"}, warn=warnings)
    assert len(warnings) == 1
    assert "FULLHIT_LISTNE" in warnings[0]


def test_addresses() -> None:
    assert parse_address("[::1]:80", "k") == Address("::1", 80)
    assert str(Address("::1", 80)) == "[::1]:80"
    assert Address("127.0.0.1", 1).loopback
    assert not Address("0.0.0.0", 1).loopback
    assert not Address("example.invalid", 1).loopback


_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
)
_TOP = st.sampled_from(["server", "events", "pool", "encoder_gateway", "health", "log", "x"])
_NAMES = st.sampled_from(["listen", "default", "plane", "workers", "ratio", "misses", "level", "y"])


@given(key=_TOP, name=_NAMES, value=_SCALARS)
def test_no_value_of_any_type_escapes_as_another_exception(key: str, name: str, value: object) -> None:
    try:
        load_config(environ={}, flags={f"{key}.{name}": value})  # type: ignore[dict-item]
    except ConfigError:
        pass


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[pool.default]\nmax_workers = 1\nworkers = ["http://a:1", "http://b:1"]', "pool.default.workers"),
        ('[health]\npath = "health"', "health.path"),
        ('[health]\npath = "/h\\r\\nX: y"', "health.path"),
    ],
)
def test_what_serve_would_fail_over_is_refused_by_check_config(text: str, key: str, tmp_path: Path) -> None:
    file = tmp_path / "fullhit.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^{key}:"):
        load_config(file, environ={})
