"""The CPU backend against attention written out in full."""

from __future__ import annotations

import random

import pytest
import torch

from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.interface import KVShape, Segment

HEADS, KV_HEADS, SIZE, DIM = 6, 2, 4, 8


def full_attention(query, keys, values, scale):
    """`query`: [heads, DIM] at the last position of `keys`, `values`: [context, kv_heads, DIM]."""
    keys = keys.repeat_interleave(HEADS // KV_HEADS, dim=1)
    values = values.repeat_interleave(HEADS // KV_HEADS, dim=1)
    weights = (torch.einsum("hd,chd->hc", query, keys) * scale).softmax(-1)
    return torch.einsum("hc,chd->hd", weights, values)


@pytest.mark.parametrize("scattered", [False, True], ids=["dense", "scattered"])
@pytest.mark.parametrize("seed", range(5))
def test_chunks_and_decodes_equal_full_attention(seed, scattered):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_blocks = 400 if scattered else 60
    backend = CpuAttention(KVShape(2, num_blocks, KV_HEADS, SIZE, DIM), torch.float32)
    free = rng.sample(range(1, num_blocks), 50)
    contexts = [rng.randrange(1, 30) for _ in range(6)]
    tables = [[free.pop() for _ in range(-(-n // SIZE))] for n in contexts]
    inputs = [torch.randn(n, HEADS + 2 * KV_HEADS, DIM) for n in contexts]
    outputs = [[] for _ in contexts]
    computed = [0] * len(contexts)
    while any(done < n for done, n in zip(computed, contexts, strict=True)):
        step = []
        for i, n in enumerate(contexts):
            if computed[i] < n:
                step.append((i, min(rng.choice((1, 1, 2, 5, 11)), n - computed[i])))
        step.sort(key=lambda item: item[1] > 1)
        segments, parts = [], []
        for i, tokens in step:
            start = sum(len(part) for part in parts)
            segments.append(Segment(start, tokens, computed[i] + tokens, tables[i]))
            parts.append(inputs[i][computed[i] : computed[i] + tokens])
        packed = torch.cat(parts).transpose(0, 1)[None]
        query, key, value = packed.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        out = backend.plan(segments).attend(1, query, key, value, 0.3)[0]
        for (i, tokens), segment in zip(step, segments, strict=True):
            outputs[i] += out[segment.start : segment.start + tokens]
            computed[i] += tokens
    for made, got in zip(inputs, outputs, strict=True):
        query, key, value = made.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        for at, row in enumerate(got):
            torch.testing.assert_close(row, full_attention(query[at], key[: at + 1], value[: at + 1], 0.3))


def test_two_sequences_may_share_blocks():
    torch.manual_seed(0)
    backend = CpuAttention(KVShape(1, 20, KV_HEADS, SIZE, DIM), torch.float32)
    prefix = torch.randn(1, HEADS + 2 * KV_HEADS, 8, DIM)
    backend.plan([Segment(0, 8, 8, [3, 4])]).attend(0, *prefix.split((HEADS, KV_HEADS, KV_HEADS), dim=1), 0.3)
    new = torch.randn(1, HEADS + 2 * KV_HEADS, 2, DIM)
    segments = [Segment(0, 1, 9, [3, 4, 5]), Segment(1, 1, 9, [3, 4, 6])]
    out = backend.plan(segments).attend(0, *new.split((HEADS, KV_HEADS, KV_HEADS), dim=1), 0.3)[0]
    for i in range(2):
        whole = torch.cat((prefix[0], new[0, :, i : i + 1]), dim=1).transpose(0, 1)
        query, key, value = whole.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        torch.testing.assert_close(out[i], full_attention(query[-1], key, value, 0.3))
