"""The forward pass of `transformers`' decoders in few operations: their weights, our order of calls.

A norm is five operations in `transformers`, a rotary embedding ten, and a layer some seventy. On the CPU a
step of 20 tokens pays more for calling most of them than for what they compute, and while one thread calls
the other sleeps. Here a layer is some thirty. What differs from family to family is read off the modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine_worker.attention.interface import AttentionPlan, Scoring
from engine_worker.config import Precision
from engine_worker.runner.linears import Projection
from engine_worker.runner.scorings import scorings

_Rotations = dict[str, tuple[Tensor, Tensor]]
"""By kind of layer: cosines and sines, each [tokens, 1, rotated dimensions], the first half of sines negated."""


class LeanModel:
    """Takes the weights out of `model` as it packs them."""

    def __init__(self, model: PreTrainedModel, precision: Precision) -> None:
        inner = model.model
        self._embed: nn.Module = inner.embed_tokens
        self._rotary: nn.Module = inner.rotary_emb
        self._layers = [
            _Layer(layer, scoring, precision)
            for layer, scoring in zip(inner.layers, scorings(model), strict=True)
        ]
        # Only Gemma 3's rotary embedding is of several kinds, and asks which.
        self._kinds = sorted({layer.kind for layer in self._layers if layer.kind})
        self._norm = _Norm(inner.norm)
        self._head = Projection([model.lm_head], precision)
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)

    def __call__(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, sampled: Tensor) -> Tensor:
        """Logits, float32[len(sampled), vocabulary]. `token_ids`, `positions`, `sampled`: int64, flat."""
        x: Tensor = self._embed(token_ids)
        rotations = self._rotations(x, positions[None])
        for layer in self._layers:
            layer.add_to(x, rotations, plan)
        # Only these rows go through lm_head, the largest product of all.
        logits = self._head(self._norm(x.index_select(0, sampled)))
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits

    def _rotations(self, x: Tensor, positions: Tensor) -> _Rotations:
        if not self._kinds:
            found = {"": self._rotary(x, positions)}
        else:
            found = {kind: self._rotary(x, positions, kind) for kind in self._kinds}
        rotations = {kind: (cos[0, :, None], sin[0, :, None]) for kind, (cos, sin) in found.items()}
        for _, sin in rotations.values():
            sin[..., : sin.shape[-1] // 2].neg_()
        return rotations


class _Layer:
    def __init__(self, module: Any, scoring: Scoring, precision: Precision) -> None:
        attn, mlp = module.self_attn, module.mlp
        self._number: int = attn.layer_idx
        self._scoring = scoring
        several_kinds = isinstance(attn.config.rope_parameters.get("full_attention"), dict)
        self.kind: str = attn.layer_type if several_kinds else ""
        self._head_dim: int = attn.head_dim
        self._qkv = _projection(attn, ("qkv_proj",), ("q_proj", "k_proj", "v_proj"), precision)
        self._out = Projection([attn.o_proj], precision)
        self._query_norm, self._key_norm = _norm(attn, "q_norm"), _norm(attn, "k_norm")
        self._kv_heads: int = attn.config.num_key_value_heads
        self._heads: int = attn.config.num_attention_heads
        self._gate_up = _projection(mlp, ("gate_up_proj",), ("gate_proj", "up_proj"), precision)
        self._down = Projection([mlp.down_proj], precision)
        self._act: nn.Module = getattr(mlp, "act_fn", None) or mlp.activation_fn
        self._before_attn = _Norm(module.input_layernorm)
        # Gemma has a norm after either part, too, under the name that others give to the one before the MLP.
        wrapped = hasattr(module, "pre_feedforward_layernorm")
        self._after_attn = _norm(module, "post_attention_layernorm") if wrapped else None
        self._before_mlp = _Norm(
            module.pre_feedforward_layernorm if wrapped else module.post_attention_layernorm
        )
        self._after_mlp = _norm(module, "post_feedforward_layernorm")

    def add_to(self, x: Tensor, rotations: _Rotations, plan: AttentionPlan) -> None:
        """`x`: [tokens, size], the residual stream."""
        attended = self._out(self._attend(self._before_attn(x), rotations, plan))
        x.add_(attended if self._after_attn is None else self._after_attn(attended))
        gate, up = self._gate_up(self._before_mlp(x)).chunk(2, dim=-1)
        added = self._down(self._act(gate).mul_(up))
        x.add_(added if self._after_mlp is None else self._after_mlp(added))

    def _attend(self, x: Tensor, rotations: _Rotations, plan: AttentionPlan) -> Tensor:
        tokens, heads, kv_heads = len(x), self._heads, self._kv_heads
        qkv = self._qkv(x).view(tokens, heads + 2 * kv_heads, self._head_dim)
        rotation = rotations[self.kind]
        if self._query_norm is None or self._key_norm is None:
            rotated = _rotated(qkv[:, : heads + kv_heads], *rotation)
            query, key = rotated[:, :heads], rotated[:, heads:]
        else:
            query = _rotated(self._query_norm(qkv[:, :heads]), *rotation)
            key = _rotated(self._key_norm(qkv[:, heads : heads + kv_heads]), *rotation)
        value = qkv[:, heads + kv_heads :]
        return plan.attend(self._number, query, key, value, self._scoring).view(tokens, -1)


class _Norm:
    """x over its root mean square, times a weight: Zhang and Sennrich, 2019 (arXiv 1910.07467)."""

    def __init__(self, module: Any) -> None:
        weight: Tensor = module.weight.detach()
        # Gemma's weights are kept less one.
        self._weight = weight + 1.0 if type(module).__name__.startswith("Gemma") else weight
        self._epsilon = torch.tensor([[getattr(module, "variance_epsilon", None) or module.eps]])

    def __call__(self, x: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x, 2, -1, True)
        scale = torch.addcmul(self._epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(self._weight)


def _norm(parent: nn.Module, name: str) -> _Norm | None:
    module = getattr(parent, name, None)
    return None if module is None else _Norm(module)


def _projection(
    parent: nn.Module, joined: Sequence[str], apart: Sequence[str], precision: Precision
) -> Projection:
    """Of layers on one input: Phi-3 has them as one already."""
    names = joined if hasattr(parent, joined[0]) else apart
    return Projection([getattr(parent, name) for name in names], precision)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x`: [tokens, heads, head_dim], of which the first dimensions are rotated, as pairs of two halves."""
    size = cos.shape[-1]
    if size == x.shape[-1]:
        return (x * cos).addcmul_(x.roll(size // 2, -1), sin)
    return torch.cat([_rotated(x[..., :size], cos, sin), x[..., size:]], dim=-1)
