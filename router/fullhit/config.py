"""Configuration: one tree of typed tables, read from TOML, environment and flags.

Order of strength, weakest first: defaults, the file, environment, flags. Everything is checked before anything
starts: a value of the wrong type, an unknown name or two settings that cannot both hold end in a `ConfigError`
that names the place (``pool.default.ratio``) and says what is allowed. A running router therefore never meets a
half-valid setting.

Usage::

    config = load_config("fullhit.toml", environ=os.environ, flags={"server.listen": "127.0.0.1:8780"})
    config.server.listen            # Address(host='127.0.0.1', port=8780)
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from fullhit.config_checks import ADMIN_KEY_ENV, GRPC_KEY_ENV, check_config
from fullhit.config_tables import (
    POLICIES,
    RATIO_ENV,
    Address,
    Config,
    ConfigError,
    DynamoConfig,
    EncoderGatewayConfig,
    EventsConfig,
    FullHitConfig,
    HealthConfig,
    LogConfig,
    OpenAIFrontConfig,
    PoolConfig,
    ServerConfig,
    WorkerConfig,
    parse_address,
)

__all__ = [
    "SETTINGS",
    "Address",
    "Config",
    "ConfigError",
    "DynamoConfig",
    "EncoderGatewayConfig",
    "EventsConfig",
    "FullHitConfig",
    "HealthConfig",
    "LogConfig",
    "OpenAIFrontConfig",
    "PoolConfig",
    "ServerConfig",
    "Setting",
    "WorkerConfig",
    "effective",
    "load_config",
    "parse_address",
]


class Setting(NamedTuple):
    """One setting that flags and environment can change."""

    flag: str
    env: str
    key: str
    metavar: str
    help: str


SETTINGS: tuple[Setting, ...] = (
    Setting("--listen", "FULLHIT_LISTEN", "server.listen", "HOST:PORT",
            "where SGLang's language servers reach the router (default 127.0.0.1:8780)"),
    Setting("--admin-listen", "FULLHIT_ADMIN_LISTEN", "server.admin_listen", "HOST:PORT",
            "metrics, health, workers, decisions (default 127.0.0.1:8781)"),
    Setting("--admin-key-file", "FULLHIT_ADMIN_KEY_FILE", "server.admin_key_file", "FILE",
            "file with the key that admin requests must carry as a bearer token; needed off loopback"),
    Setting("--grpc-listen", "FULLHIT_GRPC_LISTEN", "server.grpc_listen", "HOST:PORT",
            "where the decision API answers over gRPC (default off; needs the extra fullhit[grpc])"),
    Setting("--grpc-key-file", "FULLHIT_GRPC_KEY_FILE", "server.grpc_key_file", "FILE",
            "file with the key that gRPC calls must carry as a bearer token; needed off loopback"),
    Setting("--openai-listen", "FULLHIT_OPENAI_LISTEN", "openai_front.listen", "HOST:PORT",
            "where OpenAI clients of a Dynamo deployment reach the router (default off; 127.0.0.1:8783 with a table "
            "[openai_front])"),
    Setting("--event-plane", "FULLHIT_EVENT_PLANE", "events.plane", "PLANE",
            "embedded[:PORT] (a NATS server started and stopped with the router, port 4222 unless given, 0 = any), "
            "nats://HOST:PORT[,HOST:PORT], tls://..., or none (default embedded)"),
    Setting("--policy", "FULLHIT_POLICY", "pool.default.policy", "NAME", "one of " + ", ".join(POLICIES)),
    Setting("--ratio", "FULLHIT_RATIO", "pool.default.ratio", "N",
            f"GPU requests per CPU request of device-aware-weighted (default 8; {RATIO_ENV} is honoured)"),
    Setting("--max-body-bytes", "FULLHIT_MAX_BODY_BYTES", "server.max_body_bytes", "N",
            "largest request body (default 536870912)"),
    Setting("--drain-timeout", "FULLHIT_DRAIN_TIMEOUT", "server.drain_timeout", "SECONDS",
            "how long SIGTERM waits for requests in flight (default 30)"),
    Setting("--state-file", "FULLHIT_STATE_FILE", "server.state_file", "FILE",
            "where workers that registered, or were added by hand, are remembered over a restart (default off)"),
    Setting("--bad-image", "FULLHIT_BAD_IMAGE", "encoder_gateway.bad_image", "ACTION",
            "what to do with an inline image that cannot be decoded: auto, reject, substitute, pass (default auto)"),
    Setting("--loop", "FULLHIT_LOOP", "server.loop", "NAME", "event loop: auto, uvloop, asyncio (default auto)"),
    Setting("--log-level", "FULLHIT_LOG_LEVEL", "log.level", "LEVEL", "debug, info, warning, error (default info)"),
    Setting("--log-format", "FULLHIT_LOG_FORMAT", "log.format", "FORMAT", "auto, json, text (default auto)"),
    Setting("--log-decisions", "FULLHIT_LOG_DECISIONS", "log.decisions", "WHICH",
            "all, errors, off: which routing decisions get a log line (default all)"),
)  # fmt: skip

ENCODER_URLS_ENV = "FULLHIT_ENCODER_URLS"
FRONTENDS_ENV = "FULLHIT_DYNAMO_FRONTENDS"
CONFIG_ENV = "FULLHIT_CONFIG"
_OTHER_ENV = frozenset({ENCODER_URLS_ENV, FRONTENDS_ENV, CONFIG_ENV, ADMIN_KEY_ENV, GRPC_KEY_ENV, "FULLHIT_ADMIN_URL"})
"""FULLHIT_ names that are read elsewhere; any other unknown one is reported as a likely spelling mistake."""


def load_config(
    path: str | Path | None = None,
    *,
    environ: Mapping[str, str],
    flags: Mapping[str, str] | None = None,
    encoder_urls: Sequence[str] = (),
    dynamo_frontends: Sequence[str] = (),
    warn: list[str] | None = None,
) -> Config:
    """Read, merge and check everything. Raises `ConfigError`; remarks that stop nothing are appended to ``warn``."""
    tree: dict[str, Any] = _read_file(path) if path is not None else {}
    ratio_set = "ratio" in _table(tree, "pool", "default")
    for setting in SETTINGS:
        value, source = environ.get(setting.env), setting.env
        if flags is not None and flags.get(setting.key) is not None:
            value, source = flags[setting.key], setting.flag
        if value is not None and value != "":
            _put(tree, setting.key, _number(setting.key, value, source))
            ratio_set = ratio_set or setting.key == "pool.default.ratio"
    _merge_urls(tree, environ.get(ENCODER_URLS_ENV, "").replace(",", " ").split())
    _merge_urls(tree, encoder_urls)
    frontends = list(dynamo_frontends) or environ.get(FRONTENDS_ENV, "").replace(",", " ").split()
    if frontends:
        _put(tree, "openai_front.frontends", frontends)
    if environ.get(ADMIN_KEY_ENV):
        _put(tree, "server.admin_key", environ[ADMIN_KEY_ENV])
    if environ.get(GRPC_KEY_ENV):
        _put(tree, "server.grpc_key", environ[GRPC_KEY_ENV])
    try:
        config = msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as error:
        raise _from_validation(error) from None
    if not ratio_set:
        _ratio_from_dynamo(config, environ, warn)
    check_config(config)
    if warn is not None:
        known = {s.env for s in SETTINGS} | _OTHER_ENV
        warn.extend(f"environment variable {name} is not one of ours; is it misspelt?" for name in sorted(environ)
                    if name.startswith("FULLHIT_") and name not in known)  # fmt: skip
    return config


def effective(config: Config) -> dict[str, Any]:
    """The configuration in force as plain data, secrets masked."""
    data: dict[str, Any] = msgspec.to_builtins(config)
    for name in ("admin_key", "grpc_key"):
        if data["server"][name]:
            data["server"][name] = "***"
    plane = urlsplit(config.events.plane.split(",")[0])
    if plane.password or plane.username:
        data["events"]["plane"] = re.sub(r"//[^@/,]*@", "//***@", config.events.plane)
    for pool in data["pool"].values():
        for name in ("nats_url", "discovery") if pool["dynamo"] else ():
            pool["dynamo"][name] = re.sub(r"//[^@/,]*@", "//***@", pool["dynamo"][name])
    return data


def _number(key: str, value: str, source: str) -> object:
    """The value of a flag or variable; where its setting is a number, that number. Raises `ConfigError` naming both."""
    *tables, name = key.split(".")
    annotations = {"server": ServerConfig.__annotations__, "pool": PoolConfig.__annotations__}.get(tables[0], {})
    kind = annotations.get(name)
    if kind not in ("int", "float"):
        return value
    try:
        return int(value) if kind == "int" else float(value)
    except (ValueError, TypeError):
        wanted = "a whole number" if kind == "int" else "a number"
        raise ConfigError(f"{source} needs {wanted}, got {value!r}", key) from None


def _read_file(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _table(tree: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    node: Any = tree
    for name in names:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    node = tree
    for name in parents:
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError("expected a table", name)
        node = child
    node[last] = value


def _merge_urls(tree: dict[str, Any], urls: Sequence[str]) -> None:
    if not urls:
        return
    pool = tree.setdefault("pool", {})
    if not isinstance(pool, dict) or not isinstance(pool.setdefault("default", {}), dict):
        raise ConfigError("expected a table", "pool")
    workers = pool["default"].setdefault("workers", [])
    if not isinstance(workers, list):
        raise ConfigError("expected a list", "pool.default.workers")
    workers.extend(urls)


_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$?\.?(?P<path>[^`]*)`)?$", re.S)


def _from_validation(error: msgspec.ValidationError) -> ConfigError:
    """Turn msgspec's message and JSON path into ours."""
    match = _PATH.match(str(error))
    what, path = (match["what"], match["path"] or "") if match else (str(error), "")
    what = what.replace("Object", "table").replace("`", "'")
    return ConfigError(what[:1].lower() + what[1:], path.replace("[...]", ".*").strip("."))


def _ratio_from_dynamo(config: Config, environ: Mapping[str, str], warn: list[str] | None) -> None:
    """The reference's variable, read once; what it does not accept there (0, text, 2.5) means the default here too."""
    text = environ.get(RATIO_ENV)
    if text is None:
        return
    if text.isascii() and text.isdigit() and int(text) >= 1:
        for pool in config.pool.values():
            pool.ratio = int(text)
    elif warn is not None:
        warn.append(f"{RATIO_ENV}={text!r} is not a whole number of at least 1; the default ratio is used")
