"""Mock encoders as real processes, with the client that does what SGLang's language server does."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import nats
import nats.aio.msg
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from fullhit.lab import mock_encoder
from fullhit.lab.embedding import PartHeader, decode_header, mock_embedding
from fullhit.lab.images import data_uri
from fullhit.lab.language_server import Backend, LanguageServerSettings, MockLanguageServer, RequestFailed
from fullhit.lab.processes import Child, Supervisor, fetch_json, free_port, start_nats
from fullhit_publisher import fold, item_key, key_text
from fullhit_publisher.keys import digest
from fullhit_publisher.wire import Delta, Heartbeat, decode_envelope, decode_message

StartEncoder = Callable[..., Awaitable[tuple[Child, str]]]
Until = Callable[..., Awaitable[None]]


def expected(pictures: Sequence[bytes]) -> bytes:
    return b"".join(mock_embedding(picture, 64) for picture in pictures)


def encode_body(rid: str, item: object, **changes: object) -> dict[str, object]:
    body: dict[str, object] = {
        "req_id": f"{rid}_local_part_0",
        "mm_items": [item],
        "num_parts": 1,
        "part_idx": 0,
        "modality": "IMAGE",
        "prefill_host": "127.0.0.1",
        "embedding_port": None,
        "encoder_idx": 0,
        "encoder_url": "http://encoder.invalid",
        "time_stats_json": None,
    }
    return {**body, **changes}


async def post(http: aiohttp.ClientSession, url: str, body: object) -> tuple[int, Any]:
    async with http.post(url, data=io.BytesIO(json.dumps(body).encode())) as reply:
        return reply.status, json.loads(await reply.read())


class Rank:
    """A scheduler rank's end of the push: a bound PULL socket."""

    def __init__(self, port: int | None = None) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.url = f"127.0.0.1:{port or free_port()}"
        self.socket.bind(f"tcp://{self.url}")

    async def __aenter__(self) -> Rank:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    async def part(self) -> tuple[PartHeader, bytes]:
        async with asyncio.timeout(60):
            first, second = await self.socket.recv_multipart()
        return decode_header(first), second

    def registration(self, req_id: str, count: int = 1) -> dict[str, object]:
        return {
            "req_id": f"{req_id}_local_part_0",
            "receive_count": count,
            "receive_url": self.url,
            "modality": "IMAGE",
        }


@pytest.mark.parametrize("backend", ["zmq_to_scheduler", "zmq_to_tokenizer"])
async def test_both_zmq_backends_deliver_the_right_bytes_in_prompt_order(
    backend: Backend, start_encoder: StartEncoder, pictures: list[bytes]
) -> None:
    urls = [(await start_encoder())[1] for _ in range(2)]
    settings = LanguageServerSettings(tuple(urls), backend=backend, tp_size=2)
    async with MockLanguageServer(settings, seed=1) as server:
        results = await asyncio.gather(*(server.encode([data_uri(p) for p in pictures]) for _ in range(8)))
    for result in results:
        assert result.embedding == expected(pictures)
        assert [len(part.items) for part in result.parts] == [3, 3]
        assert result.reasons == []
    assert server.stats.finished == 8
    assert server.stats.dropped_parts == 0


async def test_registrations_that_leave_first_are_held_and_served(module_encoder: str, pictures: list[bytes]) -> None:
    url = module_encoder
    settings = LanguageServerSettings((url,), register_first=True, tp_size=2)
    async with MockLanguageServer(settings) as server:
        result = await server.encode([data_uri(pictures[0])])
    assert result.embedding == expected(pictures[:1])


async def test_an_early_registration_gets_no_answer_until_its_encode_starts(
    module_encoder: str, http: aiohttp.ClientSession, pictures: list[bytes], until: Until
) -> None:
    url = module_encoder
    async with Rank() as rank:
        early = asyncio.create_task(post(http, f"{url}/scheduler_receive_url", rank.registration("early")))

        async def held() -> bool:
            return bool((await fetch_json(f"{url}/mock/stats"))["held_registrations"] == 1)

        await until(held)
        assert not early.done()
        status = await post(http, f"{url}/encode", encode_body("early", data_uri(pictures[0])))
        assert status == (200, None)
        assert await early == (200, None)
        header, payload = await rank.part()
        assert (header.req_id, header.part_idx, header.num_parts) == ("early_local_part_0", 0, 1)
        assert header.mock
        assert header.shape == (64, 512)
        assert payload == expected(pictures[:1])


