from __future__ import annotations

import json
import subprocess
import sys
import threading
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
    "id": 5, "reason": "full_hit", "request_id": "r1",
    "candidates": [{"id": "http://127.0.0.1:30000", "inflight": 2, "held": 1}],
}  # fmt: skip


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
    assert main(["workers", "add", url, "--device", "cpu", "--admin", admin.url]) == 0
    for action in ("drain", "resume", "remove"):
        assert main(["workers", action, url, "--admin", admin.url]) == 0
    assert [(method, path, body) for method, path, body, _ in admin.asked] == [
        ("POST", "/workers", {"url": url, "device": "cpu"}),
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


def test_an_action_without_a_worker_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workers", "drain"]) == 2
    assert "needs a worker" in capsys.readouterr().err


def test_explain_finds_a_decision_by_its_id_and_by_the_request_id(
    admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.answers["GET /decisions/5"] = (200, RECORD)
    admin.answers["GET /decisions?limit=1&request_id=r1"] = (200, {"decisions": [RECORD]})
    for argument in ("5", "r1"):
        assert main(["explain", argument, "--admin", admin.url]) == 0
        out = capsys.readouterr().out
        assert "reason: full_hit" in out
        assert "candidates:" in out


def test_explain_of_an_unknown_decision_says_so(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.answers["GET /decisions?limit=1&request_id=99"] = (200, {"decisions": []})
    assert main(["explain", "99", "--admin", admin.url]) == 1
    assert "no decision '99'" in capsys.readouterr().err
