"""Attention on a GPU: a paged cache, and the fastest kernels that are proven to work on this machine.

Tried in order: torch's own `varlen_attn`, whose block table needs FlashAttention 3; the `flash_attn`
package, whose paged form takes blocks of multiples of 256 only; the kernels of this project, which
take anything. What is installed says little (a build, a GPU's generation, a block size can each rule
a kernel out), so each is tried on a small problem, and its result compared, before it is chosen.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_worker.attention.interface import KVShape, Scoring, Segment
from engine_worker.attention.kernels import decode_attention, prefill_attention, write_kv

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a step's tokens and contexts lie; all int32, on the device. Single tokens come first.

    `slots`: [num_tokens], block * block_size + offset. `block_tables`: [num_seqs, most blocks of any].
    `query_starts`: [num_seqs + 1]; `prefill_starts`: the same for the chunks alone, counted from the
    first of them. `seq_lens`: [num_seqs]; `context_starts`: [num_seqs + 1], their running sum.
    """

    num_decodes: int
    max_query_len: int
    max_seq_len: int
    slots: Tensor
    block_tables: Tensor
    query_starts: Tensor
    prefill_starts: Tensor
    seq_lens: Tensor
    context_starts: Tensor

    @staticmethod
    def parts(segments: Sequence[Segment], block_size: int) -> HostLayout:
        counts = np.array([segment.num_tokens for segment in segments])
        lengths = np.array([segment.context_len for segment in segments])
        used = -(-lengths // block_size)
        tables = np.zeros((len(segments), used.max()), dtype=np.int32)
        slots = []
        for row, segment in enumerate(segments):
            tables[row, : used[row]] = segment.blocks[: used[row]]
            positions = np.arange(segment.context_len - segment.num_tokens, segment.context_len)
            slots.append(tables[row, positions // block_size] * block_size + positions % block_size)
        starts = np.concatenate([[0], counts.cumsum()])
        decodes = int((counts == 1).sum())
        arrays = [
            np.concatenate(slots),
            tables,
            starts,
            starts[decodes:] - decodes,
            lengths,
            np.concatenate([[0], lengths.cumsum()]),
        ]
        return HostLayout(decodes, int(counts.max()), int(lengths.max()), arrays)

    @classmethod
    def of(cls, segments: Sequence[Segment], block_size: int, device: torch.device) -> Layout:
        """In one copy: on a GPU each has a price of its own, whatever its size."""
        parts = cls.parts(segments, block_size)
        flat = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts.arrays]).astype(np.int32))
        if device.type == "cuda":
            # From pinned memory, so that the host does not wait. torch reuses that memory only after the copy.
            flat = flat.pin_memory()
        sizes = [part.size for part in parts.arrays]
        return parts.on(torch.split(flat.to(device, non_blocking=True), sizes))


@dataclass(frozen=True, slots=True)
class HostLayout:
    """A layout whose arrays are not on the device yet, in the order of its fields."""

    num_decodes: int
    max_query_len: int
    max_seq_len: int
    arrays: list[NDArray[Any]]

    def on(self, pieces: Sequence[Tensor]) -> Layout:
        """`pieces`: the arrays on the device, flat, int32."""
        views = (piece.view(array.shape) for piece, array in zip(pieces, self.arrays, strict=True))
        return Layout(self.num_decodes, self.max_query_len, self.max_seq_len, *views)


Kernel = Callable[[Tensor, Tensor, Tensor, Layout, Scoring], Tensor]
"""(query [tokens, heads, head_dim], keys, values, layout, scoring) to [tokens, heads, head_dim]."""


class PagedAttention:
    """Keys and values of all layers, each [layers, blocks, block_size, kv_heads, head_dim]."""

    def __init__(
        self,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_heads: int,
        scorings: Collection[Scoring] = (),
    ) -> None:
        """`scorings`: those of the model's layers; none: plain causal attention."""
        self.shape = shape
        self.device = device
        self.name, self.kernel = choose(num_heads, shape, dtype, device, scorings)
        size = (shape.num_layers, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)

    def plan(self, segments: Sequence[Segment]) -> PagedPlan:
        return PagedPlan(self, Layout.of(segments, self.shape.block_size, self.device))

    def scrub(self, blocks: Sequence[int]) -> None:
        self.keys[:, list(blocks)] = 0
        self.values[:, list(blocks)] = 0


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """See AttentionPlan."""

    cache: PagedAttention
    layout: Layout

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        write_kv(key, value, keys, values, self.layout.slots)
        return self.cache.kernel(query, keys, values, self.layout, scoring)


