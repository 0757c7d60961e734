"""The compiled attention against the definition, on what is left of keys and values in each kind of cache."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numba import njit

from engine_worker.compiled.attention import attend, lane_bytes, scratch_floats, store
from engine_worker.compiled.pointwise import capped
from engine_worker.compiled.tile import FLOAT, HALF, LEVEL
from engine_worker.compiled.vector import LANES, MAX_ROWS, WIDTH

pytestmark = pytest.mark.skipif(WIDTH == 0, reason="no vector unit that is known")

HEADS, KV_HEADS = 6, 2
GROUP = HEADS // KV_HEADS


def kept(x, kind):
    """What is left of [tokens, heads, head_dim] in a cache."""
    if kind == LEVEL:
        scales = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
        return (x / scales).round() * scales
    return x.half().float() if kind == HALF else x


class Cache:
    """One layer's blocks, in an order of their own, full of another's numbers."""

    def __init__(self, kind: int, context: int, head_dim: int, block_size: int) -> None:
        self.kind, self.head_dim, self.block_size = kind, head_dim, block_size
        blocks = -(-context // block_size)
        self.table = np.arange(blocks, 0, -1)
        sizes = lane_bytes(kind, block_size, head_dim)
        self.keys, self.values = (
            torch.zeros(blocks + 1, KV_HEADS, size, dtype=torch.uint8) for size in sizes
        )
        stale = torch.full((KV_HEADS, head_dim), 3.0)
        for position in range(blocks * block_size):
            self.store(position, stale, stale)

    def store(self, position, key, value):
        block = int(self.table[position // self.block_size])
        for head in range(KV_HEADS):
            store(
                key[head].numpy(), value[head].numpy(), self.keys.data_ptr(), self.values.data_ptr(), self.kind,
                block * KV_HEADS + head, position % self.block_size, self.block_size,
            )  # fmt: skip

    def attend(self, query, context, window=0, cap=0.0):
        """[tokens, heads, head_dim], the newest tokens of the context."""
        tokens = len(query)
        lines = query.reshape(tokens, -1).contiguous()
        segments = np.array([0, tokens, context, 0])
        out = torch.zeros(tokens, HEADS * self.head_dim)
        scratch = torch.zeros(scratch_floats(self.head_dim) + WIDTH)
        for head in range(KV_HEADS):
            for first in range(0, tokens * GROUP, MAX_ROWS):
                task = np.array([0, head, first, min(MAX_ROWS, tokens * GROUP - first)])
                attend(
                    lines.data_ptr(), lines.shape[1], self.keys.data_ptr(), self.values.data_ptr(), self.kind,
                    HEADS, KV_HEADS, self.head_dim, self.block_size, window, cap, self.table.ctypes.data, segments,
                    task, task[:0], out.data_ptr(), out.shape[1], 1, scratch.data_ptr(),
                )  # fmt: skip
        return out.view(tokens, HEADS, self.head_dim)


def defined(query, keys, values, window=0, cap=0.0):
    context, tokens = len(keys), len(query)
    keys, values = (x.repeat_interleave(GROUP, dim=1).double() for x in (keys, values))
    scores = torch.einsum("thd,chd->htc", query.double(), keys)
    if cap:
        scores = cap * (scores / cap).tanh()
    at = torch.arange(context - tokens, context)[:, None]
    seen = torch.arange(context)[None] <= at
    if window:
        seen &= torch.arange(context)[None] > at - window
    weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
    return torch.einsum("htc,chd->thd", weights, values).float()


@pytest.mark.parametrize("kind", [FLOAT, HALF, LEVEL])
@pytest.mark.parametrize(
    ("tokens", "context", "head_dim", "block_size", "window"),
    [
        (1, 1, 8, 4, 0),
        (1, 300, 64, 64, 0),
        (1, 300, 64, 16, 70),
        (37, 37, 64, 64, 0),
        (23, 290, 40, 48, 0),
        (9, 150, 160, 32, 0),
        (50, 200, 64, 64, 33),
    ],
)
def test_attends_as_defined(kind, tokens, context, head_dim, block_size, window):
    torch.manual_seed(context + head_dim)
    query = torch.randn(tokens, HEADS, head_dim) / head_dim**0.5
    keys, values = torch.randn(2, context, KV_HEADS, head_dim) * 2
    keys[:, :, 3] *= 20  # a channel of outliers, as rotary keys have
    cache = Cache(kind, context, head_dim, block_size)
    for position in range(context):
        cache.store(position, keys[position], values[position])
    want = defined(query, kept(keys, kind), kept(values, kind), window)
    torch.testing.assert_close(cache.attend(query, context, window), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [FLOAT, HALF, LEVEL])
@pytest.mark.parametrize(("spread", "cap"), [(2.0, 50.0), (30.0, 3.0), (0.01, 50.0)])
def test_scores_are_capped(kind, spread, cap):
    torch.manual_seed(1)
    query = torch.randn(9, HEADS, 24)
    keys, values = torch.randn(2, 150, KV_HEADS, 24) * spread
    cache = Cache(kind, 150, 24, 16)
    for position in range(150):
        cache.store(position, keys[position], values[position])
    kept_keys, kept_values = kept(keys, kind), kept(values, kind)
    for window in (0, 33):
        want = defined(query, kept_keys, kept_values, window, cap)
        made = cache.attend(query, 150, window, cap)
        torch.testing.assert_close(made / spread, want / spread, rtol=1e-4, atol=1e-4)
        if spread > 1:  # a control: the cap is felt
            assert not torch.allclose(want, defined(query, kept_keys, kept_values, window), rtol=1e-2)


def test_a_capped_score_is_exact():
    """At any size: the tangent is made in two ways."""
    sizes = torch.logspace(-20, 8, 63 * WIDTH, base=10)
    numbers = torch.cat(
        (sizes, -sizes, torch.tensor([0.0, math.inf, -math.inf, math.nan]), torch.zeros(WIDTH - 4))
    )
    for cap in (50.0, 1.5, 0.01):
        made = numbers.clone()
        _capped(made.data_ptr(), cap, 1, len(made) // LANES, len(made))
        want = (cap * (numbers.double() / cap).tanh()).float()
        torch.testing.assert_close(made, want, rtol=4e-7, atol=0, equal_nan=True)


@njit
def _capped(first, cap, rows, vectors, lead):
    capped(first, np.float32(cap), rows, vectors, lead)


@pytest.mark.parametrize("kind", [FLOAT, HALF, LEVEL])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_seen(kind, which, bad):
    """And by whoever attends to it alone."""
    if (kind, bad) == (HALF, math.inf):
        pytest.skip("float16 keeps the largest number in its place")
    torch.manual_seed(0)
    query, (keys, values) = torch.randn(1, HEADS, 16), torch.randn(2, 20, KV_HEADS, 16)
    {"key": keys, "value": values}[which][19, 1, 5] = bad
    cache = Cache(kind, 20, 16, 16)
    for position in range(20):
        cache.store(position, keys[position], values[position])
    made = cache.attend(query, 20)
    assert not made[0, GROUP:].isfinite().all()
    assert made[0, :GROUP].isfinite().all(), "another key head's queries"


def test_zeros_are_kept_as_zeros():
    cache = Cache(LEVEL, 4, 8, 4)
    for position in range(4):
        cache.store(position, torch.zeros(KV_HEADS, 8), torch.zeros(KV_HEADS, 8))
    assert cache.attend(torch.ones(1, HEADS, 8), 4).eq(0).all()
