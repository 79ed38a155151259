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

from fullhit.config_tables import (
    MAX_WORKERS,
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
    Table,
    WorkerConfig,
)
from fullhit_publisher.identity import normalize_url

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
ADMIN_KEY_ENV = "FULLHIT_ADMIN_KEY"
GRPC_KEY_ENV = "FULLHIT_GRPC_KEY"
_OTHER_ENV = frozenset({ENCODER_URLS_ENV, FRONTENDS_ENV, CONFIG_ENV, ADMIN_KEY_ENV, GRPC_KEY_ENV, "FULLHIT_ADMIN_URL"})
"""FULLHIT_ names that are read elsewhere; any other unknown one is reported as a likely spelling mistake."""


def parse_address(text: str, key: str) -> Address:
    """``HOST:PORT`` or ``[IPV6]:PORT``. Raises `ConfigError` naming ``key``."""
    parts = urlsplit("//" + text)
    try:
        port = parts.port
    except ValueError:
        port = None
    if port is None or not parts.hostname or parts.path or parts.username:
        raise ConfigError(f"expected HOST:PORT such as 127.0.0.1:8780, got {text!r}", key)
    return Address(parts.hostname, port)


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
    _check(config)
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


def _check(config: Config) -> None:
    server = config.server
    data = parse_address(server.listen, "server.listen")
    admin = parse_address(server.admin_listen, "server.admin_listen")
    if data == admin and data.port != 0:
        raise ConfigError(f"{admin} is the address of server.listen; give it a port of its own", "server.admin_listen")
    if server.admin_key_file:
        server.admin_key = _key_from(server.admin_key_file, "server.admin_key_file")
    if server.grpc_key_file:
        server.grpc_key = _key_from(server.grpc_key_file, "server.grpc_key_file")
    if server.grpc_listen:
        _check_grpc(server)
    if not admin.loopback and not server.admin_key:
        raise ConfigError(
            f"{admin} can be reached from other machines, so a key is needed: set server.admin_key_file "
            f"(or {ADMIN_KEY_ENV}), or listen on 127.0.0.1",
            "server.admin_listen",
        )
    _one_of(server.loop, ("auto", "uvloop", "asyncio"), "server.loop")
    _positive(server, "server", ("max_body_bytes", "max_buffered_bytes", "max_connections", "head_timeout",
                                 "body_idle_timeout", "keepalive_timeout", "write_timeout"))  # fmt: skip
    if server.max_buffered_bytes < server.max_body_bytes:
        raise ConfigError("must be at least server.max_body_bytes", "server.max_buffered_bytes")
    if server.drain_timeout < 0:
        raise ConfigError("must not be negative", "server.drain_timeout")
    _check_events(config.events)
    if not config.pool:
        raise ConfigError("at least one pool is needed", "pool")
    homes: dict[str, str] = {}
    for name, pool in config.pool.items():
        _check_pool(name, pool, homes)
        if pool.dynamo is not None:
            _check_dynamo(pool.dynamo, f"pool.{name}.dynamo", config.events.plane)
    gateway = config.encoder_gateway
    if gateway.enabled:
        _check_home(config)
    if config.openai_front is not None:
        _check_front(config, config.openai_front)
    elif not gateway.enabled:
        _check_some_use(config)
    _one_of(gateway.bad_image, ("auto", "reject", "substitute", "pass"), "encoder_gateway.bad_image")
    if not 0 <= gateway.aliases <= 1_024:
        raise ConfigError("must be between 0 and 1024", "encoder_gateway.aliases")
    if gateway.encode_timeout < 180:
        raise ConfigError(
            "must be at least 180: SGLang's own encode may take that long", "encoder_gateway.encode_timeout"
        )
    _positive(gateway, "encoder_gateway", ("queue_max", "queue_max_bytes", "queue_timeout", "connect_timeout",
                                           "follow_timeout", "max_lost", "max_parts", "upstream_idle_timeout",
                                           "upstream_max_connections"))  # fmt: skip
    _positive(config.health, "health", ("interval", "timeout", "misses", "stuck_after", "forget_after"))
    if not config.health.path.startswith("/") or not config.health.path.isprintable() or " " in config.health.path:
        raise ConfigError("must be a path such as /health", "health.path")
    _one_of(config.log.level, ("debug", "info", "warning", "error"), "log.level")
    _one_of(config.log.format, ("auto", "json", "text"), "log.format")
    _one_of(config.log.decisions, ("all", "errors", "off"), "log.decisions")


