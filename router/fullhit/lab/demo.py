"""``fullhit demo``: what routing by cache is worth, on one machine and without a GPU.

The same chats (``workload.py``) are played twice through a client that does what SGLang's language server does:
once with its own random split over four mock encoders, once with Fullhit as the only encoder URL. Encoders, router
and NATS are real processes, pictures are real JPEGs, embeddings really arrive over ZMQ and are compared byte for
byte with what each picture must give. Imitated is the time of the vision transformer, and nothing else is in the
time to first token: it is "all embeddings are here" plus a constant for prefill (0 unless set).

Both runs get fresh encoders with the same per-item cache. That flatters the random split: a stock SGLang encoder
caches whole parts only.

With ``--encoder sglang`` the encoders are real ones with the plugin, fewer and with fewer turns; then a picture's
embedding is right when it is what it was the first time, but for the last bits of its numbers, which depend on what
else was in the forward.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from typing import Any

from fullhit.lab.demo_fleet import EncoderFleet, MockFleet, SglangFleet
from fullhit.lab.demo_report import RunReport, table, verdict
from fullhit.lab.embedding import mock_embedding
from fullhit.lab.images import DEFAULT_SIZE, LabExtraMissing, PictureSize, data_uri, draw_jpeg
from fullhit.lab.language_server import (
    Backend,
    EncodedRequest,
    LanguageServerSettings,
    MockLanguageServer,
    RequestFailed,
)
from fullhit.lab.processes import Child, ChildFailed, Supervisor, fetch_json, free_port, start_nats
from fullhit.lab.workload import SlidingWindow

__all__ = ["Demo", "DemoSettings", "add_arguments", "run"]

FULL_SIZE = PictureSize(2400, 1080)
# The router's answer to "is everyone here" must come within this, seconds.
FLEET_LIMIT = 60.0
PROGRESS_EVERY = 3.0
_ALIKE = 0.45


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Everything that shapes a demo. Milliseconds where the name says so."""

    load: SlidingWindow
    together: bool = False
    backend: Backend = "zmq_to_scheduler"
    size: PictureSize = DEFAULT_SIZE
    vit_ms: float = 15.0
    cpu_slower: float = 8.0
    embedding_kb: int = 64
    pause_ms: float = 200.0
    prefill_ms: float = 0.0
    real: RealEncoders | None = None


@dataclass(frozen=True, slots=True)
class RealEncoders:
    """How real encoders are started; see `SglangFleet`."""

    python: str
    model: str
    device: str
    arguments: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]


class Gallery:
    """The pictures of a demo, drawn once: number -> the URI that is sent and the embedding that must come back."""

    def __init__(self, settings: DemoSettings) -> None:
        self._settings = settings
        self._pictures: dict[int, tuple[str, bytes]] = {}
        self._seen: dict[int, bytes] = {}

    def draw(self) -> None:
        """Draw all; slow (some milliseconds a picture), so run it in a thread."""
        load = self._settings.load
        for user in range(load.users):
            for turn in range(load.turns):
                for number in load.pictures(user, turn):
                    if number not in self._pictures:
                        picture = draw_jpeg(number, self._settings.size)
                        embedding = mock_embedding(picture, self._settings.embedding_kb)
                        self._pictures[number] = (data_uri(picture), embedding)

    def uris(self, numbers: Sequence[int]) -> list[str]:
        return [self._pictures[number][0] for number in numbers]

    def matches(self, numbers: Sequence[int], embedding: bytes) -> bool:
        """Whether the embedding is exactly that of these pictures in this order."""
        if self._settings.real is not None:
            return self._as_before(numbers, embedding)
        size = self._settings.embedding_kb * 1024
        if len(embedding) != size * len(numbers):
            return False
        view = memoryview(embedding)
        return all(
            view[index * size : (index + 1) * size] == self._pictures[number][1] for index, number in enumerate(numbers)
        )

    def _as_before(self, numbers: Sequence[int], embedding: bytes) -> bool:
        """Whether each picture, all are of one size, has about the embedding that it had the first time."""
        size, rest = divmod(len(embedding), len(numbers))
        if rest or not size:
            return False
        pieces = [embedding[at * size : (at + 1) * size] for at in range(len(numbers))]
        return all(_alike(self._seen.setdefault(n, piece), piece) for n, piece in zip(numbers, pieces, strict=True))

    @property
    def mean_bytes(self) -> int:
        return sum(len(uri) for uri, _ in self._pictures.values()) // max(1, len(self._pictures))


