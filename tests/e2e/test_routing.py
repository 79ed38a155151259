"""The main job, end to end: SGLang-shaped traffic over real processes lands where the pictures are."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fullhit.lab.language_server import LanguageServerSettings, MockLanguageServer
from fullhit.lab.processes import fetch_json

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def aliases(base: str, count: int = 5) -> tuple[str, ...]:
    return tuple(f"{base}/v{index}" for index in range(count))


async def set_faults(url: str, **faults: object) -> None:
    async with aiohttp.ClientSession() as http, http.post(f"{url}/mock/faults", json=faults) as reply:
        assert reply.status == 200, await reply.text()


@pytest.mark.parametrize("backend", ["zmq_to_scheduler", "zmq_to_tokenizer", "mooncake"])
async def test_pictures_seen_before_go_to_their_holder_and_are_not_encoded_again(
    deployment: Any, pictures: list[str], backend: Any
) -> None:
    await deployment.start_router()
    encoders = [await deployment.start_encoder("--encoder-transfer-backend", backend) for _ in range(2)]
    urls = [url for _, url in encoders]
    await deployment.ready(*urls)
    settings = LanguageServerSettings(aliases(deployment.base), backend=backend, tp_size=2)
    async with MockLanguageServer(settings, seed=1) as server:
        first = await server.encode(pictures[:5])
        assert set(first.reasons) == {"miss"}
        await deployment.converged(*urls)
        second = await server.encode(pictures[:5])
        assert set(second.reasons) == {"full_hit"}
        assert second.embedding == first.embedding
        mixed = await server.encode([*pictures[:2], *pictures[10:12]])
        assert sorted(mixed.reasons) == ["full_hit", "full_hit", "miss", "miss"]
    assert await deployment.vit_runs(*urls) == 7
    await deployment.idle()


async def test_a_request_in_one_part_is_a_full_hit_only_where_every_picture_is(
    deployment: Any, pictures: list[str]
) -> None:
    await deployment.start_router()
    encoders = [await deployment.start_encoder() for _ in range(2)]
    urls = [url for _, url in encoders]
    await deployment.ready(*urls)
    async with MockLanguageServer(LanguageServerSettings((deployment.base,)), seed=1) as server:
        assert (await server.encode(pictures[:3])).reasons == ["miss"]
        await deployment.converged(*urls)
        assert (await server.encode(pictures[:2])).reasons == ["full_hit"]
        assert (await server.encode(pictures[:4])).reasons == ["partial_hit"]
    await deployment.idle()


async def test_gpu_holders_win_over_cpu_holders_and_the_ratio_guards_the_cpu(
    deployment: Any, pictures: list[str]
) -> None:
    await deployment.start_router()
    _, gpu = await deployment.start_encoder("--device", "cuda")
    _, cpu = await deployment.start_encoder("--device", "cpu", "--cpu-slower", "1")
    await deployment.ready(gpu, cpu)
    assert (await deployment.worker(cpu))["device_class"] == "cpu"
    async with MockLanguageServer(LanguageServerSettings(aliases(deployment.base)), seed=1) as server:
        for number in range(6):
            await server.encode([pictures[number]])
    assert (await fetch_json(f"{cpu}/mock/stats"))["vit_runs"] == 0, "one request at a time never spills to the CPU"


async def test_every_decision_is_explained_by_log_admin_and_headers(deployment: Any, pictures: list[str]) -> None:
    router = await deployment.start_router()
    _, url = await deployment.start_encoder()
    await deployment.ready(url)
    body = {"req_id": "why", "num_parts": 1, "part_idx": 0, "modality": "IMAGE", "prefill_host": "127.0.0.1",
            "embedding_port": 5577, "mm_items": pictures[:2]}  # fmt: skip
    reply = await post(f"{deployment.base}/encode", body, {"x-request-id": "trace-1"})
    assert reply.status == 200
    assert reply.body == b"null"
    assert reply.headers["x-fullhit-worker"] == url
    assert reply.headers["x-fullhit-reason"] == "miss"
    assert reply.headers["x-request-id"] == "trace-1"
    rows = (await fetch_json(f"{deployment.admin}/decisions?request_id=trace-1"))["decisions"]
    assert len(rows) == 1
    assert (rows[0]["reason"], rows[0]["outcome"]["code"], rows[0]["outcome"]["delivered"]) == ("miss", 200, "miss")
    line = await deployment.log_line(router, "decision", request_id="trace-1")
    assert (line["worker"], line["reason"], line["code"]) == (url, "miss", 200)
    metrics = (await get(f"{deployment.admin}/metrics")).body.decode()
    assert 'fullhit_requests_total{code="200",pool="default",reason="miss"} 1.0' in metrics
    assert f'fullhit_worker_up{{worker="{url}"}} 1.0' in metrics
    assert f'fullhit_cache_reports_total{{delivered="miss",predicted="miss",worker="{url}"}} 1.0' in metrics


async def test_the_curl_command_of_the_readme_shows_a_miss_and_then_a_full_hit(deployment: Any) -> None:
    command = next(block for block in re.findall(r"```bash\n(.*?)```", README, re.S) if block.startswith("curl -si"))
    await deployment.start_router()
    _, url = await deployment.start_encoder()
    await deployment.ready(url)
    command = command.replace("http://127.0.0.1:8780", deployment.base)
    reasons, delivered = [], []
    for _ in range(2):
        answer = await asyncio.to_thread(subprocess.run, ["bash", "-c", command], capture_output=True, timeout=60)
        text = answer.stdout.decode()
        assert text.startswith("HTTP/1.1 200"), text
        reasons += re.findall(r"(?im)^x-fullhit-reason: (\S+)", text)
        delivered += re.findall(r"(?im)^x-fullhit-cache: (\S+)", text)
        await deployment.converged(url)
    assert reasons == ["miss", "full_hit"] and delivered == ["miss", "hit"]


async def test_an_encoder_that_has_not_what_it_publishes_is_found_out(deployment: Any, pictures: list[str]) -> None:
    router = await deployment.start_router()
    _, url = await deployment.start_encoder()
    await deployment.ready(url)
    settings = LanguageServerSettings(aliases(deployment.base))
    async with MockLanguageServer(settings, seed=1) as server:
        await server.encode(pictures[:8])
        await deployment.converged(url)
        await set_faults(url, forgetful=True)
        reasons: list[str] = []
        while "partial_hit" not in reasons:
            reasons += (await server.encode(pictures[:8])).reasons
        assert 8 <= reasons.count("full_hit") <= 24, "believed at first"
        line = await deployment.log_line(router, "worker_contradicts", worker=url)
        assert line["doubted_seconds"] == 10.0 and (await deployment.worker(url))["doubtful"]
        await set_faults(url)

        async def trusted() -> bool:
            return not (await deployment.worker(url))["doubtful"]

        await deployment.until(trusted)
        assert set((await server.encode(pictures[:8])).reasons) == {"full_hit"}
    await deployment.idle()


async def test_stock_encoders_that_publish_nothing_are_predicted(deployment: Any, pictures: list[str]) -> None:
    await deployment.start_router()
    encoders = [await deployment.start_encoder(publish=False) for _ in range(2)]
    await deployment.ready(*[url for _, url in encoders], index=False)
    async with MockLanguageServer(LanguageServerSettings((deployment.base,)), seed=1) as server:
        assert (await server.encode(pictures[:1])).reasons == ["miss"]
        assert (await server.encode(pictures[:1])).reasons == ["predicted"]
    assert await deployment.vit_runs(*[url for _, url in encoders]) == 1


async def test_without_an_event_plane_and_on_the_stdlib_loop_it_still_routes(
    deployment: Any, pictures: list[str]
) -> None:
    await deployment.start_router("--loop", "asyncio", plane="none")
    _, url = await deployment.start_encoder(publish=False)
    await deployment.ready(url, index=False)
    async with MockLanguageServer(LanguageServerSettings((deployment.base,)), seed=1) as server:
        await server.encode(pictures[:2])
    ready = await fetch_json(f"{deployment.admin}/readyz")
    assert ready["status"] == "ready"


async def test_sigterm_finishes_what_runs_and_leaves_nothing_behind(deployment: Any, pictures: list[str]) -> None:
    router = await deployment.start_router()
    _, url = await deployment.start_encoder("--vit-ms", "3000")
    await deployment.ready(url)
    async with MockLanguageServer(LanguageServerSettings((deployment.base,)), seed=1) as server:
        running = asyncio.create_task(server.encode(pictures[:1]))

        async def in_flight() -> bool:
            return bool((await deployment.worker(url))["inflight_requests"] == 1)

        await deployment.until(in_flight)
        router.process.send_signal(signal.SIGTERM)
        assert (await running).reasons == ["miss"]
    await asyncio.to_thread(router.process.wait, 60)
    assert router.process.returncode == 0
    line = await deployment.log_line(router, "drained")
    assert (line["running"], line["cut"]) == (1, 0)


async def test_a_killed_router_knows_its_encoders_again_though_they_register_once(
    deployment: Any, pictures: list[str], tmp_path: Path
) -> None:
    state = tmp_path / "workers.json"
    options = ("--state-file", str(state))
    router = await deployment.start_router(*options, plane="none")
    _, url = await deployment.start_encoder(publish=False)
    await deployment.ready(url, index=False)

    async def remembered() -> bool:
        return state.exists() and url in state.read_text()

    await deployment.until(remembered)
    router.process.kill()
    await asyncio.to_thread(router.process.wait, 60)
    state.write_text(state.read_text())  # a file of an operator's own making will do
    again = await deployment.start_router(*options, plane="none", base=deployment.base, admin=deployment.admin)
    assert (await deployment.log_line(again, "state_file_read"))["workers"] == 1
    await deployment.ready(url, index=False)
    async with MockLanguageServer(LanguageServerSettings((deployment.base,)), seed=1) as server:
        assert (await server.encode(pictures[:1])).reasons == ["miss"]
    assert "fullhit_state_file_failing 0.0" in (await get(f"{deployment.admin}/metrics")).body.decode()


async def test_case_e3_start_is_not_held_up_by_a_silent_encoder_and_ready_means_that_a_probe_was_answered(
    deployment: Any, pictures: list[str]
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)  # takes connections, never answers
        await deployment.start_router("--encoder-url", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert (await get(f"{deployment.base}/health")).status == 200
        not_yet = await get(f"{deployment.admin}/readyz")
        assert not_yet.status == 503
        assert "none of its 1 workers is ready" in not_yet.body.decode()
        _, url = await deployment.start_encoder()
        await deployment.ready(url)
        assert (await get(f"{deployment.admin}/readyz")).status == 200
        async with MockLanguageServer(LanguageServerSettings((deployment.base,)), seed=1) as server:
            await server.encode(pictures[:2])


async def test_a_taken_port_is_told_with_the_name_of_the_setting(deployment: Any) -> None:
    await deployment.start_router()
    taken = deployment.base.removeprefix("http://")
    second = deployment.processes.start(
        "second", ["fullhit", "serve", "--listen", taken, "--admin-listen", "127.0.0.1:0", "--event-plane", "none"]
    )
    assert await asyncio.to_thread(second.process.wait, 60) == 2
    text = second.log.read_text()
    assert "server.listen" in text
    assert "Traceback" not in text


class Reply:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


def _call(url: str, data: bytes | None, headers: dict[str, str]) -> Reply:
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return Reply(reply.status, reply.headers, reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, error.headers, error.read())


async def post(url: str, body: object, headers: dict[str, str] | None = None) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await asyncio.to_thread(_call, url, data, {"Content-Type": "application/json", **(headers or {})})


async def get(url: str) -> Reply:
    return await asyncio.to_thread(_call, url, None, {})
