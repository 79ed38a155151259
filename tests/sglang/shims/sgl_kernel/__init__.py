"""Stands in for SGLang's package of CUDA kernels, which does not exist for the CPU.

SGLang imports names from ``sgl_kernel`` and its submodules all over the place, but on the CPU path calls none
of them. So here every name and every submodule exists, and calling any of them says plainly what is missing.
``torch.ops.sgl_kernel`` is covered likewise, with one hole: SGLang takes the presence of
``convert_weight_packed`` for the presence of its Intel AMX kernels, so that name must be absent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch

__version__ = "0.0.0+cpu.tests"
__path__ = []  # a package, so that submodules are looked for
MEANS_AMX = "convert_weight_packed"


class Absent:
    """Something that the real package has: attributes lead to more of the same, a call raises."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, attribute: str) -> Absent:
        return Absent(f"{self.__name__}.{public(attribute)}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} is a CUDA kernel; this is the stand-in for CPU tests")


class AbsentOperators:
    """``torch.ops.sgl_kernel``."""

    def __getattr__(self, name: str) -> Absent:
        if name == MEANS_AMX:
            raise AttributeError(name)
        return Absent(f"torch.ops.sgl_kernel.{public(name)}")


class Submodules(MetaPathFinder, Loader):
    """Finds every ``sgl_kernel.<anything>`` and fills it with absent things."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{__name__}."):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = names_of(module.__name__)


def public(name: str) -> str:
    """Refuse dunder names: the interpreter asks for them to find out what an object can do."""
    if name.startswith("__"):
        raise AttributeError(name)
    return name


def names_of(module: str) -> Callable[[str], Absent]:
    return lambda name: Absent(f"{module}.{public(name)}")


def tolerate_fake_registrations() -> None:
    """SGLang gives shape functions to operators of this package; without the operators torch refuses them."""
    real = torch.library.register_fake

    def register_fake(op: Any, func: Any = None, /, **options: Any) -> Any:
        if isinstance(op, str) and op.startswith(f"{__name__}::"):
            return func if func is not None else (lambda function: function)
        return real(op, func, **options)

    torch.library.register_fake = register_fake


__getattr__ = names_of(__name__)
sys.meta_path.append(Submodules())
torch.ops.sgl_kernel = AbsentOperators()
tolerate_fake_registrations()