def _alike(first: bytes, second: bytes) -> bool:
    """Floating-point numbers that differ in their last bits share the upper half of their bytes."""
    if first == second:
        return True
    return len(first) == len(second) and sum(map(eq, first, second)) >= _ALIKE * len(first)


class Progress:
    """One line that moves on a terminal, a line now and then elsewhere."""

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._last = 0.0

    def say(self, text: str) -> None:
        self._write(f"\r\x1b[K{text}\n" if self._live else f"{text}\n")

    def step(self, text: str) -> None:
        now = time.monotonic()
        if self._live and now - self._last > 0.1:
            self._last = now
            self._write(f"\r\x1b[K{text}")
        elif not self._live and now - self._last > PROGRESS_EVERY:
            self._last = now
            self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            pass  # nobody is watching any more


class Demo:
    """Starts what a run needs, plays it, stops it again."""

    def __init__(self, settings: DemoSettings, processes: Supervisor, progress: Progress) -> None:
        self.settings = settings
        self.processes = processes
        self.progress = progress
        self.gallery = Gallery(settings)
        self.fleet: EncoderFleet = _fleet(settings, processes)

    async def play(self) -> list[RunReport]:
        load, progress = self.settings.load, self.progress
        progress.say(f"drawing {load.distinct_images} pictures of {self.settings.size} ...")
        drawing = asyncio.create_task(asyncio.to_thread(self.gallery.draw))
        try:
            _, plane = await start_nats(self.processes)
            if self.fleet.real:
                progress.say("starting the encoders ...")
            encoders, urls = await self.fleet.start("split", [])
            await drawing
        finally:
            drawing.cancel()
        progress.say(f"pictures are {self.gallery.mean_bytes // 1024} KB each as data: URIs")
        progress.say("1/2  random split: SGLang's own, straight over " + self.fleet.label)
        split = await self._run("sglang-split", urls, urls)
        self.processes.stop(encoders)

        how = "one part a turn" if self.settings.together else "one part a picture"
        progress.say(f"2/2  Fullhit: router and fresh encoders, {how}")
        router, base, admin = await self._start_router(plane)
        events = ["--multimodal-embedding-cache-publisher", "--event-plane", plane]
        encoders, urls = await self.fleet.start("fullhit", [*events, "--encoder-register-urls", base])
        await self._until_ready(router, base, admin, urls)
        aliases = [base] if self.settings.together else [f"{base}/v{index}" for index in range(load.window)]
        routed = await self._run("fullhit", aliases, urls)
        self.processes.stop([router, *encoders])
        return [split, routed]

    async def _start_router(self, plane: str) -> tuple[Child, str, str]:
        listen, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        options = ["--listen", listen, "--admin-listen", admin, "--event-plane", plane]
        router = self.processes.start("router", ["fullhit", "serve", *options])
        await router.answers(f"http://{listen}/health")
        return router, f"http://{listen}", f"http://{admin}"

    async def _until_ready(self, router: Child, base: str, admin: str, urls: Sequence[str]) -> None:
        """Until the router knows all encoders and would route to each of them."""

        async def everyone() -> bool:
            try:
                known = (await fetch_json(f"{base}/list_encoder_urls"))["encoder_urls"]
                await fetch_json(f"{admin}/readyz")
            except (OSError, KeyError, ValueError):
                return False
            return set(urls) <= set(known)

        await router.until(everyone, "routing to all encoders", FLEET_LIMIT)

    async def _run(self, name: str, targets: Sequence[str], encoders: Sequence[str]) -> RunReport:
        load, settings = self.settings.load, self.settings
        report = RunReport(name, load.requests, load.images)
        options = LanguageServerSettings(tuple(targets), backend=settings.backend)
        started = time.perf_counter()
        self.progress.step(f"     {name}: 0/{load.requests} requests, 0 s")
        async with MockLanguageServer(options, seed=load.seed) as server, asyncio.TaskGroup() as users:
            for user in range(load.users):
                users.create_task(self._chat(server, user, report, started))
        report.seconds = time.perf_counter() - started
        for url, device in zip(encoders, self.fleet.devices, strict=True):
            report.vit_runs["cpu" if device == "cpu" else "gpu"] += await self.fleet.vit_runs(url)
        self.progress.say(f"     {load.requests} requests in {report.seconds:.1f} s, {len(report.failures)} failed")
        return report

    async def _chat(self, server: MockLanguageServer, user: int, report: RunReport, started: float) -> None:
        """One user: turn after turn, a failed one included (a chat goes on)."""
        load = self.settings.load
        for turn, pause in enumerate(load.pauses(user, self.settings.pause_ms / 1000)):
            await asyncio.sleep(pause)
            numbers = load.pictures(user, turn)
            try:
                result: EncodedRequest = await server.encode(self.gallery.uris(numbers))
            except RequestFailed as failure:
                report.failures.append(str(failure))
            else:
                if self.gallery.matches(numbers, result.embedding):
                    report.ttft.append(result.seconds + self.settings.prefill_ms / 1000)
                else:
                    report.failures.append(f"wrong embeddings for request {result.rid}")
                report.reasons.update(result.reasons)
            done = len(report.ttft) + len(report.failures)
            elapsed = time.perf_counter() - started
            self.progress.step(f"     {report.router}: {done}/{load.requests} requests, {elapsed:.0f} s")


