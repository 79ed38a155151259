"""Lets a torchvision wheel built for another torch be imported beside a CPU-only torch.

Python runs this file at start-up when its folder is first on PYTHONPATH. torchvision registers Python
implementations for operators which its compiled library would have declared; when that library does not load,
the registration fails and so does the import. Declaring the operators (without kernels: nobody here calls
them) just before the import is enough for everything in it that is plain Python, the image transforms above
all. Where the library does load, as beside a CUDA build of torch, nothing is declared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

FORWARD_ONLY = ("nms", "qnms", "qroi_align")
WITH_BACKWARD = ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d")

declared: list[object] = []  # a torch Library takes its declarations back when it is collected


class BeforeTorchvision(MetaPathFinder):
    """Finds nothing itself; being asked for torchvision is the signal."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            if not library_loads():
                declare_operators()
        return None


def library_loads() -> bool:
    import torch

    spec = find_spec("torchvision")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for library in Path(folder).glob("_C*.so"):
            try:
                torch.ops.load_library(str(library))
            except OSError:
                continue
            return True
    return False


def declare_operators() -> None:
    from torch.library import Library

    library = Library("torchvision", "DEF")
    declared.append(library)
    for name in (*FORWARD_ONLY, *WITH_BACKWARD, *(f"_{name}_backward" for name in WITH_BACKWARD)):
        library.define(f"{name}(Tensor input) -> Tensor")


sys.meta_path.insert(0, BeforeTorchvision())
