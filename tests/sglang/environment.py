"""The environment that runs unmodified SGLang on a machine without a GPU.

SGLang's published wheel declares some sixty exact requirements, most of which exist for CUDA. A tiny
vision-language model on the CPU needs about a third of them, so SGLang and the few packages whose own pins
would drag CUDA in are installed with ``--no-deps`` and everything that is really imported is named here.
Nothing of SGLang is edited: what cannot exist on a CPU is faked outside of it, in ``shims/``.

The result is nearly 3 GB and takes minutes, so it is shared by all checkouts: it lives in a cache folder
under a name that contains a hash of the recipe, and is never changed after it is complete. A build happens
in a folder with a temporary name and is renamed when it is done; the marker file inside is written last. An
exclusive file lock keeps a second builder waiting for the first instead of doing the work twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BuildFailed", "Environment", "ensure_environment"]

HERE = Path(__file__).resolve().parent
MARKER = "complete"
TORCH = ("torch==2.13.0",)
# What SGLang imports on the way up, for an image model on the CPU.
RUNTIME = (
    *("fastapi==0.165.0", "uvicorn==0.54.0", "uvloop==0.23.0", "orjson==3.13.0", "pyzmq==27.3.0"),
    *("aiohttp==3.14.5", "msgspec==0.23.0", "pillow==13.0.0", "numpy==2.4.6", "requests==2.34.2"),
    *("psutil==7.2.2", "setproctitle==1.3.8", "huggingface_hub==1.33.0", "tokenizers==0.23.2"),
    *("safetensors==0.8.0", "regex==2026.11.19", "pydantic==2.14.4", "python-multipart==0.0.34"),
    *("pybase64==1.5.1", "prometheus-client==0.26.0", "packaging==26.4", "tqdm==4.70.1"),
    *("xxhash==4.1.0", "zstandard==0.25.0", "einops==0.8.2", "python-dateutil==2.9.0.post0"),
    *("partial-json-parser", "interegular==0.3.3", "ipython==9.18.1", "openai==2.8.0"),
    *("openai-harmony==0.0.4", "tiktoken==0.14.0", "sentencepiece==0.2.1", "scipy==1.17.1"),
    *("watchfiles==1.3.0", "dill==0.4.1", "apache-tvm-ffi==0.1.11", "cffi==2.1.1", "soundfile==0.14.0"),
    *("jsonschema==4.26.0", "PyYAML==6.0.4", "typer", "loguru", "triton==3.9.0"),
)
# Their declared requirements would replace the packages above by CUDA builds.
WITHOUT_REQUIREMENTS = (
    *("sglang==0.5.23", "transformers==5.19.0", "torchvision==0.28.0"),
    *("compressed-tensors==0.18.0", "xgrammar==0.2.9", "gguf==0.19.0"),
)
STEPS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("PyTorch", (), TORCH),
    ("what SGLang imports", (), RUNTIME),
    ("SGLang 0.5.23", ("--no-deps",), WITHOUT_REQUIREMENTS),
)


class BuildFailed(Exception):
    """The environment could not be built; the message names the step and the log."""


@dataclass(frozen=True)
class Environment:
    """A complete environment: where its interpreter and the tiny model's folder are."""

    home: Path
    model: Path
    build_seconds: float | None  # None: it was there already

    @property
    def python(self) -> Path:
        return self.home / "venv" / "bin" / "python"

    def variables(self) -> dict[str, str]:
        """The variables every SGLang process of the tests runs with."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.lower().endswith("_proxy") and not name.startswith(("PYTHON", "VIRTUAL_ENV", "SGLANG_"))
        }
        return kept | {
            "PYTHONPATH": str(HERE / "shims"),
            "PYTHONUNBUFFERED": "1",
            "PYTHONNOUSERSITE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            # Otherwise receivers announce the machine's first network address, whatever --host says.
            "SGLANG_HOST_IP": "127.0.0.1",
            # Otherwise a chat whose client leaves ends this release after 4 s of waiting; see docs/behaviour.md.
            "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "86400",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # The model is tiny: more threads only take the cores away from the other servers.
            "OMP_NUM_THREADS": "1",
        }


def base_folder() -> Path:
    """``$FULLHIT_SGLANG_HOME``, else ``$XDG_CACHE_HOME/fullhit``, else ``~/.cache/fullhit``."""
    if override := os.environ.get("FULLHIT_SGLANG_HOME"):
        return Path(override).expanduser().resolve()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().resolve() / "fullhit"


def recipe_hash() -> str:
    text = repr((STEPS, sys.version_info[:2], os.uname().machine))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def ensure_environment() -> Environment:
    """Return the cached environment, building what is missing of it. Raises BuildFailed."""
    base = base_folder()
    base.mkdir(parents=True, exist_ok=True)
    home = base / f"sglang-{recipe_hash()}"
    took: float | None = None
    if not complete(home):
        with exclusive(base / f"{home.name}.lock"):
            if not complete(home):
                took = build(home)
    return Environment(home=home, model=ensure_model(home), build_seconds=took)


def complete(home: Path) -> bool:
    """Built to the end, and the Python it was built from is still there (its interpreter is a link)."""
    return (home / MARKER).exists() and (home / "venv/bin/python").exists()


@contextlib.contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building the environment; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(home: Path) -> float:
    """Build into a temporary folder beside ``home`` and rename it; returns the seconds it took."""
    started = time.monotonic()
    for leftover in home.parent.glob(f"{home.name}.building-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # we hold the lock: its builder is gone
    shutil.rmtree(home, ignore_errors=True)
    say(f"building the SGLang environment in {home} (about 3 GB; once per recipe, takes minutes)")
    work = Path(tempfile.mkdtemp(prefix=f"{home.name}.building-", dir=home.parent))
    log = work.parent / f"{home.name}.log"
    try:
        with log.open("wb") as sink:
            base_python = getattr(sys, "_base_executable", None) or sys.executable
            run_step("virtual environment", [base_python, "-m", "venv", str(work / "venv")], sink)
            pip = [str(work / "venv/bin/python"), "-m", "pip", "install", "--disable-pip-version-check"]
            for name, options, packages in STEPS:
                run_step(name, [*pip, "--quiet", *options, *packages], sink, tries=2)
        (work / MARKER).write_text(f"{recipe_hash()}\n")
        work.rename(home)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    took = time.monotonic() - started
    say(f"environment complete after {took:.0f} s")
    return took


def run_step(name: str, command: list[str], sink: object, tries: int = 1) -> None:
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    path = Path(sink.name)  # type: ignore[attr-defined]
    for attempt in range(1, tries + 1):
        started = time.monotonic()
        say(f"  installing {name} ..." + (f" (try {attempt})" if attempt > 1 else ""))
        with subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,  # type: ignore[call-overload]
        ) as process:
            while True:
                try:
                    code = process.wait(timeout=20)
                    break
                except subprocess.TimeoutExpired:
                    say(f"  installing {name} ... {time.monotonic() - started:.0f} s")
                except BaseException:
                    process.kill()
                    raise
        if code == 0:
            say(f"  installed {name} in {time.monotonic() - started:.0f} s")
            return
    tail = "\n    ".join(line[:300] for line in path.read_text(errors="replace").splitlines()[-15:])
    raise BuildFailed(f"installing {name} failed (exit {code}); log {path} ends with\n    {tail}")


def ensure_model(home: Path) -> Path:
    """The tiny model's folder (no weights in it); keyed by the text of its writer."""
    writer = HERE / "tiny_model.py"
    name = f"model-{hashlib.sha256(writer.read_bytes()).hexdigest()[:12]}"
    folder = home / name
    if folder.is_dir():
        return folder
    work = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=home))
    python = home / "venv/bin/python"
    done = subprocess.run(
        [str(python), str(writer), str(work)], capture_output=True, text=True, env={"PATH": os.defpath}, check=False
    )
    if done.returncode:
        shutil.rmtree(work, ignore_errors=True)
        raise BuildFailed(f"writing the tiny model failed:\n{done.stderr[-2000:]}")
    try:
        work.rename(folder)
    except OSError:  # somebody else was faster
        shutil.rmtree(work, ignore_errors=True)
    return folder


def say(text: str) -> None:
    print(f"[sglang] {text}", flush=True)