def _fleet(settings: DemoSettings, processes: Supervisor) -> EncoderFleet:
    real = settings.real
    if real is not None:
        return SglangFleet(
            processes, real.python, real.model, settings.backend, real.device, real.arguments, dict(real.variables)
        )
    common = ["--vit-ms", str(settings.vit_ms), "--cpu-slower", str(settings.cpu_slower)]
    return MockFleet(processes, [*common, "--embedding-kb", str(settings.embedding_kb)])


# -- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fullhit demo``."""
    parser.add_argument("--together", action="store_true", help="send all pictures of a turn as one part")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    parser.add_argument("--users", type=int, help="chats beside each other (default 30)")
    parser.add_argument("--turns", type=int, help="turns of each chat (default 8)")
    parser.add_argument("--window", type=int, default=5, help="pictures shown a turn (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="other pictures, another split (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="8 users x 4 turns, 10 ms per picture: some seconds")
    parser.add_argument("--size", type=_size, default=DEFAULT_SIZE, metavar="WxH", help="default %(default)s")
    parser.add_argument("--large", action="store_true", help=f"pictures of {FULL_SIZE}, as in the published benchmark")
    parser.add_argument("--vit-ms", type=float, help="mock ViT time per picture on a GPU-like encoder (default 15)")
    parser.add_argument("--cpu-slower", type=float, default=8.0, help="how many times slower a CPU-like one is (8)")
    parser.add_argument("--embedding-kb", type=int, default=64, help="KiB delivered per picture (default %(default)s)")
    parser.add_argument("--pause-ms", type=float, default=200.0, help="mean pause before a turn (default %(default)s)")
    parser.add_argument("--prefill-ms", type=float, default=0.0, help="constant added to every TTFT (default 0)")
    parser.add_argument(
        "--backend",
        choices=("zmq_to_scheduler", "zmq_to_tokenizer"),
        default="zmq_to_scheduler",
        help="default %(default)s",
    )
    parser.add_argument(
        "--encoder", choices=("mock", "sglang"), default="mock",
        help="sglang: two real encoders with the plugin, 4 users x 4 turns unless told otherwise (default %(default)s)",
    )  # fmt: skip
    real = parser.add_argument_group("real encoders (--encoder sglang)")
    real.add_argument("--model-path", metavar="MODEL", help="as for SGLang; needed")
    real.add_argument("--sglang-python", metavar="PYTHON", default=sys.executable,
                      help="an interpreter that has SGLang and this package (default: this one)")  # fmt: skip
    real.add_argument("--sglang-device", default="cuda", help="as SGLang's --device (default %(default)s)")
    real.add_argument("--sglang-arg", action="append", default=[], metavar="ARG", help="one more for SGLang; repeat")
    real.add_argument(
        "--sglang-env", action="append", default=[], metavar="NAME=VALUE", help="for its processes; repeat"
    )
    parser.add_argument("--keep-logs", metavar="DIR", type=Path, help="keep the logs of all processes there")


def _size(text: str) -> PictureSize:
    try:
        return PictureSize.parse(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def run(args: argparse.Namespace) -> int:
    """Play the demo. 0 it showed what it promises, 1 it did not, 2 a mistake of the user, 130 interrupted."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        return _fail(str(LabExtraMissing("Pillow")), 1)
    try:
        settings = _settings(args)
    except ValueError as problem:
        return _fail(str(problem), 2)
    if args.json is not None and not args.json.parent.is_dir():
        return _fail(f"--json: no such directory: {args.json.parent}", 2)
    try:
        return asyncio.run(_main(settings, args.json, args.keep_logs))
    except ChildFailed as problem:
        return _fail(str(problem), 1)
    except OSError as problem:
        return _fail(f"{type(problem).__name__}: {problem}", 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("\nfullhit demo: interrupted, all its processes are stopped", file=sys.stderr)
        return 130


def _settings(args: argparse.Namespace) -> DemoSettings:
    real = _real(args)
    users = args.users if args.users is not None else (4 if real else 8 if args.quick else 30)
    turns = args.turns if args.turns is not None else (4 if real or args.quick else 8)
    vit_ms = args.vit_ms if args.vit_ms is not None else (10.0 if args.quick else 15.0)
    for name in ("cpu_slower", "embedding_kb"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0")
    if vit_ms < 0 or args.pause_ms < 0 or args.prefill_ms < 0:
        raise ValueError("times must not be negative")
    return DemoSettings(
        load=SlidingWindow(users, turns, args.window, args.seed),
        together=args.together,
        backend=args.backend,
        size=FULL_SIZE if args.large else args.size,
        vit_ms=vit_ms,
        cpu_slower=args.cpu_slower,
        embedding_kb=args.embedding_kb,
        pause_ms=args.pause_ms,
        prefill_ms=args.prefill_ms,
        real=real,
    )


def _real(args: argparse.Namespace) -> RealEncoders | None:
    if args.encoder == "mock":
        return None
    if not args.model_path:
        raise ValueError("--encoder sglang needs --model-path MODEL")
    variables = [text.partition("=") for text in args.sglang_env]
    if not all(name and equals for name, equals, _ in variables):
        raise ValueError("--sglang-env takes NAME=VALUE")
    return RealEncoders(
        args.sglang_python, args.model_path, args.sglang_device, tuple(args.sglang_arg),
        tuple((name, value) for name, _, value in variables),
    )  # fmt: skip


async def _main(settings: DemoSettings, json_file: Path | None, logs: Path | None) -> int:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    load, started = settings.load, time.monotonic()
    print(
        f"Fullhit demo: {load.users} users x {load.turns} turns, {load.window} pictures a turn of which "
        f"{load.window - 1} repeat.\n"
        + (
            f"Real SGLang encoders on {settings.real.device}, with the plugin: {settings.real.model}."
            if settings.real is not None
            else f"Mock encoders: a picture takes {settings.vit_ms:g} ms on the 2 GPU-like, "
            f"{settings.vit_ms * settings.cpu_slower:g} ms on the 2 CPU-like ones; prefill: {settings.prefill_ms:g} ms."
        ),
        flush=True,
    )
    async with Supervisor(logs) as processes:
        split, routed = await Demo(settings, processes, Progress()).play()
    print(f"\n{table([split, routed], load.distinct_images)}\n")
    good, lines = verdict(
        split, routed, load.distinct_images, together=settings.together, real=settings.real is not None
    )
    print("\n".join(lines))
    what = "real SGLang encoders" if settings.real is not None else "mock encoders: the times show queues, not a GPU"
    print(f"all in {time.monotonic() - started:.0f} s, with {what}")
    if json_file is not None:
        document = {"distinct_images": load.distinct_images, "runs": [split.as_json(), routed.as_json()]}
        await asyncio.to_thread(json_file.write_text, json.dumps(document, indent=2) + "\n")
    return 0 if good else 1


def _fail(message: str, code: int) -> int:
    print(f"fullhit demo: {message}", file=sys.stderr)
    return code


def main() -> int:
    """``python -m fullhit.lab.demo``."""
    parser = argparse.ArgumentParser(prog="fullhit demo", description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
