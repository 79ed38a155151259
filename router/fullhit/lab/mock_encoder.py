"""``fullhit mock-encoder``: a process that speaks the HTTP of an SGLang encoder, without a model or a GPU.

For the demo, tests and benches; nothing here serves a model, and everything it prints says *mock*. What it answers
is in ``mock_app``, the imitated device in ``mock_device``, the ways of an embedding in ``mock_delivery``. Unlike the
stock encoder it caches per item and, with ``--multimodal-embedding-cache-publisher``, says what it holds.

When it is ready it prints one line, ``{"mock_encoder": true, "url": ..., "device": ..., "pid": ...}``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable

import aiohttp
from aiohttp import web

from fullhit.lab.images import LabExtraMissing
from fullhit.lab.mock_app import BACKENDS, EncoderSettings, Faults, MockEncoder
from fullhit.lab.mock_device import DeviceSettings, MockDevice
from fullhit.lab.mock_losses import LossyTransport, filler
from fullhit_publisher.args import add_cli_args, from_args
from fullhit_publisher.cache import EmbeddingCache
from fullhit_publisher.transports.base import Transport

__all__ = ["add_arguments", "run"]

log = logging.getLogger("mock-encoder")

# SGLang's: how often and how many times an encoder announces itself, then never again.
ANNOUNCE_TRIES = 30
ANNOUNCE_PAUSE = 5.0
# Units of 2^30 bytes, unless told otherwise.
DEFAULT_CACHE_GB = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fullhit mock-encoder``."""
    serving = parser.add_argument_group("serving")
    serving.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    serving.add_argument("--port", type=int, default=0, help="port; 0 = any free one, printed as JSON (default)")
    serving.add_argument("--encoder-transfer-backend", choices=BACKENDS, default="auto", help="auto = as /encode says")
    serving.add_argument("--encoder-register-urls", metavar="URL", nargs="+", default=[], help="announce myself there")
    serving.add_argument(
        "--advertise-url", metavar="URL", default="", help="what I call myself, if a proxy stands before me"
    )
    device = parser.add_argument_group("mock device")
    device.add_argument("--device", choices=("cuda", "cpu", "xpu"), default="cuda", help="default %(default)s")
    device.add_argument("--vit-ms", type=float, default=25.0, help="time per image on a GPU (default %(default)s)")
    device.add_argument(
        "--cpu-slower", type=float, default=8.0, help="how many times slower a CPU is (default %(default)s)"
    )
    device.add_argument("--embedding-kb", type=int, default=64, help="KiB delivered per image (default %(default)s)")
    device.add_argument("--seed", type=int, default=0, help="seed of the faults")
    add_cli_args(parser)
    if not os.environ.get("DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB"):
        # A mock without a cache shows nothing; a real encoder's default is none.
        parser.set_defaults(multimodal_embedding_cache_capacity_gb=DEFAULT_CACHE_GB)
    parser.add_argument("--pool", default="default", help="pool the events belong to (default %(default)s)")
    parser.add_argument(
        "--heartbeat-interval", type=float, default=1.0, metavar="SECONDS", help="of the events (default %(default)s)"
    )
    faults = parser.add_argument_group("faults, for tests")
    faults.add_argument(
        "--drop-deltas", type=float, default=0.0, metavar="RATE", help="share of deltas that are lost on the way"
    )
    faults.add_argument(
        "--hide-losses",
        action="store_true",
        help="no reader can notice: deltas numbered anew, no heartbeats, no snapshots",
    )
    faults.add_argument(
        "--fail-rate", type=float, default=None, help="share of /encode to fail (1 if --status is given)"
    )
    faults.add_argument("--status", type=int, default=None, help="HTTP status of those (default 500)")
    faults.add_argument("--crash-after", type=int, default=0, metavar="N", help="kill -9 of itself at the Nth /encode")
    faults.add_argument("--slow-health", type=float, default=0.0, metavar="SECONDS", help="delay of /health")
    faults.add_argument("--garbage", action="store_true", help="answer /encode with bytes that are no HTTP")
    faults.add_argument("--forgetful", action="store_true", help="encode anew what the cache holds")
    faults.add_argument("--registration-404", action="store_true", help="404 after 5 s, as an encoder with --dp-size")
    faults.add_argument("--hold", type=float, default=180.0, help="seconds an early registration is held")
    faults.add_argument("--send-timeout", type=float, default=180.0, help="seconds to wait for destinations")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; 0, or 1 with a message when it cannot start."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        import PIL  # noqa: F401
    except ImportError:
        print(f"fullhit mock-encoder: {LabExtraMissing('Pillow')}", file=sys.stderr)
        return 1
    try:
        _check(args)
        asyncio.run(_serve(args))
    except OSError as problem:
        # Name resolution has negative error numbers of its own.
        number = problem.errno or 0
        reason = os.strerror(number) if number > 0 else "unknown host name"
        print(f"fullhit mock-encoder: cannot listen on {args.host}:{args.port}: {reason}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass
    except ValueError as problem:
        print(f"fullhit mock-encoder: {problem}", file=sys.stderr)
        return 2
    return 0


def _check(args: argparse.Namespace) -> None:
    """ValueError that names the option."""
    limits = {
        "port": (0, 65535),
        "vit_ms": (0, 3_600_000),
        "cpu_slower": (0, 1000),
        "embedding_kb": (1, 1_048_576),
        "fail_rate": (0, 1),
        "drop_deltas": (0, 1),
        "heartbeat_interval": (0.01, 3600),
        "status": (200, 599),
        "crash_after": (0, 2**63),
        "slow_health": (0, 86400),
        "hold": (0, 86400),
        "send_timeout": (0, 86400),
    }
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')} must be between {low} and {high}, not {value:g}")


async def _serve(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    listener = socket.create_server((args.host, args.port), backlog=1024)
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(args.host, args.host)
    url = f"http://{host}:{listener.getsockname()[1]}"
    vit_ms = args.vit_ms * (args.cpu_slower if args.device == "cpu" else 1.0)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(listener.close)
        name = args.advertise_url or url
        cache, publisher = from_args(
            args,
            url=name,
            device=args.device,
            pool=args.pool,
            heartbeat_interval=args.heartbeat_interval,
            wrap=_losses(args) if args.drop_deltas else None,
        )
        cache = EmbeddingCache[bytes](0) if cache is None else cache
        device = MockDevice(cache, DeviceSettings(vit_ms / 1000, args.embedding_kb))
        encoder = MockEncoder(device, _settings(args))
        encoder.app.add_routes([filler(cache)])
        if publisher is not None:
            encoder.on_inflight = lambda inflight: publisher.set_stats(inflight=inflight)
            await stack.enter_async_context(publisher)
        stack.push_async_callback(encoder.close)
        # 5 s of idle keep-alive and no handler cancellation, as the real one.
        runner = web.AppRunner(encoder.app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=5.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener).start()
        announcers = [asyncio.create_task(_announce(registry, name)) for registry in args.encoder_register_urls]
        print(json.dumps({"mock_encoder": True, "url": url, "device": args.device, "pid": os.getpid()}), flush=True)
        log.info("mock encoder on %s, device %s, %g ms per image", url, args.device, vit_ms)
        await stop.wait()
        for task in announcers:
            task.cancel()
        await asyncio.gather(*(_withdraw(registry, name) for registry in args.encoder_register_urls))
    log.info("mock encoder stopped: %s", json.dumps(encoder.stats()))


def _settings(args: argparse.Namespace) -> EncoderSettings:
    fail_rate = args.fail_rate if args.fail_rate is not None else (1.0 if args.status is not None else 0.0)
    faults = Faults(
        fail_rate=fail_rate,
        status=args.status or 500,
        crash_after=args.crash_after,
        slow_health=args.slow_health,
        garbage=args.garbage,
        forgetful=args.forgetful,
    )
    return EncoderSettings(
        backend=args.encoder_transfer_backend,
        hold=args.hold,
        send_timeout=args.send_timeout,
        dp_404=args.registration_404,
        seed=args.seed,
        faults=faults,
    )


def _losses(args: argparse.Namespace) -> Callable[[Transport], Transport]:
    return lambda inner: LossyTransport(inner, args.drop_deltas, random.Random(args.seed), hidden=args.hide_losses)


async def _announce(registry: str, url: str) -> None:
    """Post my URL until it is taken, as an encoder with ``--encoder-register-urls`` does; then never again."""
    for attempt in range(1, ANNOUNCE_TRIES + 1):
        problem = await _registry_call("POST", f"{registry.rstrip('/')}/register_encoder_url", url)
        if problem is None:
            log.info("mock encoder registered at %s", registry)
            return
        log.warning("mock: registry %s, try %d of %d: %s", registry, attempt, ANNOUNCE_TRIES, problem)
        await asyncio.sleep(ANNOUNCE_PAUSE)


async def _withdraw(registry: str, url: str) -> None:
    problem = await _registry_call("DELETE", f"{registry.rstrip('/')}/unregister_encoder_url", url)
    if problem is not None:
        log.warning("mock: not unregistered at %s: %s", registry, problem)


async def _registry_call(method: str, target: str, url: str) -> str | None:
    """None when it worked, else what went wrong."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session,
            session.request(method, target, json={"url": url}) as reply,
        ):
            return None if reply.status == 200 else f"{reply.status} {(await reply.text())[:200]}"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as problem:
        return f"{type(problem).__name__} {problem}"


def main() -> int:
    """``python -m fullhit.lab.mock_encoder``."""
    parser = argparse.ArgumentParser(prog="fullhit mock-encoder", description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
