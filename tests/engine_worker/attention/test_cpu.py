"""The CPU backend against attention written out in full."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.cpu_decode import _GAP, _runs
from engine_worker.attention.interface import KVShape, Scoring, Segment

HEADS, KV_HEADS, SIZE, DIM = 6, 2, 4, 8


PLAIN = Scoring(0.3)


def full_attention(query, keys, values, scoring):
    """`query`: [heads, DIM] at the last position of `keys`, `values`: [context, kv_heads, DIM]."""
    if scoring.window is not None:
        keys, values = keys[-scoring.window :], values[-scoring.window :]
    keys = keys.repeat_interleave(HEADS // KV_HEADS, dim=1)
    values = values.repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("hd,chd->hc", query, keys) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    return torch.einsum("hc,chd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize(
    "scoring",
    [PLAIN, *(Scoring(0.3, window, softcap) for window in (1, 3, 4, 9, 40) for softcap in (None, 0.7))],
    ids=str,
)
@pytest.mark.parametrize("layout", ["mixed", "scattered", "in runs"])
@pytest.mark.parametrize("seed", range(5))
def test_chunks_and_decodes_equal_full_attention(seed, layout, scoring):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_blocks = 400 if layout == "scattered" else 60
    backend = CpuAttention(KVShape(2, num_blocks, KV_HEADS, SIZE, DIM))
    # In runs, each sequence that ends leaves a hole.
    free = list(range(50, 0, -1)) if layout == "in runs" else rng.sample(range(1, num_blocks), 50)
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
        query, key, value = torch.cat(parts).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        out = backend.plan(segments).attend(1, query, key, value, scoring)
        for (i, tokens), segment in zip(step, segments, strict=True):
            outputs[i] += out[segment.start : segment.start + tokens]
            computed[i] += tokens
    for made, got in zip(inputs, outputs, strict=True):
        query, key, value = made.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        for at, row in enumerate(got):
            torch.testing.assert_close(
                row, full_attention(query[at], key[: at + 1], value[: at + 1], scoring)
            )


@given(st.sets(st.integers(0, 120), min_size=1).flatmap(lambda found: st.permutations(sorted(found))))
def test_runs_hold_all_blocks_and_little_else(blocks):
    runs, places = _runs(np.array(blocks))
    laid_out = [block for there, _ in runs for block in range(there.start, there.stop)]
    assert [laid_out[place] for place in places] == blocks
    assert [here.start for _, here in runs] == [0, *(here.stop for _, here in runs[:-1])]
    of_nobody = "".join("01"[block in blocks] for block in laid_out)
    assert "0" * (_GAP + 1) not in of_nobody
    for (before, _), (after, _) in pairwise(runs):
        assert after.start - before.stop > _GAP


def test_two_sequences_may_share_blocks():
    torch.manual_seed(0)
    backend = CpuAttention(KVShape(1, 20, KV_HEADS, SIZE, DIM))
    prefix = torch.randn(8, HEADS + 2 * KV_HEADS, DIM)
    backend.plan([Segment(0, 8, 8, [3, 4])]).attend(
        0, *prefix.split((HEADS, KV_HEADS, KV_HEADS), dim=1), PLAIN
    )
    new = torch.randn(2, HEADS + 2 * KV_HEADS, DIM)
    segments = [Segment(0, 1, 9, [3, 4, 5]), Segment(1, 1, 9, [3, 4, 6])]
    out = backend.plan(segments).attend(0, *new.split((HEADS, KV_HEADS, KV_HEADS), dim=1), PLAIN)
    for i in range(2):
        whole = torch.cat((prefix, new[i : i + 1]))
        query, key, value = whole.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        torch.testing.assert_close(out[i], full_attention(query[-1], key, value, PLAIN))


def test_layers_with_and_without_a_window_share_a_step():
    """Fault 3: a window hides keys from its own layer and leaves the cache as it is."""
    torch.manual_seed(0)
    backend = CpuAttention(KVShape(2, 20, KV_HEADS, SIZE, DIM))
    made = torch.randn(19, HEADS + 2 * KV_HEADS, DIM)
    for begin, end in ((0, 7), (7, 18), (18, 19)):
        plan = backend.plan([Segment(0, end - begin, end, [9, 2, 3, 14, 5])])
        step = made[begin:end].split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        for layer, scoring in enumerate((Scoring(0.3, 5), PLAIN)):
            out = plan.attend(layer, *step, scoring)[-1]
            query, key, value = made[:end].split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            torch.testing.assert_close(out, full_attention(query[-1], key, value, scoring))
