"""What an attention backend is, and how `transformers` models come to call it.

Models run unmodified on one packed row of tokens, `[1, total_tokens]`. Their attention layers call
the function registered here, which hands query, key and value to the step's plan; the plan knows
which tokens belong to which sequence and where its keys and values lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

IMPLEMENTATION: Final = "weir"
"""The `attn_implementation` of a model that runs in the engine."""

PLAN: Final = "weir_plan"
"""The keyword by which a step's plan travels through the model's forward."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one sequence in a packed batch, and all of its context.

    Query token i of the segment sits at position `context_len - num_tokens + i` and sees that and
    every earlier position.
    """

    start: int
    """Index of its first token in the packed row."""
    num_tokens: int
    context_len: int
    """Tokens up to and including this step's."""
    blocks: Sequence[int]
    adapter: str = ""
    """The LoRA adapter that its tokens go through; "": none."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Of the cache of one model."""

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Keys and values of one block in all layers; of int8, with a float32 scale for each head of a token."""
        of_token = self.head_dim * dtype.itemsize + (4 if dtype == torch.int8 else 0)
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * of_token


def zeroed(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros that the system maps only once they are written: a cache costs what is in it.

    torch.zeros writes them all. Zeros, and not whatever was there: a masked score is -inf whatever the
    key was, unless it was NaN.
    """
    # torch has no way to name a numpy type after its own but by a tensor.
    return torch.from_numpy(np.zeros(shape, torch.empty(0, dtype=dtype).numpy().dtype))


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns products of queries and keys into scores. Layers of one model may differ."""

    scale: float
    window: int | None = None
    """Tokens that a query sees, its own included; None: all up to its own. The cache keeps all of them."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap): Gemma 2 (arXiv 2408.00118), section 2."""

    def cap_(self, scores: Tensor) -> None:
        """In place."""
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)


class AttentionPlan(Protocol):
    """One step's attention, for each layer in turn."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Stores the step's keys and values, then attends.

        `query`: [tokens, heads, head_dim]; `key`, `value`: [tokens, kv_heads, head_dim].
        Returns [tokens, heads, head_dim].
        """


class AttentionBackend(Protocol):
    """Owns the KV cache's tensors."""

    def plan(self, segments: Sequence[Segment]) -> AttentionPlan:
        """Everything that all layers share. Segments of one token come first."""

    def scrub(self, blocks: Sequence[int]) -> None:
        """Overwrites blocks that may hold NaN, which a mask of -inf does not stop."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that attention layers of `transformers` call.

    `query`: [1, heads, tokens, head_dim]; `key`, `value`: [1, kv_heads, tokens, head_dim].
    Returns [1, tokens, heads, head_dim].
    """
    plan: AttentionPlan | None = kwargs.get(PLAN)
    if plan is None:
        # An ordinary forward on this module would silently lose causality: there is no mask.
        raise RuntimeError(f"attention {IMPLEMENTATION!r} runs only inside the engine, which passes {PLAN!r}")
    if kwargs.get("s_aux") is not None:
        raise RuntimeError(
            "attention with sinks (s_aux) is not computed here, and no family that is served has it"
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, kwargs.get("sliding_window"), kwargs.get("softcap"))
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    return plan.attend(layer, query, key, value, scoring)[None], None


def register() -> None:
    """Makes `transformers` know the implementation. Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    # Without a mask function of that name transformers would build a dense mask for the packed row.
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)
