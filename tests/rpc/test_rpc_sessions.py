"""Session: Select and Release on one stream, whose leases end with it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import grpc
import pytest

from fullhit.rpc.v1 import router_pb2 as pb
from fullhit.rpc.v1 import router_pb2_grpc

A, B = "http://127.0.0.1:1001", "http://127.0.0.1:1002"

GREEDY_CLIENT = """
import sys, time, grpc
from fullhit.rpc.v1 import router_pb2 as pb, router_pb2_grpc
stub = router_pb2_grpc.RouterStub(grpc.insecure_channel(sys.argv[1]))
def asks():
    for n in range(5):
        yield pb.SessionRequest(call=n, select=pb.SelectRequest(lease_seconds=3000))
    time.sleep(600)
session = stub.Session(asks())
for _ in range(5):
    next(session)
print("holding", flush=True)
time.sleep(600)
"""


async def ask(session: Any, call: int = 0, **question: Any) -> pb.SessionReply:
    await session.write(pb.SessionRequest(call=call, **question))
    return await session.read()


async def test_questions_are_answered_in_their_turn(house):
    house.add_ready(A, B)
    session = house.stub().Session()
    for n in range(10):
        await session.write(pb.SessionRequest(call=n, select=pb.SelectRequest(request_id=f"r{n}")))
    told = [await session.read() for _ in range(10)]
    assert [reply.call for reply in told] == list(range(10))
    assert {reply.selected.worker.id for reply in told} == {A, B} and house.inflight() == 10
    for reply in told:
        freed = await ask(session, 2**64 - 1, release=pb.ReleaseRequest(lease_id=reply.selected.lease_id))
        assert freed.call == 2**64 - 1 and freed.released.released
    assert house.inflight() == 0
    await session.done_writing()
    assert await session.read() is grpc.aio.EOF and await session.code() is grpc.StatusCode.OK


async def test_a_refusal_is_an_answer(house):
    session = house.stub().Session()
    refusal = (await ask(session, 1, select=pb.SelectRequest())).refusal
    assert (refusal.code, refusal.retryable) == ("empty_pool", False)
    house.add_ready(A)
    refusal = (await ask(session, 2, select=pb.SelectRequest(exclude=[A]))).refusal
    assert (refusal.code, refusal.retryable) == ("all_excluded", True)
    for question in ({"select": pb.SelectRequest(lease_seconds=-1)}, {"release": pb.ReleaseRequest()}, {}):
        assert (await ask(session, 3, **question)).refusal.code == "invalid_request"
    assert (await ask(session, 4, select=pb.SelectRequest())).selected.worker.id == A
    assert not (await ask(session, 5, release=pb.ReleaseRequest(lease_id="none"))).released.released
    session.cancel()


async def test_the_leases_of_a_session_end_with_it(house, until):
    house.add_ready(A, B)
    session = house.stub().Session()
    for n in range(4):
        await ask(session, n, select=pb.SelectRequest(request_id=f"r{n}"))
    kept = await house.stub().Select(pb.SelectRequest(request_id="r0"))
    assert kept.repeated_call, "asked again over a call of its own: no longer the session's"
    other = house.stub().Session()
    assert (await ask(other, 9, select=pb.SelectRequest(request_id="r1"))).selected.repeated_call
    assert house.inflight() == 4
    session.cancel()
    await until(lambda: house.inflight() == 2, "its own are given back, those asked for again are not")
    other.cancel()
    await until(lambda: house.inflight() == 1)
    assert (await house.stub().Release(pb.ReleaseRequest(lease_id=kept.lease_id))).released
    assert not house.service.leases._holders and len(house.service.leases) == 0


async def test_a_killed_client_holds_nothing(house, until):
    house.add_ready(A)
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", GREEDY_CLIENT, house.target, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert client.stdout is not None
        async with asyncio.timeout(60):
            assert (await client.stdout.readline()).strip() == b"holding"
        assert house.inflight() == 5 and house.server.servicer.sessions == 1
    finally:
        os.kill(client.pid, signal.SIGKILL)
        await client.wait()
    await until(lambda: house.inflight() == 0, "given back at once, long before its leases end")
    assert house.server.servicer.sessions == 0 and house.service.leases.expired == 0


SELF_KILLER = """
import itertools, os, signal, sys, time, grpc
from fullhit.rpc.v1 import router_pb2 as pb, router_pb2_grpc
channel = grpc.insecure_channel(sys.argv[1], options=[("grpc.http2.bdp_probe", 0)])  # little room for answers
said = 0
def asks():
    global said
    ask = pb.SessionRequest(select=pb.SelectRequest(request_id="x" * 256, dry_run=True))
    for said in itertools.count():
        yield ask
answers = router_pb2_grpc.RouterStub(channel).Session(asks())
before = -1
while said != before:  # until nothing moves: the answers, which nobody reads, wait for room
    before = said
    time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_clients_killed_in_the_midst_of_answers_leave_no_stack_trace(house, until, caplog):
    house.add_ready(A)
    clients = [await asyncio.create_subprocess_exec(sys.executable, "-c", SELF_KILLER, house.target) for _ in range(4)]
    async with asyncio.timeout(120):
        assert {await client.wait() for client in clients} == {-signal.SIGKILL}
    await until(lambda: house.server.servicer.sessions == 0 and house.inflight() == 0)
    assert (await house.stub().Select(pb.SelectRequest())).worker.id == A
    assert not [record for record in caplog.records if record.exc_info or "Traceback" in record.getMessage()]


async def test_leases_of_a_session_still_end_at_their_time(house, until):
    house.add_ready(A)
    session = house.stub().Session()
    await ask(session, select=pb.SelectRequest(lease_seconds=0.05))
    await until(lambda: house.inflight() == 0)
    assert not house.service.leases._holders
    session.cancel()


async def test_garbage_ends_a_session(house, until):
    house.add_ready(A)
    method = house.channel().stream_stream("/fullhit.v1.Router/Session")
    good = pb.SessionRequest(select=pb.SelectRequest()).SerializeToString()
    session = method(iter([good, b"\xff\xff"]))
    await session.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await session.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: house.inflight() == 0 and house.server.servicer.sessions == 0)


async def test_a_leaving_router_ends_sessions_with_unavailable(opening):
    async with opening() as house:
        house.add_ready(A)
        session = house.stub().Session()
        await ask(session, select=pb.SelectRequest())
        reading = asyncio.ensure_future(session.read())
        stop = asyncio.create_task(house.server.stop(5))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(20):
                await reading
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await stop
        assert house.inflight() == 0 and house.server.servicer.sessions == 0


async def test_a_reader_that_stops_does_not_fill_the_memory(house, until):
    """Answers wait in the stream's window; beyond it the session reads no further."""
    house.add_ready(*(f"http://127.0.0.1:{port}" for port in range(2001, 2031)))
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    channel = grpc.aio.insecure_channel(house.target, options=options)
    session = router_pb2_grpc.RouterStub(channel).Session()
    big = pb.SessionRequest(select=pb.SelectRequest(dry_run=True, candidates=16, keys=["k" * 500] * 20))
    written = 0

    async def pour() -> None:
        nonlocal written
        for _ in range(100_000):
            await session.write(big)
            written += 1

    pouring = asyncio.create_task(pour())
    last = -1
    while written != last:
        last = written
        await asyncio.sleep(0.3)
    assert 0 < written < 100_000, "the writer is held up"
    session.cancel()
    pouring.cancel()
    await asyncio.gather(pouring, return_exceptions=True)
    await channel.close()
    await until(lambda: house.server.servicer.sessions == 0)
