"""Child processes come up by condition, explain a failure, and never outlive who started them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fullhit.lab.processes import ChildFailed, Supervisor, fetch_json, free_port, start_nats

Until = Callable[..., Awaitable[None]]

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); time.sleep(600)"
)


def alive(pid: int) -> bool:
    """Whether the process still runs; a zombie that nobody reaps does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_leaving_the_block_stops_all_and_removes_the_logs() -> None:
    with Supervisor() as processes:
        child = processes.run(
            "sleeper", [sys.executable, "-c", "print('{}', flush=True); import time; time.sleep(600)"]
        )
        await child.json_line()
        assert repr(child) == f"<Child sleeper pid={child.pid} running>"
    assert child.process.returncode == -signal.SIGTERM
    assert not processes.directory.exists()
    processes.close()  # idempotent


async def test_a_child_that_ignores_sigterm_is_killed(processes: Supervisor) -> None:
    child = processes.run("stubborn", [sys.executable, "-c", STUBBORN])
    await child.json_line()
    processes.stop(grace=0.1)
    assert child.process.returncode == -signal.SIGKILL


async def test_a_child_that_ends_early_says_why(processes: Supervisor) -> None:
    child = processes.run("broken", [sys.executable, "-c", "import sys; sys.exit('no configuration found')"])
    with pytest.raises(ChildFailed, match=r"broken: ended with code 1 before(.|\n)*no configuration found"):
        await child.json_line()


async def test_a_child_that_is_not_ready_in_time_is_named(processes: Supervisor) -> None:
    child = processes.run("slow", [sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(ChildFailed, match=r"slow: not answering http://127\.0\.0\.1.* after 0\.1 s"):
        await child.answers(f"http://127.0.0.1:{free_port()}/health", limit=0.1)


async def test_a_program_that_does_not_exist_is_a_clear_failure(processes: Supervisor) -> None:
    with pytest.raises(ChildFailed, match="cannot start /no/such/program"):
        processes.run("ghost", ["/no/such/program"])


def test_free_ports_are_none_that_the_system_gives_away() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {free_port() for _ in range(50)}
    assert len(ports) > 40
    assert not any(lowest <= port <= highest for port in ports)


async def test_nats_takes_a_free_port_and_is_there_when_start_returns(processes: Supervisor) -> None:
    child, url = await start_nats(processes)
    host, port = url.removeprefix("nats://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    await writer.wait_closed()
    assert host == "127.0.0.1"
    assert child.running


async def test_children_die_with_a_parent_that_is_killed(tmp_path: Path, until: Until) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from fullhit.lab.processes import Supervisor\n"
        "child = Supervisor(Path(sys.argv[1])).run('child', [sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(tmp_path), stdout=subprocess.PIPE)
    assert parent.stdout is not None
    grandchild = int(await parent.stdout.readline())
    assert alive(grandchild)
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(grandchild))


async def test_fetch_json_maps_a_dead_server_to_oserror() -> None:
    with pytest.raises(OSError, match="refused"):
        await fetch_json(f"http://127.0.0.1:{free_port()}/")


def test_a_ctrl_c_does_not_reach_children_by_itself(processes: Supervisor) -> None:
    child = processes.run("own-group", [sys.executable, "-c", "import time; time.sleep(600)"])
    assert os.getpgid(child.pid) == child.pid != os.getpgrp()
