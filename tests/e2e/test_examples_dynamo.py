"""The commands of examples/dynamo, taken out of its README and run: the router real, Dynamo's part played by us."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from nats.aio.client import Client

from fullhit.lab.processes import free_port
from fullhit_publisher.dynamo_keys import from_chat
from fullhit_publisher.identity import dynamo_name

FOLDER = Path(__file__).parents[2] / "examples" / "dynamo"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*) ?(\w*)\n(.*?)^```$", README, re.M | re.S)
TOPIC = "multimodal_embedding_cache"
GPU, CPU = 2**63 + 11, 2**63 + 12
PORTS = ("4222", "8000", "8781", "8783")


def test_every_block_is_run_here_or_needs_what_only_a_gpu_host_has() -> None:
    kinds = [(language, mark) for language, mark, _ in BLOCKS]
    assert kinds.count(("sh", "gpu")) == 1 and set(kinds) <= {("sh", "gpu"), ("sh", ""), ("", "")}
    for language, mark, text in BLOCKS:
        if (language, mark) == ("sh", "gpu"):
            commands = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line and line[0] != "#"]
            assert all(re.match(r"(export |(\w+=\S+ )?python -m dynamo\.\w+ )", line) for line in commands)


class Deployment:
    """What of Dynamo's the router meets: discovery records, a frontend in direct mode, events of the encoders. An
    encoder publishes the pictures of a request before it answers."""

    def __init__(self, store: Path, ports: dict[str, str]) -> None:
        self.ports = ports
        self.seen: list[str] = []
        self._store = store
        self._sequences = {GPU: 0, CPU: 0}

    def discover(self) -> None:
        folder = self._store / "v1/instances"
        folder.mkdir(parents=True)
        for number, device in ((GPU, "cuda"), (CPU, "cpu")):
            record = {"type": "Endpoint", "namespace": "dynamo", "component": "encoder", "endpoint": "generate",
                      "instance_id": number, "device_type": device}  # fmt: skip
            (folder / f"dynamo%2Fencoder%2Fgenerate%2F{number:x}").write_text(json.dumps(record))

    def keep_alive(self) -> None:
        for record in (self._store / "v1/instances").iterdir():
            record.touch()

    async def chat(self, request: web.Request) -> web.Response:
        worker = int(request.headers["x-dynamo-worker-instance-id"])
        body = await request.json()
        keys = [key for item in from_chat(body).distinct for key in item]
        client = Client()
        await client.connect(f"nats://127.0.0.1:{self.ports['4222']}")
        payload = {"worker_id": worker, "update": {"added_keys": keys, "removed_keys": []}}
        envelope = {"publisher_id": worker % 1000, "sequence": self._sequences[worker], "published_at": 1,
                    "topic": TOPIC, "payload": msgspec.msgpack.encode(payload)}  # fmt: skip
        self._sequences[worker] += 1
        subject = f"namespace.dynamo.component.encoder.endpoint.generate.{TOPIC}"
        if not self.seen:
            await client.publish(subject, msgspec.msgpack.encode(envelope))
        await client.flush()
        await client.close()
        self.seen.append(dynamo_name(worker))
        return web.json_response({"model": body["model"], "choices": [{"message": {"content": "a cat"}}]})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "qwen-vl"}]})

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy", "instances": []})


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    deployment = Deployment(tmp_path / "store", {port: str(free_port()) for port in PORTS})
    deployment.discover()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", deployment.chat)
    app.router.add_get("/v1/models", deployment.models)
    app.router.add_get("/health", deployment.health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(deployment.ports["8000"])).start()
    yield deployment
    await runner.cleanup()


def moved(text: str, deployment: Deployment, store: Path) -> str:
    """The same text with free ports, and discovery where the test has it."""
    for port, free in deployment.ports.items():
        text = re.sub(rf"\b{port}\b", free, text)
    return text.replace("/var/lib/dynamo", str(store))


async def test_the_commands_of_the_readme_work(deployment: Deployment, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for file in FOLDER.iterdir():
        if file.suffix in (".toml", ".py"):
            (tmp_path / file.name).write_text(moved(file.read_text(encoding="utf-8"), deployment, store))
    script = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"]
    for language, mark, text in BLOCKS:
        if (language, mark) == ("sh", ""):
            installs = re.sub(r"^pip install .*$", ":", text, flags=re.M)  # it is installed: this very checkout
            script += ["echo '=====' >&2; echo '====='", moved(installs, deployment, store)]
    binaries = Path(sys.executable).parent
    assert shutil.which("nats-server", path=str(binaries)) and shutil.which("curl")
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", "\n".join(script),
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
             "FULLHIT_ADMIN_URL": f"http://127.0.0.1:{deployment.ports['8781']}"},
    )  # fmt: skip
    alive = asyncio.create_task(_keep_alive(deployment))
    try:
        async with asyncio.timeout(120):
            out, err = await process.communicate()
    finally:
        alive.cancel()
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()[-3000:]
    _, nats, check, serve, chats, explain, own, zmq = out.decode().split("=====\n")
    assert "[pool.vision]" in check or "vision" in check
    assert f"dynamo:{GPU}" in serve and f"dynamo:{CPU}" in serve
    reasons = re.findall(r"x-fullhit-reason: (\w+)", chats)
    workers = re.findall(r"x-fullhit-worker: (\S+)", chats)
    assert reasons == ["miss", "full_hit"]
    assert workers == deployment.seen == [f"dynamo:{GPU}"] * 2
    key = from_chat_key()
    assert "hold all 1 keys" in explain and key[:32] in explain, explain
    assert re.search(rf"holders:\n.*\n\s+{key[:32]}\s+dynamo:{GPU}", explain), explain
    assert f'"dynamo:{GPU}"' in own and '"full_hit"' in own
    assert f"send it to {GPU} (full_hit), then release" in own and "because: 1 eligible worker(s) hold all" in own
    assert "zmq" in zmq and not nats.strip()


def from_chat_key() -> str:
    url = {"type": "image_url", "image_url": {"url": "https://pictures.invalid/cat.png"}}
    ((key,),) = from_chat({"messages": [{"content": [url]}]}).distinct
    return key


async def _keep_alive(deployment: Deployment) -> None:
    """As the owners of discovery records do: those that nobody touches are gone after some seconds."""
    while True:
        deployment.keep_alive()
        await asyncio.sleep(1)
