"""Whether this machine and this model can be computed here; asked before anything is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from transformers import PretrainedConfig

from engine_worker.compiled import team
from engine_worker.compiled.vector import WIDTH
from engine_worker.runner.model_loader import LoadedModel

_ADAPTED: Final = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)")
"""Layers that an adapter may change."""
_ACTIVATIONS: Final = ("silu", "swish", "gelu_pytorch_tanh")


def activation(config: PretrainedConfig) -> str:
    """The name of the function in its MLP's gate."""
    name: str = getattr(config, "hidden_activation", None) or config.hidden_act
    return name


def unsupported(loaded: LoadedModel, adapted: Iterable[str] = ()) -> str | None:
    """Why this model can't run here, with adapters that change the layers `adapted`; None if it can."""
    config = loaded.model.config
    if not team.AVAILABLE or WIDTH == 0:
        return "no OpenMP runtime of GCC's, or no vector unit that is known"
    if activation(config) not in _ACTIVATIONS:
        return f"activation {activation(config)!r}"
    if getattr(config, "mlp_bias", False):
        return "biases in the MLP"
    if others := sorted(layer for layer in adapted if not _ADAPTED.fullmatch(layer)):
        return f"an adapter of {others[0]}"
    return None
