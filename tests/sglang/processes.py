"""Processes of a test run: each in a group of its own, with a log file, and none left behind.

Every process is started as the leader of a new process group and is told by the kernel to die with this
process, so that neither Ctrl-C nor a crash of the runner leaves a server on a port. Stopping one always ends
with its whole group: SGLang's scheduler and detokenizer are children of the process we start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

__all__ = ["Died", "Process", "ProcessGroup", "TimedOut", "until"]

PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Died(Exception):
    """A process that should run has ended."""


class TimedOut(Exception):
    """A condition did not come true in time."""


class Process:
    """One running program. ``log`` gets its standard output and error, appended over restarts."""

    def __init__(self, name: str, command: list[str], variables: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.command = command
        self.variables = dict(variables)
        self.log = log
        self.starts = 0
        self.popen: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        state = "not started" if self.popen is None else f"pid {self.popen.pid}, exit {self.popen.poll()}"
        return f"<{self.name}: {state}>"

    @property
    def alive(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def start(self) -> None:
        assert not self.alive, f"{self.name} runs already"
        self.starts += 1
        with self.log.open("ab") as sink:
            sink.write(f"--- start {self.starts}: {' '.join(self.command)}\n".encode())
            sink.flush()
            self.popen = subprocess.Popen(
                self.command,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def check(self) -> None:
        """Raise Died when it does not run."""
        if not self.alive:
            code = self.popen.returncode if self.popen else None
            raise Died(f"{self.name} ended (exit {code})")

    def kill(self) -> None:
        """SIGKILL for the whole group, and wait until it is gone."""
        self.signal_group(signal.SIGKILL)
        if self.popen is not None:
            self.popen.wait()
        deadline = time.monotonic() + 10
        while self.signal_group(signal.SIGKILL) and time.monotonic() < deadline:
            time.sleep(0.02)  # members are being reaped by init

    def pause(self) -> None:
        self.signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal_group(signal.SIGCONT)

    async def end(self, number: signal.Signals, patience: float = 15.0) -> bool:
        """The signal to the leader, then SIGKILL to what is left. True if it ended by itself."""
        if self.popen is None:
            return True
        self.popen.send_signal(number)
        with contextlib.suppress(TimedOut):
            await until(lambda: not self.alive, f"{self.name} ends", patience)
        by_itself = self.popen.poll() is not None
        self.kill()
        return by_itself

    def signal_group(self, number: int) -> bool:
        """Whether the group still had a member."""
        if self.popen is None:
            return False
        try:
            os.killpg(self.popen.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def tail(self, lines: int = 25) -> str:
        if not self.log.exists():
            return ""
        text = self.log.read_bytes()[-64_000:].decode(errors="replace")
        return "\n".join(f"    {line[:300]}" for line in text.splitlines()[-lines:])


class ProcessGroup:
    """All processes of a run and the folder of their logs."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fullhit-sglang-"))
        self.processes: list[Process] = []

    def add(self, name: str, command: list[str], variables: Mapping[str, str]) -> Process:
        process = Process(name, command, variables, self.folder / f"{name}.log")
        self.processes.append(process)
        return process

    def kill_all(self) -> None:
        for process in self.processes:
            process.signal_group(signal.SIGKILL)
        for process in self.processes:
            process.kill()

    def remove_logs(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def die_with_parent() -> None:
    if libc is not None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def until(
    condition: Callable[[], Awaitable[bool] | bool],
    what: str,
    limit: float,
    *,
    needs: tuple[Process, ...] = (),
    every: float = 0.1,
) -> None:
    """Wait for ``condition``; Died as soon as a needed process ends, TimedOut after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while True:
        for process in needs:
            process.check()
        outcome = condition()
        if outcome if isinstance(outcome, bool) else await outcome:
            return
        if time.monotonic() > deadline:
            raise TimedOut(f"{what}: not within {limit:.0f} s")
        await asyncio.sleep(every)
