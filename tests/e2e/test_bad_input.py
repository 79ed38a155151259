"""Bad input of every kind, sent to one living deployment: whoever erred is told, nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest

from fullhit.lab.language_server import LanguageServerSettings, MockLanguageServer
from fullhit_publisher import wire
from fullhit_publisher.identity import worker_id_for

GOOD = {"req_id": "r_local_part_0", "num_parts": 1, "part_idx": 0, "modality": "IMAGE", "prefill_host": "127.0.0.1",
        "embedding_port": 5577}  # fmt: skip
MIB = 1 << 20


@pytest.fixture
async def living(deployment: Any, pictures: list[str]) -> AsyncIterator[Any]:
    """Router with a 1 MiB body limit and two encoders; afterwards it must still route, and nothing may be in flight."""
    await deployment.start_router("--max-body-bytes", str(MIB))
    encoders = [await deployment.start_encoder() for _ in range(2)]
    deployment.urls = [url for _, url in encoders]
    await deployment.ready(*deployment.urls)
    async with MockLanguageServer(LanguageServerSettings((deployment.base,)), seed=1) as server:
        await server.encode(pictures[:2])
        yield deployment
        await deployment.converged(*deployment.urls)
        assert (await server.encode(pictures[:2])).reasons == ["full_hit"]
    await deployment.idle()


def exchange(base: str, request: bytes, *, shut: bool = False) -> tuple[int, dict[str, Any], bytes]:
    """One raw request on a fresh connection; status, JSON body, whole answer. (0, {}, b"") when cut off."""
    parts = urlsplit(base)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as sock:
        try:
            sock.sendall(request)
            if shut:
                sock.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        except ConnectionResetError:
            return 0, {}, b""
    if not answer:
        return 0, {}, b""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {}, answer


def encode_request(body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = ["POST /encode HTTP/1.1", "Host: x", "Connection: close", *headers]
    lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def metric(deployment: Any, line: str) -> float:
    text = await asyncio.to_thread(exchange, deployment.admin, b"GET /metrics HTTP/1.0\r\n\r\n")
    for row in text[2].decode().splitlines():
        if row.startswith(line):
            return float(row.rpartition(" ")[2])
    return 0.0


async def test_bad_requests_get_an_error_that_names_the_fault(living: Any, pictures: list[str]) -> None:
    picture = pictures[0]
    cases: list[tuple[bytes, int, str]] = [
        (b"{", 400, "JSON"),
        (b"", 400, ""),
        (b"[1, 2]", 400, "object"),
        (b"\xff\xfe\x00", 400, ""),
        (json.dumps({**GOOD, "mm_items": "no list"}).encode(), 400, "mm_items"),
        (json.dumps({**GOOD, "mm_items": [picture], "req_id": 7}).encode(), 400, "req_id"),
        (json.dumps({**GOOD, "mm_items": [picture], "modality": "SMELL"}).encode(), 400, "modality"),
        (json.dumps({**GOOD, "mm_items": [picture], "num_parts": "two"}).encode(), 400, "num_parts"),
        (json.dumps({**GOOD, "mm_items": ["data:image/png;base64,AAAA"]}).encode(), 400, ""),
        (json.dumps({**GOOD, "mm_items": ["x" * 2 * MIB]}).encode(), 413, "max_body_bytes"),
    ]
    for body, status, word in cases:
        got, error, answer = await asyncio.to_thread(exchange, living.base, encode_request(body))
        assert got == status, (body[:80], answer[:300])
        assert error["status"] == "error"
        assert word in error["message"], error
    assert await metric(living, "fullhit_rejected_total") > 0
    # None of them reached an encoder.
    for url in living.urls:
        assert (await living.worker(url))["inflight_requests"] == 0


async def test_half_a_body_and_ambiguous_framing_reach_no_encoder(living: Any, pictures: list[str]) -> None:
    body = json.dumps({**GOOD, "mm_items": [pictures[0]]}).encode()
    before = [row["inflight_requests"] for row in await living.workers()]
    half = encode_request(body[:100], length=len(body))
    status, _, _ = await asyncio.to_thread(exchange, living.base, half, shut=True)
    assert status in (0, 400)
    smuggled = encode_request(body, "Transfer-Encoding: chunked")
    status, _, answer = await asyncio.to_thread(exchange, living.base, smuggled)
    assert status == 400, answer[:300]
    assert [row["inflight_requests"] for row in await living.workers()] == before


async def test_bad_events_are_counted_by_cause_and_change_no_other_workers_entries(living: Any) -> None:
    victim, liar = living.urls
    await living.converged(victim, liar)
    keys = (await living.worker(victim))["keys"]
    subject = wire.events_subject("default", worker_id_for(victim))
    forged = wire.Delta(
        worker_id=worker_id_for(victim),
        update=wire.Update(added_keys=["f" * 32], removed_keys=[]),
        epoch=1,
        seq=1,
        pool="default",
    )
    huge_key = wire.Delta(
        worker_id=worker_id_for(liar),
        update=wire.Update(added_keys=["k" * 900_000], removed_keys=[]),
        epoch=1,
        seq=1,
        pool="default",
    )
    client = await nats.connect(living.plane)
    try:
        # Not msgpack; an id that is not the subject's; a key far beyond any limit; a pool that is not there.
        await client.publish(subject, b"\xc1 no msgpack")
        liars_subject = wire.events_subject("default", worker_id_for(liar))
        await client.publish(liars_subject, wire.encode(forged, publisher_id=1, sequence=0, published_at=0))
        await client.publish(liars_subject, wire.encode(huge_key, publisher_id=1, sequence=1, published_at=0))
        await client.publish(
            wire.events_subject("elsewhere", 5), wire.encode(forged, publisher_id=1, sequence=2, published_at=0)
        )
        await client.publish("fullhit.v1.default.nonsense.events", b"x")
        await client.flush()
        for cause in ("envelope", "identity", "key_too_long", "pool", "subject"):

            async def counted(cause: str = cause) -> bool:
                return await metric(living, f'fullhit_events_rejected_total{{cause="{cause}"}}') >= 1

            await living.until(counted)
    finally:
        await client.close()
    assert (await living.worker(victim))["keys"] == keys


async def test_requests_that_meet_an_encoder_which_answers_garbage_are_served_by_another(
    living: Any, pictures: list[str]
) -> None:
    _, bad = await living.start_encoder("--garbage")
    await living.ready(bad)
    async with MockLanguageServer(LanguageServerSettings((f"{living.base}/v0", f"{living.base}/v1")), seed=5) as server:
        outcomes = await asyncio.gather(
            *(server.encode(pictures[number : number + 1]) for number in range(10, 26)), return_exceptions=True
        )
    assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []
    failures = f'fullhit_worker_failures_total{{kind="garbage",worker="{bad}"}}'
    assert await metric(living, failures) >= 1, "it did get its share, and it was noticed"
