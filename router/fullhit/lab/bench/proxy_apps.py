"""The two small servers of the proxy bench, run as processes of their own.

`relay`: the wire package alone, handing every request to one upstream. What the router's features cost is the
difference between this row and `fullhit serve`. `--probe-file` makes it write the longest single callback of
its loop to a file on exit.

`stub`: a worker that reads a body to its end and answers a fixed 300 bytes of JSON. It exists because nginx, the
faster stub, answers `return 200` before it has read a large body, which turns every request into an early
response. It parses nothing but Content-Length.

    python -m fullhit.lab.bench.proxy_apps stub --port 9000
    python -m fullhit.lab.bench.proxy_apps relay --upstream 127.0.0.1:9000 --port 9001
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import uvloop

from fullhit.http.wire import HttpListener, Origin, Request, Responder, Timeouts, UpstreamClient

__all__ = ["STUB_REPLY", "main"]

STUB_REPLY = json.dumps({"id": "stub", "object": "chat.completion", "pad": "x" * 240}).encode()
LENGTH = re.compile(rb"(?i)\r\ncontent-length:[ \t]*(\d+)")


class StubConnection(asyncio.BufferedProtocol):
    """Counts bodies away."""

    scratch = memoryview(bytearray(1024 * 1024))
    reply = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        len(STUB_REPLY),
        STUB_REPLY,
    )

    def __init__(self) -> None:
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.left = 0
        self.head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self.left:
            used = min(self.left, nbytes)
            self.left -= used
            if not self.left:
                self.transport.write(self.reply)
            if used == nbytes:
                return
            self.head = bytes(self.scratch[used:nbytes])
        else:
            self.head += bytes(self.scratch[:nbytes]) if nbytes < 65536 else bytes(self.scratch[:65536])
        cut = self.head.find(b"\r\n\r\n")
        if cut < 0:
            return
        match = LENGTH.search(self.head, 0, cut + 2)
        length = int(match[1]) if match else 0
        self.head = b""
        self.left = max(0, length - (nbytes - cut - 4))
        if not self.left:
            self.transport.write(self.reply)


class LoopProbe:
    """How long the turns of the loop are: a callback that reschedules itself sees every gap between two turns.

    Gaps are CPU time of the thread, so that being preempted by another process does not count. It keeps the loop from
    sleeping, so it runs only in the measurement of stalls.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.gaps: list[float] = []
        self.last = 0.0

    def begin(self) -> None:
        self.gaps.clear()
        self.last = time.thread_time()
        self.tick()

    def tick(self) -> None:
        now = time.thread_time()
        if now - self.last > 50e-6:
            self.gaps.append(now - self.last)
        self.last = now
        self.loop.call_soon(self.tick)

    def report(self) -> str:
        """Longest gap, and the 99th percentile of those above 50 us, in seconds."""
        gaps = sorted(self.gaps) or [0.0]
        return f"{gaps[-1]:.6f} {gaps[len(gaps) * 99 // 100 - (len(gaps) >= 100)]:.6f}\n"


async def serve_relay(arguments: argparse.Namespace) -> None:
    host, _, port = arguments.upstream.rpartition(":")
    origin = Origin(host, int(port))
    client = UpstreamClient()
    timeouts = Timeouts()

    async def handler(request: Request, responder: Responder) -> None:
        response = await client.send(
            origin, request.method, request.target, request.forwarded(), request.body, timeouts=timeouts
        )
        await response.relay(responder)

    listener = HttpListener(handler)
    await listener.start("127.0.0.1", arguments.port)
    await until_stopped(arguments)
    await listener.close()
    await client.close()


async def serve_stub(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(StubConnection, "127.0.0.1", arguments.port, backlog=1024)
    await until_stopped(arguments)
    server.close()


async def until_stopped(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gc.collect()
    gc.freeze()
    probe: LoopProbe | None = None
    if arguments.probe_file:
        probe = LoopProbe(loop)
        loop.add_signal_handler(signal.SIGUSR1, probe.begin)
    print("ready", flush=True)
    await stop.wait()
    if probe is not None:
        Path(arguments.probe_file).write_text(probe.report())  # noqa: ASYNC240


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="proxy_apps", description=__doc__.partition("\n")[0])
    parser.add_argument("app", choices=("relay", "stub"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", default="")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--probe-file", default="")
    parser.add_argument("--profile", default="", help="write cProfile data to this file")
    arguments = parser.parse_args(argv)
    work: Any = serve_relay(arguments) if arguments.app == "relay" else serve_stub(arguments)
    run = uvloop.run if arguments.loop == "uvloop" else asyncio.run
    if arguments.profile:
        import cProfile

        profile = cProfile.Profile()
        profile.runcall(run, work)
        profile.dump_stats(arguments.profile)
    else:
        run(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
