"""The encoders of a demo: mock ones, whose ViT is a pause, or real SGLang ones with the embedding-cache plugin."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.request import urlopen

from fullhit.lab.processes import Child, Supervisor, fetch_json, free_port

__all__ = ["EncoderFleet", "MockFleet", "SglangFleet"]

# SGLang with a large model takes its time to start.
_START_LIMIT = 900.0
_ITEMS = re.compile(r'^fullhit_encoder_items_total\{[^}]*result="(\w+)"[^}]*\} ([0-9.e+]+)$', re.M)


class EncoderFleet(Protocol):
    """Starts encoders, and asks them."""

    @property
    def devices(self) -> Sequence[str]:
        """One entry an encoder: ``cpu`` or another kind."""

    @property
    def label(self) -> str:
        """What they are, for people."""

    @property
    def real(self) -> bool: ...

    async def start(self, run: str, options: Sequence[str]) -> tuple[list[Child], list[str]]:
        """Fresh encoders for a run, with these options more; they and their URLs."""

    async def vit_runs(self, url: str) -> int:
        """How many pictures this encoder's ViT has seen."""


@dataclass(slots=True)
class MockFleet:
    """Two GPU-like and two CPU-like mock encoders. ``common``: their options."""

    processes: Supervisor
    common: Sequence[str]
    devices: Sequence[str] = ("cuda", "cuda", "cpu", "cpu")
    label: str = "2 GPU-like and 2 CPU-like mock encoders"
    real: bool = False

    async def start(self, run: str, options: Sequence[str]) -> tuple[list[Child], list[str]]:
        children = [
            self.processes.start(
                f"mock-encoder-{run}-{index}-{device}",
                ["fullhit.lab.mock_encoder", "--device", device, *self.common, *options],
            )
            for index, device in enumerate(self.devices)
        ]
        return children, [str((await child.json_line())["url"]) for child in children]

    async def vit_runs(self, url: str) -> int:
        return int((await fetch_json(f"{url}/mock/stats"))["vit_runs"])


@dataclass(slots=True)
class SglangFleet:
    """Two real encoders. ``python``: an interpreter that has SGLang and this package. ``arguments``: what SGLang is
    told beside model and ports. They are started one after the other, which is faster where cores are few."""

    processes: Supervisor
    python: str
    model: str
    backend: str
    device: str
    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    label: str = "2 real SGLang encoders with the plugin"
    real: bool = True

    @property
    def devices(self) -> Sequence[str]:
        return (self.device, self.device)

    async def start(self, run: str, options: Sequence[str]) -> tuple[list[Child], list[str]]:
        children, urls = [], []
        for index, device in enumerate(self.devices):
            port = free_port()
            command = [self.python, "-m", "sglang.launch_server", "--model-path", self.model, "--encoder-only"]
            command += ["--encoder-transfer-backend", self.backend, "--device", device, "--enable-metrics"]
            command += ["--host", "127.0.0.1", "--port", str(port)]
            command += ["--multimodal-embedding-cache-capacity-gb", "1", *self.arguments, *options]
            child = self.processes.run(
                f"sglang-{run}-{index}", command, {"SGLANG_HOST_IP": "127.0.0.1", **self.variables}
            )
            await child.answers(f"http://127.0.0.1:{port}/health", _START_LIMIT)
            children.append(child)
            urls.append(f"http://127.0.0.1:{port}")
        return children, urls

    async def vit_runs(self, url: str) -> int:
        def read() -> str:
            with urlopen(f"{url}/metrics", timeout=30) as reply:
                return str(reply.read().decode())

        told = dict(_ITEMS.findall(await asyncio.to_thread(read)))
        return int(float(told.get("miss", 0)) + float(told.get("unkeyed", 0)))
