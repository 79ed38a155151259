"""How calls end: deadlines, cancellation, clients that are killed, a router that leaves. Nothing may stay behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import time

import aiohttp
import grpc
import pytest

from fullhit.decision import DecisionSettings
from fullhit.rpc.v1 import router_pb2 as pb
from fullhit.rpc.v1 import router_pb2_grpc

A, B = "http://127.0.0.1:1001", "http://127.0.0.1:1002"

GREEDY_CLIENT = """
import sys, time, grpc
from fullhit.rpc.v1 import router_pb2 as pb, router_pb2_grpc
stub = router_pb2_grpc.RouterStub(grpc.insecure_channel(sys.argv[1]))
for _ in range(5):
    stub.Select(pb.SelectRequest(lease_seconds=float(sys.argv[2])))
watch = stub.WatchWorkers(pb.WatchWorkersRequest())
next(watch)
print("holding", flush=True)
time.sleep(600)
"""


async def test_the_leases_and_streams_of_a_killed_client_are_gone_within_their_time(house, until):
    house.add_ready(A, B)
    seconds = 1.0
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", GREEDY_CLIENT, house.target, str(seconds), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert client.stdout is not None
        async with asyncio.timeout(60):
            assert (await client.stdout.readline()).strip() == b"holding"
        assert house.inflight() <= 5 and house.server.servicer.watchers == 1
    finally:
        os.kill(client.pid, signal.SIGKILL)
        await client.wait()
    killed = time.monotonic()
    await until(lambda: house.inflight() == 0, "the slots are back")
    assert time.monotonic() - killed < seconds + 1.0
    await until(lambda: house.server.servicer.watchers == 0, "the stream has ended")
    assert house.service.leases.expired == 5 and len(house.service.leases) == 0


async def test_each_lease_ends_at_its_own_time(house, until):
    house.add_ready(A)
    stub = house.stub()
    long = await stub.Select(pb.SelectRequest(lease_seconds=500))
    await stub.Select(pb.SelectRequest(lease_seconds=0.05))
    await until(lambda: house.inflight() == 1, "the short one is over")
    assert (await stub.Release(pb.ReleaseRequest(lease_id=long.lease_id))).released
    assert house.inflight() == 0


async def test_a_call_whose_deadline_has_passed_holds_no_slot(house, until):
    house.add_ready(A)
    stub = house.stub()
    await stub.Select(pb.SelectRequest(dry_run=True))
    call = stub.Select(pb.SelectRequest(), timeout=0.05)
    await asyncio.sleep(0)  # it is on its way
    time.sleep(0.2)  # noqa: ASYNC251 (the router's loop is held up meanwhile)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await stub.Select(pb.SelectRequest(dry_run=True))
    await until(lambda: house.inflight() == 0)


async def test_a_stream_ends_at_its_deadline(house, until):
    call = house.stub().WatchWorkers(pb.WatchWorkersRequest(), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(20):
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: house.server.servicer.watchers == 0, "the stream has ended")


async def test_cancelled_choices_leave_no_slot_behind(house, until):
    """Cancelled at all moments of their life. Where the answer was on its way, the request id gives the slot back."""
    house.add_ready(A, B)
    stub = house.stub()
    rng = random.Random(5)
    answered = 0

    async def one(number: int) -> None:
        nonlocal answered
        call = stub.Select(pb.SelectRequest(lease_seconds=3000, request_id=f"r{number}"))
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        if rng.random() < 0.8:
            await asyncio.sleep(rng.random() * 0.01)
        call.cancel()
        try:
            await call
            answered += 1
        except (asyncio.CancelledError, grpc.aio.AioRpcError):
            pass
        await stub.Release(pb.ReleaseRequest(request_id=f"r{number}"))

    for turn in range(10):
        await asyncio.gather(*(one(20 * turn + n) for n in range(20)))
    assert 0 < answered < 200
    await until(lambda: house.inflight() == 0, "all slots are back")
    assert len(house.service.leases) == 0 and all(w.encoding == 0 for w in house.pool.workers())


async def test_an_abandoned_watch_ends_when_it_is_cancelled(house, until):
    house.add_ready(A)
    calls = [house.stub().WatchWorkers(pb.WatchWorkersRequest()) for _ in range(8)]
    for call in calls:
        await call.read()
    assert house.server.servicer.watchers == 8
    for call in calls:
        call.cancel()
    await until(lambda: house.server.servicer.watchers == 0, "all have ended")
    assert house.server.servicer._stirred in house.fleet.on_added


async def test_a_channel_closed_over_reading_streams_leaves_no_connection(house, until):
    """Case E57: streams with a reader waiting, closed with their channel."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        channel = grpc.aio.insecure_channel(house.target, options=[("grpc.use_local_subchannel_pool", 1)])
        call = router_pb2_grpc.RouterStub(channel).WatchWorkers(pb.WatchWorkersRequest())
        await call.read()
        reader = asyncio.ensure_future(call.read())
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await channel.close()
    await until(lambda: house.server.servicer.watchers == 0)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2, "the sockets are closed")


