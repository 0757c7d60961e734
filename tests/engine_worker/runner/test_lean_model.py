"""The lean forward pass against the modules whose weights it takes: the same logits, for every family."""

from __future__ import annotations

import pytest
import torch

from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.interface import KVShape, Segment
from engine_worker.runner.lean_model import LeanModel
from engine_worker.runner.model_loader import load
from tests.engine_worker.engine.test_families import CASES
from tests.engine_worker.models import make_tiny_model, reference, weighted

BLOCK, TOKENS = 4, 23
ALSO = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-stray-window": ("llama", {"sliding_window": 8}),
    "qwen3-gelu": ("qwen3", {"hidden_act": "gelu"}),
}


@pytest.mark.parametrize("name", [*CASES, *ALSO])
def test_logits_equal_those_of_the_modules(name, tmp_path):
    family, changes = {**CASES, **ALSO}[name]
    model_dir = weighted(make_tiny_model(tmp_path, family, **changes))
    token_ids = torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = reference(model_dir)(input_ids=token_ids[None]).logits[0]
        loaded = load(model_dir)
        attention = CpuAttention(KVShape(loaded.num_layers, 9, loaded.num_kv_heads, BLOCK, loaded.head_dim))
        lean = LeanModel(loaded.model, "fp32")
        blocks = list(range(1, 8))
        # A prompt in two chunks, then a token: each kind of attention.
        for begin, end in ((0, 9), (9, TOKENS - 1), (TOKENS - 1, TOKENS)):
            plan = attention.plan([Segment(0, end - begin, end, blocks[: -(-end // BLOCK)])])
            every = torch.arange(end - begin)
            logits = lean(token_ids[begin:end], torch.arange(begin, end), plan, every)
            torch.testing.assert_close(logits, expected[begin:end], atol=2e-4, rtol=2e-4)
        none = lean(token_ids[:1], torch.zeros(1, dtype=torch.int64), plan, every[:0])
        assert none.shape == (0, expected.shape[1])