async def test_encode_answers_only_after_every_rank_has_registered(
    module_encoder: str, http: aiohttp.ClientSession, pictures: list[bytes], until: Until
) -> None:
    url = module_encoder
    async with Rank() as first, Rank() as second:
        encode = asyncio.create_task(post(http, f"{url}/encode", encode_body("two", data_uri(pictures[0]))))
        register = f"{url}/scheduler_receive_url"
        assert await post(http, register, first.registration("two", 2)) == (200, None)
        assert await post(http, register, first.registration("two", 2)) == (200, None)  # the same address twice
        assert (await post(http, register, second.registration("two", 3)))[0] == 400  # another count
        assert not encode.done()
        assert await post(http, register, second.registration("two", 2)) == (200, None)
        assert await encode == (200, None)
        assert (await first.part())[1] == (await second.part())[1] == expected(pictures[:1])


async def test_the_same_part_posted_twice_is_delivered_twice(
    module_encoder: str, http: aiohttp.ClientSession, pictures: list[bytes], until: Until
) -> None:
    url = module_encoder
    async with Rank() as rank:
        body = encode_body("twice", data_uri(pictures[0]))
        before = (await fetch_json(f"{url}/mock/stats"))["requests"]
        encodes = [asyncio.create_task(post(http, f"{url}/encode", body)) for _ in range(2)]

        async def both_there() -> bool:
            return bool((await fetch_json(f"{url}/mock/stats"))["requests"] == before + 2)

        await until(both_there)
        assert await post(http, f"{url}/scheduler_receive_url", rank.registration("twice")) == (200, None)
        assert await asyncio.gather(*encodes) == [(200, None), (200, None)]
        assert (await rank.part())[0] == (await rank.part())[0]


async def test_a_cache_hit_skips_the_vit_whatever_the_request(
    start_encoder: StartEncoder, pictures: list[bytes]
) -> None:
    _, url = await start_encoder()
    async with MockLanguageServer(LanguageServerSettings((url,))) as server:
        await server.encode([data_uri(p) for p in pictures[:3]])
        again = await server.encode([data_uri(p) for p in [pictures[2], pictures[3], pictures[0]]])
    assert again.embedding == expected([pictures[2], pictures[3], pictures[0]])
    stats = await fetch_json(f"{url}/mock/stats")
    assert (stats["images"], stats["vit_runs"], stats["hits"], stats["cached_keys"]) == (6, 4, 2, 4)


async def test_cached_keys_are_those_that_the_router_computes(
    start_encoder: StartEncoder, pictures: list[bytes]
) -> None:
    _, url = await start_encoder()
    content_hash = f"sha256:{hashlib.sha256(pictures[1]).hexdigest()}"
    items: list[object] = [
        data_uri(pictures[0]),
        {"url": data_uri(pictures[1]), "detail": "high"},
        {"url": data_uri(pictures[1]), "content_hash": content_hash},
    ]
    async with MockLanguageServer(LanguageServerSettings((url,))) as server:
        await server.encode(items)
    keys = [item_key(item) for item in items]
    assert await fetch_json(f"{url}/mock/cache") == sorted(key_text(key) for key in keys if key is not None)


async def test_every_change_of_the_cache_is_published_evictions_too(
    start_encoder: StartEncoder, processes: Supervisor, pictures: list[bytes], until: Until
) -> None:
    _, plane = await start_nats(processes)
    reader = await nats.connect(plane)
    believed: set[str] = set()
    beats: list[Heartbeat] = []

    async def read(message: nats.aio.msg.Msg) -> None:
        event = decode_message(decode_envelope(message.data))
        if isinstance(event, Delta):
            believed.difference_update(event.update.removed_keys)
            believed.update(event.update.added_keys)
        elif isinstance(event, Heartbeat):
            beats.append(event)

    await reader.subscribe("fullhit.v1.*.*.events", cb=read)
    await reader.flush()
    # Room for three embeddings of 64 KiB.
    options = ["--multimodal-embedding-cache-capacity-gb", str(3 * 65536 / 2**30)]
    options += ["--multimodal-embedding-cache-publisher", "--event-plane", plane, "--pool", "lab", "--device", "cpu"]
    _, url = await start_encoder(*options, "--cpu-slower", "1")
    async with MockLanguageServer(LanguageServerSettings((url,))) as server:
        for picture in [*pictures, pictures[5], pictures[0]]:
            await server.encode([data_uri(picture)])
    cached = await fetch_json(f"{url}/mock/cache")
    assert len(cached) == 3

    def agrees() -> bool:
        return bool(beats) and beats[-1].keys == 3 and beats[-1].digest == digest(fold(key) for key in believed)

    await until(agrees)
    assert sorted(believed) == cached
    assert (beats[-1].url, beats[-1].device, beats[-1].pool, beats[-1].hits) == (url, "cpu", "lab", 1)
    await reader.close()


