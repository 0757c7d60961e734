"""Prompt logprobs, requests that only score, and words that must not come."""

from __future__ import annotations

import pytest
import torch

from engine_worker.protocol import FinishReason
from tests.engine_worker.driving import Driver, request, run_tokens

PROMPT = list(b"the weir regulates a stream, and it regulates it well")


@pytest.fixture(scope="module")
def expected(tiny_reference):
    """float32[len(PROMPT) - 1, vocab]: a direct forward of `transformers`."""
    with torch.inference_mode():
        return tiny_reference(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)


def check_scores(scores, expected, top: int) -> None:
    assert len(scores) == len(PROMPT) - 1
    best = expected.topk(max(top, 1), dim=-1)
    for at, position in enumerate(scores):
        assert position.chosen.token_id == PROMPT[at + 1]
        assert position.chosen.logprob == pytest.approx(expected[at, PROMPT[at + 1]].item(), abs=1e-3)
        assert position.rank == int((expected[at] > expected[at, PROMPT[at + 1]]).sum()) + 1
        assert [entry.token_id for entry in position.top] == best.indices[at, :top].tolist()


@pytest.mark.parametrize("budget", [64, 8, 3])
def test_fault_04_prompt_logprobs_are_whole_and_never_from_the_cache(build_tiny, expected, budget):
    driver = Driver(build_tiny(max_num_batched_tokens=budget, max_num_seqs=3))
    plain = driver.run([request("warm", PROMPT, 5)])["warm"].token_ids
    for name in "ab":
        result = driver.run([request(name, PROMPT, 5, prompt_logprobs=3)])[name]
        assert result.token_ids == plain
        assert result.finish.cached_tokens == 0
        reported = [piece.prompt_logprobs for piece in result.pieces if piece.prompt_logprobs is not None]
        assert len(reported) == 1
        check_scores(reported[0], expected, 3)
    # What such a request computed serves others.
    assert driver.run([request("after", PROMPT, 5)])["after"].finish.cached_tokens == 52


def test_fault_04_in_a_mixed_batch_and_through_a_preemption(build_tiny, expected):
    driver = Driver(build_tiny(max_num_seqs=2, max_num_batched_tokens=8))
    driver.add(request("other", [1, 2, 3], 40, priority=(2, 0.0)))
    driver.add(request("scored", PROMPT, 4, prompt_logprobs=0, priority=(2, 1.0)))
    for _ in range(3):
        driver.step()
    driver.add(request("urgent", [9] * 5, 30, priority=(0, 0.0)))
    results = driver.run()
    assert driver.core.stats().preemptions == 1
    (scores,) = [p.prompt_logprobs for p in results["scored"].pieces if p.prompt_logprobs is not None]
    check_scores(scores, expected, 0)
    assert results["scored"].token_ids == run_tokens(build_tiny(), request("a", PROMPT, 4))[0]


def test_fault_18_no_tokens_scores_only(build_tiny, expected):
    driver = Driver(build_tiny())
    result = driver.run([request("a", PROMPT, 0, prompt_logprobs=1)])["a"]
    assert (result.token_ids, result.text, result.finish.reason) == ([], "", FinishReason.LENGTH)
    assert (result.finish.prompt_tokens, result.finish.completion_tokens) == (len(PROMPT), 0)
    check_scores(result.pieces[0].prompt_logprobs, expected, 1)
    assert driver.run([request("b", PROMPT, 0)])["b"].finish.completion_tokens == 0


def test_a_prompt_of_one_token_has_nothing_to_score(build_tiny):
    result = Driver(build_tiny()).run([request("a", [5], 2, prompt_logprobs=1)])["a"]
    assert result.pieces[0].prompt_logprobs == []


def test_a_resumed_request_does_not_score_again(build_tiny):
    result = Driver(build_tiny()).run([request("a", PROMPT, 4, prompt_logprobs=1, resumed_token_ids=[1])])[
        "a"
    ]
    assert all(piece.prompt_logprobs is None for piece in result.pieces)


def test_bad_words_never_come(build_tiny):
    letters = {i: -100.0 for i in range(258) if i not in (97, 98, 32)}
    ask = {"temperature": 1.0, "seed": 4, "logit_bias": letters}
    driver = Driver(build_tiny())
    plain = driver.run([request("plain", PROMPT, 60, **ask)])["plain"].text
    assert "ab" in plain
    assert "bb" in plain
    text = driver.run([request("a", PROMPT, 60, bad_words=("ab", "bbb"), **ask)])["a"].text
    assert len(text) == 60
    assert "ab" not in text
    assert "bbb" not in text
    assert "bb" in text
    assert "a" not in driver.run([request("b", PROMPT, 60, bad_words=("a",), **ask)])["b"].text


def test_bad_words_look_at_the_output_alone(build_tiny):
    forced = {98: 1000.0}
    result = Driver(build_tiny()).run([request("a", [*PROMPT, 97], 3, bad_words=("ab",), logit_bias=forced)])
    assert result["a"].text == "bbb"
