"""The tables of the configuration: what can be set, of which type, and the defaults.

Plain typed structures. Reading, merging and checking them is `fullhit.config`. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import ipaddress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

__all__ = [
    "MAX_WORKERS",
    "POLICIES",
    "RATIO_ENV",
    "ROLES",
    "SERVING",
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
    "Table",
    "WorkerConfig",
    "parse_address",
]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
POLICIES = (
    "device-aware-weighted",
    "least-loaded",
    "round-robin",
    "random",
    "power-of-two",
    "consistent-hash",
)
RATIO_ENV = "DYN_ENCODER_CUDA_TO_CPU_RATIO"
MAX_WORKERS = 65_536
SERVING = ("aggregated", "pd", "decode")
"""Roles of pools whose workers' answers go to clients."""
ROLES = ("encode", *SERVING, "prefill")


class ConfigError(Exception):
    """The operator's mistake. ``key`` is the dotted path of the setting, empty when the file itself is at fault."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key = key


class Address(NamedTuple):
    """Host and port of a listener; port 0 asks the system for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


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


class Table(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all tables: unknown names are refused, so that a misspelt setting cannot be silently ignored."""


class ServerConfig(Table):
    """Listeners and limits. Sizes in bytes, times in seconds."""

    listen: str = "127.0.0.1:8780"
    admin_listen: str = "127.0.0.1:8781"
    admin_key: str = ""
    admin_key_file: str = ""
    grpc_listen: str = ""
    grpc_key: str = ""
    grpc_key_file: str = ""
    grpc_tls_cert: str = ""
    grpc_tls_key: str = ""
    grpc_client_ca: str = ""
    grpc_max_message_bytes: int = 64 * MIB
    max_body_bytes: int = 512 * MIB
    max_buffered_bytes: int = 4 * GIB
    max_connections: int = 10_000
    head_timeout: float = 30.0
    body_idle_timeout: float = 60.0
    keepalive_timeout: float = 75.0
    write_timeout: float = 60.0
    drain_timeout: float = 30.0
    state_file: str = ""
    loop: str = "auto"


class EventsConfig(Table):
    """The event plane. ``plane``: ``embedded``, ``embedded:PORT``, a ``nats://`` or ``tls://`` URL, or ``none``."""

    plane: str = "embedded"
    credentials_file: str = ""
    plane_grace: float = 5.0
    doubt_ttl: float = 600.0
    max_message_bytes: int = 16 * MIB
    max_key_chars: int = 1024
    max_buffered_deltas: int = 10_000
    max_buffered_keys: int = 500_000
    max_backlog_bytes: int = 256 * MIB
    max_snapshots: int = 8
    gap_keys_per_second: int = 100_000
    discover: bool = True


class WorkerConfig(Table):
    """One worker known from the start. Without ``device`` its heartbeat tells; until then it counts as GPU."""

    url: str
    device: str | None = None
    weight: float = 1.0
    max_inflight: int | None = None
    bootstrap_port: int = 0


class FullHitConfig(Table):
    """What to prefer among workers which hold everything: ``gpu`` first, or ``any`` device alike."""

    prefer: str = "gpu"


class DynamoConfig(Table):
    """A pool whose workers are a Dynamo deployment's: where their lease and their events are found, and how they key.

    ``discovery``: ``file:PATH`` or ``etcd:URL``. ``plane``: ``nats`` or ``zmq``; without ``nats_url`` the URL of
    ``events.plane``, without ``brokers`` every publisher's own socket.
    """

    namespace: str
    discovery: str
    component: str = ""
    endpoint: str = ""
    plane: str = "nats"
    nats_url: str = ""
    brokers: list[str] = msgspec.field(default_factory=list)
    lease: float = 10.0
    session_scoped: bool = True
    video_config: dict[str, Any] | None = None


class PoolConfig(Table):
    """Workers which are interchangeable. ``ratio`` = requests on a GPU per request on a CPU."""

    role: str = "encode"
    policy: str = "device-aware-weighted"
    parity: str = "none"
    ratio: int = 8
    full_hit: FullHitConfig = msgspec.field(default_factory=FullHitConfig)
    device_ratios: dict[str, int] = msgspec.field(default_factory=dict)
    max_inflight: int = 128
    predict: bool = True
    predicted_capacity_bytes: int = 4 * GIB
    max_keys: int = 20_000_000
    max_keys_per_worker: int = 2_000_000
    max_workers: int = 4_096
    load_until: str = "first_token"
    models: list[str] = msgspec.field(default_factory=list)
    prefill_pool: str = ""
    workers: list[WorkerConfig | str] = msgspec.field(default_factory=list)
    dynamo: DynamoConfig | None = None


class EncoderGatewayConfig(Table):
    """The seat in front of SGLang encoders. ``aliases`` = how many ``/vN`` prefixes are served."""

    enabled: bool = True
    pool: str = "default"
    aliases: int = 16
    queue_max: int = 4_096
    queue_max_bytes: int = 2 * GIB
    queue_timeout: float = 150.0
    connect_timeout: float = 2.0
    encode_timeout: float = 1_800.0
    follow_timeout: float = 180.0
    max_attempts: int = 0
    max_lost: int = 3
    registration: bool = True
    max_parts: int = 200_000
    bad_image: str = "auto"
    verify_media: bool = True
    upstream_idle_timeout: float = 3.0
    upstream_max_connections: int = 4_096


class OpenAIFrontConfig(Table):
    """The seat for OpenAI clients. ``mode``: ``dynamo``, Dynamo's frontends are behind it (without ``pool`` the only
    Dynamo pool; no ``models`` = all), or ``workers``, the workers of all pools that serve whole requests are."""

    mode: str = "dynamo"
    listen: str = "127.0.0.1:8783"
    pool: str = ""
    prefill_pool: str = ""
    frontends: list[str] = msgspec.field(default_factory=lambda: ["http://127.0.0.1:8000"])
    models: list[str] = msgspec.field(default_factory=list)
    connect_timeout: float = 2.0
    first_byte_timeout: float = 1_800.0
    idle_timeout: float = 600.0
    max_attempts: int = 3
    queue_max: int = 4_096
    queue_max_bytes: int = 2 * GIB
    queue_timeout: float = 60.0
    send_timeout: float = 30.0
    total_timeout: float = 0.0
    retry_share: float = 0.2
    learn_interval: float = 30.0
    pass_through: list[str] = msgspec.field(default_factory=lambda: ["/tokenize", "/detokenize"])


class HealthConfig(Table):
    """Probing of workers: rare, one at a time per worker, patient (a probe may run a real forward)."""

    interval: float = 10.0
    timeout: float = 30.0
    misses: int = 3
    stuck_after: float = 300.0
    forget_after: float = 600.0
    path: str = "/health"


class LogConfig(Table):
    """``format``: ``auto`` (text on a terminal, JSON otherwise), ``json``, ``text``. ``decisions``: who gets a line."""

    level: str = "info"
    format: str = "auto"
    decisions: str = "all"


class Config(Table):
    """The whole of it."""

    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    events: EventsConfig = msgspec.field(default_factory=EventsConfig)
    pool: dict[str, PoolConfig] = msgspec.field(default_factory=lambda: {"default": PoolConfig()})
    encoder_gateway: EncoderGatewayConfig = msgspec.field(default_factory=EncoderGatewayConfig)
    openai_front: OpenAIFrontConfig | None = None
    health: HealthConfig = msgspec.field(default_factory=HealthConfig)
    log: LogConfig = msgspec.field(default_factory=LogConfig)

    @property
    def default_pool(self) -> str:
        """The pool meant where nobody names one: the encoder gateway's, else the front's, else the only one; empty when
        there is none of these."""
        if self.encoder_gateway.enabled:
            return self.encoder_gateway.pool
        if self.openai_front is not None and self.openai_front.mode == "dynamo":
            return self.openai_front.pool
        if self.openai_front is not None:
            return next(name for name, pool in self.pool.items() if pool.role in SERVING)
        return next(iter(self.pool)) if len(self.pool) == 1 else ""
