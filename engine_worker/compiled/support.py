"""Whether this machine and this model can be computed here; asked before anything is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from engine_worker.compiled import team
from engine_worker.compiled.vector import WIDTH
from engine_worker.runner.model_loader import LoadedModel

FAMILIES: Final = ("llama", "mistral", "phi3", "qwen2", "qwen3")
_ADAPTED: Final = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)")
"""Layers that an adapter may change."""


def unsupported(loaded: LoadedModel, adapted: Iterable[str] = ()) -> str | None:
    """Why this model can't run here, with adapters that change the layers `adapted`; None if it can."""
    config = loaded.model.config
    if not team.AVAILABLE or WIDTH == 0:
        return "no OpenMP runtime of GCC's, or no vector unit that is known"
    if config.model_type not in FAMILIES:
        return f"family {config.model_type!r}"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act!r}"
    if getattr(config, "mlp_bias", False):
        return "biases in the MLP"
    if others := sorted(layer for layer in adapted if not _ADAPTED.fullmatch(layer)):
        return f"an adapter of {others[0]}"
    return None