async def test_a_broken_picture_is_refused_with_400_and_an_error_part(
    module_encoder: str, http: aiohttp.ClientSession
) -> None:
    url = module_encoder
    async with Rank() as rank:
        status, reply = await post(http, f"{url}/encode", encode_body("bad", "data:image/png;base64,AAAA"))
        assert status == 400
        assert reply["status"] == "error"
        assert reply["req_id"] == "bad_local_part_0"
        assert "cannot decode image" in reply["message"]
        # The registration that follows is accepted, and what it waits for is told over ZMQ.
        assert await post(http, f"{url}/scheduler_receive_url", rank.registration("bad")) == (200, None)
        header, _ = await rank.part()
        assert (header.error_code, header.error_message) == (400, reply["message"])


async def test_sizes_are_told_for_every_backend_once_the_media_are_decoded(
    start_encoder: StartEncoder, http: aiohttp.ClientSession, pictures: list[bytes]
) -> None:
    _, url = await start_encoder("--vit-ms", "50", "--embedding-kb", "64")
    question = f"{url}/scheduler_receive_meta_data"
    asked = asyncio.create_task(post(http, question, {"req_id": "good_local_part_0", "part_idx": 0}))
    encode = asyncio.create_task(post(http, f"{url}/encode", encode_body("good", data_uri(pictures[0]))))
    sizes = {"embedding_size": 65536, "embedding_len": 64, "embedding_dim": 512}
    assert await asked == (200, {"req_id": "good_local_part_0", "part_idx": 0, **sizes})
    assert not encode.done(), "nobody has registered yet"
    async with Rank() as rank:
        assert await post(http, f"{url}/scheduler_receive_url", rank.registration("good")) == (200, None)
        assert await encode == (200, None)
        assert (await rank.part())[0].shape == (64, 512)
    assert (await post(http, f"{url}/encode", encode_body("bad", "data:image/png;base64,AAAA")))[0] == 400
    status, reply = await post(http, question, {"req_id": "bad_local_part_0", "part_idx": 0})
    assert status == 500
    assert "cannot decode image" in reply["message"]
    assert (await fetch_json(f"{url}/mock/stats"))["error_parts"] == 0, "who has not registered is told nothing"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modality": None}, "modality"),
        ({"num_parts": None}, "num_parts"),
        ({"part_idx": 1}, "part_idx"),
        ({"mm_items": []}, "mm_items"),
        ({"req_id": 5}, "req_id"),
        ({"mm_items": [7]}, "media item"),
        ({"mm_items": ["/etc/passwd"]}, "local files"),
        ({"mm_items": ["http://pictures.invalid/a.png"]}, "this machine only"),
        ({"mm_items": ["http://127.0.0.1.invalid/a.png"]}, "this machine only"),
        ({"mm_items": [{"url": "data:;base64,AAAA", "content_hash": "sha256:00"}]}, "content_hash"),
    ],
)
async def test_what_cannot_be_encoded_is_refused_with_the_reason(
    changes: dict[str, object], message: str, module_encoder: str, http: aiohttp.ClientSession
) -> None:
    status, reply = await post(http, f"{module_encoder}/encode", encode_body("x", "data:,", **changes))
    assert status == 400
    assert message in reply["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe"])
async def test_a_body_that_is_no_json_object_is_refused(
    body: bytes, module_encoder: str, http: aiohttp.ClientSession
) -> None:
    async with http.post(f"{module_encoder}/encode", data=body) as reply:
        assert reply.status == 400
        assert (await reply.json())["status"] == "error"


