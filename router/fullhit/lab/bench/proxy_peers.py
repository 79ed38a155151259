"""What stands between load and stub in the proxy bench: ourselves, and those whom we are measured against.

Every peer is one process tree on one core, with the settings its own documentation would give a stranger: HAProxy
with one thread and default buffers, nginx with one worker and request buffering as it comes (its body limit and buffer
raised, or it would refuse or write files), sglang-router with round_robin. The stub and the load share the other core.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from fullhit.lab.processes import Child, ChildFailed, Supervisor, free_port

from .proxy_apps import STUB_REPLY
from .proxy_load import pinned

__all__ = ["Absent", "Peer", "Rig", "cpu_seconds"]

PROXY_CORE, OTHER_CORE = 0, 1
READY = 60.0
SGLANG_ROUTER = "0.3.2"
"""Newest published version when this was written."""
SGLANG_NEEDS = ("aiohttp", "fastapi", "orjson", "setproctitle", "uvicorn")


class Absent(Exception):
    """A peer that cannot run here; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A running peer. `path` is where it takes requests, `chat` whether it wants a chat body."""

    name: str
    port: int
    child: Child | None
    path: str
    chat: bool = False
    counted: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.path}"


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all its descendants so far."""
    children: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
            times[int(entry)] = (int(fields[11]) + int(fields[12])) / tick
    total, queue = 0.0, [pid]
    while queue:
        one = queue.pop()
        total += times.get(one, 0.0)
        queue.extend(children.get(one, ()))
    return total


