"""``fullhit mock-worker``: a process that speaks the HTTP of an SGLang or vLLM server, without a model or a GPU.

For the demo, tests and benches; nothing here serves a model, and everything it prints says *mock*. What it answers is
in ``mock_worker_app``. When it is ready it prints one line, ``{"mock_worker": true, "url": ..., "role": ..., "pid":
...}``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys

import msgspec
from aiohttp import web

from fullhit.lab.images import LabExtraMissing
from fullhit.lab.mock_device import DeviceSettings, MockDevice
from fullhit.lab.mock_worker_app import MockWorker, WorkerFaults, WorkerSettings
from fullhit_publisher.args import add_cli_args, from_args
from fullhit_publisher.cache import EmbeddingCache

__all__ = ["add_arguments", "run"]

log = logging.getLogger("mock-worker")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fullhit mock-worker``."""
    serving = parser.add_argument_group("serving")
    serving.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    serving.add_argument("--port", type=int, default=0, help="port; 0 = any free one, printed as JSON (default)")
    serving.add_argument("--role", choices=("aggregated", "prefill", "decode"), default="aggregated",
                         help="default %(default)s")  # fmt: skip
    serving.add_argument("--model", nargs="+", default=["mock"], help="models it serves (default mock)")
    serving.add_argument(
        "--bootstrap-port",
        type=int,
        default=0,
        help="where decodes join a prefill; 0 = any free one, told by /server_info (default)",
    )
    serving.add_argument("--rendezvous-seconds", type=float, default=10.0,
                         help="how long the legs of a pair wait for each other (default %(default)s)")  # fmt: skip
    device = parser.add_argument_group("mock device")
    device.add_argument("--device", choices=("cuda", "cpu", "xpu"), default="cuda", help="default %(default)s")
    device.add_argument("--tokens", type=int, default=16, help="tokens of an answer at most (default %(default)s)")
    device.add_argument("--token-ms", type=float, default=5.0, help="time per token (default %(default)s)")
    device.add_argument("--vit-ms", type=float, default=25.0, help="time per image (default %(default)s)")
    add_cli_args(parser)
    parser.add_argument("--pool", default="default", help="pool the events belong to (default %(default)s)")
    parser.add_argument(
        "--faults",
        metavar="JSON",
        default="{}",
        help='how to misbehave, for instance {"fail_rate": 0.1}: what POST /mock/faults takes',
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        import PIL  # noqa: F401
    except ImportError:
        print(f"fullhit mock-worker: {LabExtraMissing('Pillow')}", file=sys.stderr)
        return 1
    try:
        asyncio.run(_serve(args))
    except OSError as problem:
        number = problem.errno or 0
        reason = os.strerror(number) if number > 0 else "unknown host name"
        print(f"fullhit mock-worker: cannot listen on {args.host}:{args.port}: {reason}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass
    except (ValueError, msgspec.ValidationError) as problem:
        print(f"fullhit mock-worker: {problem}", file=sys.stderr)
        return 2
    return 0


async def _serve(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    faults = msgspec.json.decode(args.faults, type=WorkerFaults)
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(socket.create_server((args.host, args.port), backlog=1024))
        url = f"http://{args.host}:{listener.getsockname()[1]}"
        bootstrap = None
        if args.role == "prefill":
            bootstrap = stack.enter_context(socket.create_server((args.host, args.bootstrap_port), backlog=1024))
        cache, publisher = from_args(args, url=url, device=args.device, pool=args.pool)
        device = MockDevice(EmbeddingCache[bytes](0) if cache is None else cache, DeviceSettings(args.vit_ms / 1000, 4))
        worker = MockWorker(device, _settings(args, bootstrap.getsockname()[1] if bootstrap is not None else 0))
        worker.faults = faults
        if publisher is not None:
            await stack.enter_async_context(publisher)
        stack.push_async_callback(worker.close)
        await _listen(stack, worker.app, listener)
        if bootstrap is not None:
            await _listen(stack, worker.bootstrap_app, bootstrap)
        print(json.dumps({"mock_worker": True, "url": url, "role": args.role, "pid": os.getpid()}), flush=True)
        await stop.wait()


async def _listen(stack: contextlib.AsyncExitStack, app: web.Application, sock: socket.socket) -> None:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.SockSite(runner, sock).start()


def _settings(args: argparse.Namespace, bootstrap_port: int) -> WorkerSettings:
    return WorkerSettings(
        role=args.role,
        models=tuple(args.model),
        tokens=args.tokens,
        token_seconds=args.token_ms / 1000,
        bootstrap_port=bootstrap_port,
        rendezvous_seconds=args.rendezvous_seconds,
    )


def main() -> int:
    """``python -m fullhit.lab.mock_worker``."""
    parser = argparse.ArgumentParser(prog="fullhit mock-worker", description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
