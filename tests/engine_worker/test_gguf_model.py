"""A GGUF file of each family gives the tokens of the model that it was made from."""

from __future__ import annotations

import random

import pytest
from safetensors.torch import load_file

from engine_worker.config import EngineConfig
from engine_worker.engine.build import build
from engine_worker.gguf_model import _ROPE_FACTORS
from engine_worker.model_store import ModelNotReadable, ensure_model
from engine_worker.runner.families import SUPPORTED
from tests.engine_worker.driving import request, run_tokens
from tests.engine_worker.gguf_files import write_gguf
from tests.engine_worker.models import greedy, make_tiny_model, reference, weighted

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES = {
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "num_hidden_layers": 6,
        "final_logit_softcapping": None,
    },
    "llama": {"rope_parameters": _LLAMA3},
    "mistral": {"sliding_window": 8},
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": None, "rope_theta": 1000.0},
    "qwen2": {"rope_theta": 1000.0},
    "qwen3": {"head_dim": 16},
}
_RANDOM = random.Random(2)
PROMPTS = [[_RANDOM.randrange(256) for _ in range(n)] for n in (1, 9, 30)]


def test_every_served_family_is_here():
    assert set(CASES) == set(SUPPORTED)


@pytest.mark.parametrize("family", CASES)
def test_the_same_weights_and_tokens(tmp_path, family):
    source = weighted(make_tiny_model(tmp_path / "source", family, **CASES[family]))
    gguf = write_gguf(source, tmp_path / "tiny.gguf")
    directory = ensure_model(str(gguf), tmp_path / "models", progress=False)
    ours, theirs = (load_file(place / "model.safetensors") for place in (directory, source))
    # Gemma's norms go through an addition and a subtraction of one.
    for name, weight in theirs.items():
        assert (ours[name] - weight).abs().max() < 1e-6, name
    model = reference(source)
    built = build(
        EngineConfig(model_dir=directory, block_size=4, num_kv_blocks=65, threads=1, precision="fp32")
    )
    requests = [request(str(i), prompt, 12) for i, prompt in enumerate(PROMPTS)]
    assert run_tokens(built, *requests) == [greedy(model, prompt, 12) for prompt in PROMPTS]


def test_what_would_be_ignored_is_refused(tmp_path):
    source = make_tiny_model(tmp_path / "source", "llama")
    gguf = write_gguf(source, tmp_path / "tiny.gguf", rope__scaling__type="yarn", rope__scaling__factor=4.0)
    with pytest.raises(ModelNotReadable, match="scaled by 'yarn'"):
        ensure_model(str(gguf), tmp_path / "models", progress=False)
    odd = {**_LLAMA3, "factor": 5.0}
    source = make_tiny_model(tmp_path / "odd", "llama", rope_parameters=odd)
    with pytest.raises(ModelNotReadable, match=_ROPE_FACTORS):
        ensure_model(str(write_gguf(source, tmp_path / "odd.gguf")), tmp_path / "models", progress=False)
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


def test_an_unserved_family_is_refused_by_name(tmp_path):
    source = make_tiny_model(tmp_path / "source", "starcoder2", norm_epsilon=1e-5, rms_norm_eps=1e-5)
    with pytest.raises(ModelNotReadable, match="'starcoder2' is not served; served are: gemma2"):
        ensure_model(str(write_gguf(source, tmp_path / "x.gguf")), tmp_path / "models", progress=False)