def choose(
    num_heads: int,
    shape: KVShape,
    dtype: torch.dtype,
    device: torch.device,
    scorings: Collection[Scoring] = (),
) -> tuple[str, Kernel]:
    """Name and kernel: the first that gives the right numbers for this model on this device."""
    scorings = scorings or [_plain(shape)]
    for name, kernel in KERNELS.items():
        if name == "triton":
            break
        if device.type != "cuda":
            continue
        try:
            worst = max(worst_error(kernel, num_heads, shape, dtype, device, each) for each in scorings)
        except Exception as error:
            # Whatever it is that does not fit here (an import, a shape, a GPU), the next one may do.
            reason = f"{type(error).__name__}: {error}"[:300]
            log.info("attention.kernel_unusable kernel=%s reason=%s", name, reason)
            continue
        if worst < TOLERANCE:
            log.info("attention.kernel_chosen kernel=%s", name)
            return name, kernel
        log.warning("attention.kernel_wrong kernel=%s error=%s", name, worst)
    return "triton", KERNELS["triton"]


TOLERANCE: Final = 0.03
"""Of outputs about 1 in size, in bfloat16."""


def _plain(shape: KVShape) -> Scoring:
    return Scoring(float(shape.head_dim**-0.5))


def worst_error(
    kernel: Kernel,
    num_heads: int,
    shape: KVShape,
    dtype: torch.dtype,
    device: torch.device,
    scoring: Scoring | None = None,
) -> float:
    """Largest difference from attention written out, for a token and a chunk whose contexts end in mid-block."""
    size = shape.block_size
    scoring = scoring or _plain(shape)
    if scoring.window is not None:
        # One that hides some of so short a context, or a kernel that ignores windows would pass.
        scoring = replace(scoring, window=min(scoring.window, size))
    segments = [Segment(0, 1, size + 1, [3, 1]), Segment(1, 5, size + 3, [2, 4])]
    random = torch.Generator(device).manual_seed(0)
    cache = torch.randn(2, 5, size, shape.num_kv_heads, shape.head_dim, generator=random, device=device).to(
        dtype
    )
    query = torch.randn(6, num_heads, shape.head_dim, generator=random, device=device).to(dtype)
    got = kernel(query, cache[0], cache[1], Layout.of(segments, size, device), scoring)
    worst = 0.0
    for segment in segments:
        tokens = slice(segment.start, segment.start + segment.num_tokens)
        key, value = cache[:, list(segment.blocks)].float().flatten(1, 2)[:, : segment.context_len]
        group = num_heads // shape.num_kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query[tokens].float(), key) * scoring.scale
        if scoring.softcap is not None:
            scores = (scores / scoring.softcap).tanh() * scoring.softcap
        before = segment.context_len - segment.num_tokens
        hidden = torch.ones_like(scores[0]).triu(before + 1).bool()
        if scoring.window is not None:
            hidden |= torch.ones_like(scores[0]).tril(before - scoring.window).bool()
        want = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
        worst = max(worst, float((got[tokens].float() - want).abs().nan_to_num(nan=torch.inf).max()))
    return worst


def _left(scoring: Scoring) -> int:
    """Tokens before its own that a query sees, as FlashAttention counts them; -1: all."""
    return -1 if scoring.window is None else scoring.window - 1


def _varlen(query: Tensor, keys: Tensor, values: Tensor, layout: Layout, scoring: Scoring) -> Tensor:
    if scoring.softcap is not None:
        raise ValueError("varlen_attn has no softcap")
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    out: Tensor = varlen.varlen_attn(
        query,
        keys,
        values,
        layout.query_starts,
        None,
        layout.max_query_len,
        layout.max_seq_len,
        scale=scoring.scale,
        window_size=(_left(scoring), 0),
        enable_gqa=True,
        seqused_k=layout.seq_lens,
        block_table=layout.block_tables,
    )
    return out


def _flash(query: Tensor, keys: Tensor, values: Tensor, layout: Layout, scoring: Scoring) -> Tensor:
    flash: Any = importlib.import_module("flash_attn")
    out: Tensor = flash.flash_attn_varlen_func(
        query,
        keys,
        values,
        layout.query_starts,
        layout.context_starts,
        layout.max_query_len,
        layout.max_seq_len,
        softmax_scale=scoring.scale,
        causal=True,
        window_size=(_left(scoring), 0),
        softcap=scoring.softcap or 0.0,
        block_table=layout.block_tables,
    )
    return out


def _triton(query: Tensor, keys: Tensor, values: Tensor, layout: Layout, scoring: Scoring) -> Tensor:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    n, tables, lengths = layout.num_decodes, layout.block_tables, layout.seq_lens
    if n:
        decode_attention(
            query[:n],
            keys,
            values,
            tables[:n],
            lengths[:n],
            scale=scoring.scale,
            sliding_window=scoring.window,
            softcap=scoring.softcap,
            out=out[:n],
        )
    if n < lengths.shape[0]:
        prefill_attention(
            query[n:],
            keys,
            values,
            tables[n:],
            layout.prefill_starts,
            lengths[n:],
            max_query_len=layout.max_query_len,
            scale=scoring.scale,
            sliding_window=scoring.window,
            softcap=scoring.softcap,
            out=out[n:],
        )
    return out


KERNELS: Final[dict[str, Kernel]] = {"varlen_attn": _varlen, "flash_attn": _flash, "triton": _triton}
