"""Greedy output equals that of `transformers`, token for token in fp32, whatever happens around it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine_worker.config import EngineConfig
from engine_worker.engine.build import build
from engine_worker.engine.types import EngineRequest
from tests.engine_worker.driving import Driver, request, run_tokens
from tests.engine_worker.models import (
    greedy,
    greedy_given,
    real_model_dir,
    reference,
    workload,
)

_RANDOM = random.Random(5)
PROMPTS = [[_RANDOM.randrange(256) for _ in range(n)] for n in (1, 2, 3, 4, 5, 7, 8, 9, 16, 23, 40, 61)]


@pytest.fixture(
    params=[("torch", 1), ("compiled", 1), ("compiled", 2)], ids=["torch", "compiled", "compiled-2"]
)
def build_tiny(request, tiny_config):
    """With each kind of kernels; two threads share the work of every stage."""
    kernels, threads = request.param
    return lambda **changes: build(replace(tiny_config, kernels=kernels, threads=threads, **changes))


@pytest.fixture(scope="module")
def expected(tiny_reference):
    return [greedy(tiny_reference, prompt, 20) for prompt in PROMPTS]


def _requests(max_tokens: int = 20, **changes) -> list[EngineRequest]:
    return [request(str(i), prompt, max_tokens, **changes) for i, prompt in enumerate(PROMPTS)]


def test_alone(build_tiny, expected):
    built = build_tiny()
    assert [run_tokens(built, item)[0] for item in _requests()] == expected


def test_together(build_tiny, expected):
    assert run_tokens(build_tiny(), *_requests()) == expected


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 17])
def test_chunked_prefill_at_every_offset(build_tiny, expected, budget):
    built = build_tiny(max_num_batched_tokens=budget, max_num_seqs=min(budget, 8))
    assert run_tokens(built, *_requests()) == expected


def test_joins_and_leaves_in_mid_run(build_tiny, expected):
    driver = Driver(build_tiny(max_num_seqs=4))
    rng = random.Random(1)
    aborted = set()
    for i, item in enumerate(_requests()):
        uid = driver.add(item)
        if i % 3 == 2:
            aborted.add(i)
        for _ in range(rng.randrange(5)):
            driver.step()
        if i in aborted:
            driver.core.abort(uid)
    results = driver.run()
    for i, tokens in enumerate(expected):
        got = results[str(i)].token_ids
        assert got == tokens[: len(got)]
        assert i in aborted or len(got) == 20


def test_fault_05_forced_preemption_changes_nothing(build_tiny, expected):
    # 24 blocks of 4 hold 96 tokens: a few of these requests, which end at 21 to 81 tokens.
    built = build_tiny(num_kv_blocks=25)
    driver = Driver(built)
    results = driver.run(_requests())
    assert driver.core.stats().preemptions > 0
    assert [results[str(i)].token_ids for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("at", range(20))
def test_resume_at_each_token(build_tiny, expected, at):
    driver = Driver(build_tiny())
    results = driver.run(
        request(str(i), prompt, 20, resumed_token_ids=expected[i][:at]) for i, prompt in enumerate(PROMPTS)
    )
    for i, tokens in enumerate(expected):
        assert results[str(i)].token_ids == tokens[at:]
        assert results[str(i)].pieces[0].seq == at
        assert results[str(i)].finish.completion_tokens == 20


def test_ends_at_the_end_token(build_tiny, tiny_reference, expected):
    # The model's own end token is one that this prompt is known to produce.
    eos = expected[3][6]
    built = build_tiny()
    built = replace(built, admission=replace(built.admission, eos_token_ids=frozenset({eos})))
    result = Driver(built).run([request("a", PROMPTS[3], 20, ignore_eos=False)])["a"]
    assert result.token_ids == expected[3][: expected[3].index(eos) + 1]
    assert (result.finish.reason, result.finish.stop_reason) == ("stop", None)


def test_real_model_in_a_mix():
    model_dir = real_model_dir()
    chats = workload()[:3]
    built = build(EngineConfig(model_dir=model_dir, max_num_batched_tokens=96, precision="fp32"))
    outputs = run_tokens(built, *(request(str(chat["id"]), chat["ids"], 10) for chat in chats))
    model = reference(model_dir)
    for chat, output in zip(chats, outputs, strict=True):
        assert output == greedy_given(model, chat["ids"], output)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_depend_on_nothing_around(tiny_config, precision, threads):
    """Bit for bit: on our kernels no batch, chunk or thread changes the order in which a row's terms are added."""

    def build_tiny(**changes):
        return build(replace(tiny_config, kernels="compiled", threads=threads, **changes))

    alone = _first_logits(build_tiny(precision=precision, max_num_batched_tokens=64), PROMPTS[-1:])
    mixed = _first_logits(build_tiny(precision=precision, max_num_batched_tokens=61), PROMPTS[-1:], PROMPTS)
    chunked = _first_logits(build_tiny(precision=precision, max_num_batched_tokens=8), PROMPTS[-1:])
    assert alone.tobytes() == chunked.tobytes() == mixed.tobytes()


def _first_logits(built, prompts, others=()):
    """float32[vocab]: what the first sampled row of `prompts` was chosen from."""
    seen = {}
    runner = built.core.device.executor.runner
    execute = runner.execute

    def watching(step):
        logits = execute(step)
        row = 0
        for item in step:
            if item.num_logits and item.sequence.request.request_id not in seen:
                seen[item.sequence.request.request_id] = logits[row + item.num_logits - 1].numpy().copy()
            row += item.num_logits
        return logits

    runner.execute = watching
    requests = [request(f"other-{i}", prompt, 6) for i, prompt in enumerate(others)]
    run_tokens(built, *requests, request("watched", prompts[0], 1))
    return seen["watched"]
