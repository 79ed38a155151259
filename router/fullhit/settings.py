"""From the configuration to the settings of the parts. One function for each part, and no decisions."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from fullhit.config import Config, ConfigError, DynamoConfig, EncoderGatewayConfig, OpenAIFrontConfig, PoolConfig
from fullhit.core import DeviceClass, PoolSettings
from fullhit.dynamo import DynamoOptions
from fullhit.events import IngestSettings, NatsSettings, StreamSettings
from fullhit.events.dynamo_scope import DynamoScope
from fullhit.fleet import FleetSettings
from fullhit.http.encoder import GatewaySettings, PartLimits
from fullhit.http.encoder.settings import BadImage
from fullhit.http.openai import FrontSettings, LoadUntil
from fullhit.http.wire import ListenerLimits, UpstreamLimits
from fullhit.http.workers import WorkerFrontSettings
from fullhit.rpc.settings import RpcSettings
from fullhit_publisher.dynamo_keys import KeyRules
from fullhit_publisher.wire import Limits

__all__ = [
    "dynamo_options",
    "fleet_settings",
    "front_settings",
    "front_upstream_limits",
    "gateway_settings",
    "ingest_settings",
    "key_rules",
    "listener_limits",
    "nats_settings",
    "pool_settings",
    "rpc_settings",
    "upstream_limits",
    "worker_front_settings",
    "worker_upstream_limits",
]


def pool_settings(pool: PoolConfig) -> PoolSettings:
    """`Pool`. Further device classes keep CPU and GPU beside them."""
    classes: tuple[DeviceClass, ...] = ()
    if pool.device_ratios:
        more = {name: ratio for name, ratio in pool.device_ratios.items() if name not in ("gpu", "cpu")}
        classes = (
            DeviceClass("gpu", pool.device_ratios.get("gpu", 1), ()),
            DeviceClass("cpu", pool.device_ratios.get("cpu", pool.ratio), ("cpu",)),
            *(DeviceClass(name, ratio, (name,)) for name, ratio in more.items()),
        )
    return PoolSettings(
        policy=pool.policy,
        parity="dynamo" if pool.parity == "dynamo" else "none",
        ratio=pool.ratio,
        full_hit_prefer="any" if pool.full_hit.prefer == "any" else "gpu",
        classes=classes,
        predict=pool.predict,
        predicted_bytes=pool.predicted_capacity_bytes,
        max_keys=pool.max_keys,
        max_keys_per_worker=pool.max_keys_per_worker,
        max_workers=pool.max_workers,
    )


def fleet_settings(config: Config) -> FleetSettings:
    """`Fleet`."""
    health = config.health
    return FleetSettings(
        interval=health.interval,
        timeout=health.timeout,
        misses=health.misses,
        stuck_after=health.stuck_after,
        forget_after=health.forget_after,
        path=health.path,
        discover=config.events.discover,
        default_pool=config.default_pool,
        max_inflight={name: pool.max_inflight for name, pool in config.pool.items() if pool.max_inflight},
        leased_pools=frozenset(name for name, pool in config.pool.items() if pool.dynamo is not None),
    )


def ingest_settings(config: Config) -> IngestSettings:
    """`Ingest`."""
    events = config.events
    # Beyond the cap of the index a worker is cut short, far beyond it is not believed at all.
    most = 2 * max(pool.max_keys_per_worker for pool in config.pool.values())
    return IngestSettings(
        stream=StreamSettings(
            plane_grace=events.plane_grace,
            doubt_ttl=events.doubt_ttl,
            max_buffered_deltas=events.max_buffered_deltas,
            max_buffered_keys=events.max_buffered_keys,
            gap_keys_per_second=events.gap_keys_per_second,
            max_keys=most,
        ),
        limits=Limits(max_message_bytes=events.max_message_bytes, max_key_chars=events.max_key_chars),
        max_snapshots=events.max_snapshots,
        max_lane_bytes=max(1, events.max_backlog_bytes // 4),
        max_backlog_bytes=events.max_backlog_bytes,
    )


def nats_settings(config: Config) -> NatsSettings:
    """`NatsPlane`."""
    file = config.events.credentials_file
    return NatsSettings(credentials=Path(file) if file else None)


def dynamo_options(config: Config, dynamo: DynamoConfig) -> DynamoOptions:
    """`DynamoPool`."""
    return DynamoOptions(
        scope=DynamoScope(dynamo.namespace, dynamo.component, dynamo.endpoint),
        discovery=dynamo.discovery,
        plane=dynamo.plane,
        nats=dynamo.nats_url,
        brokers=tuple(dynamo.brokers),
        lease=dynamo.lease,
        nats_settings=nats_settings(config),
    )


def key_rules(dynamo: DynamoConfig) -> KeyRules:
    """Keys of media for a Dynamo pool."""
    return KeyRules(session_scoped=dynamo.session_scoped, video_config=dynamo.video_config)


def listener_limits(config: Config) -> ListenerLimits:
    """The data listener."""
    server = config.server
    return ListenerLimits(
        max_body_bytes=server.max_body_bytes,
        max_buffered_bytes=server.max_buffered_bytes,
        max_connections=server.max_connections,
        head_timeout=server.head_timeout,
        body_idle_timeout=server.body_idle_timeout,
        keepalive_timeout=server.keepalive_timeout,
        write_timeout=server.write_timeout,
    )


def upstream_limits(gateway: EncoderGatewayConfig) -> UpstreamLimits:
    """Connections to encoders."""
    return UpstreamLimits(
        max_connections=gateway.upstream_max_connections,
        max_idle=min(1024, gateway.upstream_max_connections),
        idle_timeout=gateway.upstream_idle_timeout,
    )


def gateway_settings(gateway: EncoderGatewayConfig) -> GatewaySettings:
    """`EncoderGateway`."""
    return GatewaySettings(
        aliases=gateway.aliases,
        queue_max=gateway.queue_max,
        queue_max_bytes=gateway.queue_max_bytes,
        queue_timeout=gateway.queue_timeout,
        connect_timeout=gateway.connect_timeout,
        encode_timeout=gateway.encode_timeout,
        follow_timeout=gateway.follow_timeout,
        max_attempts=gateway.max_attempts,
        max_lost=gateway.max_lost,
        registration=gateway.registration,
        bad_image=cast("BadImage", gateway.bad_image),  # checked by `load_config`
        verify_media=gateway.verify_media,
        parts=PartLimits(max_parts=gateway.max_parts),
    )


def front_settings(front: OpenAIFrontConfig, pool: PoolConfig) -> FrontSettings:
    """`OpenAIFront`."""
    return FrontSettings(
        frontends=tuple(front.frontends),
        models=frozenset(front.models),
        load_until=cast("LoadUntil", pool.load_until),  # checked by `load_config`
        connect_timeout=front.connect_timeout,
        first_byte_timeout=front.first_byte_timeout,
        idle_timeout=front.idle_timeout,
        max_attempts=front.max_attempts,
        queue_max=front.queue_max,
        queue_max_bytes=front.queue_max_bytes,
        queue_timeout=front.queue_timeout,
    )


def worker_front_settings(front: OpenAIFrontConfig) -> WorkerFrontSettings:
    """`WorkerFront`."""
    return WorkerFrontSettings(
        connect_timeout=front.connect_timeout,
        send_timeout=front.send_timeout,
        first_byte_timeout=front.first_byte_timeout,
        idle_timeout=front.idle_timeout,
        total_timeout=front.total_timeout or None,
        max_attempts=front.max_attempts,
        retry_share=front.retry_share,
        queue_max=front.queue_max,
        queue_max_bytes=front.queue_max_bytes,
        queue_timeout=front.queue_timeout,
        pass_through=tuple(front.pass_through),
        learn_interval=front.learn_interval,
    )


def front_upstream_limits() -> UpstreamLimits:
    """Connections to Dynamo's frontends, of which a few carry everything."""
    return UpstreamLimits(max_connections=16_384, max_idle=1_024, idle_timeout=15.0)


def worker_upstream_limits() -> UpstreamLimits:
    """Connections to workers. uvicorn, which SGLang and vLLM run on, closes an idle one after 5 s."""
    return UpstreamLimits(max_connections=4_096, max_idle=1_024, idle_timeout=3.0)


def rpc_settings(config: Config) -> RpcSettings:
    """`RpcServer`. Raises ConfigError for a certificate that cannot be read."""
    server = config.server
    return RpcSettings(
        key=server.grpc_key,
        certificate=_file(server.grpc_tls_cert, "server.grpc_tls_cert"),
        private_key=_file(server.grpc_tls_key, "server.grpc_tls_key"),
        client_ca=_file(server.grpc_client_ca, "server.grpc_client_ca"),
        max_message_bytes=server.grpc_max_message_bytes,
    )


def _file(path: str, key: str) -> bytes:
    try:
        return Path(path).read_bytes() if path else b""
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", key) from None
