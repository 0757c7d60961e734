"""Attention kernels against what the device can do: decode and writing by bandwidth, prefill by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.report import Report, seconds
from engine_worker.attention.cuda import KERNELS, TOLERANCE, Kernel, Layout, worst_error
from engine_worker.attention.interface import KVShape, Scoring, Segment
from engine_worker.attention.kernels import write_kv

BLOCK_SIZE = 64
HEAD_SHAPES = {"32/8x128": (32, 8, 128), "32/8x64": (32, 8, 64), "16/8x128": (16, 8, 128)}
"""Query heads, KV heads, head_dim of Llama 3.1 8B, Llama 3.2 1B and Qwen3 0.6B."""


@dataclass(frozen=True, slots=True)
class Roof:
    """What the device does at best, measured: bytes per second of a copy, operations of a product."""

    bytes_per_s: float
    flops: float

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Roof:
        size = (1 << 30) if device.type == "cuda" else (1 << 22)
        source = torch.empty(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        bandwidth = 2 * size / seconds(lambda: target.copy_(source), device)
        n = 8192 if device.type == "cuda" else 128
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        return cls(bandwidth, 2 * n**3 / seconds(lambda: a @ b, device))


def _heads(*, tiny: bool) -> dict[str, tuple[int, int, int]]:
    return {"2/1x16": (2, 1, 16)} if tiny else HEAD_SHAPES


def usable(num_heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Kernels that give the right numbers here."""
    names = []
    for name, kernel in KERNELS.items():
        shape = KVShape(1, 1, kv_heads, BLOCK_SIZE, dim)
        try:
            if worst_error(kernel, num_heads, shape, dtype, device) < TOLERANCE:
                names.append(name)
        except Exception:  # noqa: S112 - not installed, or not for this device: nothing to measure
            continue
    return names


def _caches(
    segments: list[Segment], kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device, at_least: int
) -> Tensor:
    """[copies, 2, blocks, block_size, kv_heads, dim]: so many copies that none is still in the device's cache."""
    blocks = 1 + max(block for segment in segments for block in segment.blocks)
    one = 2 * blocks * BLOCK_SIZE * kv_heads * dim * dtype.itemsize
    copies = max(1, -(-at_least // one))
    return torch.zeros(copies, 2, blocks, BLOCK_SIZE, kv_heads, dim, dtype=dtype, device=device)


def _segments(lengths: list[tuple[int, int]]) -> list[Segment]:
    segments, start, block = [], 0, 1
    for tokens, context in lengths:
        count = -(-context // BLOCK_SIZE)
        segments.append(Segment(start, tokens, context, range(block, block + count)))
        start, block = start + tokens, block + count
    return segments


def _attend(kernel: Kernel, query: Tensor, caches: Tensor, layout: Layout) -> None:
    for copy in caches:
        kernel(query, copy[0], copy[1], layout, Scoring(float(query.shape[-1] ** -0.5)))


def decode(report: Report, roof: Roof, device: torch.device, dtype: torch.dtype, *, tiny: bool) -> None:
    for label, (heads, kv_heads, dim) in _heads(tiny=tiny).items():
        names = usable(heads, kv_heads, dim, dtype, device)
        for batch, context in [(2, 64)] if tiny else [(1, 4096), (8, 4096), (64, 4096), (256, 2048)]:
            segments = _segments([(1, context)] * batch)
            caches = _caches(segments, kv_heads, dim, dtype, device, 1 if tiny else 256 << 20)
            query = torch.randn(batch, heads, dim, device=device, dtype=dtype)
            layout = Layout.of(segments, BLOCK_SIZE, device)
            read = len(caches) * batch * 2 * context * kv_heads * dim * dtype.itemsize
            for name in names:
                run = partial(_attend, KERNELS[name], query, caches, layout)
                rate = read / seconds(run, device)
                report.add(
                    f"decode attention, {name}",
                    f"{label}, {batch} x {context}",
                    f"{rate / 1e9:.0f} GB/s",
                    f"{rate / roof.bytes_per_s:.0%} of a copy",
                )


def prefill(report: Report, roof: Roof, device: torch.device, dtype: torch.dtype, *, tiny: bool) -> None:
    for label, (heads, kv_heads, dim) in list(_heads(tiny=tiny).items())[:2]:
        names = usable(heads, kv_heads, dim, dtype, device)
        for batch, tokens, context in (
            [(1, 64, 64)] if tiny else [(1, 8192, 8192), (8, 1024, 1024), (1, 512, 8192)]
        ):
            segments = _segments([(tokens, context)] * batch)
            caches = _caches(segments, kv_heads, dim, dtype, device, 1)
            query = torch.randn(batch * tokens, heads, dim, device=device, dtype=dtype)
            layout = Layout.of(segments, BLOCK_SIZE, device)
            seen = tokens * (context - tokens) + tokens * (tokens + 1) // 2
            for name in names:
                run = partial(_attend, KERNELS[name], query, caches, layout)
                rate = 4 * batch * heads * dim * seen / seconds(run, device)
                report.add(
                    f"prefill attention, {name}",
                    f"{label}, {batch} x {tokens} of {context}",
                    f"{rate / 1e12:.2f} TFLOP/s",
                    f"{rate / roof.flops:.0%} of a product",
                )


def write(report: Report, roof: Roof, device: torch.device, dtype: torch.dtype, *, tiny: bool) -> None:
    tokens, heads, dim = (32, 2, 16) if tiny else (8192, 8, 128)
    caches = torch.zeros(2, tokens // BLOCK_SIZE + 2, BLOCK_SIZE, heads, dim, dtype=dtype, device=device)
    key, value = torch.randn(2, tokens, heads, dim, device=device).to(dtype)
    slots = torch.randperm(tokens, device=device) + BLOCK_SIZE
    rate = 4 * key.nbytes / seconds(lambda: write_kv(key, value, caches[0], caches[1], slots), device)
    report.add(
        "KV write",
        f"{tokens} tokens, {heads}x{dim}",
        f"{rate / 1e9:.0f} GB/s",
        f"{rate / roof.bytes_per_s:.0%} of a copy",
    )
