"""Linear layers with packed weights, side by side, by precision and by how many rows go through.

A layer's weight is reordered once into the layout that a kernel wants. Measured on two Zen 3 cores
(AVX2), all products of a SmolLM2-135M step with 20 rows: `F.linear` 180 ms, oneDNN packed 96 ms,
fbgemm with float16 weights 77 ms, with int8 weights 46 ms; with 256 rows oneDNN is ahead of float16.
On two cores of a Xeon with AVX-512 its layers' products take oneDNN 37 ms and MKL 33 with 20 rows, 68 and 58
with 64, both 365 with 512.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from engine_worker.config import Precision
from engine_worker.runner.adapters import Adapted

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
    if torch._C.has_mkl and _is_intel():
        return _mkl(weight, bias)
    if not torch._C._has_mkldnn:
        return lambda x: nn.functional.linear(x, weight, bias)
    linear: Callable[..., Tensor] = _OPS.mkldnn._linear_pointwise.default
    packed = _OPS.mkldnn._reorder_linear_weight(weight, _MANY_ROWS)
    return lambda x: linear(x, packed, bias, "none", [], "")


def _mkl(weight: Tensor, bias: Tensor | None) -> _Product:
    linear: Callable[..., Tensor] = _OPS.mkl._mkl_linear.default
    packed = _OPS.mkl._mkl_reorder_linear_weight(weight, _MANY_ROWS)
    # The operator reads the weight itself only if told of other rows than come; else its shape will do.
    shape = weight.new_empty(1).expand(weight.shape)
    return lambda x: linear(x, packed, shape, bias, x.numel() // x.shape[-1])


@cache
def _is_intel() -> bool:
    """MKL has its best kernels for its maker's processors."""
    info = Path("/proc/cpuinfo")
    return info.exists() and "GenuineIntel" in info.read_text()


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


class Projection:
    """Linear layers on one input as one product, their outputs side by side; adapters add to theirs.

    Takes the weights out of the layers.
    """

    def __init__(self, layers: Sequence[nn.Linear | Adapted], precision: Precision) -> None:
        bases = [layer.base if isinstance(layer, Adapted) else layer for layer in layers]
        weights: list[Tensor] = [base.weight.detach() for base in bases]
        biases: list[Tensor] = [base.bias.detach() for base in bases if base.bias is not None]
        assert len(biases) in (0, len(bases))
        self._packed = PackedLinear(torch.cat(weights), torch.cat(biases) if biases else None, precision)
        self._adapted: list[tuple[Adapted, slice]] = []
        end = 0
        for layer, base in zip(layers, bases, strict=True):
            begin, end = end, end + base.out_features
            if isinstance(layer, Adapted):
                self._adapted.append((layer, slice(begin, end)))
            base.weight = None  # type: ignore[assignment]  # the file's mapping goes with the last

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] to [tokens, out of all layers]."""
        out = self._packed.forward(x)  # without what calling a module costs
        for layer, columns in self._adapted:
            layer.add(x, out[:, columns])
        return out
