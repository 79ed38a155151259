"""The stubs in the tree are those that `make proto` would write."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc_tools")
ROOT = Path(__file__).parents[2]
STUBS = Path("fullhit/rpc/v1")


def test_the_stubs_are_what_make_proto_writes(tmp_path):
    recipe = re.search(r"^proto:.*\n\t\$\(BIN\)/python (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert recipe, "the Makefile has no target proto"
    command = shlex.split(recipe[1].replace("=router ", f"={tmp_path} "))
    assert str(tmp_path) in recipe[1].replace("=router ", f"={tmp_path} ")
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True, timeout=60)
    for name in ("router_pb2.py", "router_pb2.pyi", "router_pb2_grpc.py"):
        fresh, kept = (tmp_path / STUBS / name).read_text(), (ROOT / "router" / STUBS / name).read_text()
        assert _without_versions(fresh) == _without_versions(kept), f"{name} is stale: run `make proto`"


def _without_versions(text: str) -> str:
    """Another release of the compiler is no drift of ours."""
    text = re.sub(r"(?m)^(# Protobuf Python Version: |GRPC_GENERATED_VERSION = ).*$", r"\1", text)
    return re.sub(r"(?s)ValidateProtobufRuntimeVersion\(.*?\n\)", "", text)
