"""The compiled forward pass as the runner sees it: packs a model's weights, keeps the KV cache, runs steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.interface import KVShape, Segment, zeroed
from engine_worker.compiled import attention, dot, product, team
from engine_worker.compiled.forward import (
    LAYER,
    STAGES,
    STAGES_PER_LAYER,
    STEP,
    grouped,
    run_step,
    scratch_floats,
)
from engine_worker.compiled.low_rank import LowRanks
from engine_worker.compiled.product import DOT
from engine_worker.compiled.support import activation
from engine_worker.compiled.tile import BYTE, FLOAT, HALF, LEVEL
from engine_worker.compiled.vector import MAX_ROWS, WIDTH, padded, panels
from engine_worker.config import Precision
from engine_worker.runner.adapters import LowRank
from engine_worker.runner.model_loader import LoadedModel

log = structlog.get_logger(__name__)

_KIND: Final = {"fp32": FLOAT, "fp16": HALF, "int8": DOT if dot.AVAILABLE else BYTE}
_KV_KIND: Final = {"fp32": FLOAT, "fp16": HALF, "int8": LEVEL}


class CompiledDecoder:
    """Belongs to one thread. Takes the weights out of `loaded.model` as it packs them.

    `keys`, `values`: uint8[layers, blocks, heads, bytes], see `attention`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        shape: KVShape,
        precision: Precision,
        threads: int,
        adapters: Mapping[str, Mapping[str, LowRank]] | None = None,
    ) -> None:
        model, config = loaded.model, loaded.model.config
        began, kind = time.perf_counter(), _KIND[precision]
        self._threads = threads
        self._rotary = model.model.rotary_emb
        self._vocab = model.lm_head.out_features
        self._shape = shape
        self._group = config.num_attention_heads // shape.num_kv_heads
        self._kept: list[Tensor] = []
        lanes = (shape.num_layers, shape.num_blocks, shape.num_kv_heads)
        of_keys, of_values = attention.lane_bytes(_KV_KIND[precision], shape.block_size, shape.head_dim)
        self.keys = zeroed(*lanes, of_keys, dtype=torch.uint8)
        self.values = zeroed(*lanes, of_values, dtype=torch.uint8)
        self.caches = self.keys, self.values

        self._size: int = config.hidden_size
        self._lead = padded(self._size)
        self._inner = padded(config.intermediate_size)
        embed = model.model.embed_tokens
        self._embedding = embed.weight.detach() * getattr(embed, "scalar_embed_scale", 1.0)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Only Gemma 3's rotary embedding is of several kinds, and asks which.
        of_kinds = isinstance(config.rope_parameters.get("full_attention"), dict)
        self._turns = sorted(set(config.layer_types)) if of_kinds else []
        self._low_ranks = LowRanks(adapters or {}, shape.num_layers)
        lm_head = self._keep(product.pack(model.lm_head.weight.detach(), kind))
        self._layers = np.zeros(shape.num_layers, LAYER)
        for number, layer in enumerate(model.model.layers):
            self._layers[number] = self._packed(layer, number, kind)
            for parameter in layer.parameters():
                parameter.data = torch.empty(0)
        model.lm_head.weight = model.model.embed_tokens.weight = None  # the file's mapping goes with the last

        self._step = np.zeros(1, STEP)
        self._set(
            scale=model.model.layers[0].self_attn.scaling,
            epsilon=config.rms_norm_eps,
            cap=getattr(config, "attn_logit_softcapping", None) or 0,
            layers=self._layers.ctypes.data,
            num_layers=shape.num_layers,
            size=self._size,
            lead=self._lead,
            heads=config.num_attention_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            inner=self._inner,
            kind=kind,
            kv_kind=_KV_KIND[precision],
            gelu="gelu" in activation(config),
            final_norm=self._keep_vector(_norm_weight(model.model.norm)),
            lm_head=lm_head,
            vocab_panels=panels(self._vocab),
            block_size=shape.block_size,
        )
        attended = config.num_attention_heads * shape.head_dim
        scratch = max(
            product.scratch_floats(self._size),
            product.scratch_floats(self._inner),
            product.scratch_floats(attended),
            attention.scratch_floats(shape.head_dim),
            scratch_floats(self._size, self._inner, attended),
        )
        self._scratch = torch.zeros(threads, scratch + WIDTH)
        self._set(scratch=self._scratch.data_ptr(), scratch_bytes=self._scratch.stride(0) * 4)
        self._widths = {
            "hidden": self._lead,
            "branch": self._lead if self._layers["attention_norm"].any() else 0,
            "operand": -(-product.tile_bytes(kind, 1, max(self._size, attended, self._inner)) // 4),
            "qkv": padded((config.num_attention_heads + 2 * shape.num_kv_heads) * shape.head_dim),
            "attended": grouped(attended),
            "gated": grouped(self._inner),
        }
        self._buffers: dict[str, Tensor] = {}
        self._logits = torch.zeros(0)
        self._arrived = np.zeros(1, np.int64)
        self._set(arrived=self._arrived.ctypes.data)
        self._times = np.zeros(len(STAGES), np.int64)
        self._set(times=self._times.ctypes.data)
        self._counters = np.zeros(shape.num_layers * STAGES_PER_LAYER + 1, np.int64)
        log.info("compiled.packed", seconds=round(time.perf_counter() - began, 1))

    def forward(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        sampled: Sequence[int],
    ) -> Tensor:
        """Logits, float32[len(sampled), vocabulary], of the rows `sampled`; valid until the next call."""
        tokens, samples = len(token_ids), len(sampled)
        tiles, rows = product.tiling(tokens)
        sample_tiles, sample_rows = product.tiling(samples) if samples else (0, 0)
        self._reserve(tokens + tiles + MAX_ROWS, sample_tiles * sample_rows)
        hidden = self._buffers["hidden"]
        hidden[:tokens, : self._size] = self._embedding[torch.tensor(token_ids)]
        cos, sin = self._rotations(torch.tensor([positions]))
        plan = _Plan(segments, self._shape, self._group)
        wanted = np.asarray(sampled, np.int64)
        self._counters[:] = 0
        self._set(
            tokens=tokens,
            tiles=tiles,
            rows=rows,
            samples=samples,
            sample_tiles=sample_tiles,
            sample_rows=sample_rows,
            rotary=cos.shape[-1],
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            blocks=plan.blocks.ctypes.data,
            offsets=plan.offsets.ctypes.data,
            segments=plan.segments.ctypes.data,
            num_segments=len(plan.segments),
            tables=plan.tables.ctypes.data,
            task_list=plan.tasks.ctypes.data,
            tasks=len(plan.tasks),
            sampled=wanted.ctypes.data,
            adapters=self._low_ranks.select(segments, tiles * rows),
            counters=self._counters.ctypes.data,
            logits=self._logits.data_ptr(),
        )
        team.run(run_step.address, self._step.ctypes.data, self._threads)
        width = self._step["vocab_panels"][0] * WIDTH
        logits = self._logits[: samples * width].view(samples, width)[:, : self._vocab]
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32[kinds, tokens, rotated dimensions] each. `positions`: int64[1, tokens]."""
        like = self._embedding[None, :1]  # says the type
        kinds: list[tuple[str, ...]] = [(kind,) for kind in self._turns] or [()]
        found = [self._rotary(like, positions, *kind) for kind in kinds]
        cos, sin = (torch.cat(parts).contiguous() for parts in zip(*found, strict=True))
        return cos, sin

    def shares(self) -> dict[str, float]:
        """The share that each stage had of the time of all steps so far."""
        return dict(zip(STAGES, self._times / max(1, self._times.sum()), strict=True))

    def scrub(self, blocks: Sequence[int]) -> None:
        self.keys[:, list(blocks)] = 0
        self.values[:, list(blocks)] = 0

    def _packed(self, layer: Any, number: int, kind: int) -> Any:
        attn, mlp = layer.self_attn, layer.mlp
        # Phi-3 has both as one layer already.
        fused = getattr(attn, "qkv_proj", None)
        qkv = [attn.q_proj, attn.k_proj, attn.v_proj] if fused is None else [fused]
        weight = torch.cat([part.weight.detach() for part in qkv])
        fused = getattr(mlp, "gate_up_proj", None)
        gated = (mlp.gate_proj.weight, mlp.up_proj.weight) if fused is None else fused.weight.chunk(2)
        gate, up = (product.pack(part.detach(), kind) for part in gated)
        packed = {
            "input_norm": self._keep_vector(_norm_weight(layer.input_layernorm)),
            "qkv": self._keep(product.pack(weight, kind)),
            "out": self._keep(product.pack(attn.o_proj.weight.detach(), kind)),
            "gate_up": self._keep(torch.stack((gate, up), dim=1)),
            "down": self._keep(product.pack(mlp.down_proj.weight.detach(), kind, depth=self._inner)),
            "keys": self.keys[number].data_ptr(),
            "values": self.values[number].data_ptr(),
            "window": _window(attn) or 0,
        }
        # Gemma has a norm after either part, too, under the name that others give to the one before the MLP.
        after_attention = layer.post_attention_layernorm
        if hasattr(layer, "pre_feedforward_layernorm"):
            packed["attention_norm"] = self._keep_vector(_norm_weight(after_attention))
            packed["post_norm"] = self._keep_vector(_norm_weight(layer.pre_feedforward_layernorm))
            packed["mlp_norm"] = self._keep_vector(_norm_weight(layer.post_feedforward_layernorm))
        else:
            packed["post_norm"] = self._keep_vector(_norm_weight(after_attention))
        if self._turns:
            packed["turn"] = self._turns.index(attn.layer_type)
        if qkv[0].bias is not None:
            packed["qkv_bias"] = self._keep_vector(torch.cat([part.bias for part in qkv]))
        if attn.o_proj.bias is not None:
            packed["out_bias"] = self._keep_vector(attn.o_proj.bias)
        for name in ("query_norm", "key_norm"):
            norm = getattr(attn, f"{name[0]}_norm", None)
            if norm is not None:
                packed[name] = self._keep_vector(_norm_weight(norm))
        row = np.zeros(1, LAYER)
        for name, value in packed.items():
            row[name] = value
        return row[0]

    def _keep(self, tensor: Tensor) -> int:
        """The address of a tensor that lives as long as this decoder."""
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _keep_vector(self, vector: Tensor) -> int:
        """The same, of a copy with zeros to the end of a tile's width."""
        kept = torch.zeros(padded(len(vector)))
        kept[: len(vector)] = vector.detach()
        return self._keep(kept)

    def _set(self, **fields: float) -> None:
        for name, value in fields.items():
            self._step[name] = value

    def _reserve(self, rows: int, sampled_rows: int) -> None:
        """Buffers for at least as many rows."""
        if not self._buffers or len(self._buffers["hidden"]) < rows:
            self._buffers = {name: torch.zeros(rows, width) for name, width in self._widths.items()}
            self._set(**{name: buffer.data_ptr() for name, buffer in self._buffers.items()})
        needed = sampled_rows * int(self._step["vocab_panels"][0]) * WIDTH
        if len(self._logits) < needed:
            self._logits = torch.zeros(needed)


def _norm_weight(norm: Any) -> Tensor:
    """What a normed row is multiplied by: Gemma's weights are kept less one."""
    weight: Tensor = norm.weight.detach()
    return weight + 1.0 if type(norm).__name__.startswith("Gemma") else weight


def _window(attn: Any) -> int | None:
    """Tokens that a layer sees. Mistral's and Phi-3's layers read the configuration, Qwen's hold their own."""
    if attn.config.model_type in ("mistral", "phi3"):
        return getattr(attn.config, "sliding_window", None)
    return getattr(attn, "sliding_window", None)


class _Plan:
    """What of a step all layers share, as the kernels read it: int64 arrays.

    `blocks`, `offsets`: [tokens], where each token's key goes. `segments`: [segments, 4] and `tasks`:
    [tasks, 4] as `attention.attend` and `forward` read them; `tables`: block tables end to end.
    """

    def __init__(self, segments: Sequence[Segment], shape: KVShape, group: int) -> None:
        block_size, kv_heads = shape.block_size, shape.num_kv_heads
        tables: list[NDArray[np.int64]] = []
        blocks, offsets, rows, tasks = [], [], [], []
        at = 0
        for number, segment in enumerate(segments):
            table = np.asarray(segment.blocks, np.int64)[: -(-segment.context_len // block_size)]
            positions = np.arange(segment.context_len - segment.num_tokens, segment.context_len)
            blocks.append(table[positions // block_size])
            offsets.append(positions % block_size)
            rows.append((segment.start, segment.num_tokens, segment.context_len, at))
            tables.append(table)
            at += len(table)
            queries = segment.num_tokens * group
            first = np.arange(0, queries, MAX_ROWS)
            task = np.empty((kv_heads, len(first), 4), np.int64)
            task[..., 0] = number
            task[..., 1] = np.arange(kv_heads)[:, None]
            task[..., 2] = first
            task[..., 3] = np.minimum(MAX_ROWS, queries - first)
            tasks.append(task.reshape(-1, 4))
        self.blocks = np.concatenate(blocks)
        self.offsets = np.concatenate(offsets)
        self.segments = np.array(rows, np.int64)
        self.tables = np.concatenate(tables)
        self.tasks = np.concatenate(tasks)
