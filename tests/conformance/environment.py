"""Where the published Dynamo runtimes live: one small interpreter environment, and a folder per release beside it.

The wheels are self-contained (a native extension and a few Python files), so each is unpacked into a folder of its own
and put on ``PYTHONPATH`` of the child that is to speak for that release. They are shared by all checkouts, under
``$XDG_CACHE_HOME/fullhit`` or ``~/.cache/fullhit``; a marker file says that a folder is complete.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RELEASES", "BuildFailed", "Environment", "ensure_environment"]

RELEASES = ("1.3.1", "1.4.2", "1.6.1")
PACKAGES = ("pydantic==2.14.4", "uvloop==0.23.0", "msgspec>=0.19", "xxhash>=3.4", "nats-py>=2.9")
"""What the runtime needs, and what our own publisher does."""
MARKER = "complete"


class BuildFailed(Exception):
    """The environment could not be built; the text names the step."""


@dataclass(frozen=True)
class Environment:
    """``python`` runs Dynamo's children; ``runtimes`` is the folder of each release."""

    python: Path
    runtimes: dict[str, Path]


def ensure_environment(releases: tuple[str, ...] = RELEASES) -> Environment:
    """Build what is missing. Raises BuildFailed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fullhit"
    cache.mkdir(parents=True, exist_ok=True)
    version = f"{sys.version_info[0]}{sys.version_info[1]}"
    home = cache / f"dynamo-py{version}"
    with (cache / "dynamo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        home.mkdir(exist_ok=True)
        python = home / "venv/bin/python"
        marker = home / "venv" / MARKER
        if not marker.exists() or marker.read_text() != "\n".join(PACKAGES):
            _run("environment", sys.executable, "-m", "venv", str(home / "venv"))
            _run("packages", str(python), "-m", "pip", "install", "--quiet", *PACKAGES)
            marker.write_text("\n".join(PACKAGES))
        runtimes = {}
        for release in releases:
            folder = runtimes[release] = home / f"runtime-{release}"
            if not (folder / MARKER).exists():
                _run(
                    f"ai-dynamo-runtime {release}",
                    *(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"),
                    *("--target", str(folder), f"ai-dynamo-runtime=={release}"),
                )
                (folder / MARKER).touch()
    return Environment(python, runtimes)


def _run(step: str, *command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BuildFailed(f"{step}: {' '.join(command[:4])} ... ended with {done.returncode}\n{done.stdout[-2000:]}")
