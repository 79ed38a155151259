"""Checks of the OpenAI front and of the roles of pools, and the two checks that every table needs."""

from __future__ import annotations

from collections.abc import Sequence

from fullhit.config_tables import SERVING, Config, ConfigError, OpenAIFrontConfig, Table, parse_address
from fullhit_publisher.identity import normalize_url

__all__ = ["check_front", "check_roles", "one_of", "positive"]


def check_front(config: Config, front: OpenAIFrontConfig) -> None:
    """The table [openai_front]; fills in what follows from the rest. Raises ConfigError."""
    key = "openai_front"
    one_of(front.mode, ("dynamo", "workers"), f"{key}.mode")
    address = parse_address(front.listen, f"{key}.listen")
    server = config.server
    others = {"server.admin_listen": server.admin_listen}
    if config.encoder_gateway.enabled:
        others["server.listen"] = server.listen
    for name, other in others.items():
        if address.port and address == parse_address(other, name):
            raise ConfigError(f"{address} is the address of {name}; give it a port of its own", f"{key}.listen")
    positive(front, key, ("connect_timeout", "first_byte_timeout", "idle_timeout", "max_attempts", "queue_max",
                           "queue_max_bytes", "queue_timeout", "send_timeout", "learn_interval"))  # fmt: skip
    if front.total_timeout < 0:
        raise ConfigError("must not be negative (0 = no limit)", f"{key}.total_timeout")
    if front.mode == "dynamo":
        _check_dynamo_front(config, front)
    else:
        _check_worker_front(config, front)


def _check_dynamo_front(config: Config, front: OpenAIFrontConfig) -> None:
    key = "openai_front"
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


def _check_worker_front(config: Config, front: OpenAIFrontConfig) -> None:
    key = "openai_front"
    for setting in ("pool", "prefill_pool", "models"):
        if getattr(front, setting):
            raise ConfigError(
                'is for mode = "dynamo"; in mode "workers" each pool says its role, models and prefill_pool',
                f"{key}.{setting}",
            )
    if not any(pool.role in SERVING for pool in config.pool.values()):
        raise ConfigError(f"no pool has one of the roles {', '.join(SERVING)}", f"{key}.mode")
    if not 0 <= front.retry_share <= 1:
        raise ConfigError("must be between 0 and 1", f"{key}.retry_share")
    for prefix in front.pass_through:
        if not prefix.startswith("/") or prefix == "/" or "?" in prefix or not prefix.isascii():
            raise ConfigError(f"{prefix!r} must begin with / and name a path", f"{key}.pass_through")


def check_roles(config: Config) -> None:
    """Roles of pools, and which prefill pool belongs to which decode pool. Raises ConfigError."""
    prefills = [name for name, pool in config.pool.items() if pool.role == "prefill"]
    for name, pool in config.pool.items():
        key = f"pool.{name}"
        if pool.dynamo is not None and pool.role != "encode":
            raise ConfigError("a pool of Dynamo workers keeps the role encode", f"{key}.role")
        if pool.role == "decode":
            if not pool.prefill_pool and len(prefills) == 1:
                pool.prefill_pool = prefills[0]
            if pool.prefill_pool not in prefills:
                known = ", ".join(prefills) or "there are none"
                raise ConfigError(f"name a pool of the role prefill ({known})", f"{key}.prefill_pool")
        elif pool.prefill_pool:
            raise ConfigError("is for pools of the role decode", f"{key}.prefill_pool")
        if pool.models and pool.role not in SERVING:
            raise ConfigError(f"is for the roles {', '.join(SERVING)}", f"{key}.models")
    gateway = config.encoder_gateway
    if gateway.enabled and config.pool[gateway.pool].role != "encode":
        raise ConfigError(
            f"pool {gateway.pool!r} has the role {config.pool[gateway.pool].role}; name a pool of encoders, or set "
            "encoder_gateway.enabled = false",
            "encoder_gateway.pool",
        )
    served: dict[str, str] = {}
    for name, pool in config.pool.items():
        for model in pool.models:
            if served.setdefault(model, name) != name:
                raise ConfigError(f"{model!r} is served by pool {served[model]} already", f"pool.{name}.models")


def one_of(value: str, allowed: Sequence[str], key: str) -> None:
    if value not in allowed:
        raise ConfigError(f"expected one of {', '.join(allowed)}, got {value!r}", key)


def positive(table: Table, prefix: str, names: Sequence[str]) -> None:
    for name in names:
        if not getattr(table, name) > 0:
            raise ConfigError("must be above 0", f"{prefix}.{name}")
