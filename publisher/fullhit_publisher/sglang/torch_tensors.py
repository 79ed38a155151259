"""`Tensors` for torch. Imported only inside an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["TorchTensors"]


class TorchTensors:
    """``device``: where the encoder computes."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def rows(self, tensor: Any) -> int:
        return int(tensor.shape[0])

    def keep(self, tensor: Any) -> Any:
        return torch.empty_like(tensor, device="cpu").copy_(tensor.detach())

    def bring(self, tensor: Any, *, on_device: bool) -> Any:
        return tensor.to(self._device) if on_device else tensor.cpu()

    def join(self, tensors: Sequence[Any]) -> Any:
        return torch.cat(list(tensors), dim=0)