async def test_a_prefixed_path_is_unknown_as_at_the_real_encoder(
    module_encoder: str, http: aiohttp.ClientSession
) -> None:
    async with http.post(f"{module_encoder}/v0/encode", json={}) as reply:
        assert reply.status == 404
    async with http.get(f"{module_encoder}/health") as reply:
        assert (reply.status, await reply.read()) == (200, b"")


async def test_a_picture_on_this_machine_is_fetched(
    module_encoder: str, pictures: list[bytes], serve: Callable[[web.Application], Awaitable[str]]
) -> None:
    app = web.Application()

    async def picture(request: web.Request) -> web.Response:
        return web.Response(body=pictures[0], content_type="image/jpeg")

    app.router.add_get("/a.jpg", picture)
    base = await serve(app)
    url = module_encoder
    async with MockLanguageServer(LanguageServerSettings((url,))) as server:
        result = await server.encode([f"{base}/a.jpg"])
        with pytest.raises(RequestFailed, match="404"):
            await server.encode([f"{base}/other.jpg"])
    assert result.embedding == expected(pictures[:1])


async def test_bodies_of_many_megabytes_pass(module_encoder: str, http: aiohttp.ClientSession) -> None:
    url = module_encoder
    status, reply = await post(http, f"{url}/encode", encode_body("big", "A" * 9_000_000))
    assert status == 400  # taken and looked at; an aiohttp server by default says 413
    assert "cannot decode" in reply["message"]


async def test_a_push_waits_for_its_receiver_inside_the_socket_and_only_a_bad_address_is_a_502(
    module_encoder: str, http: aiohttp.ClientSession, pictures: list[bytes]
) -> None:
    url = module_encoder
    late = free_port()
    body = encode_body("late", data_uri(pictures[0]), embedding_port=late)
    assert await post(http, f"{url}/encode", body) == (200, None)
    async with Rank(late) as rank:
        assert (await rank.part())[1] == expected(pictures[:1])
    body = encode_body("bad", data_uri(pictures[0]), embedding_port=70_000)
    status, reply = await post(http, f"{url}/encode", body)
    assert (status, "70000" in reply["message"]) == (502, True)


async def test_an_encode_that_nobody_registers_for_is_a_504(
    start_encoder: StartEncoder, http: aiohttp.ClientSession, pictures: list[bytes]
) -> None:
    _, url = await start_encoder("--send-timeout", "0.1")
    status, reply = await post(http, f"{url}/encode", encode_body("y", data_uri(pictures[0])))
    assert status == 504
    assert "0 of ? destinations" in reply["message"]


async def test_mooncake_sizes_come_first_and_every_rank_is_told_when_it_is_done(
    start_encoder: StartEncoder, http: aiohttp.ClientSession, pictures: list[bytes]
) -> None:
    _, url = await start_encoder("--encoder-transfer-backend", "mooncake")
    settings = LanguageServerSettings((url,), backend="mooncake", tp_size=2)
    async with MockLanguageServer(settings) as server:
        result = await server.encode([data_uri(p) for p in pictures[:2]])
    assert [header.shape for header in result.headers] == [(128, 512)]
    status, reply = await post(http, f"{url}/send", {"req_id": "gone", "prefill_host": "127.0.0.1"})
    assert status == 500
    assert "no staged embedding" in reply["message"]


async def test_an_encoder_killed_in_mid_encode_fails_the_request_and_not_the_client(
    start_encoder: StartEncoder, pictures: list[bytes], until: Until
) -> None:
    child, url = await start_encoder("--vit-ms", "600000")
    async with MockLanguageServer(LanguageServerSettings((url,))) as server:
        request = asyncio.create_task(server.encode([data_uri(pictures[0])]))

        async def busy() -> bool:
            return bool((await fetch_json(f"{url}/mock/stats"))["inflight"] == 1)

        await until(busy)
        child.kill()
        with pytest.raises(RequestFailed) as failure:
            await request
        assert failure.value.would_stop_server
        assert failure.value.status == 502


