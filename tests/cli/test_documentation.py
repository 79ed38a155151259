from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from fullhit.config import SETTINGS, Config, PoolConfig

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    match = re.search(rf"^## `\[{re.escape(name)}\]`$(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert match, f"docs/configuration.md has no section for [{name}]"
    return match[1]


@pytest.mark.parametrize("table", [f.name for f in msgspec.structs.fields(Config)])
def test_every_setting_is_documented_in_its_section(table: str) -> None:
    text = section("pool.NAME" if table == "pool" else table)
    struct = PoolConfig if table == "pool" else {f.name: f.type for f in msgspec.structs.fields(Config)}[table]
    if get_args(struct):  # a table that may be absent
        struct = next(kind for kind in get_args(struct) if kind is not type(None))
    for field in msgspec.structs.fields(struct):
        assert re.search(rf"`{field.name}[`.]", text), f"{table}.{field.name} is not in docs/configuration.md"


def test_every_flag_and_variable_is_documented() -> None:
    for setting in SETTINGS:
        assert f"`{setting.flag}`" in TEXT, setting.flag
        assert setting.env in TEXT or setting.key.startswith("log."), setting.env


def test_links_between_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
