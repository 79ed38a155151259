"""The commands of examples/sglang, taken out of its README and run with a mock encoder."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

from fullhit.lab.processes import free_port

README = (Path(__file__).parents[2] / "examples" / "sglang" / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*) ?(\w*)\n(.*?)^```$", README, re.M | re.S)
PORTS = ("4222", "5577", "8780", "8781", "30000")


def test_what_is_not_run_here_starts_sglang() -> None:
    assert {(language, mark) for language, mark, _ in BLOCKS} == {("sh", ""), ("sh", "gpu")}
    for _, mark, text in BLOCKS:
        if mark == "gpu":
            for line in re.sub(r"\\\n", " ", text).splitlines():
                assert re.match(r"python -m sglang\.launch_server .* &$", line)


async def test_the_commands_of_the_readme_work(tmp_path: Path) -> None:
    script = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\n"
    script += "echo =====\n".join(text for language, mark, text in BLOCKS if (language, mark) == ("sh", ""))
    ports = {port: str(free_port()) for port in PORTS}
    for port, free in ports.items():
        script = re.sub(rf"\b{port}\b", free, script)
    binaries = Path(sys.executable).parent
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", script,
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
             "FULLHIT_ADMIN_URL": f"http://127.0.0.1:{ports['8781']}"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(100):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()[-3000:]
    _, encoder, by_hand = out.decode().split("=====\n")
    assert "confirmed" in encoder
    assert re.findall(r"x-fullhit-reason: (\w+)", by_hand) == ["miss", "full_hit"]
    assert f"http://127.0.0.1:{ports['30000']}" in by_hand and "holders:" in by_hand
