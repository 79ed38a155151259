"""What is public is what ``__all__`` says, and an encoder imports no more than it needs."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import types

import pytest

import fullhit_publisher

MODULES = [module.name for module in pkgutil.walk_packages(fullhit_publisher.__path__, "fullhit_publisher.")]


def test_all_names_of_the_package_are_listed_and_no_others() -> None:
    public = {
        name
        for name, value in vars(fullhit_publisher).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(fullhit_publisher.__all__)
    assert list(fullhit_publisher.__all__) == sorted(fullhit_publisher.__all__, key=lambda n: (n.lower() == n, n))


@pytest.mark.parametrize("name", MODULES)
def test_every_module_lists_names_that_exist(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    for public in module.__all__:
        assert hasattr(module, public), public


def test_importing_it_imports_neither_the_router_nor_a_nats_client() -> None:
    code = "import sys, fullhit_publisher; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    for heavy in ("'fullhit'", "'nats'", "'aiohttp'", "'torch'", "'numpy'", "'uvloop'"):
        assert heavy not in run.stdout
