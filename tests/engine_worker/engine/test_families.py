"""Every served family, token for token against `transformers`, alone and in a mix."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from engine_worker.config import EngineConfig
from engine_worker.engine.build import build
from engine_worker.runner.families import SUPPORTED
from tests.engine_worker.driving import Driver, request, run_tokens
from tests.engine_worker.models import greedy, logprobs_given, make_tiny_model, reference, weighted

_RANDOM = random.Random(11)
PROMPTS = [[_RANDOM.randrange(256) for _ in range(n)] for n in (1, 3, 7, 8, 9, 16, 23, 40)]
NEW = 14
WINDOW = 8
"""Tokens: two blocks; most prompts are longer, and the others grow past it."""

_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0] * 4}
_VARIED = {"tie_word_embeddings": False}
"""Of Gemma, whose embeddings are large: tied, a tiny model only repeats the prompt's last token."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "gemma2",
        _VARIED | {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    ),
    "gemma2-capped-logits": ("gemma2", {"sliding_window": WINDOW, "final_logit_softcapping": 1.5}),
    "gemma3_text": (
        "gemma3_text",
        _VARIED | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3-window": ("phi3", {"sliding_window": WINDOW}),
    "phi3-longrope": ("phi3", {"rope_scaling": _LONGROPE, "original_max_position_embeddings": 128}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
}

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
_PARTIAL_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + number / 8 for number in range(24)],
    "long_factor": [4.0] * 24,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "one-head-of-keys-each": (
        "llama",
        {"num_key_value_heads": 4, "head_dim": 80, "rope_parameters": _LLAMA3},
    ),
    "one-head-of-keys-for-all": (
        "llama",
        {"num_key_value_heads": 1, "head_dim": 24, "rope_parameters": _YARN},
    ),
    "biases": ("llama", {"attention_bias": True, "head_dim": 16, "rope_parameters": _LINEAR}),
    "seven-heads-on-one": (
        "qwen2",
        {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56},
    ),
    "window-ends-in-a-block": ("mistral", {"sliding_window": 7}),
    "partly-rotated": (
        "phi3",
        {
            "num_key_value_heads": 4,
            "hidden_size": 384,
            "head_dim": 96,
            "partial_rotary_factor": 0.5,
            "rope_scaling": _PARTIAL_LONGROPE,
            "original_max_position_embeddings": 128,
        },
    ),
    "capped-scores-window-ends-in-a-block": (
        "gemma2",
        _VARIED
        | {
            "sliding_window": 7,
            "num_key_value_heads": 1,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "capped-logits": (
        "gemma3_text",
        _VARIED
        | {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "head_dim": 32,
            "final_logit_softcapping": 2.0,
        },
    ),
    "normed-heads-with-biases": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
}


def test_every_served_family_is_here():
    assert {family for family, _ in CASES.values()} == set(SUPPORTED)


KINDS = [(name, kernels) for kernels in ("torch", "compiled") for name in CASES]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def case(request, tmp_path_factory):
    """A configuration and what `transformers` generates for each prompt alone."""
    name, kernels = request.param
    family, changes = CASES[name]
    model_dir = weighted(make_tiny_model(tmp_path_factory.mktemp(name), family, **changes))
    model = reference(model_dir)
    expected = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    config = EngineConfig(
        model_dir=model_dir,
        block_size=4,
        num_kv_blocks=129,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kernels=kernels,
        threads=2,
        precision="fp32",
    )
    return config, expected


REQUESTS = [request(str(i), prompt, NEW) for i, prompt in enumerate(PROMPTS)]


def test_alone(case):
    config, expected = case
    built = build(config)
    assert [run_tokens(built, item)[0] for item in REQUESTS] == expected


@pytest.mark.parametrize("budget", [8, 11])
def test_in_a_mix_with_chunked_prefill_and_preemption(case, budget):
    config, expected = case
    # 19 blocks of 4 hold a few of these requests, which end at 15 to 54 tokens.
    driver = Driver(build(replace(config, num_kv_blocks=20, max_num_batched_tokens=budget)))
    results = driver.run(REQUESTS)
    assert driver.core.stats().preemptions > 0
    assert [results[item.request_id].token_ids for item in REQUESTS] == expected


def test_fault_03_a_window_reuses_no_wrong_blocks(case):
    """The same prompts four times in one engine: blocks that others held are taken again."""
    config, expected = case
    built = build(replace(config, num_kv_blocks=40))
    for round_ in range(4):
        items = [replace(item, request_id=f"{round_}-{item.request_id}") for item in REQUESTS]
        assert run_tokens(built, *items) == expected


@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes(name, tmp_path):
    """Heads, groups, windows and rotations unlike those of CASES, in small and in large blocks, twice."""
    family, changes = SHAPES[name]
    model_dir = weighted(make_tiny_model(tmp_path, family, **changes))
    model = reference(model_dir)
    prompts = [PROMPTS[index] for index in (0, 4, 7)]
    requests = [request(str(number), prompt, NEW, logprobs=0) for number, prompt in enumerate(prompts)]
    expected = [greedy(model, prompt, NEW) for prompt in prompts]
    assert min(len(set(tokens)) for tokens in expected) > NEW // 4, "what repeats itself proves little"
    likely = [logprobs_given(model, prompt, output) for prompt, output in zip(prompts, expected, strict=True)]
    again = [replace(item, request_id=f"again-{item.request_id}") for item in requests]
    for kernels, block_size in product(("torch", "compiled"), (4, 32)):
        built = build(
            EngineConfig(
                model_dir=model_dir,
                block_size=block_size,
                num_kv_blocks=65,
                max_num_seqs=8,
                max_num_batched_tokens=11,
                kernels=kernels,
                threads=2,
                precision="fp32",
            )
        )
        # The second time the prefix cache holds them.
        for items in (requests, again):
            results = Driver(built).run(items)
            made = [results[item.request_id] for item in items]
            assert [result.token_ids for result in made] == expected, (kernels, block_size)
            # Capped logits have the order of those that are not: the tokens alone would not tell.
            for result, right in zip(made, likely, strict=True):
                told = [entry.chosen.logprob for piece in result.pieces for entry in piece.logprobs or ()]
                assert told == pytest.approx(right, abs=2e-3), (kernels, block_size)


def test_the_cases_can_tell_a_window_from_none(tmp_path):
    """A control: without the window these prompts give other tokens."""
    family, changes = CASES["mistral-window"]
    with_window = reference(weighted(make_tiny_model(tmp_path / "a", family, **changes)))
    without = reference(weighted(make_tiny_model(tmp_path / "b", family, sliding_window=None)))
    assert [greedy(with_window, p, NEW) for p in PROMPTS] != [greedy(without, p, NEW) for p in PROMPTS]
