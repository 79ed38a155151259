"""Whether a configuration can hold: values in range, settings that agree with each other, files that can be read.

Keys are read from their files here, worker URLs brought to their normal form, and names that may be left out filled in.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from fullhit.config_front import check_front, check_roles, one_of, positive
from fullhit.config_tables import (
    MAX_WORKERS,
    POLICIES,
    ROLES,
    Config,
    ConfigError,
    DynamoConfig,
    EventsConfig,
    PoolConfig,
    ServerConfig,
    WorkerConfig,
    parse_address,
)
from fullhit_publisher.identity import normalize_url

__all__ = ["ADMIN_KEY_ENV", "GRPC_KEY_ENV", "check_config"]

ADMIN_KEY_ENV = "FULLHIT_ADMIN_KEY"
GRPC_KEY_ENV = "FULLHIT_GRPC_KEY"


def check_config(config: Config) -> None:
    """Check everything, and fill in what follows from other settings. Raises ConfigError naming the place."""
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
    one_of(server.loop, ("auto", "uvloop", "asyncio"), "server.loop")
    positive(server, "server", ("max_body_bytes", "max_buffered_bytes", "max_connections", "head_timeout",
                                 "body_idle_timeout", "keepalive_timeout", "write_timeout"))  # fmt: skip
    if server.max_buffered_bytes < server.max_body_bytes:
        raise ConfigError("must be at least server.max_body_bytes", "server.max_buffered_bytes")
    if server.drain_timeout < 0:
        raise ConfigError("must not be negative", "server.drain_timeout")
    if server.state_file and not Path(server.state_file).absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {Path(server.state_file).absolute().parent}", "server.state_file")
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
    check_roles(config)
    if config.openai_front is not None:
        check_front(config, config.openai_front)
    elif not gateway.enabled:
        _check_some_use(config)
    one_of(gateway.bad_image, ("auto", "reject", "substitute", "pass"), "encoder_gateway.bad_image")
    if not 0 <= gateway.aliases <= 1_024:
        raise ConfigError("must be between 0 and 1024", "encoder_gateway.aliases")
    if gateway.encode_timeout < 180:
        raise ConfigError(
            "must be at least 180: SGLang's own encode may take that long", "encoder_gateway.encode_timeout"
        )
    positive(gateway, "encoder_gateway", ("queue_max", "queue_max_bytes", "queue_timeout", "connect_timeout",
                                           "follow_timeout", "max_lost", "max_parts", "upstream_idle_timeout",
                                           "upstream_max_connections"))  # fmt: skip
    positive(config.health, "health", ("interval", "timeout", "misses", "stuck_after", "forget_after"))
    if not config.health.path.startswith("/") or not config.health.path.isprintable() or " " in config.health.path:
        raise ConfigError("must be a path such as /health", "health.path")
    one_of(config.log.level, ("debug", "info", "warning", "error"), "log.level")
    one_of(config.log.format, ("auto", "json", "text"), "log.format")
    one_of(config.log.decisions, ("all", "errors", "off"), "log.decisions")


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
    positive(server, "server", ("grpc_max_message_bytes",))


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
    positive(events, "events", ("plane_grace", "doubt_ttl", "max_message_bytes", "max_key_chars",
                                 "max_buffered_deltas", "max_buffered_keys", "max_backlog_bytes",
                                 "max_snapshots", "gap_keys_per_second"))  # fmt: skip


def _check_dynamo(dynamo: DynamoConfig, key: str, plane: str) -> None:
    if not dynamo.namespace:
        raise ConfigError("must not be empty", f"{key}.namespace")
    one_of(dynamo.plane, ("nats", "zmq"), f"{key}.plane")
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
    positive(dynamo, key, ("lease",))


def _check_pool(name: str, pool: PoolConfig, homes: dict[str, str]) -> None:
    """``homes``: worker URL -> the pool that has it, over all pools seen so far."""
    key = f"pool.{name}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ConfigError("a pool's name has 1 to 64 letters, digits, _ . or -", key)
    one_of(pool.role, ROLES, f"{key}.role")
    one_of(pool.policy, POLICIES, f"{key}.policy")
    one_of(pool.parity, ("none", "dynamo"), f"{key}.parity")
    one_of(pool.load_until, ("first_token", "end"), f"{key}.load_until")
    if pool.parity == "dynamo" and pool.device_ratios:
        raise ConfigError('must be left out with parity = "dynamo"', f"{key}.device_ratios")
    if pool.dynamo is not None and pool.workers:
        raise ConfigError("must be left out: discovery finds the workers of a Dynamo pool", f"{key}.workers")
    one_of(pool.full_hit.prefer, ("gpu", "any"), f"{key}.full_hit.prefer")
    if pool.ratio < 1:
        raise ConfigError("must be a whole number of at least 1", f"{key}.ratio")
    for device, ratio in pool.device_ratios.items():
        if ratio < 1:
            raise ConfigError("must be a whole number of at least 1", f"{key}.device_ratios.{device}")
    if pool.max_inflight < 0:
        raise ConfigError("must not be negative (0 = no cap)", f"{key}.max_inflight")
    positive(pool, key, ("predicted_capacity_bytes", "max_keys", "max_keys_per_worker", "max_workers"))
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
        if not 0 <= entry.bootstrap_port < 65_536:
            raise ConfigError("must be a port", f"{where}.bootstrap_port")
        if not 0 < entry.weight < 1e6:
            raise ConfigError("must be above 0", f"{where}.weight")
        home = homes.setdefault(entry.url, f"{name}.{place}")
        if home != f"{name}.{place}":
            raise ConfigError(f"{entry.url} is listed twice; the other place is pool.{home}", where)
        pool.workers[place] = entry
