"""Which models of `transformers` run in the engine, and what of them would give wrong tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from transformers import PretrainedConfig

from engine_worker.engine.errors import UnsupportedModel

SUPPORTED: Final = ("gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Each is proven token for token against `transformers` in tests/engine_worker/engine/test_families.py."""


def refuse_family(model_type: str | None) -> None:
    if model_type not in SUPPORTED:
        raise UnsupportedModel(
            f"architecture {model_type!r} is not served; served are: {', '.join(SUPPORTED)}"
        )


def refuse_unsupported(config: PretrainedConfig) -> None:
    """Raises UnsupportedModel, naming the family or the feature."""
    refuse_family(config.model_type)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel("weights quantised by other tools are not served")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel("attention to later tokens (use_bidirectional_attention) is not served")
    if any("dynamic" in rope.get("rope_type", "") for rope in _ropes(config)):
        # transformers takes its frequencies from the longest sequence of a batch: each request's tokens
        # would depend on the others.
        raise UnsupportedModel("rotary embeddings with rope_type 'dynamic' are not served")


def context_length(config: PretrainedConfig) -> int:
    """Prompt plus output that the model is served with."""
    # Beyond its original length longrope changes the frequencies of every token, and transformers does so
    # for the whole batch: other requests' tokens, and keys that are cached already, would be wrong.
    short: list[int] = [
        rope["original_max_position_embeddings"]
        for rope in _ropes(config)
        if rope.get("rope_type") == "longrope" and rope.get("original_max_position_embeddings")
    ]
    longest: int = config.max_position_embeddings
    return min([longest, *short])


def _ropes(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """The parameters of each rotary embedding: one, or one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]