class Rig:
    """Starts stubs and peers below one supervisor."""

    def __init__(self, supervisor: Supervisor, directory: Path) -> None:
        self.supervisor = supervisor
        self.directory = directory
        cores = sorted(os.sched_getaffinity(0))
        self.proxy_core = cores[PROXY_CORE]
        self.other_core = cores[min(OTHER_CORE, len(cores) - 1)]

    # --- stubs

    def stub(self) -> int:
        """The worker that reads bodies to their end; returns its port."""
        port = free_port()
        self._python("stub", ["fullhit.lab.bench.proxy_apps", "stub", "--port", str(port)], self.other_core)
        self._ready("stub", port)
        return port

    def fast_stub(self) -> int | None:
        """nginx answering by itself: for bodies that come with the head, where it does not answer early."""
        if which("nginx") is None:
            return None
        port = free_port()
        location = f"location / {{ return 200 '{STUB_REPLY.decode()}'; default_type application/json; }}"
        self._nginx("stub-nginx", port, location, "", self.other_core)
        self._ready("stub-nginx", port)
        return port

    # --- peers

    def peers(self, stub: int, say: Callable[[str], None]) -> list[Peer]:
        """All that can run here, in front of the stub; says why the others cannot."""
        found = []
        for start in (self.relay, self.gateway, self.haproxy, self.nginx, self.sglang_router):
            try:
                found.append(start(stub))
            except Absent as reason:
                say(f"skipped: {reason}")
            except ChildFailed as reason:
                say(f"skipped: {start.__name__} did not start: {reason}")
        return found

    def relay(self, stub: int, probe: Path | None = None) -> Peer:
        """The wire package and nothing else."""
        port = free_port()
        argv = ["fullhit.lab.bench.proxy_apps", "relay", "--upstream", f"127.0.0.1:{stub}", "--port", str(port)]
        if probe is not None:
            argv += ["--probe-file", str(probe)]
        child = self._python("relay", argv, self.proxy_core)
        self._ready("relay", port)
        return Peer("fullhit wire", port, child, "/encode")

    def gateway(self, stub: int) -> Peer:
        """`fullhit serve` with one encoder."""
        if find_spec("fullhit.app") is None:
            raise Absent("fullhit serve is not there")
        port, admin = free_port(), free_port()
        argv = ["fullhit", "serve", "--encoder-url", f"http://127.0.0.1:{stub}", "--event-plane", "none"]
        argv += ["--listen", f"127.0.0.1:{port}", "--admin-listen", f"127.0.0.1:{admin}"]
        argv += ["--log-level", "warning", "--log-decisions", "off", "--loop", "uvloop", "--bad-image", "pass"]
        child = self._python("serve", argv, self.proxy_core)
        self._ready("serve", port, "/health")
        return Peer("fullhit serve", port, child, "/encode", counted=True)

    def haproxy(self, stub: int) -> Peer:
        if which("haproxy") is None:
            raise Absent("haproxy not on PATH")
        port = free_port()
        config = self.directory / f"haproxy-{port}.cfg"
        config.write_text(
            "global\n nbthread 1\n maxconn 4000\n"
            "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n http-reuse always\n"
            f"frontend in\n bind 127.0.0.1:{port}\n default_backend out\n"
            f"backend out\n server stub 127.0.0.1:{stub}\n"
        )
        child = self.supervisor.run("haproxy", pinned(self.proxy_core, ["haproxy", "-db", "-f", str(config)]))
        self._ready("haproxy", port)
        return Peer("HAProxy", port, child, "/encode")

    def nginx(self, stub: int) -> Peer:
        if which("nginx") is None:
            raise Absent("nginx not on PATH")
        port = free_port()
        upstream = f"upstream stub {{ server 127.0.0.1:{stub}; keepalive 512; keepalive_requests 100000000; }}"
        location = (
            "client_max_body_size 0; client_body_buffer_size 8m; location / { proxy_pass http://stub; "
            'proxy_http_version 1.1; proxy_set_header Connection ""; }'
        )
        child = self._nginx("nginx", port, location, upstream, self.proxy_core)
        self._ready("nginx", port)
        return Peer("nginx", port, child, "/encode")

    def sglang_router(self, stub: int) -> Peer:
        python = _sglang_python()
        port, metrics = free_port(), free_port()
        argv = [str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--worker-urls", f"http://127.0.0.1:{stub}", "--policy", "round_robin", "--log-level", "warn"]
        argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
        env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        child = self.supervisor.run("sglang-router", pinned(self.proxy_core, argv), env)
        self._ready("sglang-router", port, "/readiness")
        return Peer("sglang-router", port, child, "/v1/chat/completions", chat=True)

    # --- internals

    def _python(self, name: str, module: list[str], core: int) -> Child:
        return self.supervisor.run(name, pinned(core, [sys.executable, "-m", *module]))

    def _nginx(self, name: str, port: int, location: str, upstream: str, core: int) -> Child:
        prefix = self.directory / f"{name}-{port}"
        (prefix / "logs").mkdir(parents=True)
        config = prefix / "nginx.conf"
        temporary = " ".join(f"{kind}_temp_path {prefix}/{kind};" for kind in TEMPORARY)
        config.write_text(
            f"daemon off; master_process off; worker_processes 1; pid {prefix}/pid;\n"
            f"error_log {prefix}/error.log crit;\n"
            "events { worker_connections 4096; }\n"
            f"http {{ access_log off; tcp_nodelay on; keepalive_requests 100000000; {temporary} {upstream}\n"
            f"server {{ listen 127.0.0.1:{port}; {location} }} }}\n"
        )
        argv = ["nginx", "-p", str(prefix), "-c", str(config), "-e", str(prefix / "error.log")]
        return self.supervisor.run(name, pinned(core, argv))

    def _ready(self, name: str, port: int, path: str = "/") -> None:
        child = self.supervisor.children[-1]
        deadline = time.monotonic() + READY
        while time.monotonic() < deadline:
            if not child.running:
                raise child.failure(f"{name} ended")
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                connection.request("GET", path)
                if connection.getresponse().status < 500:
                    return
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            time.sleep(0.05)
        raise child.failure(f"{name} does not answer")


TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def _sglang_python() -> Path:
    """An environment with the published wheel and without torch, made once and kept in the cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fullhit"
    home = cache / f"sglang-router-{SGLANG_ROUTER}-py{sys.version_info[0]}{sys.version_info[1]}"
    python, stamp = home / "bin" / "python", home / ".complete"
    if stamp.exists():
        return python
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        venv.EnvBuilder(with_pip=True, clear=True).create(home)
        for wanted in (["--no-deps", "--only-binary=:all:", f"sglang-router=={SGLANG_ROUTER}"], list(SGLANG_NEEDS)):
            subprocess.run(pip + wanted, check=True, capture_output=True, text=True, timeout=240)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or ["pip failed"]
        raise Absent(f"sglang-router: {lines[-1]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Absent(f"sglang-router: {error}") from error
    stamp.touch()
    return python
