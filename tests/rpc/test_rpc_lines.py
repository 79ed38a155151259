"""RegisterWorker: encoders that bring their events over a stream of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from fullhit.core import Reason, SelectRequest
from fullhit.rpc.v1 import router_pb2 as pb
from fullhit_publisher.identity import worker_id_for
from fullhit_publisher.keys import item_key, key_text
from fullhit_publisher.state import PublisherState
from fullhit_publisher.wire import Delta, Heartbeat, Snapshot

A, B = "http://127.0.0.1:1001", "http://127.0.0.1:1002"
URL = "https://pictures.invalid/cat.jpg"
TEXT = key_text(item_key(URL))


class Encoder:
    """A small publisher: the state of the real one, and a stream instead of a broker."""

    def __init__(self, url: str = A, state: PublisherState | None = None, **hello: Any) -> None:
        self.url = url
        self.state = state or PublisherState(worker_id_for(url), clock_ns=time.time_ns, url=url, interval_ms=200)
        self.hello = pb.Hello(url=url, **hello)
        self.outbox: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self.snapshots = 0
        self.welcome: pb.Welcome | None = None
        self.error: grpc.aio.AioRpcError | None = None
        self.call: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, stub: Any) -> Encoder:
        self.call = stub.RegisterWorker(self._say())
        self.outbox.put_nowait(pb.WorkerMessage(hello=self.hello))
        first = await self.call.read()
        self.welcome = first.welcome
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]
        return self

    def publish(self) -> None:
        while (delta := self.state.next_delta()) is not None:
            self.outbox.put_nowait(pb.WorkerMessage(delta=delta_message(delta)))

    def change(self, added: list[str], removed: list[str] | None = None) -> None:
        self.state.apply(added, removed or [])
        self.publish()

    async def close(self) -> None:
        if self.call is not None:
            self.call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _say(self) -> AsyncIterator[pb.WorkerMessage]:
        while (message := await self.outbox.get()) is not None:
            yield message

    async def _beat(self) -> None:
        while True:
            self.outbox.put_nowait(pb.WorkerMessage(heartbeat=beat_message(self.state.heartbeat())))
            await asyncio.sleep(0.2)

    async def _listen(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                for part in self.state.snapshot().parts(message.snapshot_request.request_id, 8192):
                    self.outbox.put_nowait(pb.WorkerMessage(snapshot=part_message(part)))
                self.snapshots += 1
        except grpc.aio.AioRpcError as error:
            self.error = error


def beat_message(beat: Heartbeat) -> pb.Heartbeat:
    return pb.Heartbeat(**{f.name: getattr(beat, f.name) for f in pb.Heartbeat.DESCRIPTOR.fields})


def delta_message(delta: Delta) -> pb.Delta:
    return pb.Delta(
        epoch=delta.epoch, seq=delta.seq, added_keys=delta.added, removed_keys=delta.removed, resync=delta.resync
    )


def part_message(part: Snapshot) -> pb.SnapshotPart:
    return pb.SnapshotPart(**{f.name: getattr(part, f.name) for f in pb.SnapshotPart.DESCRIPTOR.fields})


def in_step(house, encoder: Encoder) -> bool:
    worker = house.pool.get(encoder.url)
    return (
        worker is not None
        and not worker.doubtful
        and worker.publishing
        and house.pool.key_count(encoder.url) == len(encoder.state.snapshot().keys)
        and house.pool.digest(encoder.url) == encoder.state.heartbeat().digest
    )


@pytest.fixture
async def encoders() -> AsyncIterator[list[Encoder]]:
    made: list[Encoder] = []
    yield made
    for encoder in made:
        await encoder.close()


async def test_what_an_encoder_publishes_becomes_a_full_hit(house, encoders, until):
    house.add_ready(B)
    encoder = Encoder(device="cpu", weight=2.0, max_inflight=3, labels={"zone": "a"})
    encoders.append(encoder)
    encoder.state.apply([TEXT, "old"], [])
    stub = house.stub()
    await encoder.connect(stub)
    assert (encoder.welcome.worker_id, encoder.welcome.pool) == (worker_id_for(A), "default")
    member = house.fleet.get(A)
    assert (str(member.source), member.spec.device, member.spec.weight, member.spec.max_inflight) == (
        "registered", "cpu", 2.0, 3,
    )  # fmt: skip
    house.add_ready(A)
    encoder.publish()
    await until(lambda: in_step(house, encoder), "the router knows its keys")
    got = await stub.Select(pb.SelectRequest(items=[pb.MediaItem(url=URL)]))
    assert (got.worker.id, got.reason) == (A, pb.REASON_FULL_HIT)
    encoder.change(["new"], [TEXT])
    await until(lambda: in_step(house, encoder))
    got = await stub.Select(pb.SelectRequest(items=[pb.MediaItem(url=URL)]))
    assert got.reason == pb.REASON_MISS


async def test_a_router_that_does_not_know_the_keys_asks_for_a_snapshot(house, encoders, until):
    encoder = Encoder()
    encoders.append(encoder)
    encoder.state.apply([f"{n:032x}" for n in range(3000)], [])
    while encoder.state.next_delta() is not None:
        pass  # said to nobody
    await encoder.connect(house.stub())
    await until(lambda: in_step(house, encoder), "the snapshot is in")
    assert encoder.snapshots >= 1
    before = encoder.snapshots
    encoder.state.apply(["lost"], [])
    encoder.state.next_delta()  # said to nobody
    encoder.change(["after"])
    await until(lambda: in_step(house, encoder), "a gap is closed")
    assert encoder.snapshots > before


async def test_a_stream_that_comes_back_goes_on_where_it_was(house, encoders, until):
    encoder = Encoder()
    encoders.append(encoder)
    await encoder.connect(house.stub())
    encoder.change([TEXT])
    await until(lambda: in_step(house, encoder))
    await encoder.close()
    await until(lambda: len(house.lines) == 0, "the line is closed")
    assert house.pool.key_count(A) == 1 and not house.pool.get(A).doubtful, "believed for a moment"
    again = Encoder(state=encoder.state)
    encoders.append(again)
    await again.connect(house.stub())
    again.change(["more"])
    await until(lambda: in_step(house, again))
    assert house.pool.key_count(A) == 2


async def test_a_second_stream_of_a_worker_ends_the_first(house, encoders, until):
    old, new = Encoder(), Encoder()
    encoders.extend((old, new))
    await old.connect(house.stub())
    await new.connect(house.stub())
    await until(lambda: old.error is not None, "the first is ended")
    assert old.error.code() is grpc.StatusCode.ABORTED and "another stream" in old.error.details()
    assert len(house.lines) == 1
    new.change([TEXT])
    await until(lambda: in_step(house, new))


async def test_a_removed_worker_is_told(house, encoders, until):
    encoder = Encoder()
    encoders.append(encoder)
    await encoder.connect(house.stub())
    house.fleet.remove(A, cause="test")
    await until(lambda: encoder.error is not None)
    assert encoder.error.code() is grpc.StatusCode.NOT_FOUND
    assert len(house.lines) == 0 and house.pool.get(A) is None


async def test_the_loss_of_a_broker_says_nothing_about_a_line(house, encoders, until):
    """A plane beside it comes and goes; so does not the worker's standing, nor the way of its requests."""
    encoder = Encoder()
    encoders.append(encoder)
    await encoder.connect(house.stub())
    encoder.change([TEXT])
    await until(lambda: in_step(house, encoder))
    house.ingest.plane_up()
    house.ingest.plane_lost()
    stream = house.ingest.stream("default", A)
    assert stream._plane_down_since is None
    before = encoder.snapshots
    encoder.state.apply(["lost"], [])
    encoder.state.next_delta()
    encoder.change(["after"])
    await until(lambda: in_step(house, encoder) and encoder.snapshots > before, "asked over its line")


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (pb.WorkerMessage(delta=pb.Delta(epoch=1, seq=1)), "first message must be a hello"),
        (pb.WorkerMessage(), "first message must be a hello"),
        (pb.WorkerMessage(hello=pb.Hello(url="tcp://x")), "must start with http"),
        (pb.WorkerMessage(hello=pb.Hello(url=A, pool="nowhere")), "the pools are default"),
        (pb.WorkerMessage(hello=pb.Hello(url=A, weight=-1.0)), "weight"),
        (pb.WorkerMessage(hello=pb.Hello(url=A, max_inflight=0)), "max_inflight"),
        (pb.WorkerMessage(hello=pb.Hello(url=A, labels={f"l{n}": "x" for n in range(65)})), "at most 64"),
        (pb.WorkerMessage(hello=pb.Hello(url=A, labels={"l": "x" * 257})), "longer than 256"),
        (None, "first message must be a hello"),
    ],
)
async def test_a_stream_that_begins_wrongly_is_refused(house, first, message):
    call = house.stub().RegisterWorker(iter([first] if first is not None else []))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and message in caught.value.details()
    assert len(house.fleet) == 0 and len(house.lines) == 0


