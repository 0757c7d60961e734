"""Linear layers with packed weights, by precision and by how many rows go through.

A layer's weight is reordered once into the layout that a kernel wants. Measured on two Zen 3 cores
(AVX2), all products of a SmolLM2-135M step with 20 rows: `F.linear` 180 ms, oneDNN packed 96 ms,
fbgemm with float16 weights 77 ms, with int8 weights 46 ms; with 256 rows oneDNN is ahead of float16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from engine_worker.config import Precision

_MANY_ROWS: Final = 64
"""From here on the arithmetic decides, not the reading of weights: float32 kernels pass float16 ones."""


class PackedLinear(nn.Module):
    """x -> x W^T + b. `weight`: [out, in], float32; it is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: Precision) -> None:
        super().__init__()
        weight = weight.detach()
        bias = None if bias is None else bias.detach()
        if precision == "int8":
            self._few = self._many = _int8(weight, bias)
        else:
            self._many = _float32(weight, bias)
            self._few = _float16(weight, bias) if precision == "fp16" else self._many

    def forward(self, x: Tensor) -> Tensor:
        product = self._few if x.shape[-2] < _MANY_ROWS else self._many
        return product(x)


_Product = Callable[[Tensor], Tensor]
_OPS: Final[Any] = torch.ops  # untyped


def _float32(weight: Tensor, bias: Tensor | None) -> _Product:
    if not torch._C._has_mkldnn:
        return lambda x: nn.functional.linear(x, weight, bias)
    linear: Callable[..., Tensor] = _OPS.mkldnn._linear_pointwise.default
    packed = _OPS.mkldnn._reorder_linear_weight(weight, _MANY_ROWS)
    return lambda x: linear(x, packed, bias, "none", [], "")


def _float16(weight: Tensor, bias: Tensor | None) -> _Product:
    packed = _OPS.quantized.linear_prepack_fp16(weight, bias)
    linear: Callable[..., Tensor] = _OPS.quantized.linear_dynamic_fp16.default
    return lambda x: linear(x, packed)


def _int8(weight: Tensor, bias: Tensor | None) -> _Product:
    """Weights in int8 with a scale per output, activations quantised as they come."""
    scales = weight.abs().amax(dim=1).clamp_(min=1e-9) / 127
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    quantised = _OPS.aten.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed = _OPS.quantized.linear_prepack(quantised, bias)
    linear: Callable[..., Tensor] = _OPS.quantized.linear_dynamic.default
    # Seven bits of activation: with eight, AVX2's 16-bit sums of products may saturate.
    return lambda x: linear(x, packed, True)


class _FirstOf(nn.Module):
    """Several layers on one input as one product; the others' parts wait here for their turn."""

    def __init__(self, layers: Sequence[nn.Linear], precision: Precision) -> None:
        super().__init__()
        weights: list[Tensor] = [layer.weight for layer in layers]
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self._linear = PackedLinear(torch.cat(weights), torch.cat(biases) if biases else None, precision)
        self._sizes = [layer.out_features for layer in layers]
        self._rest: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(self._linear(x), self._sizes, dim=-1)
        self._rest = list(parts[1:])
        return parts[0]

    def take_next(self) -> Tensor:
        return self._rest.pop(0)


class _NextOf(nn.Module):
    """A layer whose product `first` has computed already. Layers are called in the order they were given."""

    def __init__(self, first: _FirstOf) -> None:
        super().__init__()
        # The method, not the module, which would then be in the model twice.
        self._take: Callable[[], Tensor] = first.take_next

    def forward(self, x: Tensor) -> Tensor:
        return self._take()


_FUSED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that a module of `transformers` calls one after the other on the same input."""


def pack_linears(model: nn.Module, precision: Precision) -> None:
    """Swaps every linear layer of `model` for packed ones, fused where they share their input."""
    for parent in list(model.modules()):
        for names in _FUSED:
            layers = [getattr(parent, name, None) for name in names]
            linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
            if len(linears) == len(names) and len({layer.bias is None for layer in linears}) == 1:
                first = _FirstOf(linears, precision)
                swapped: list[nn.Module] = [first, *(_NextOf(first) for _ in names[1:])]
                for name, module in zip(names, swapped, strict=True):
                    setattr(parent, name, module)
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, PackedLinear(child.weight, child.bias, precision))
