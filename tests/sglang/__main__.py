"""``python -m tests.sglang``: end to end with unmodified SGLang on the CPU; prints one table.

Builds the environment when it is missing, then runs, for each ZMQ backend, two real encoders, the router and
a real language server whose only encoder URLs are the router's, and plays the cases over them. Exit code 0:
all passed; 1: a case failed; 2: the environment or a server did not come up; 130: interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import signal
import sys
import time
from dataclasses import dataclass

from . import faults, plugin, traffic
from .case import CASES, Case, CaseFailed, Run
from .client import Client
from .environment import BuildFailed, Environment, ensure_environment, say
from .plugin import PluginStack
from .processes import Died, Process, ProcessGroup, TimedOut
from .stack import PLUGIN, TO_SCHEDULER, TO_TOKENIZER, Stack

MODULES = (traffic, faults, plugin)  # in the order in which their cases run
BACKENDS = (TO_SCHEDULER, TO_TOKENIZER, PLUGIN)


@dataclass
class Row:
    """One line of the table."""

    case: str
    backend: str
    requests: int
    result: str
    seconds: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.result.startswith("FAILED")


def main() -> int:
    arguments = parse()
    started = time.monotonic()
    try:
        environment = ensure_environment()
    except BuildFailed as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    if arguments.build_only:
        say(f"environment: {environment.home}")
        return 0
    processes = ProcessGroup()
    rows: list[Row] = []
    code = 2
    try:
        code = asyncio.run(run_all(environment, processes, arguments, rows))
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted")
        code = 130
    except (Died, TimedOut) as error:
        say(f"could not go on: {error}")
        show_logs(processes.processes)
    finally:
        processes.kill_all()
    print_table(rows, time.monotonic() - started)
    if code == 0 and not arguments.keep_logs:
        processes.remove_logs()
    else:
        say(f"logs of all processes: {processes.folder}")
    return code


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sglang", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", action="append", help="only cases whose name contains TEXT")
    parser.add_argument("--backend", choices=BACKENDS, help="only this backend")
    parser.add_argument("--build-only", action="store_true", help="build the environment and stop")
    parser.add_argument("--keep-logs", action="store_true", help="keep the logs also when all passed")
    parser.add_argument(
        "--router",
        metavar="COMMAND",
        help="another router to run the cases over; called with HOST:PORT and the encoders' URLs",
    )
    return parser.parse_args()


async def run_all(
    environment: Environment, processes: ProcessGroup, arguments: argparse.Namespace, rows: list[Row]
) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    client = Client()
    seeds = itertools.count(1)
    try:
        for backend in (arguments.backend,) if arguments.backend else BACKENDS:
            cases = [c for c in in_order() if backend in c.backends and selected(c, arguments.only)]
            if not cases:
                continue
            # Each way of writing --encoder-urls is used once; cases switch it over at run time.
            kind = PluginStack if backend == PLUGIN else Stack
            stack = kind(environment, processes, client, backend, backend == TO_TOKENIZER, arguments.router)
            peer = "" if backend == PLUGIN else " and a language server"
            say(f"{backend}: starting two encoders, the router{peer}")
            await stack.start()
            try:
                await stack.all_encoders_ready()
                for entry in cases:
                    row = await run_case(entry, stack, seeds)
                    rows.append(row)
            finally:
                await stack.stop()
    finally:
        await client.close()
    return 0 if rows and all(row.ok for row in rows) else 1


def in_order() -> list[Case]:
    names = [module.__name__ for module in MODULES]
    return sorted(CASES, key=lambda entry: names.index(entry.body.__module__))


def selected(entry: Case, wanted: list[str] | None) -> bool:
    return not wanted or any(text.lower() in entry.name.lower() for text in wanted)


async def run_case(entry: Case, stack: Stack, seeds: itertools.count[int]) -> Row:
    run = Run(stack, seeds)
    started = time.monotonic()
    result = "ok"
    try:
        if entry.intact and await stack.repair():
            await stack.all_encoders_ready()
        if entry.aliases is not None and entry.aliases != stack.aliases:
            await stack.use_aliases(entry.aliases)
            stack.aliases = entry.aliases
        async with asyncio.timeout(entry.limit):
            await entry.body(run)
    except TimeoutError as error:
        late = time.monotonic() - started >= entry.limit
        result = "FAILED: " + (f"not done after {entry.limit:.0f} s" if late else f"timed out {error}")
    except (CaseFailed, AssertionError, Died, TimedOut) as error:
        result = f"FAILED: {error}"
    except Exception as error:
        result = f"FAILED: {type(error).__name__}: {error}"
    finally:
        run.close()
    if entry.known_limit and result != "ok":
        result = f"known limit: {entry.known_limit}"
    row = Row(entry.name, stack.backend, run.requests, result, time.monotonic() - started, run.note)
    word, _, why = row.result.partition(": ")
    details = ", ".join(filter(None, (f"{row.requests} requests", f"{row.seconds:.1f} s", row.note)))
    say(f"  {word:<6} {row.case} ({details})" + (f": {why}" if why else ""))
    if not row.ok:
        show_logs(guilty(stack))
    return row


def guilty(stack: Stack) -> list[Process]:
    """Whose log to show: of what died, else of the router."""
    servers = [stack.router, *stack.encoders]
    if stack.backend != PLUGIN:
        servers.insert(0, stack.language)
    dead = [server.process for server in servers if server.process.popen is not None and not server.process.alive]
    return dead or [stack.router.process]


def show_logs(processes: list[Process]) -> None:
    for process in processes:
        if process.popen is not None:
            say(f"{process!r}, end of {process.log}:\n{process.tail()}")


def print_table(rows: list[Row], seconds: float) -> None:
    if not rows:
        return
    width = max(len(row.case) for row in rows)
    print(f"\n{'case':<{width}}  {'backend':<16}  requests  seconds  result")
    for row in rows:
        result = row.result.splitlines()[0][:140] + (f" ({row.note})" if row.note else "")
        print(f"{row.case:<{width}}  {row.backend:<16}  {row.requests:8}  {row.seconds:7.1f}  {result}")
    limits = sum(row.result.startswith("known limit") for row in rows)
    failed = sum(not row.ok for row in rows)
    print(f"\n{sum(row.requests for row in rows)} requests, {seconds:.0f} s in all, known limits: {limits}")
    print(f"{len(rows) - failed - limits} passed, {failed} failed", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
