"""Layers of real models' shapes, random: the second-level cache holds less of them than of tiny ones."""

from __future__ import annotations

import pytest
import torch

from engine_worker.attention.interface import KVShape, Segment
from engine_worker.compiled.vector import WIDTH
from engine_worker.config import EngineConfig
from engine_worker.runner.decoder import make_decoder
from engine_worker.runner.model_loader import load
from tests.engine_worker.models import make_tiny_model, reference

pytestmark = pytest.mark.skipif(WIDTH == 0, reason="no vector unit that is known")

LENGTHS = [29, 1, 150]
BLOCK = 32
SHAPES = {
    # Qwen3 0.6B, Llama 3.2 1B, Gemma 2 2B.
    "qwen3": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "llama": {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    "gemma2": {"hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
}
INNER = {"qwen3": 3072, "llama": 8192, "gemma2": 9216}


@pytest.fixture(scope="module", params=SHAPES)
def wide(request, tmp_path_factory):
    shape = SHAPES[request.param]
    model_dir = tmp_path_factory.mktemp("wide")
    rest = {"intermediate_size": INNER[request.param], "num_hidden_layers": 1, "initializer_range": 0.03}
    return make_tiny_model(model_dir, request.param, **shape, **rest), shape


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp16", 2e-3), ("int8", 6e-2)])
def test_logits_are_transformers(wide, precision, tolerance):
    model_dir, shape = wide
    config = EngineConfig(model_dir=model_dir, precision=precision, kernels="compiled", threads=2)
    cache = KVShape(1, 16, shape["num_key_value_heads"], BLOCK, shape["head_dim"])
    decoder = make_decoder(config, load(model_dir), cache)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 250, (length,), generator=generator) for length in LENGTHS]
    order = sorted(range(len(prompts)), key=lambda number: LENGTHS[number] > 1)  # those of one token first
    tokens, positions, segments, free = [], [], [], iter(range(16))
    for number in order:
        length = LENGTHS[number]
        blocks = [next(free) for _ in range(-(-length // BLOCK))]
        segments.append(Segment(len(tokens), length, length, blocks))
        tokens += prompts[number].tolist()
        positions += range(length)
    logits = decoder.forward(tokens, positions, segments, list(range(len(tokens))))
    model = reference(model_dir)
    with torch.no_grad():
        want = torch.cat([model(prompts[number][None]).logits[0] for number in order])
    assert (logits - want).norm() / want.norm() < tolerance
