"""Load for the proxy bench: `wrk` when it is there, else a closed-loop generator of our own.

Ours costs about twice wrk's CPU per request, on the other core; that lowers what the fastest peers can show in
requests per second, and leaves CPU per request alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import cast
from urllib.parse import urlsplit

import uvloop

__all__ = ["Body", "Load", "offer", "pinned"]

MARK = "000000000000"
"""Twelve digits in a body that are counted up, so that every request is a different one."""


@dataclass(frozen=True, slots=True)
class Body:
    """A request body in a file. `counted`: it holds `MARK` once, to be replaced by a number."""

    path: Path
    counted: bool


@dataclass(frozen=True, slots=True)
class Load:
    """What was achieved: requests answered 2xx or not, seconds, median latency in us."""

    requests: int
    seconds: float
    p50: float
    failed: int

    @property
    def rate(self) -> float:
        return self.requests / self.seconds if self.seconds else 0.0


def pinned(core: int, argv: list[str]) -> list[str]:
    """The command, on one core."""
    code = "import os,sys; os.sched_setaffinity(0,{int(sys.argv[1])}); os.execvp(sys.argv[2],sys.argv[2:])"
    return [sys.executable, "-S", "-c", code, str(core), *argv]


LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local file = io.open("%s", "rb")
wrk.body = file:read("*a")
"""
LUA_COUNTED = """
local at = string.find(wrk.body, "000000000000", 1, true)
local head, tail, n = string.sub(wrk.body, 1, at - 1), string.sub(wrk.body, at + 12), %d
request = function()
  n = n + 1
  return wrk.format(nil, nil, nil, head .. string.format("%%012d", n) .. tail)
end
"""


def offer(url: str, body: Body, connections: int, seconds: float, core: int) -> Load:
    """Closed loop: `connections` requests always under way for `seconds`, from the given core."""
    if which("wrk") is not None:
        return _wrk(url, body, connections, seconds, core)
    argv = [sys.executable, "-m", "fullhit.lab.bench.proxy_load", url, str(body.path), str(connections), str(seconds)]
    done = subprocess.run(pinned(core, argv), capture_output=True, text=True, timeout=seconds + 60, check=True)
    return Load(**json.loads(done.stdout))


def _wrk(url: str, body: Body, connections: int, seconds: float, core: int) -> Load:
    script = body.path.with_suffix(".lua")
    start = time.time_ns() // 1_000_000 % 10**9 * 1000
    script.write_text(LUA % body.path + (LUA_COUNTED % start if body.counted else ""))
    whole = max(1, round(seconds))
    argv = ["wrk", "-t1", f"-c{connections}", f"-d{whole}s", "--timeout", "30s", "--latency", "-s", str(script), url]
    done = subprocess.run(pinned(core, argv), capture_output=True, text=True, timeout=whole + 90, check=True)
    text = done.stdout
    total = re.search(r"(\d+) requests in ([\d.]+)(us|ms|s|m),", text)
    median = re.search(r"50%\s+([\d.]+)(us|ms|s|m)\b", text)
    if total is None:
        raise RuntimeError(f"wrk said: {text}{done.stderr}")
    failed = sum(int(n) for n in re.findall(r"Non-2xx or 3xx responses: (\d+)", text))
    failed += sum(int(n) for line in re.findall(r"Socket errors: (.*)", text) for n in re.findall(r"\d+", line))
    p50 = float(median[1]) * UNITS[median[2]] if median is not None else 0.0
    return Load(int(total[1]), float(total[2]) * UNITS[total[3]] / 1e6, p50, failed)


UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6, "m": 6e7}


class _Caller(asyncio.Protocol):
    """One connection of the closed loop. Understands answers with Content-Length only."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.data = b""
        self.began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.next()

    def next(self) -> None:
        self.began = time.perf_counter()
        self.transport.writelines(self.run.request())

    def data_received(self, data: bytes) -> None:
        self.data += data
        cut = self.data.find(b"\r\n\r\n")
        if cut < 0:
            return
        match = LENGTH.search(self.data, 0, cut + 2)
        if match is None:
            self.run.failed += 1
            self.transport.close()
            return
        if len(self.data) < cut + 4 + int(match[1]):
            return
        if not self.data.startswith(b"HTTP/1.1 2"):
            self.run.failed += 1
        self.run.times.append(time.perf_counter() - self.began)
        self.data = b""
        if time.perf_counter() < self.run.end:
            self.next()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.run.failed += 1
        self.run.left -= 1
        if not self.run.left:
            self.run.over.set()


LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*(\d+)")


class _Run:
    def __init__(self, url: str, body: bytes, connections: int, seconds: float) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 80
        head = (
            f"POST {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        at = body.find(MARK.encode())
        self.fixed = (head, body) if at < 0 else None
        self.head, self.tail = head + body[:at], body[at + 12 :]
        self.n = time.time_ns() // 1_000_000 % 10**9 * 1000
        self.times: list[float] = []
        self.failed = 0
        self.left = connections
        self.seconds = seconds
        self.end = 0.0
        self.over = asyncio.Event()

    def request(self) -> tuple[bytes, ...]:
        if self.fixed is not None:
            return self.fixed
        self.n += 1
        return self.head, b"%012d" % self.n, self.tail

    async def go(self) -> Load:
        began = time.perf_counter()
        self.end = began + self.seconds
        loop = asyncio.get_running_loop()
        for _ in range(self.left):
            await loop.create_connection(lambda: _Caller(self), self.host, self.port)
        await self.over.wait()
        times = sorted(self.times) or [0.0]
        return Load(len(self.times), time.perf_counter() - began, times[len(times) // 2] * 1e6, self.failed)


async def _main(arguments: argparse.Namespace) -> int:
    body = Path(arguments.body).read_bytes()  # noqa: ASYNC240
    load = await _Run(arguments.url, body, arguments.connections, arguments.seconds).go()
    figures = {name: getattr(load, name) for name in ("requests", "seconds", "p50", "failed")}
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("body")
    parser.add_argument("connections", type=int)
    parser.add_argument("seconds", type=float)
    sys.exit(uvloop.run(_main(parser.parse_args())))
