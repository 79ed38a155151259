"""Who may call: keys, TLS, exposure. And what is open: health, reflection."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fullhit.rpc import RpcMissing, load_server
from fullhit.rpc.server import ExposedWithoutKey, RpcServer
from fullhit.rpc.settings import RpcSettings
from fullhit.rpc.v1 import router_pb2 as pb

A = "http://127.0.0.1:1001"
SERVICE = "fullhit.v1.Router"
BEARER = (("authorization", "Bearer sesame"),)


async def status_of(call) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_with_a_key_every_call_must_carry_it(opening):
    async with opening(rpc=RpcSettings(key="sesame")) as house:
        house.add_ready(A)
        stub = house.stub()
        for metadata in (
            (), (("authorization", "Bearer wrong"),), (("authorization", "sesame"),), (("authorization", "Bearer"),),
            (("authorization", "Bearer sesame "), ("authorization", "Bearer wrong")),
        ):  # fmt: skip
            for call in (
                stub.Select(pb.SelectRequest(), metadata=metadata),
                stub.Release(pb.ReleaseRequest(lease_id="x"), metadata=metadata),
                stub.ListWorkers(pb.ListWorkersRequest(), metadata=metadata),
                stub.WatchWorkers(pb.WatchWorkersRequest(), metadata=metadata).read(),
                stub.RegisterWorker(iter([pb.WorkerMessage(hello=pb.Hello(url=A))]), metadata=metadata).read(),
            ):
                assert await status_of(call) is grpc.StatusCode.UNAUTHENTICATED
        assert house.inflight() == 0 and len(house.lines) == 0 and house.server.servicer.watchers == 0
        assert (await stub.Select(pb.SelectRequest(), metadata=BEARER)).worker.id == A
        health = health_pb2_grpc.HealthStub(house.channel())
        assert await status_of(health.Check(health_pb2.HealthCheckRequest())) is grpc.StatusCode.OK
        assert await status_of(house.channel().unary_unary("/x.Y/Z")(b"")) is grpc.StatusCode.UNIMPLEMENTED


async def test_an_exposed_listener_without_a_key_does_not_start(house):
    for host in ("0.0.0.0", "::", "10.1.2.3"):
        server = RpcServer(house.service, house.lines, RpcSettings(), ready=lambda: True)
        with pytest.raises(ExposedWithoutKey, match="set a key"):
            await server.start(host, 0)
        server.servicer.leave()


async def test_a_taken_port_is_an_os_error(house):
    server = RpcServer(house.service, house.lines, RpcSettings(), ready=lambda: True)
    with pytest.raises(OSError, match="cannot bind"):
        await server.start("127.0.0.1", house.port)
    server.servicer.leave()


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate authority, a server certificate for 127.0.0.1 and a client's."""
    folder = tmp_path_factory.mktemp("tls")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test ca")
    for name in ("server", "client"):
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.pem", "-extfile", "ext", "-days", "2")  # fmt: skip
    return folder


async def test_tls_with_certificates_on_both_sides_and_a_key(opening, papers):
    read = {path.name: path.read_bytes() for path in papers.iterdir()}
    settings = RpcSettings(
        key="sesame", certificate=read["server.pem"], private_key=read["server.key"], client_ca=read["ca.pem"]
    )
    async with opening(rpc=settings) as house:
        house.add_ready(A)
        known = grpc.ssl_channel_credentials(read["ca.pem"], read["client.key"], read["client.pem"])
        assert (await house.stub(known).Select(pb.SelectRequest(), metadata=BEARER)).worker.id == A
        assert await status_of(house.stub(known).Select(pb.SelectRequest())) is grpc.StatusCode.UNAUTHENTICATED
        nameless = grpc.ssl_channel_credentials(read["ca.pem"])
        for stub in (house.stub(nameless), house.stub()):
            call = stub.Select(pb.SelectRequest(), metadata=BEARER, timeout=10)
            assert await status_of(call) is grpc.StatusCode.UNAVAILABLE
        assert house.inflight() == 1


async def test_a_certificate_that_is_none_is_refused_at_the_start(house):
    settings = RpcSettings(certificate=b"no certificate", private_key=b"no key")
    server = RpcServer(house.service, house.lines, settings, ready=lambda: True)
    with pytest.raises((ValueError, OSError)):
        await server.start("127.0.0.1", 0)
    server.servicer.leave()


async def test_health_follows_readiness(house, until):
    health = health_pb2_grpc.HealthStub(house.channel())
    seen: list[int] = []

    async def ask() -> None:
        seen.append((await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))).status)

    await ask()
    assert seen == [health_pb2.HealthCheckResponse.NOT_SERVING], "no workers yet"
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    try:
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        house.add_ready(A)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    finally:
        watch.cancel()
    unknown = health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert await status_of(unknown) is grpc.StatusCode.NOT_FOUND


async def test_reflection_describes_the_service(house):
    stub = reflection_pb2_grpc.ServerReflectionStub(house.channel())
    ask = reflection_pb2.ServerReflectionRequest
    call = stub.ServerReflectionInfo(iter([ask(list_services=""), ask(file_containing_symbol=SERVICE)]))
    listed, described = await call.read(), await call.read()
    names = {service.name for service in listed.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    (file,) = described.file_descriptor_response.file_descriptor_proto
    assert b"RegisterWorker" in file


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc_reflection", None)
    with pytest.raises(RpcMissing, match=r"pip install 'fullhit\[grpc\]'"):
        load_server()


def test_the_router_without_the_extra_needs_none_of_it():
    """Everything but the server itself can be imported where the packages are missing."""
    code = (
        "import sys\n"
        "for name in ('grpc', 'google.protobuf', 'grpc_health', 'grpc_reflection'): sys.modules[name] = None\n"
        "import fullhit.app, fullhit.client\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
