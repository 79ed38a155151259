"""The demo's own parts; the whole demo with the router is played in the end-to-end tests."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fullhit.lab import demo
from fullhit.lab.demo_report import RunReport, table, verdict
from fullhit.lab.processes import Supervisor

Until = Callable[..., Awaitable[None]]


def report(router: str, gpu: int, cpu: int, failures: int = 0, **reasons: int) -> RunReport:
    return RunReport(
        router,
        requests=100,
        images=500,
        seconds=10.0,
        ttft=[index / 100 for index in range(100 - failures)],
        failures=["it broke"] * failures,
        vit_runs=Counter(gpu=gpu, cpu=cpu),
        reasons=Counter(reasons),
    )


def test_the_json_has_exactly_the_promised_fields() -> None:
    document = report("fullhit", 100, 5, full_hit=395, miss=105).as_json()
    assert document == {
        "router": "fullhit",
        "requests": 100,
        "failed": 0,
        "images": 500,
        "vit_runs": 105,
        "ttft_p50_ms": 500.0,
        "ttft_p99_ms": 990.0,
        "rps": 10.0,
        "reasons": {"full_hit": 395, "miss": 105},
    }


def test_a_run_without_answers_has_zeros_and_no_crash() -> None:
    document = RunReport("fullhit", 5, 25).as_json()
    assert (document["ttft_p50_ms"], document["rps"], document["vit_runs"]) == (0.0, 0.0, 0)


def test_the_promise_is_kept_only_by_few_runs_no_failure_and_a_worse_split() -> None:
    split = report("sglang-split", 200, 200)
    assert verdict(split, report("fullhit", 110, 5), 100, together=False)[0]
    for bad in (report("fullhit", 110, 6), report("fullhit", 100, 0, failures=1)):
        good, lines = verdict(split, bad, 100, together=False)
        assert not good
        assert any(line.startswith("FAILED") for line in lines)
    assert not verdict(report("sglang-split", 130, 10), report("fullhit", 110, 0), 100, together=False)[0]


def test_together_is_told_as_it_is_and_fails_only_by_failed_requests() -> None:
    split = report("sglang-split", 200, 200)
    good, lines = verdict(split, report("fullhit", 300, 5, partial_hit=100), 100, together=True)
    assert good
    assert "305 ViT runs for 100 distinct images (3.05 x)" in lines[1]
    assert "a full hit cannot happen" in lines[2]


def test_the_table_has_a_row_for_every_figure_and_reason() -> None:
    text = table([report("sglang-split", 200, 200), report("fullhit", 100, 5, full_hit=395)], 100)
    rows = [line.split("  ") for line in text.splitlines()]
    assert "395 (79 %)" in text
    assert "parts: full_hit" in text
    assert len(rows) == 12


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--users", "0"), "users must be at least 1"),
        (("--pause-ms", "-1"), "must not be negative"),
        (("--cpu-slower", "0"), "--cpu-slower must be above 0"),
        (("--json", "/no/such/directory/x.json"), "no such directory"),
    ],
)
def test_a_mistake_of_the_user_is_told_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.run(parsed(*arguments)) == 2
    assert message in capsys.readouterr().err


def marked(mark: str) -> list[int]:
    """Processes of this machine that carry the mark in their environment, zombies not counted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("drawing", signal.SIGINT),
        ("1/2", signal.SIGTERM),
        ("requests, ", signal.SIGINT),
        ("requests, ", signal.SIGKILL),
    ],
)
async def test_interrupted_at_any_moment_it_leaves_no_process(
    moment: str, number: signal.Signals, tmp_path: Path, until: Until
) -> None:
    mark = f"FULLHIT_TEST_MARK={uuid.uuid4().hex}"
    environment = {**os.environ, "FULLHIT_TEST_MARK": mark.partition("=")[2], "TMPDIR": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fullhit.lab.demo", "--quick", "--vit-ms", "500", "--size", "96x64",
            env=environment, stderr=log, stdout=log,
        )  # fmt: skip
        await until(lambda: moment in (tmp_path / "log").read_text())
        process.send_signal(number)
        code = await asyncio.wait_for(process.wait(), 60)
    await until(lambda: not marked(mark))
    if number != signal.SIGKILL:
        text = (tmp_path / "log").read_text()
        assert code == 130
        assert "Traceback" not in text
        assert text.endswith("interrupted, all its processes are stopped\n")
        assert os.listdir(tmp_path) == ["log"]


async def test_a_child_that_cannot_start_is_told_without_a_stack_trace(
    processes: Supervisor,
) -> None:
    broken = processes.directory / "sitecustomize.py"
    broken.write_text(
        "import os, sys\n"
        "if 'mock_encoder' in ' '.join(sys.orig_argv):\n"
        "    os.write(2, b'no room here\\n')\n"
        "    os._exit(1)\n"
    )
    environment = {"PYTHONPATH": str(processes.directory)}
    child = processes.start("demo", ["fullhit.lab.demo", "--quick", "--size", "96x64"], environment)
    assert await asyncio.to_thread(child.process.wait, 60) == 1
    text = child.log.read_text()
    assert "Traceback" not in text
    assert "no room here" in text


async def test_a_small_demo_plays_through_the_router(processes: Supervisor, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--users", "3", "--turns", "3", "--vit-ms", "2", "--size", "96x64", "--json", str(figures)]
    child = processes.start("demo", ["fullhit.lab.demo", *options])
    await asyncio.to_thread(child.process.wait, 100)
    assert figures.exists(), child.tail(40)
    document = json.loads(figures.read_bytes())
    assert document["distinct_images"] == 21
    split, routed = document["runs"]
    assert (split["router"], routed["router"]) == ("sglang-split", "fullhit")
    for run in document["runs"]:
        assert (run["requests"], run["failed"], run["images"]) == (9, 0, 45)
        assert run["ttft_p50_ms"] > 0
    assert split["reasons"] == {}
    assert sum(routed["reasons"].values()) == 45
    assert routed["reasons"]["full_hit"] > 15
    assert 21 <= routed["vit_runs"] < 30
