"""Whether this machine and this model can be computed here; asked before anything is compiled."""

from __future__ import annotations

from typing import Final

from engine_worker.compiled import team
from engine_worker.compiled.vector import WIDTH
from engine_worker.runner.model_loader import LoadedModel

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")


def unsupported(loaded: LoadedModel) -> str | None:
    """Why this model can't run here; None if it can."""
    config = loaded.model.config
    if not team.AVAILABLE or WIDTH == 0:
        return "no OpenMP runtime of GCC's, or no vector unit that is known"
    if config.model_type not in FAMILIES:
        return f"family {config.model_type!r}"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act!r}"
    if getattr(config, "mlp_bias", False):
        return "biases in the MLP"
    return None
