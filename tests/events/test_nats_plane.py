"""The NATS plane against a real nats-server: killed, frozen, swallowed by the network, and too fast for us."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest

from fullhit.core import Pool
from fullhit.events import EmbeddedNats, Ingest, NatsPlane, NatsSettings, find_nats_server
from fullhit.events.nats_link import parse_servers
from fullhit_publisher import wire
from fullhit_publisher.identity import worker_id_for

A, B, C, D = (letter * 32 for letter in "abcd")
URL = "http://encoder-1.invalid:30002"
OTHER = "http://encoder-2.invalid:30002"


async def test_what_a_publisher_announces_becomes_a_full_hit_and_what_it_evicts_ends_it(
    nats, make_router, make_publisher, eventually
):
    router = await make_router(nats.url)
    publisher = make_publisher(nats.url)
    router.add()
    publisher.publish_delta([A, B], [])
    await eventually(lambda: router.full_hit(A, B))
    publisher.publish_delta([], [B])
    await eventually(lambda: not router.full_hit(B))
    assert router.full_hit(A)
    status = router.plane.status()
    assert (status.connected, status.error, status.connects) == (True, "", 1)
    assert status.last_message_age is not None
    assert status.last_message_age < 30


async def test_a_worker_that_does_not_publish_is_no_malformed_event(nats, make_router, eventually):
    """The server answers a request nobody listens for with an empty message; it was counted as a broken envelope."""
    router = await make_router(nats.url, request_timeout=0.2, backoff_base=0.05)
    await eventually(lambda: router.plane.status().connected)
    router.add()
    await eventually(lambda: router.ingest.counters.get("fullhit_resyncs_total{cause=start,outcome=timeout}", 0) > 1)
    assert not [name for name in router.ingest.counters if "rejected" in name]


async def test_case_a5_a_router_that_starts_after_the_workers_is_warm_by_snapshot(
    nats, make_router, make_publisher, eventually
):
    publisher = make_publisher(nats.url)
    publisher.publish_delta([A, B], [])
    await eventually(lambda: publisher.counters.deltas == 1)
    keys = [f"{n:032x}" for n in range(40_000)]
    publisher.publish_delta(keys, [])
    router = await make_router(nats.url)
    router.add()
    await eventually(lambda: router.full_hit(A, B, keys[0], keys[-1]))
    assert router.pool.key_count(URL) == 40_002


async def test_a_router_starts_without_a_server_says_so_and_finds_it_later(
    nats, make_router, make_publisher, eventually
):
    port = nats.port
    await nats.close()
    router = await make_router(nats.url)
    router.add()
    await eventually(lambda: "cannot connect" in router.plane.status().error)
    assert not router.plane.status().connected
    later = EmbeddedNats(port)
    await later.start()
    try:
        publisher = make_publisher(later.url)
        publisher.publish_delta([A], [])
        await eventually(lambda: router.full_hit(A))
        assert router.plane.status().error == ""
    finally:
        await router.plane.close()
        await later.close()


async def test_a_server_killed_and_restarted_costs_nothing_that_changed_meanwhile(
    nats, make_router, make_publisher, eventually
):
    router = await make_router(nats.url)
    publisher = make_publisher(nats.url)
    router.add()
    publisher.publish_delta([A, B], [])
    await eventually(lambda: router.full_hit(A, B))
    os.kill(nats.pid, signal.SIGKILL)
    publisher.publish_delta([C], [A])
    await eventually(lambda: nats.restarts == 1)
    await eventually(lambda: router.full_hit(B, C) and not router.full_hit(A))
    assert router.state() == "live"
    assert router.plane.status().connects >= 2


async def test_entries_become_doubtful_while_the_server_stays_away_and_routing_goes_on(
    nats, make_router, make_publisher, eventually
):
    router = await make_router(nats.url, plane_grace=0.2)
    publisher = make_publisher(nats.url)
    router.add()
    publisher.publish_delta([A], [])
    await eventually(lambda: router.full_hit(A))
    await nats.close()
    await eventually(lambda: not router.full_hit(A))
    assert router.pool.key_count(URL) == 1


async def test_case_c44_a_network_that_swallows_everything_is_noticed_and_the_connection_replaced(
    nats, make_router, make_publisher, make_black_hole, eventually
):
    hole = await make_black_hole(nats.port)
    router = await make_router(f"nats://127.0.0.1:{hole.port}", plane_grace=0.3)
    publisher = make_publisher(nats.url)
    router.add()
    publisher.publish_delta([A], [])
    await eventually(lambda: router.full_hit(A))
    hole.swallow()
    publisher.publish_delta([B], [A])
    await eventually(lambda: router.plane.rebuilds == 1)
    await eventually(lambda: not router.full_hit(A))
    await eventually(lambda: hole.accepted >= 3, "keeps trying through the dead network")
    hole.deliver()
    await eventually(lambda: router.full_hit(B))
    assert not router.full_hit(A)


async def test_case_c44_a_server_that_is_frozen_is_noticed_like_a_dead_network(
    nats, make_router, make_publisher, eventually
):
    router = await make_router(nats.url)
    publisher = make_publisher(nats.url)
    router.add()
    publisher.publish_delta([A], [])
    await eventually(lambda: router.full_hit(A))
    os.kill(nats.pid, signal.SIGSTOP)
    try:
        await eventually(lambda: not router.plane.status().connected)
    finally:
        os.kill(nats.pid, signal.SIGCONT)
    publisher.publish_delta([B], [A])
    await eventually(lambda: router.full_hit(B) and not router.full_hit(A))


async def test_case_c45_an_inbox_that_no_longer_delivers_gets_a_new_connection(
    nats, make_router, make_publisher, eventually
):
    router = await make_router(nats.url, request_timeout=0.3, backoff_base=0.05, backoff_max=0.2)
    publisher = make_publisher(nats.url)
    await eventually(lambda: router.plane.status().connected)
    client = router.plane._link._client
    [inbox] = [sid for sid, sub in client._subs.items() if sub.subject.startswith("_INBOX")]
    client._remove_sub(inbox)
    publisher.publish_delta([A], [])
    await eventually(lambda: publisher.counters.deltas == 1)
    router.add()
    await eventually(lambda: router.full_hit(A))
    assert router.plane.rebuilds >= 1
    assert router.plane.status().connects >= 2


async def test_case_c45_a_worker_that_answers_nobody_does_not_keep_the_connection_from_living(
    nats, make_router, make_publisher, eventually
):
    """Heard, but deaf: the connection is replaced once for it, and then seldom."""
    settings = NatsSettings(watchdog_interval=0.05, backoff_min=0.01, backoff_max=0.02, distrust_pause=60.0)
    router = await make_router(nats.url, settings, request_timeout=0.05, backoff_base=0.01, backoff_max=0.05)
    deaf = worker_id_for(OTHER)
    beat = wire.Heartbeat(deaf, 5, 9, "default", 1, 1, url=OTHER, interval_ms=1000)
    router.add(OTHER)

    async def beat_for_ever() -> None:
        sequence = 0
        while True:
            sequence += 1
            data = wire.encode(beat, publisher_id=1, sequence=sequence, published_at=0)
            router.ingest.feed(wire.events_subject("default", deaf), data)
            await asyncio.sleep(0.01)

    beating = asyncio.create_task(beat_for_ever())
    try:
        await eventually(lambda: router.plane.rebuilds == 1)
        await eventually(lambda: router.ingest.replies_missing >= 6)
        assert router.plane.rebuilds == 1
    finally:
        beating.cancel()


async def test_case_c46_messages_dropped_because_we_were_too_slow_make_every_stream_doubtful_until_verified(
    nats, make_router, make_publisher, eventually
):
    settings = NatsSettings(pending_messages=20, watchdog_interval=5.0)
    router = await make_router(nats.url, settings)
    publisher = make_publisher(nats.url)
    router.add()
    publisher.publish_delta([A], [])
    await eventually(lambda: router.full_hit(A))
    seen: list[str] = []
    watched = router.ingest.messages_lost
    router.ingest.messages_lost = lambda cause: (watched(cause), seen.append(router.state()))  # type: ignore
    flood(nats.port, "fullhit.v1.default.1.events", 3000)
    await eventually(lambda: router.plane.dropped > 0 and len(seen) >= 2)
    assert set(seen) == {"doubtful"}
    await eventually(lambda: router.full_hit(A), "a heartbeat of the worker verifies it")
    assert router.ingest.counters["fullhit_events_rejected_total{cause=slow_consumer}"] == len(seen)
    assert router.plane.status().connects == 1


def flood(port: int, subject: str, count: int) -> None:
    """Publish in one burst, over a plain socket, while the event loop stands still."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b'CONNECT {"verbose":false}\r\n' + f"PUB {subject} 1\r\nx\r\n".encode() * count + b"PING\r\n"
        )
        received = b""
        while b"PONG\r\n" not in received:
            received += connection.recv(4096)


