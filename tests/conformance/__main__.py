"""``python -m tests.conformance``: a real Dynamo deployment and our router; prints two tables.

Wire: real publishers of three releases feed our index. Decisions: a real frontend and ours choose over one fleet.

Installs the published wheels into an environment of their own when they are missing. Older releases bind their sockets
to all interfaces, so everything runs in a network of its own which has nothing but a loopback, where the system lets us
have one (``unshare``); elsewhere the cases with publishers' own sockets are left out for those releases.

Exit code 0: all passed; 1: a case failed; 2: the environment could not be built.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from .decisions import decide, print_decisions
from .environment import RELEASES, BuildFailed, Environment, ensure_environment
from .stand import CaseFailed, Stand, eventually

TRANSPORTS = ("nats", "zmq", "broker")
ALONE = "FULLHIT_CONFORMANCE_ALONE"


class Row(NamedTuple):
    case: str
    releases: str
    transport: str
    messages: int
    result: str
    seconds: float


async def walk(stand: Stand, releases: tuple[str, ...], deltas: int) -> str:
    """A random life of a cache: at the end we hold what the publisher holds, and believe it."""
    await stand.start_router()
    publisher = await stand.publisher(releases[0])
    await stand.heard(publisher)
    held = (await publisher.ask("walk", 7, deltas, 500))["held"]
    await stand.agrees(publisher, held)
    if stand.state(publisher) != "live":
        raise CaseFailed(f"the stream is {stand.state(publisher)}")
    return f"{len(held)} keys"


async def names(stand: Stand, releases: tuple[str, ...], deltas: int) -> str:
    """Names that have to be escaped in subjects and in the names of files."""
    stand.namespace, stand.component = "My_NS-1", "Back End"
    return await walk(stand, releases, min(deltas, 500))


async def mixed(stand: Stand, releases: tuple[str, ...], deltas: int) -> str:
    """Publishers of all releases at once."""
    await stand.start_router()
    publishers = [await stand.publisher(release) for release in releases]
    for publisher in publishers:
        await stand.heard(publisher)
    answers = await asyncio.gather(
        *(publisher.ask("walk", turn, deltas, 300) for turn, publisher in enumerate(publishers))
    )
    for publisher, answer in zip(publishers, answers, strict=True):
        await stand.agrees(publisher, answer["held"])
    return f"{sum(len(answer['held']) for answer in answers)} keys"


async def burst(stand: Stand, releases: tuple[str, ...], deltas: int) -> str:
    """More at once than its queue takes: what it dropped itself leaves no gap, what it sent is here."""
    await stand.start_router()
    publisher = await stand.publisher(releases[0])
    await stand.heard(publisher)
    answer = await publisher.ask("burst", 6000)
    sent = 6000 - answer["refused"]
    await eventually(lambda: stand.key_count(publisher) >= sent, f"{sent} keys of the burst")
    if stand.key_count(publisher) != sent or stand.holds(publisher, answer["held"]) != sent:
        raise CaseFailed(f"{stand.key_count(publisher)} keys held, {sent} published")
    if stand.state(publisher) != "live":
        raise CaseFailed(f"the stream is {stand.state(publisher)}")
    return f"{answer['refused']} of 6000 dropped by the publisher, unseen"


async def late(stand: Stand, releases: tuple[str, ...], deltas: int) -> str:
    """Our router is restarted: it starts from nothing, believes nothing false, and learns from then on."""
    await stand.start_router()
    publisher = await stand.publisher(releases[0])
    await stand.heard(publisher)
    await publisher.ask("walk", 3, 200, 100)
    await stand.stop_router()
    await publisher.ask("walk", 4, 50, 100)
    await stand.start_router()
    await eventually(lambda: stand.pool.get(publisher.name), "discovery after our restart")
    if stand.key_count(publisher):
        raise CaseFailed("keys from nowhere")
    await stand.heard(publisher)
    held = (await publisher.ask("walk", 5, 1000, 100))["held"]
    await stand.agrees(publisher, held)
    return f"{len(held)} keys, all learnt again"


async def killed(stand: Stand, releases: tuple[str, ...], deltas: int) -> str:
    """A publisher is killed: its worker and its keys leave with the lease; its successor starts clean."""
    await stand.start_router()
    first = await stand.publisher(releases[0])
    await stand.heard(first)
    held = (await first.ask("walk", 3, 200, 100))["held"]
    await stand.agrees(first, held)
    began = time.monotonic()
    await first.kill()
    second = await stand.publisher(releases[0])
    await stand.heard(second)
    await eventually(lambda: stand.pool.get(first.name) is None, "the end of the lease", 90)
    took = time.monotonic() - began
    if stand.holds(second, held):
        raise CaseFailed("the successor holds keys of the dead one")
    held = (await second.ask("walk", 9, 200, 100))["held"]
    await stand.agrees(second, held)
    return f"gone after {took:.1f} s"


async def broken(stand: Stand, releases: tuple[str, ...], deltas: int) -> str:
    """The NATS server dies under traffic and comes back. What a client held back meanwhile may come after all: then we
    hold exactly what the publisher holds; otherwise the gap must be seen."""
    assert stand.nats is not None
    await stand.start_router()
    publisher = await stand.publisher(releases[0])
    await stand.heard(publisher)
    await stand.agrees(publisher, (await publisher.ask("walk", 3, 200, 100))["held"])
    assert stand.nats.pid is not None
    os.kill(stand.nats.pid, signal.SIGKILL)  # it comes back by itself
    held = (await publisher.ask("walk", 4, 50, 100))["held"]
    await eventually(lambda: stand.status()["plane"]["connects"] > 1, "our router back on the plane", 60)
    before = stand.status()["messages"]
    for turn in range(600):
        key = f"after {turn}"
        held.append(key)
        await publisher.ask("publish", [key], [])
        await asyncio.sleep(0.1)
        if stand.holds(publisher, [key]):
            break
    else:
        raise CaseFailed("nothing was heard after the server came back")
    if stand.state(publisher) == "doubtful":
        return "doubtful after the gap"
    await stand.agrees(publisher, held)
    return f"live, nothing was lost ({stand.status()['messages'] - before} messages came after all)"


CASES: tuple[tuple[str, Callable[[Stand, tuple[str, ...], int], Awaitable[str]], tuple[str, ...]], ...] = (
    ("random walk", walk, (*TRANSPORTS, "etcd")),
    ("names with blanks", names, TRANSPORTS),
    ("all releases at once", mixed, TRANSPORTS),
    ("queue overrun", burst, TRANSPORTS),
    ("router restarted", late, (*TRANSPORTS, "etcd")),
    ("publisher killed", killed, (*TRANSPORTS, "etcd")),
    ("broker killed", broken, ("nats",)),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description="Dynamo publishers, our index")
    parser.add_argument("--deltas", type=int, default=10_000, help="length of a random walk (default 10000)")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--table", choices=("wire", "decisions"), help="only one of the tables")
    parser.add_argument("--release", action="append", choices=RELEASES, help="default: all")
    arguments = parser.parse_args()
    releases = tuple(arguments.release or RELEASES)
    try:
        environment = ensure_environment(releases)
    except BuildFailed as error:
        print(error, file=sys.stderr)
        return 2
    if not os.environ.get(ALONE) and _can_be_alone():
        # The loopback of a new network is down.
        script = 'ip link set lo up && exec "$0" "$@"'
        command = ["unshare", "-rn", "sh", "-c", script, sys.executable, "-m", "tests.conformance", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, ALONE: "1"}).returncode
    good = True
    if arguments.table != "decisions":
        rows = asyncio.run(_play(environment, releases, arguments.only, arguments.deltas))
        good = bool(rows) and all(row.result.startswith("ok") for row in rows)
        _print(rows)
    if arguments.table != "wire" and not arguments.only:
        decided = asyncio.run(decide(environment))
        good = good and bool(decided) and not any(row.wrong for row in decided)
        print_decisions(decided)
    return 0 if good else 1


def _can_be_alone() -> bool:
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0


async def _play(environment: Environment, releases: tuple[str, ...], only: str, deltas: int) -> list[Row]:
    rows: list[Row] = []
    if not os.environ.get(ALONE):
        print("left out: zmq, whose sockets the network could reach; no network of our own here", file=sys.stderr)
    if not shutil.which("etcd"):
        print("left out: discovery by etcd; there is none on PATH", file=sys.stderr)
    for name, case, transports in CASES:
        if only not in name:
            continue
        for transport in transports:
            for chosen in [releases] if case is mixed else [(release,) for release in releases]:
                if transport == "zmq" and not os.environ.get(ALONE):
                    continue  # their sockets would be open to the network
                if transport == "etcd" and not shutil.which("etcd"):
                    continue
                rows.append(await _one(environment, name, case, transport, chosen, deltas))
                row = rows[-1]
                print(f"  {row.case}, {row.transport}, {row.releases}: {row.result}", file=sys.stderr, flush=True)
    return rows


async def _one(
    environment: Environment,
    name: str,
    case: Callable[[Stand, tuple[str, ...], int], Awaitable[str]],
    transport: str,
    releases: tuple[str, ...],
    deltas: int,
) -> Row:
    began = time.monotonic()
    messages = 0
    async with Stand(environment, transport) as stand:
        try:
            result = "ok: " + await case(stand, releases, deltas)
            messages = stand.status()["messages"]
            refused = stand.status()["refused"]
            if set(refused) - {"unknown_worker"}:
                result = f"FAILED: refused {refused}"
        except CaseFailed as error:
            result = f"FAILED: {error}"
    return Row(name, ", ".join(releases), transport, messages, result, time.monotonic() - began)


def _print(rows: list[Row]) -> None:
    print(f"{'case':<22}{'transport':<11}{'release':<22}{'messages':>9}{'seconds':>9}  result")
    for row in rows:
        print(f"{row.case:<22}{row.transport:<11}{row.releases:<22}{row.messages:>9}{row.seconds:>9.1f}  {row.result}")


if __name__ == "__main__":
    sys.exit(main())
