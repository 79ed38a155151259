"""The memory plane: everything above the transport, without sockets."""

from __future__ import annotations

import asyncio
import time

from fullhit.core import Pool, WorkerSpec
from fullhit.events import Ingest, MemoryPlane
from fullhit_publisher import EmbeddingCachePublisher
from fullhit_publisher.transports import MemoryBroker, MemoryTransport

URL = "http://encoder-1.invalid:30002"


async def test_a_publisher_in_another_thread_reaches_the_index_and_answers_for_its_past(eventually):
    broker = MemoryBroker()
    publisher = EmbeddingCachePublisher(url=URL, transport=MemoryTransport(broker), heartbeat_interval=0.2).start()
    publisher.publish_delta([f"{n:032x}" for n in range(5000)], [])
    await eventually(lambda: publisher.counters.deltas == 1)
    pool = Pool("default", clock=time.monotonic)
    pool.add_worker(WorkerSpec(id=URL, url=URL))
    ingest = Ingest({"default": pool})
    plane = MemoryPlane(broker, ingest)
    await plane.start()
    try:
        ingest.worker_added("default", URL)
        await eventually(lambda: pool.key_count(URL) == 5000)
        publisher.publish_delta([], [f"{0:032x}"])
        await eventually(lambda: pool.key_count(URL) == 4999)
        assert plane.status().connected
    finally:
        await plane.close()
        await asyncio.to_thread(publisher.close)
    assert not plane.status().connected
