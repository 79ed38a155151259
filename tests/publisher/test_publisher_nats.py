"""The publisher over a real NATS server that is killed, frozen, locked and limited."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest

from fullhit_publisher import EmbeddingCache, EmbeddingCachePublisher, PublisherOptions, wire

URL = "http://127.0.0.1:30002"
QUICK = PublisherOptions(backoff_min=0.02, backoff_max=0.1, io_timeout=1.0, connect_timeout=1.0, close_timeout=0.5)

Make = Callable[..., EmbeddingCachePublisher]


@pytest.fixture
def make() -> Iterator[Make]:
    publishers: list[EmbeddingCachePublisher] = []

    def build(plane: str, **changes: Any) -> EmbeddingCachePublisher:
        settings: dict[str, Any] = {"heartbeat_interval": 0.1, "options": QUICK, **changes}
        publishers.append(EmbeddingCachePublisher(URL, event_plane=plane, **settings))
        return publishers[-1]

    yield build
    for publisher in publishers:
        publisher.close()


async def test_deltas_arrive_in_order(nats_server: Any, make: Make, follow: Any, until: Any) -> None:
    publisher = make(nats_server.url, pool="qwen/vl 2.5")
    reader = await follow(nats_server.url, publisher)
    publisher.start()
    for number in range(50):
        publisher.publish_delta([f"k{number}"], [f"k{number - 5}"] if number >= 5 else [])
        await asyncio.sleep(0)
    await until(lambda: reader.keys == {f"k{number}" for number in range(45, 50)}, "the reader")
    assert [delta.seq for delta in reader.deltas] == list(range(1, len(reader.deltas) + 1))
    assert reader.sequences == list(range(len(reader.sequences)))
    assert not any(delta.resync for delta in reader.deltas)
    await until(lambda: len(reader.beats) > 3, "heartbeats")
    assert not reader.in_doubt and not reader.snapshots


async def test_a_killed_and_restarted_server_is_found_again_and_losses_are_announced(
    nats_server: Any, make: Make, follow: Any, until: Any
) -> None:
    publisher = make(nats_server.url, heartbeat_interval=600.0)
    reader = await follow(nats_server.url, publisher)
    publisher.start()
    await until(lambda: reader.beats, "the first heartbeat")
    publisher.publish_delta(["a"], [])
    await until(lambda: reader.keys == {"a"}, "the first delta")
    nats_server.kill()
    await until(lambda: not publisher.counters.connected, "the loss")
    publisher.publish_delta(["b"], [])
    await until(lambda: publisher.counters.connect_failures > 1, "attempts")
    nats_server.start()
    # The reader may be back later than the publisher; heartbeats would heal that, and here is none.
    await until(lambda: publisher.counters.reconnects == 1 and publisher.counters.deltas == 2, "the publisher")
    reader.doubt()
    await until(lambda: reader.snapshots and reader.keys == {"a", "b"}, "the reader")
    assert publisher.counters.lost_marks == 1
    publisher.publish_delta(["c"], ["a"])
    await until(lambda: reader.keys == {"b", "c"}, "the next delta")


async def test_a_server_that_is_not_there_at_the_start_is_waited_for(
    stopped_nats: Any, make: Make, follow: Any, until: Any
) -> None:
    stopped_nats.start()
    stopped_nats.kill()
    publisher = make(f"nats://127.0.0.1:1,{stopped_nats.url}")
    publisher.start()
    publisher.publish_delta(["a"], [])
    await until(lambda: publisher.counters.connect_failures >= 3, "attempts")
    stopped_nats.start()
    reader = await follow(stopped_nats.url, publisher)
    await until(lambda: reader.keys == {"a"}, "the reader")


async def test_a_large_snapshot_comes_in_parts_while_deltas_continue(
    nats_server: Any, make: Make, follow: Any, until: Any
) -> None:
    options = PublisherOptions(max_message_bytes=8 * 1024)
    publisher = make(nats_server.url, options=options, heartbeat_interval=0.5)
    publisher.publish_delta([f"{number:032x}" for number in range(30_000)], [])
    publisher.start()
    await until(lambda: publisher.counters.heartbeats > 1, "the deltas")
    done = threading.Event()

    def churn() -> None:
        number = 0
        while not done.wait(0.001):
            publisher.publish_delta([f"x{number}"], [f"{number:032x}"])
            number += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        reader = await follow(nats_server.url, publisher)
        await until(lambda: reader.snapshots, "the snapshot")
        await until(lambda: len(reader.deltas) > 20, "deltas beside it")
    finally:
        done.set()
        thread.join()
    await until(lambda: reader.keys == set(publisher.keys()), "the reader")
    parts = reader.snapshots[0]
    assert len(parts) > 100 and {part.parts for part in parts} == {len(parts)}
    assert len({(part.epoch, part.seq) for part in parts}) == 1


async def test_eight_threads_publish_while_the_server_is_killed_and_comes_back(
    nats_server: Any, make: Make, follow: Any, until: Any
) -> None:
    cache: EmbeddingCache[bytes] = EmbeddingCache(100)
    publisher = make(nats_server.url).attach(cache)
    reader = await follow(nats_server.url, publisher)
    publisher.start()
    await until(lambda: reader.beats, "the first heartbeat")
    stop = threading.Event()

    def work(seed: int) -> None:
        step = 0
        while not stop.wait(0.0005):
            step += 1
            key = str((step * 7 + seed * 131) % 400)
            cache.put(key, b"x") if step % 4 else cache.pop(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            deltas = len(reader.deltas)
            await until(lambda deltas=deltas: len(reader.deltas) > deltas + 5, "traffic")
            nats_server.kill()
            failures = publisher.counters.connect_failures
            await until(lambda n=failures: publisher.counters.connect_failures > n, "the loss")
            nats_server.start()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    await until(lambda: reader.keys == set(cache.keys()) == set(publisher.keys()), "the reader")


async def test_a_frozen_server_is_given_up_and_found_again(
    nats_server: Any, make: Make, follow: Any, until: Any
) -> None:
    publisher = make(nats_server.url)
    reader = await follow(nats_server.url, publisher)
    publisher.start()
    publisher.publish_delta(["a"], [])
    await until(lambda: reader.keys == {"a"}, "the first delta")
    nats_server.freeze()
    try:
        publisher.publish_delta(["b"], [])
        await until(lambda: not publisher.counters.connected, "the watchdog")
        await until(lambda: publisher.counters.connect_failures > 0, "a failed attempt")
    finally:
        nats_server.thaw()
    publisher.publish_delta(["c"], ["a"])
    await until(lambda: reader.keys == {"b", "c"}, "the reader")
    assert publisher.counters.lost_marks >= 1


@pytest.mark.parametrize("state", ["never there", "killed", "frozen"])
async def test_close_does_not_hang_when_the_server_is_gone(
    stopped_nats: Any, make: Make, until: Any, state: str
) -> None:
    stopped_nats.start()
    publisher = make(stopped_nats.url)
    if state == "never there":
        stopped_nats.kill()
        publisher.start()
    else:
        publisher.start()
        await until(lambda: publisher.counters.heartbeats, "the connection")
        stopped_nats.kill() if state == "killed" else stopped_nats.freeze()
    publisher.publish_delta([f"{number:032x}" for number in range(90_000)], [])
    began = time.monotonic()
    try:
        await asyncio.to_thread(publisher.close)
        # Twelve times what is promised: other tests may have the machine.
        assert time.monotonic() - began < 12
        await until(lambda: all(one.name != "fullhit-publisher" for one in threading.enumerate()), "the thread's end")
    finally:
        if state == "frozen":
            stopped_nats.thaw()


async def test_the_payload_limit_of_the_server_is_kept(stopped_nats: Any, make: Make, follow: Any, until: Any) -> None:
    stopped_nats.config = "max_payload: 16384\n"
    stopped_nats.start()
    publisher = make(stopped_nats.url)
    reader = await follow(stopped_nats.url, publisher)
    publisher.publish_delta([f"picture {number:050}" for number in range(3000)], [])
    publisher.start()
    await until(lambda: len(reader.keys) == 3000, "the reader")
    reader.doubt()
    await until(lambda: reader.snapshots, "the snapshot")
    assert len(reader.deltas) > 10 and len(reader.snapshots[0]) > 10
    assert publisher.counters.connects == 1


async def test_garbage_on_the_request_subject_is_counted_and_survived(
    nats_server: Any, make: Make, follow: Any, until: Any
) -> None:
    publisher = make(nats_server.url)
    reader = await follow(nats_server.url, publisher)
    publisher.start()
    await until(lambda: reader.beats, "the first heartbeat")
    client = await nats.connect(nats_server.url)
    subject = wire.snapshot_subject(publisher.pool, publisher.worker_id)
    for _ in range(100):
        await client.publish(subject, b"\xc1garbage", reply="_INBOX.x")
        await client.publish(subject, b"", reply="")
    await client.close()
    await until(lambda: publisher.counters.requests_rejected == 200, "the counter")
    publisher.publish_delta(["a"], [])
    await until(lambda: reader.keys == {"a"}, "the reader")


async def test_user_and_password_are_used_and_never_logged(
    stopped_nats: Any, make: Make, follow: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    stopped_nats.config = 'authorization { user: "en@coder", password: "hunter:2" }\n'
    stopped_nats.start()
    right = f"nats://en%40coder:hunter%3A2@127.0.0.1:{stopped_nats.port}"
    wrong = make(f"nats://en%40coder:secret99@127.0.0.1:{stopped_nats.port}", pool="other")
    wrong.start()
    publisher = make(right)
    reader = await follow(stopped_nats.url, publisher, user="en@coder", password="hunter:2")
    publisher.start()
    publisher.publish_delta(["a"], [])
    await until(lambda: reader.keys == {"a"}, "the reader")
    await until(lambda: wrong.counters.connect_failures > 2, "refusals")
    assert not wrong.counters.connected
    assert "uthorization" in caplog.text, "the reason is given"
    for secret in ("hunter", "secret99"):
        assert secret not in caplog.text + repr(publisher) + repr(wrong)


async def test_a_token_is_used(stopped_nats: Any, make: Make, until: Any) -> None:
    stopped_nats.config = 'authorization { token: "t0ken" }\n'
    stopped_nats.start()
    publisher = make(f"nats://t0ken@127.0.0.1:{stopped_nats.port}").start()
    await until(lambda: publisher.counters.heartbeats > 1, "heartbeats")


async def test_a_refused_subject_is_logged_once_and_is_no_reason_to_reconnect(
    stopped_nats: Any, make: Make, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stopped_nats.config = (
        'authorization { users = [{ user: u, password: p, permissions { publish: "other.>", subscribe: ">" } }] }\n'
    )
    stopped_nats.start()
    publisher = make(f"nats://u:p@127.0.0.1:{stopped_nats.port}").start()
    await until(lambda: publisher.counters.heartbeats > 4, "heartbeats")
    await until(lambda: "ermissions" in caplog.text, "the log line")
    assert publisher.counters.connects == 1
    assert sum("refuses" in record.message for record in caplog.records) == 1


async def test_a_tls_url_never_speaks_clear_text(make: Make, until: Any) -> None:
    heard = bytearray()

    async def plain_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576}\r\n')
        while data := await reader.read(1000):
            heard.extend(data)
        writer.close()

    server = await asyncio.start_server(plain_server, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    publisher = make(f"tls://user:hunter2@127.0.0.1:{port}").start()
    await until(lambda: publisher.counters.connect_failures > 1, "refusals")
    await asyncio.to_thread(publisher.close)
    server.close()
    await server.wait_closed()
    assert heard == b""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program for a certificate")
async def test_tls_with_a_private_authority_works(
    stopped_nats: Any, make: Make, follow: Any, until: Any, tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    making = await asyncio.create_subprocess_exec(
        *command.split(), "-keyout", str(key), "-out", str(cert), stderr=asyncio.subprocess.DEVNULL
    )
    assert await making.wait() == 0
    stopped_nats.config = f'tls {{ cert_file: "{cert}", key_file: "{key}" }}\n'
    stopped_nats.start()
    context = ssl.create_default_context(cafile=str(cert))
    plane = f"tls://127.0.0.1:{stopped_nats.port}"
    stranger = make(plane, pool="other").start()
    publisher = make(plane, tls=context)
    reader = await follow(plane, publisher, tls=context)
    publisher.start()
    publisher.publish_delta(["a"], [])
    await until(lambda: reader.keys == {"a"}, "the reader")
    await until(lambda: stranger.counters.connect_failures > 0, "the refusal")
    assert not stranger.counters.connects