async def test_streams_cancelled_in_mid_word_do_not_pile_up(house, until):
    """Case E55, on a small scale: each stream is cancelled while a read and a write are under way."""
    house.add_ready(A)
    stub = house.stub()

    async def one() -> None:
        session, watch = stub.Session(), stub.WatchWorkers(pb.WatchWorkersRequest())
        writing = asyncio.ensure_future(session.write(pb.SessionRequest(select=pb.SelectRequest())))
        reading = [asyncio.ensure_future(call.read()) for call in (session, watch)]
        await asyncio.wait({*reading}, timeout=0.002)
        session.cancel()
        watch.cancel()
        writing.cancel()  # of itself it would wait for ever: nobody wakes a write whose call was cancelled before it
        await asyncio.gather(writing, *reading, return_exceptions=True)

    async def many() -> int:
        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(15)))
        servicer = house.server.servicer
        await until(lambda: servicer.watchers == 0 and servicer.sessions == 0 and house.inflight() == 0)
        gc.collect()
        with open("/proc/self/statm") as file:  # noqa: ASYNC230 (memory, not a disk)
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    await many()
    before = await many()
    after = await many()
    assert after - before < 8 << 20, f"{(after - before) / 1e6:.1f} MB more after 300 streams"
    assert len(asyncio.all_tasks()) < 40


async def test_a_leaving_router_ends_its_streams_with_unavailable(opening):
    async with opening() as house:
        call = house.stub().WatchWorkers(pb.WatchWorkersRequest())
        await call.read()
        stop = asyncio.create_task(house.server.stop(5))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(20):
                await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await stop
        assert house.server.servicer._stirred not in house.fleet.on_added
        assert house.lines._removed not in house.fleet.on_removed


async def test_the_number_of_watchers_is_bounded(opening):
    from fullhit.rpc.settings import RpcSettings

    async with opening(rpc=RpcSettings(max_watchers=1)) as house:
        first = house.stub().WatchWorkers(pb.WatchWorkersRequest())
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await house.stub().WatchWorkers(pb.WatchWorkersRequest()).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()


async def test_census_after_a_storm_of_clients(opening, until):
    """Everything taken is given back, whatever way the calls ended."""
    async with opening(decision=DecisionSettings(lease_seconds=0.5)) as house:
        house.add_ready(A, B)
        rng = random.Random(9)

        async def client(number: int) -> None:
            stub = house.stub()
            for turn in range(15):
                got = await stub.Select(pb.SelectRequest(request_id=f"{number}-{turn % 5}", keys=[f"k{turn}"]))
                if rng.random() < 0.7:
                    await stub.Release(pb.ReleaseRequest(lease_id=got.lease_id))

        await asyncio.gather(*map(client, range(8)))
        await until(lambda: house.inflight() == 0, "the slots are back")
        assert len(house.service.leases) == 0 and not house.service.leases._of_request
        assert sum(w.encoding for w in house.pool.workers()) == 0


async def test_a_draining_router_chooses_nothing_more_at_either_door_but_takes_slots_back(house):
    house.add_ready(A)
    stub = house.stub()
    held = await stub.Select(pb.SelectRequest(keys=["k"]))
    house.service.leaving = True
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Select(pb.SelectRequest(keys=["k"]))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(refused.value.trailing_metadata())["fullhit-code"] == "leaving"
    session = stub.Session()
    await session.write(pb.SessionRequest(call=3, select=pb.SelectRequest(keys=["k"])))
    answer = await session.read()
    assert (answer.call, answer.refusal.code, answer.refusal.retryable) == (3, "leaving", True)
    session.cancel()
    async with aiohttp.ClientSession() as client:
        async with client.post(f"{house.admin}/select", json={"keys": ["k"]}) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
            assert (await reply.json())["error"]["code"] == "leaving"
        async with client.post(f"{house.admin}/select", json={"keys": ["k"], "dry_run": True}) as reply:
            assert reply.status == 200
    assert (await stub.Release(pb.ReleaseRequest(lease_id=held.lease_id))).released
    assert house.inflight() == 0


async def test_a_burst_of_more_calls_than_the_library_keeps_waiting_is_answered_whole(house, until):
    house.add_ready(A)
    stub = house.stub()
    answers = await asyncio.gather(
        *(stub.Select(pb.SelectRequest(dry_run=True)) for _ in range(3_000)), return_exceptions=True
    )
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    assert not failed, f"{len(failed)} of 3000, the first: {failed[0]}"