async def test_garbage_on_a_stream_ends_it_and_harms_nobody_else(house, encoders, until):
    good = Encoder(B)
    encoders.append(good)
    await good.connect(house.stub())
    good.change([TEXT])
    await until(lambda: in_step(house, good))
    hello = pb.WorkerMessage(hello=pb.Hello(url=A)).SerializeToString()
    method = house.channel().stream_stream("/fullhit.v1.Router/RegisterWorker")
    for second in (b"\xff\xff", hello):
        call = method(iter([hello, second]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: len(house.lines) == 1)
    assert in_step(house, good)


async def test_messages_out_of_bounds_are_counted_and_survived(house, encoders, until):
    encoder = Encoder()
    encoders.append(encoder)
    await encoder.connect(house.stub())
    encoder.change([TEXT])
    await until(lambda: in_step(house, encoder))
    for bad in (
        pb.Delta(epoch=1, seq=0),
        pb.Delta(epoch=1, seq=5, added_keys=["k" * 5000]),
        pb.Delta(epoch=2**64 - 1, seq=2**64 - 1, added_keys=["far"]),
    ):
        encoder.outbox.put_nowait(pb.WorkerMessage(delta=bad))
    encoder.outbox.put_nowait(pb.WorkerMessage(snapshot=pb.SnapshotPart(request_id=7, part=3, parts=2)))
    encoder.outbox.put_nowait(pb.WorkerMessage())
    await until(lambda: sum(n for name, n in house.ingest.counters.items() if "rejected" in name) >= 3)
    assert house.fleet.get(A) is not None and len(house.lines) == 1


async def test_a_hit_over_a_line_is_a_hit_for_the_gateway_too(house, encoders, until):
    encoder = Encoder()
    encoders.append(encoder)
    await encoder.connect(house.stub())
    house.add_ready(A)
    encoder.change([TEXT])
    await until(lambda: in_step(house, encoder))
    with house.pool.select(SelectRequest(keys=(item_key(URL),), items=1)).ticket as ticket:
        assert ticket.worker.id == A
    assert house.pool.select(SelectRequest((item_key(URL),), 1, dry_run=True)).reason is Reason.FULL_HIT