def _check_home(config: Config) -> None:
    """The encoder gateway's pool."""
    name = config.encoder_gateway.pool
    if name not in config.pool:
        raise ConfigError(
            f"there is no pool {name!r}; without SGLang encoders set encoder_gateway.enabled = false",
            "encoder_gateway.pool",
        )
    if config.pool[name].dynamo is not None:
        raise ConfigError(
            f"pool {name!r} has Dynamo workers, which have no /encode to call; name another pool, or set "
            "encoder_gateway.enabled = false",
            "encoder_gateway.pool",
        )


def _check_some_use(config: Config) -> None:
    """Without a seat there must be workers for the decision API to choose from."""
    events = config.events
    found = events.discover and events.plane != "none"
    if found or config.server.grpc_listen or any(pool.workers or pool.dynamo for pool in config.pool.values()):
        return
    raise ConfigError(
        "the gateway is off, there is no [openai_front], and no pool can come by workers for the decision API to "
        "choose from; set one of these up",
        "encoder_gateway.enabled",
    )


def _check_front(config: Config, front: OpenAIFrontConfig) -> None:
    key = "openai_front"
    _one_of(front.mode, ("dynamo",), f"{key}.mode")
    address = parse_address(front.listen, f"{key}.listen")
    server = config.server
    others = {"server.admin_listen": server.admin_listen}
    if config.encoder_gateway.enabled:
        others["server.listen"] = server.listen
    for name, other in others.items():
        if address.port and address == parse_address(other, name):
            raise ConfigError(f"{address} is the address of {name}; give it a port of its own", f"{key}.listen")
    dynamo = [name for name, pool in config.pool.items() if pool.dynamo is not None]
    if not front.pool:
        if len(dynamo) != 1:
            raise ConfigError(
                f"name the pool; those of Dynamo workers are: {', '.join(dynamo) or 'none'}", f"{key}.pool"
            )
        front.pool = dynamo[0]
    for setting, name in (("pool", front.pool), ("prefill_pool", front.prefill_pool)):
        if name and name not in dynamo:
            why = "has no Dynamo workers" if name in config.pool else "does not exist"
            raise ConfigError(f"pool {name!r} {why}; it needs a table [pool.{name}.dynamo]", f"{key}.{setting}")
    if front.prefill_pool == front.pool:
        raise ConfigError("must be another pool than openai_front.pool", f"{key}.prefill_pool")
    if not front.frontends:
        raise ConfigError("at least one is needed", f"{key}.frontends")
    for place, url in enumerate(front.frontends):
        try:
            front.frontends[place] = normalize_url(url)
        except ValueError as error:
            raise ConfigError(str(error).replace("worker URL", "URL"), f"{key}.frontends.{place}") from None
    if len(set(front.frontends)) != len(front.frontends):
        raise ConfigError("one is listed twice", f"{key}.frontends")
    _positive(front, key, ("connect_timeout", "first_byte_timeout", "idle_timeout", "max_attempts", "queue_max",
                           "queue_max_bytes", "queue_timeout"))  # fmt: skip


