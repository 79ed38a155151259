from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import fullhit
from fullhit.cli import main

WORKER = {
    "id": "http://127.0.0.1:30000", "pool": "default", "device": "cuda", "state": "ready", "source": "registered",
    "inflight_requests": 2, "encoding_requests": 1, "keys": 7, "doubtful": False, "publishing": True,
}  # fmt: skip
RECORD = {
    "id": 5, "reason": "full_hit", "request_id": "r1", "at": "2026-01-02T03:04:05.678+00:00",
    "inputs": {"keys": ["k1", "k2"], "exclude": [], "dry_run": False}, "groups": [], "ineligible_holders": [],
    "candidates": [{"id": "http://127.0.0.1:30000", "inflight": 2, "keys_held": 1, "chosen": True, "allowed": None}],
    "outcome": {"code": 200, "req_id": "sg-1"},
}  # fmt: skip
EXPLAINED = """\
id:          5
reason:      full_hit
request id:  r1
at:          2026-01-02T03:04:05.678+00:00
inputs:      keys k1 k2, dry run no
outcome:     code 200, req id sg-1

candidates:
  id                      inflight  keys held  chosen  allowed
  http://127.0.0.1:30000  2         1          yes     -
"""


class Admin:
    """A scripted admin listener that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any, str | None]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                outer.asked.append((self.command, self.path, body, self.headers.get("Authorization")))
                status, value = outer.answers.get(f"{self.command} {self.path}", (404, {"error": {"message": "no"}}))
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()


@pytest.fixture
def admin() -> Iterator[Admin]:
    server = Admin()
    yield server
    server.server.shutdown()
    server.server.server_close()
    server.thread.join()


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip() == f"fullhit {fullhit.__version__}"


def test_without_a_command_the_help_is_shown_and_the_exit_code_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out = capsys.readouterr().out
    for command in ("serve", "demo", "mock-encoder", "workers", "explain", "bench", "check-config", "version"):
        assert command in out


def test_every_command_has_help() -> None:
    for command in ("serve", "demo", "mock-encoder", "workers", "explain", "bench", "check-config"):
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0


def test_check_config_prints_the_effective_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.toml"
    file.write_text("[pool.default]\nratio = 3\n")
    assert main(["check-config", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["pool"]["default"]["ratio"] == 3


def test_check_config_takes_the_file_that_serve_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f.toml"
    file.write_text("[pool.default]\nratio = 3\n")
    monkeypatch.setenv("FULLHIT_CONFIG", str(file))
    assert main(["check-config"]) == 0
    assert json.loads(capsys.readouterr().out)["pool"]["default"]["ratio"] == 3


def test_check_config_names_the_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.toml"
    file.write_text("[pool.default]\nratio = 0\n")
    assert main(["check-config", str(file)]) == 2
    assert "pool.default.ratio: must be a whole number of at least 1" in capsys.readouterr().err


def test_serve_refuses_a_bad_setting_without_a_stack_trace() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "fullhit", "serve", "--policy", "fastest"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2
    assert "pool.default.policy" in run.stderr
    assert "Traceback" not in run.stderr


def test_workers_are_listed_as_a_table(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.answers["GET /workers"] = (200, {"workers": [WORKER]})
    assert main(["workers", "--admin", admin.url]) == 0
    out = capsys.readouterr().out
    assert "http://127.0.0.1:30000" in out
    assert "confirmed" in out


def test_the_table_says_why_a_worker_gets_nothing(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    down = {**WORKER, "id": "http://a:1", "state": "unhealthy", "draining": True, "down": "3 probes failed"}
    held = {**WORKER, "id": "http://b:1", "breaker": {"held_seconds": 0.5}, "last_failure": "connect"}
    new = {**WORKER, "id": "http://c:1", "state": "probing", "last_probe_error": "refused"}
    admin.answers["GET /workers"] = (200, [down, held, new, {**WORKER, "oldest_inflight_age_seconds": 2.0}])
    assert main(["workers", "--admin", admin.url]) == 0
    table, _, notes = capsys.readouterr().out.partition("\n\n")
    assert "unhealthy, draining" in table
    assert "2.0 s" in table
    assert notes.splitlines() == [
        "http://a:1: 3 probes failed",
        "http://b:1: gets no requests for 0.5 s after a failure (connect)",
        "http://c:1: has not answered a health probe yet, last refused",
    ]


def test_an_empty_list_of_workers_says_how_to_get_one(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.answers["GET /workers"] = (200, {"workers": []})
    assert main(["workers", "--admin", admin.url]) == 0
    assert "--encoder-register-urls" in capsys.readouterr().out


def test_adding_draining_resuming_and_removing_reach_the_router(
    admin: Admin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FULLHIT_ADMIN_KEY", "k")
    url = "http://127.0.0.1:30000"
    quoted = "http%3A%2F%2F127.0.0.1%3A30000"
    admin.answers.update(
        {
            "POST /workers": (201, WORKER),
            f"POST /workers/{quoted}/drain": (200, {}),
            f"POST /workers/{quoted}/resume": (200, {}),
            f"DELETE /workers/{quoted}": (200, {}),
        }
    )
    assert main(["workers", "add", "--device", "cpu", "--max-inflight", "3", url, "--admin", admin.url]) == 0
    for action in ("drain", "resume"):
        assert main(["workers", action, url, "--admin", admin.url]) == 0
    assert main(["workers", "--admin", admin.url, "remove", url]) == 0
    assert [(method, path, body) for method, path, body, _ in admin.asked] == [
        ("POST", "/workers", {"url": url, "device": "cpu", "max_inflight": 3}),
        ("POST", f"/workers/{quoted}/drain", None),
        ("POST", f"/workers/{quoted}/resume", None),
        ("DELETE", f"/workers/{quoted}", None),
    ]
    assert {key for *_, key in admin.asked} == {"Bearer k"}
    assert "draining" in capsys.readouterr().out


def test_a_refusal_is_told_in_the_routers_words(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.answers["POST /workers"] = (400, {"error": {"message": "ftp is not supported"}})
    assert main(["workers", "add", "ftp://x", "--admin", admin.url]) == 1
    assert "ftp is not supported" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["workers"], ["explain", "5"]])
def test_an_absent_router_is_told_without_a_stack_trace(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--admin", "http://127.0.0.1:1"]) == 1
    assert "fullhit serve" in capsys.readouterr().err


def test_something_else_on_that_port_is_told(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.answers["GET /workers"] = (200, b"<html>")
    assert main(["workers", "--admin", admin.url]) == 1
    assert "not JSON" in capsys.readouterr().err


def test_the_wrong_listener_is_told(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.answers["GET /workers"] = (404, {"status": "error", "message": "no '/workers' here"})
    assert main(["workers", "--admin", admin.url]) == 1
    assert "HTTP 404; is it the admin listener?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["workers", "explain"])
@pytest.mark.parametrize("address", ["ftp://x", "http://", "x:y", "http://[x", ""])
def test_an_address_that_is_none_is_told_without_a_stack_trace(
    command: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--admin", address]) == 1
    assert "--admin: expected a URL such as" in capsys.readouterr().err


def test_an_address_may_leave_out_the_scheme(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.answers["GET /workers"] = (200, [WORKER])
    assert main(["workers", "--admin", admin.url.removeprefix("http://")]) == 0
    assert "ready" in capsys.readouterr().out


def test_the_key_may_stand_in_a_file(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    monkeypatch.setenv("FULLHIT_ADMIN_KEY_FILE", str(file))
    assert main(["workers", "--admin", admin.url]) == 1
    assert "FULLHIT_ADMIN_KEY_FILE: cannot read" in capsys.readouterr().err
    file.write_text("sesame\n")
    admin.answers["GET /workers"] = (200, [])
    assert main(["workers", "--admin", admin.url]) == 0
    assert [key for *_, key in admin.asked] == ["Bearer sesame"]


def test_a_missing_or_wrong_key_says_where_it_comes_from(
    admin: Admin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.answers["GET /workers"] = (401, {"error": {"message": "send the admin key"}})
    assert main(["workers", "--admin", admin.url]) == 1
    assert "wants its key: set FULLHIT_ADMIN_KEY or FULLHIT_ADMIN_KEY_FILE" in capsys.readouterr().err
    monkeypatch.setenv("FULLHIT_ADMIN_KEY", "bad")
    assert main(["workers", "--admin", admin.url]) == 1
    assert "refused the key" in capsys.readouterr().err


def test_an_action_without_a_worker_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["workers", "drain"])
    assert caught.value.code == 2
    assert "required: URL" in capsys.readouterr().err


@pytest.mark.parametrize("argument", [["5"], ["r1"], ["sg-1"], []])
def test_explain_finds_a_decision_by_any_of_its_names_and_the_latest_without_one(
    argument: list[str], admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {**RECORD, "outcome": {"code": 200}}
    admin.answers["GET /decisions/5"] = (200, RECORD)
    admin.answers["GET /decisions?limit=1"] = (200, {"decisions": [RECORD]})
    admin.answers["GET /decisions?limit=1&request_id=r1"] = (200, {"decisions": [RECORD]})
    admin.answers["GET /decisions?limit=1&request_id=sg-1"] = (200, {"decisions": []})
    admin.answers["GET /decisions?limit=1000"] = (200, {"decisions": [other, RECORD]})
    assert main(["explain", *argument, "--admin", admin.url]) == 0
    assert capsys.readouterr().out == EXPLAINED


def test_explain_of_an_unknown_decision_says_so(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.answers["GET /decisions?limit=1&request_id=99"] = (200, {"decisions": []})
    admin.answers["GET /decisions?limit=1000"] = (200, {"decisions": []})
    admin.answers["GET /decisions?limit=1"] = (200, {"decisions": []})
    assert main(["explain", "--admin", admin.url]) == 1
    assert "no decision was made yet" in capsys.readouterr().err
    assert main(["explain", "99", "--admin", admin.url]) == 1
    assert "no decision '99'" in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_serve_lives_without_standard_streams(closed: str, tmp_path: Path) -> None:
    """Sockets took the free numbers, and libuv aborts when it closes a descriptor below 3."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (
        f"exec {sys.executable} -m fullhit serve --event-plane embedded:0 "
        f"--listen 127.0.0.1:0 --admin-listen 127.0.0.1:{port} {closed}"
    )
    router = subprocess.Popen(["/bin/sh", "-c", command], cwd=tmp_path)
    try:
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
                    assert answer.status == 200
                break
            except (urllib.error.URLError, OSError):
                assert router.poll() is None
                time.sleep(0.1)
        else:
            pytest.fail("not up after 30 s")
        assert {0, 1, 2} <= {int(name) for name in os.listdir(f"/proc/{router.pid}/fd")}
        router.terminate()
        assert router.wait(30) == 0
    finally:
        router.kill()
        router.wait()
