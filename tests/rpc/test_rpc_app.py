"""The listener as a part of the router: configuration, start, stop."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fullhit.app import Router, StartError
from fullhit.client import AsyncClient, NoWorker
from fullhit.config import ConfigError, effective, load_config
from fullhit.rpc.v1 import router_pb2 as pb
from fullhit.rpc.v1 import router_pb2_grpc
from fullhit.telemetry import Log

QUIET = {
    "server.listen": "127.0.0.1:0", "server.admin_listen": "127.0.0.1:0", "server.grpc_listen": "127.0.0.1:0",
    "events.plane": "none",
}  # fmt: skip


def configured(tmp_path: Path, server: str = "", **flags: str) -> Any:
    path = tmp_path / "fullhit.toml"
    path.write_text(f"[server]\n{server}\n")
    return load_config(path, environ={}, flags=flags)


async def started(config: Any) -> tuple[Router, dict[str, Any]]:
    text = io.StringIO()
    log = Log(text, format="json")
    router = Router(config, log)
    try:
        await router.start()
    except (StartError, ConfigError):
        await router.stop(0)
        raise
    assert log.flush(10)
    lines = [json.loads(line) for line in text.getvalue().splitlines()]
    return router, next(line for line in lines if line["event"] == "listening")


async def test_a_router_with_the_listener_answers_at_both_doors_and_stops_cleanly(tmp_path):
    router, told = await started(configured(tmp_path, 'grpc_key = "sesame"', **QUIET))
    try:
        async with AsyncClient(f"grpc://{told['grpc']}", "sesame") as rpc, AsyncClient(told["admin"]) as web:
            for client in (rpc, web):
                with pytest.raises(NoWorker) as none:
                    await client.select()
                assert none.value.code == "empty_pool"
            channel = grpc.aio.insecure_channel(told["grpc"])
            metadata = (("authorization", "Bearer sesame"),)
            call = router_pb2_grpc.RouterStub(channel).RegisterWorker(metadata=metadata)
            await call.write(pb.WorkerMessage(hello=pb.Hello(url="http://127.0.0.1:9", device="cpu")))
            assert (await call.read()).welcome.pool == "default"
            epoch = 2**63 + 1
            await call.write(pb.WorkerMessage(heartbeat=pb.Heartbeat(epoch=epoch, interval_ms=1000)))
            (worker,) = await rpc.workers()
            assert (worker.device, await web.workers()) == ("cpu", [worker])
            row: dict[str, Any] = {}
            async with aiohttp.ClientSession() as session:
                while not (row.get("stream") or {}).get("epoch"):
                    async with session.get(told["admin"] + "/workers") as reply:
                        (row,) = await reply.json()
            assert row["stream"]["epoch"] == str(epoch), "64-bit numbers are text"
            assert row["stream"]["worker_id"] == row["worker_id"] == str(worker.worker_id)
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING, "no worker is ready"
            call.cancel()
            await channel.close()
    finally:
        await router.stop(0)
    assert router.service.leases.expire() == [] and len(router.service.leases) == 0


async def test_a_taken_address_and_a_missing_extra_are_said_at_the_start(tmp_path, monkeypatch):
    router, told = await started(configured(tmp_path, **QUIET))
    try:
        with pytest.raises(StartError, match=r"cannot listen on .*server\.grpc_listen"):
            await started(configured(tmp_path, **(QUIET | {"server.grpc_listen": told["grpc"]})))
    finally:
        await router.stop(0)
    monkeypatch.setitem(sys.modules, "grpc_health", None)
    with pytest.raises(StartError, match=r"server\.grpc_listen is set, but .*pip install 'fullhit\[grpc\]'"):
        await started(configured(tmp_path, **QUIET))


async def test_a_certificate_that_cannot_be_read_is_named(tmp_path):
    config = configured(tmp_path, 'grpc_tls_cert = "/nowhere/a.pem"\ngrpc_tls_key = "/nowhere/a.key"', **QUIET)
    with pytest.raises(ConfigError, match=r"server\.grpc_tls_cert: cannot read /nowhere/a\.pem"):
        await started(config)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ('grpc_listen = "0.0.0.0:8782"', "server.grpc_listen: 0.0.0.0:8782 can be reached from other machines"),
        ('grpc_listen = "[::]:8782"', "can be reached from other machines"),
        ('grpc_listen = "8782"', "server.grpc_listen: expected HOST:PORT"),
        ('grpc_listen = "127.0.0.1:0"\ngrpc_tls_cert = "a.pem"', "server.grpc_tls_cert: a certificate and its key"),
        ('grpc_listen = "127.0.0.1:0"\ngrpc_client_ca = "a.pem"', "server.grpc_client_ca: client certificates need"),
        ('grpc_listen = "127.0.0.1:0"\ngrpc_max_message_bytes = 0', "server.grpc_max_message_bytes: must be above 0"),
        ('grpc_key_file = "/nowhere/key"', "server.grpc_key_file: cannot read"),
    ],
)
def test_settings_that_cannot_hold_are_refused(tmp_path, server, message):
    with pytest.raises(ConfigError) as caught:
        configured(tmp_path, server)
    assert message in str(caught.value)


def test_the_key_comes_from_a_file_or_the_environment_and_is_never_shown(tmp_path):
    (tmp_path / "key").write_text("sesame\n")
    config = configured(tmp_path, f'grpc_listen = "0.0.0.0:0"\ngrpc_key_file = "{tmp_path}/key"')
    assert config.server.grpc_key == "sesame" and effective(config)["server"]["grpc_key"] == "***"
    environ = {"FULLHIT_GRPC_KEY": "open", "FULLHIT_GRPC_LISTEN": "0.0.0.0:1"}
    warnings: list[str] = []
    config = load_config(environ=environ, warn=warnings)
    assert (config.server.grpc_key, config.server.grpc_listen, warnings) == ("open", "0.0.0.0:1", [])