def _key_from(path: str, key: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", key) from None
    if not text:
        raise ConfigError(f"{path} is empty", key)
    return text


def _check_grpc(server: ServerConfig) -> None:
    address = parse_address(server.grpc_listen, "server.grpc_listen")
    if not address.loopback and not server.grpc_key:
        raise ConfigError(
            f"{address} can be reached from other machines, so a key is needed: set server.grpc_key_file "
            f"(or {GRPC_KEY_ENV}), or listen on 127.0.0.1",
            "server.grpc_listen",
        )
    if bool(server.grpc_tls_cert) != bool(server.grpc_tls_key):
        raise ConfigError("a certificate and its key go together: set server.grpc_tls_cert and server.grpc_tls_key",
                          "server.grpc_tls_cert")  # fmt: skip
    if server.grpc_client_ca and not server.grpc_tls_cert:
        raise ConfigError("client certificates need TLS: set server.grpc_tls_cert too", "server.grpc_client_ca")
    _positive(server, "server", ("grpc_max_message_bytes",))


def _check_events(events: EventsConfig) -> None:
    plane = events.plane
    if plane != "none" and plane != "embedded":
        if plane.startswith("embedded:"):
            port = plane.removeprefix("embedded:")
            if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
                raise ConfigError(f"embedded:PORT needs a port number, got {port!r}", "events.plane")
        elif urlsplit(plane).scheme not in ("nats", "tls"):
            raise ConfigError(
                f"expected embedded, embedded:PORT, nats://..., tls://... or none, got {plane!r}",
                "events.plane",
            )
    _positive(events, "events", ("plane_grace", "doubt_ttl", "max_message_bytes", "max_key_chars",
                                 "max_buffered_deltas"))  # fmt: skip


def _check_dynamo(dynamo: DynamoConfig, key: str, plane: str) -> None:
    if not dynamo.namespace:
        raise ConfigError("must not be empty", f"{key}.namespace")
    _one_of(dynamo.plane, ("nats", "zmq"), f"{key}.plane")
    kind, _, place = dynamo.discovery.partition(":")
    if kind not in ("file", "etcd") or not place:
        raise ConfigError(
            f"expected file:PATH (the folder of DYN_FILE_KV) or etcd:URL, got {dynamo.discovery!r}", f"{key}.discovery"
        )
    if dynamo.plane == "nats":
        if not dynamo.nats_url:
            if urlsplit(plane).scheme not in ("nats", "tls"):
                raise ConfigError(
                    "needed, for events.plane is no NATS server that Dynamo could use too", f"{key}.nats_url"
                )
            dynamo.nats_url = plane
        if dynamo.brokers:
            raise ConfigError('are for plane = "zmq"', f"{key}.brokers")
    for broker in dynamo.brokers:
        if not broker.startswith("tcp://"):
            raise ConfigError(f"expected the tcp:// address of a broker's XPUB side, got {broker!r}", f"{key}.brokers")
    _positive(dynamo, key, ("lease",))


def _check_pool(name: str, pool: PoolConfig, homes: dict[str, str]) -> None:
    """``homes``: worker URL -> the pool that has it, over all pools seen so far."""
    key = f"pool.{name}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ConfigError("a pool's name has 1 to 64 letters, digits, _ . or -", key)
    _one_of(pool.role, ("encode",), f"{key}.role")
    _one_of(pool.policy, POLICIES, f"{key}.policy")
    _one_of(pool.parity, ("none", "dynamo"), f"{key}.parity")
    _one_of(pool.load_until, ("first_token", "end"), f"{key}.load_until")
    if pool.parity == "dynamo" and pool.device_ratios:
        raise ConfigError('must be left out with parity = "dynamo"', f"{key}.device_ratios")
    if pool.dynamo is not None and pool.workers:
        raise ConfigError("must be left out: discovery finds the workers of a Dynamo pool", f"{key}.workers")
    _one_of(pool.full_hit.prefer, ("gpu", "any"), f"{key}.full_hit.prefer")
    if pool.ratio < 1:
        raise ConfigError("must be a whole number of at least 1", f"{key}.ratio")
    for device, ratio in pool.device_ratios.items():
        if ratio < 1:
            raise ConfigError("must be a whole number of at least 1", f"{key}.device_ratios.{device}")
    if pool.max_inflight < 0:
        raise ConfigError("must not be negative (0 = no cap)", f"{key}.max_inflight")
    _positive(pool, key, ("predicted_capacity_bytes", "max_keys", "max_keys_per_worker", "max_workers"))
    if pool.max_workers > MAX_WORKERS:
        raise ConfigError(f"must be at most {MAX_WORKERS}", f"{key}.max_workers")
    if len(pool.workers) > pool.max_workers:
        raise ConfigError(f"{len(pool.workers)} workers, but max_workers is {pool.max_workers}", f"{key}.workers")
    for place, worker in enumerate(pool.workers):
        entry = WorkerConfig(url=worker) if isinstance(worker, str) else worker
        where = f"{key}.workers.{place}"
        try:
            entry.url = normalize_url(entry.url)
        except ValueError as error:
            raise ConfigError(str(error), where) from None
        if not 0 < entry.weight < 1e6:
            raise ConfigError("must be above 0", f"{where}.weight")
        home = homes.setdefault(entry.url, f"{name}.{place}")
        if home != f"{name}.{place}":
            raise ConfigError(f"{entry.url} is listed twice; the other place is pool.{home}", where)
        pool.workers[place] = entry


def _one_of(value: str, allowed: Sequence[str], key: str) -> None:
    if value not in allowed:
        raise ConfigError(f"expected one of {', '.join(allowed)}, got {value!r}", key)


def _positive(table: Table, prefix: str, names: Sequence[str]) -> None:
    for name in names:
        if not getattr(table, name) > 0:
            raise ConfigError("must be above 0", f"{prefix}.{name}")
