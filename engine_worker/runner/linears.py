"""Linear layers of a model, swapped for ones that run faster on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine_worker.config import Precision


class OneDnnLinear(nn.Module):
    """float32 through oneDNN, the weight reordered once into the layout that its kernels want."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 64)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


def pack_linears(model: nn.Module, precision: Precision) -> None:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, OneDnnLinear(child.weight, child.bias))
