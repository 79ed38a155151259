"""The data plane beside HAProxy, nginx and sglang-router, one core each, in interleaved rounds of one run.

Two of ours: `fullhit wire`, the protocol package alone handing bytes through, and `fullhit serve`, the encoder gateway
with everything on (`/encode` bodies, a different request each time, one encoder). Ratios are made within a round and
the median of the rounds counts, so that a neighbour's load meets numerator and denominator alike.

The budget is on CPU seconds per 1,000 requests, from /proc and for the whole process tree: requests per second swing
with whoever else uses the machine. A saturated core's requests per second are its inverse, and are printed beside it.
sglang-router takes a chat body of the same size and parses it; the others do not look.

For 2 KB bodies the worker is nginx when it is there, for larger ones always our own stub: nginx would answer before it
has read them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fullhit.lab.processes import ChildFailed, Supervisor

from .proxy_load import MARK, Body, Load, offer
from .proxy_peers import Absent, Peer, Rig, cpu_seconds
from .table import Row

__all__ = ["rows"]

COMMAND = "fullhit bench --only proxy"
OURS = ("fullhit wire", "fullhit serve")


@dataclass(frozen=True, slots=True)
class Case:
    """A body size at a concurrency. Budgets: at least so many times the peer (1 / CPU)."""

    name: str
    size: int
    connections: int
    haproxy: float
    sglang: float


CASES = (
    Case("2 KB, c=32", 2_048, 32, 0.5, 3.5),
    Case("2 KB, c=256", 2_048, 256, 0.6, 3.5),
    Case("300 KB, c=32", 306_888, 32, 0.7, 2.5),
    Case("6 MB, c=8", 6_290_968, 8, 0.7, 2.0),
)


@dataclass(slots=True)
class Sample:
    """One peer in one round."""

    load: Load
    cpu: float

    @property
    def cost(self) -> float:
        """CPU seconds per 1,000 requests."""
        return self.cpu / max(self.load.requests, 1) * 1000


def rows(args: argparse.Namespace) -> list[Row]:
    """All rows of this part; a missing peer costs its rows and a line that says why."""
    from . import Skip

    if sys.platform != "linux":
        raise Skip("CPU figures are read from /proc: needs Linux")
    if len(os.sched_getaffinity(0)) < 2:
        raise Skip("needs two cores: one for the proxy, one for load and worker")
    seconds = 1 if args.quick else 2
    rounds = 1 if args.quick else max(args.rounds, 1)
    out: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="fullhit-bench-") as name:
        directory = Path(name)
        with Supervisor() as supervisor:
            rig = Rig(supervisor, directory)
            try:
                stub = rig.stub()
                fast = rig.fast_stub() or stub
                small = rig.peers(fast, _say)
                large = small if fast == stub else rig.peers(stub, lambda _: None)
            except ChildFailed as problem:
                raise Skip(str(problem)) from problem
            for case in CASES:
                peers = small if case.size < 16_384 else large
                out += _compare(case, peers, rounds, seconds, rig, directory)
            out += _latency(small, fast, rounds, seconds, rig, directory)
        with Supervisor() as supervisor:
            out += _stall(Rig(supervisor, directory), directory, 2 if args.quick else 4)
    return out


# --- throughput


def _compare(case: Case, peers: list[Peer], rounds: int, seconds: float, rig: Rig, directory: Path) -> list[Row]:
    bodies = {peer.name: _body(peer, case.size, directory) for peer in peers}
    samples: dict[str, list[Sample]] = {peer.name: [] for peer in peers}
    for _ in range(rounds):
        for peer in peers:
            assert peer.child is not None
            before = cpu_seconds(peer.child.pid)
            load = offer(peer.url, bodies[peer.name], case.connections, seconds, rig.other_core)
            samples[peer.name].append(Sample(load, cpu_seconds(peer.child.pid) - before))
    out = []
    for label, taken in samples.items():
        failed = sum(sample.load.failed for sample in taken)
        if failed or not all(sample.load.requests for sample in taken):
            _say(f"{case.name}: {label}: {failed} failed of {sum(s.load.requests for s in taken)} requests, left out")
            samples[label] = []
            continue
        cost = median(sample.cost for sample in taken)
        rate = median(sample.load.rate for sample in taken)
        out.append(Row.info(f"{case.name}: {label}, CPU", cost, "s/1k req", COMMAND))
        out.append(Row.info(f"{case.name}: {label}", rate, "req/s", COMMAND))
    for ours in OURS:
        for other, budget in (("HAProxy", case.haproxy), ("sglang-router", case.sglang), ("nginx", None)):
            pairs = list(zip(samples.get(ours, ()), samples.get(other, ()), strict=False))
            if not pairs:
                continue
            ratio = median(theirs.cost / max(mine.cost, 1e-9) for mine, theirs in pairs)
            name = f"{case.name}: {ours} / {other}, by CPU"
            if budget is None:
                out.append(Row.info(name, ratio, "x", COMMAND))
            else:
                out.append(Row.at_least(name, ratio, "x", budget, COMMAND))
            speed = median(mine.load.rate / max(theirs.load.rate, 1e-9) for mine, theirs in pairs)
            out.append(Row.info(f"{case.name}: {ours} / {other}, by req/s", speed, "x", COMMAND))
    return out


# --- latency


def _latency(peers: list[Peer], stub: int, rounds: int, seconds: float, rig: Rig, directory: Path) -> list[Row]:
    """What a peer adds to the median at one request at a time."""
    straight = Peer("no proxy", stub, None, "/encode")
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for peer in (straight, *peers):
            load = offer(peer.url, _body(peer, 2_048, directory), 1, seconds, rig.other_core)
            if not load.failed:
                taken.setdefault(peer.name, []).append(load.p50)
    base = median(taken.pop(straight.name, [0.0]))
    added = {name: median(values) - base for name, values in taken.items()}
    out = []
    for name, value in added.items():
        label = f"added p50 at c=1, 2 KB: {name}"
        if name in OURS and "HAProxy" in added:
            out.append(Row.at_most(label, value, "us", added["HAProxy"] + 75, COMMAND))
        else:
            out.append(Row.info(label, value, "us", COMMAND))
    return out


# --- stalls


def _stall(rig: Rig, directory: Path, seconds: float) -> list[Row]:
    """The longest turn of the loop while 6 MB bodies pass one at a time, in CPU time of its thread."""
    probe = directory / "stall"
    try:
        peer = rig.relay(rig.stub(), probe)
    except (Absent, ChildFailed) as problem:
        _say(f"skipped: event loop stall: {problem}")
        return []
    assert peer.child is not None
    body = _body(peer, 6_290_968, directory)
    offer(peer.url, body, 1, 1, rig.other_core)
    peer.child.signal(signal.SIGUSR1)
    offer(peer.url, body, 1, seconds, rig.other_core)
    peer.child.signal(signal.SIGTERM)
    deadline = time.monotonic() + 20
    while not probe.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if not probe.exists():
        _say("skipped: event loop stall: the relay did not report")
        return []
    longest, typical = (float(value) * 1000 for value in probe.read_text().split())
    return [
        Row.at_most("longest turn of the loop, 6 MB bodies", longest, "ms", 20, COMMAND),
        Row.at_most("p99 of turns over 50 us, 6 MB bodies", typical, "ms", 1, COMMAND),
    ]


# --- bodies


def _body(peer: Peer, size: int, directory: Path) -> Body:
    """A body of about `size` bytes: one inline image (or addresses) as filler that compresses badly for a parser."""
    kind = "chat" if peer.chat else "counted" if peer.counted else "encode"
    path = directory / f"{kind}-{size}.json"
    if not path.exists():
        path.write_bytes(_chat(size) if peer.chat else _encode(size))
    return Body(path, peer.counted)


def _encode(size: int) -> bytes:
    def make(item: str) -> bytes:
        document = {"mm_items": [item], "num_parts": 1, "part_idx": 0, "req_id": MARK, "modality": "IMAGE"}
        return json.dumps(document).encode()

    prefix = _prefix(size)
    return make(prefix + "A" * max(0, size - len(make(prefix))))


def _chat(size: int) -> bytes:
    def make(item: str) -> bytes:
        content = [{"type": "image_url", "image_url": {"url": item}}, {"type": "text", "text": "What is this?"}]
        return json.dumps({"model": "bench", "messages": [{"role": "user", "content": content}]}).encode()

    prefix = _prefix(size)
    return make(prefix + "A" * max(0, size - len(make(prefix))))


def _prefix(size: int) -> str:
    return "data:image/jpeg;base64," if size > 16_384 else "http://images.invalid/"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