async def test_a_flood_of_small_messages_leaves_the_event_loop_its_turns(nats, make_router, eventually):
    router = await make_router(nats.url)
    await eventually(lambda: router.plane.status().connected)
    flood(nats.port, "fullhit.v1.nowhere.1.events", 20_000)
    turns = 0
    while router.ingest.counters.get("fullhit_events_rejected_total{cause=pool}", 0) < 20_000:
        await asyncio.sleep(0)
        turns += 1
        assert turns < 10_000_000
    assert turns > 50


async def test_case_a18_every_router_of_three_hears_everything(nats, make_router, make_publisher, eventually):
    routers = [await make_router(nats.url) for _ in range(3)]
    publisher = make_publisher(nats.url)
    for router in routers:
        router.add()
    publisher.publish_delta([A, B, C], [])
    for router in routers:
        await eventually(lambda router=router: router.full_hit(A, B, C))


async def test_case_c49_nothing_piles_up_while_the_server_is_away(nats, make_router, make_publisher, eventually):
    router = await make_router(nats.url, request_timeout=0.05, backoff_base=0.01, backoff_max=0.05)
    await eventually(lambda: router.plane.status().connected)
    await nats.close()
    await eventually(lambda: not router.plane.status().connected)
    for n in range(50):
        router.add(f"http://encoder-{n}.invalid:1")
    await asyncio.sleep(0.3)
    assert not any(row.state == "filling" for row in router.ingest.status())
    assert router.ingest.counters == {}