async def test_faults_can_be_switched_while_it_runs(
    start_encoder: StartEncoder, http: aiohttp.ClientSession, pictures: list[bytes]
) -> None:
    child, url = await start_encoder("--status", "503")
    settings = LanguageServerSettings((url,), backend="zmq_to_tokenizer")
    async with MockLanguageServer(settings) as server:
        with pytest.raises(RequestFailed, match="503 on purpose"):
            await server.encode([data_uri(pictures[0])])
        assert (await post(http, f"{url}/mock/faults", {"garbage": True}))[0] == 200
        with pytest.raises(RequestFailed) as failure:
            await server.encode([data_uri(pictures[0])])
        assert not failure.value.would_stop_server
        assert (await post(http, f"{url}/mock/faults", {"no_such_fault": 1}))[0] == 400
        assert (await post(http, f"{url}/mock/faults", {}))[0] == 200
        assert (await server.encode([data_uri(pictures[0])])).embedding == expected(pictures[:1])
        assert (await post(http, f"{url}/mock/faults", {"crash_after": 1}))[0] == 200
        with pytest.raises(RequestFailed):
            await server.encode([data_uri(pictures[0])])
    assert child.process.wait(60) == -9


async def test_registration_without_encode_is_404_from_a_dp_like_encoder_and_504_from_others(
    start_encoder: StartEncoder, http: aiohttp.ClientSession
) -> None:
    (_, dp), (_, plain) = (
        await start_encoder("--registration-404", "--hold", "0.05"),
        await start_encoder("--hold", "0.05"),
    )
    body = {"req_id": "r_local_part_0", "receive_count": 1, "receive_url": "127.0.0.1:1", "modality": "IMAGE"}
    answers = await asyncio.gather(*(post(http, f"{url}/scheduler_receive_url", body) for url in (dp, plain)))
    assert [status for status, _ in answers] == [404, 504]
    assert answers[0][1]["message"] == "Unknown req_id: r_local_part_0"


async def test_it_announces_itself_and_leaves_on_sigterm(
    start_encoder: StartEncoder,
    processes: Supervisor,
    serve: Callable[[web.Application], Awaitable[str]],
    until: Until,
) -> None:
    calls: list[tuple[str, str]] = []

    async def registry(request: web.Request) -> web.Response:
        calls.append((f"{request.method} {request.path}", (await request.json())["url"]))
        return web.Response(text="OK")

    app = web.Application()
    app.router.add_post("/register_encoder_url", registry)
    app.router.add_delete("/unregister_encoder_url", registry)
    base = await serve(app)
    child, url = await start_encoder("--encoder-register-urls", base)
    await until(lambda: calls == [("POST /register_encoder_url", url)])
    await asyncio.to_thread(processes.stop)
    assert child.process.returncode == 0
    assert calls[1:] == [("DELETE /unregister_encoder_url", url)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "--port must be between 0 and 65535, not 99999"),
        (["--vit-ms", "-1"], "--vit-ms must be"),
        (["--fail-rate", "2"], "--fail-rate must be"),
        (["--multimodal-embedding-cache-publisher", "--event-plane", "smoke://signal"], "smoke"),
    ],
)
def test_a_mistake_in_the_options_is_told_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    mock_encoder.add_arguments(parser)
    assert mock_encoder.run(parser.parse_args(arguments)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


async def test_it_leaves_at_once_although_nobody_took_what_it_pushed(
    start_encoder: StartEncoder, processes: Supervisor, http: aiohttp.ClientSession, pictures: list[bytes]
) -> None:
    child, url = await start_encoder()
    for rid in ("a", "b"):
        async with Rank() as rank:
            gone = rank.registration(rid)
        encode = asyncio.create_task(post(http, f"{url}/encode", encode_body(rid, data_uri(pictures[0]))))
        assert await post(http, f"{url}/scheduler_receive_url", gone) == (200, None)
        assert await encode == (200, None)
    await asyncio.to_thread(processes.stop)
    assert child.process.returncode == 0


async def test_a_busy_port_is_told_without_a_stack_trace(processes: Supervisor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        child = processes.start("busy", ["fullhit.lab.mock_encoder", "--port", port])
        assert await asyncio.to_thread(child.process.wait, 60) == 1
    assert child.log.read_text() == f"fullhit mock-encoder: cannot listen on 127.0.0.1:{port}: Address already in use\n"
