"""`Tensors` for torch, which is there inside an encoder and is not asked for before."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

__all__ = ["TorchTensors"]

_log = logging.getLogger("fullhit_publisher")


class TorchTensors:
    """``device``: where the encoder computes. ``pinned``: what is held will be brought back to it, which is faster from
    page-locked memory; where that cannot be had, ordinary memory serves. Raises ImportError without torch."""

    def __init__(self, device: Any, *, pinned: bool = False) -> None:
        import torch

        self._torch: Any = torch
        self._device = device
        self._pinned = pinned and torch.device(device).type == "cuda"

    def rows(self, tensor: Any) -> int:
        return int(tensor.shape[0])

    def keep(self, tensor: Any) -> Any:
        if self._pinned:
            try:
                return self._torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach())
            except RuntimeError as error:  # no more memory may be locked, or none at all
                self._pinned = False
                _log.warning("embeddings are held in ordinary memory from now on: %s", error)
        return self._torch.empty_like(tensor, device="cpu").copy_(tensor.detach())

    def bring(self, tensor: Any, *, on_device: bool) -> Any:
        return tensor.to(self._device) if on_device else tensor.cpu()

    def grid_of(self, grids: Any, place: int) -> Any:
        grid = grids[place]
        return grid.detach().clone() if isinstance(grid, self._torch.Tensor) else grid

    def same_grid(self, grid: Any, grids: Any, place: int) -> bool:
        return bool(self._torch.equal(self._torch.as_tensor(grid).cpu(), self._torch.as_tensor(grids[place]).cpu()))

    def grids(self, grids: Sequence[Any]) -> Any:
        return self._torch.stack(list(grids)) if isinstance(grids[0], self._torch.Tensor) else list(grids)

    def join(self, tensors: Sequence[Any]) -> Any:
        return self._torch.cat(list(tensors), dim=0)