async def test_closing_a_plane_is_quick_whatever_the_network_does(nats, make_black_hole, eventually):
    hole = await make_black_hole(nats.port)
    ingest = Ingest({"default": Pool("default", clock=lambda: 0.0)})
    plane = NatsPlane(f"nats://127.0.0.1:{hole.port}", ingest, NatsSettings(close_timeout=0.2))
    await plane.start()
    await eventually(lambda: plane.status().connected)
    hole.swallow()
    async with asyncio.timeout(5):
        await plane.close()
    assert plane.status().error == "closed"


async def test_a_tls_url_is_never_served_in_clear_text(nats, make_router, eventually):
    router = await make_router(f"tls://user:secret@127.0.0.1:{nats.port}")
    await eventually(lambda: "TLS" in router.plane.status().error)
    assert "secret" not in repr(router.plane.status())
    assert "secret" not in repr(router.log)


async def test_user_and_password_are_sent_and_never_shown(make_router, make_publisher, eventually, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = await asyncio.create_subprocess_exec(
        find_nats_server(), "-a", "127.0.0.1", "-p", str(port), "--user", "rou@ter", "--pass", "s:cret",
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        refused = await make_router(f"nats://rou%40ter:wrong@127.0.0.1:{port}")
        await eventually(lambda: "authorization" in refused.plane.status().error.lower())
        router = await make_router(f"nats://rou%40ter:s%3Acret@127.0.0.1:{port}")
        await eventually(lambda: router.plane.status().connected)
        assert router.plane.url == f"nats://127.0.0.1:{port}"
        assert "cret" not in repr(router.plane.status())
        await refused.plane.close()
        await router.plane.close()
    finally:
        server.kill()
        await server.wait()


async def test_the_second_server_of_a_list_is_used_when_the_first_is_away(nats, make_router, eventually):
    router = await make_router(f"nats://127.0.0.1:1,{nats.url}")
    await eventually(lambda: router.plane.status().connected)


@pytest.mark.parametrize(
    "text", ["", " , ", "http://host:1", "nats://", "nats://host:0", "nats://host:99999", "nats://host:1/path"]
)
def test_malformed_server_lists_are_refused_without_repeating_them(text):
    with pytest.raises(ValueError, match="NATS"):
        parse_servers(text)
