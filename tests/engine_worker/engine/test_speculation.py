"""Guessing ahead changes how fast tokens come, and nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.engine.slo import Allowance
from engine_worker.engine.speculation import Drafter, draft_limit
from engine_worker.protocol import FinishReason
from tests.engine_worker.driving import Driver, request

_RANDOM = random.Random(2)
REPEATING = [1, 2, 3, 4, 5, 6, 7, 8] * 6
PROMPTS = [REPEATING, REPEATING[:20], [_RANDOM.randrange(256) for _ in range(30)], [9] * 12]
LETTERS = {i: -100.0 for i in range(258) if i not in (97, 98, 99)}
"""Three letters only, so that even random text repeats."""
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 11, "logit_bias": LETTERS},
    "penalties": {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "temperature": 1.0,
        "seed": 4,
        "logit_bias": LETTERS,
    },
    "logprobs": {"logprobs": 2, "temperature": 0.7, "seed": 3, "logit_bias": LETTERS},
    "bad words": {"bad_words": ("ab", "cc"), "temperature": 1.0, "seed": 5, "logit_bias": LETTERS},
    "min tokens": {"ignore_eos": False, "min_tokens": 20, "logit_bias": {256: 100.0, **LETTERS}},
    "stop": {"stop": ("abca",), "temperature": 1.0, "seed": 8, "logit_bias": LETTERS},
}


def run(build_tiny, speculative: int, asked, **changes):
    driver = Driver(build_tiny(speculative_tokens=speculative, **changes))
    return driver, driver.run(asked)


def same(mine, theirs) -> None:
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert mine[name].token_ids == theirs[name].token_ids
        assert mine[name].text == theirs[name].text
        assert mine[name].finish.reason == theirs[name].finish.reason
        assert mine[name].finish.stop_reason == theirs[name].finish.stop_reason
        told = [entry for piece in mine[name].pieces for entry in piece.logprobs or ()]
        expected = [entry for piece in theirs[name].pieces for entry in piece.logprobs or ()]
        assert [entry.chosen.token_id for entry in told] == [entry.chosen.token_id for entry in expected]
        for one, other in zip(told, expected, strict=True):
            assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_are_the_same(build_tiny, way):
    asked = [request(str(i), prompt, 60, **WAYS[way]) for i, prompt in enumerate(PROMPTS)]
    _, plain = run(build_tiny, 0, asked)
    driver, guessed = run(build_tiny, 4, asked)
    same(guessed, plain)
    assert driver.core.stats().drafted_tokens > 0


def test_fewer_steps_for_a_text_that_repeats(build_tiny):
    asked = [request("a", REPEATING, 120, logit_bias={97: 100.0})]
    slow, _ = run(build_tiny, 0, asked)
    fast, results = run(build_tiny, 4, asked)
    stats, finish = fast.core.stats(), results["a"].finish
    assert stats.steps < 0.3 * slow.core.stats().steps
    assert finish.accepted_tokens == stats.accepted_tokens
    assert finish.drafted_tokens == stats.drafted_tokens
    assert stats.steps + stats.accepted_tokens == slow.core.stats().steps


def test_what_a_step_brings_at_once_is_counted_token_by_token(build_tiny):
    asked = [request(str(i), REPEATING, 40 + i, logit_bias={97: 100.0}) for i in range(2)]
    driver, results = run(build_tiny, 4, asked)
    meter, stats = driver.core.meter, driver.core.stats()
    made = sum(len(result.token_ids) for result in results.values())
    assert stats.steps < made
    assert meter.output_tokens == made
    assert sum(meter.time_to_first_token.counts) + sum(meter.inter_token.counts) == made
    assert meter.inter_token.sum == pytest.approx(meter.decode.sum)
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 20])
def test_exactly_max_tokens(build_tiny, max_tokens):
    _, results = run(build_tiny, 4, [request("a", REPEATING, max_tokens)])
    assert len(results["a"].token_ids) == max_tokens
    assert results["a"].finish.reason == FinishReason.LENGTH


def test_through_preemption_the_prefix_cache_and_resumption(build_tiny):
    asked = [request(str(i), prompt, 60, **WAYS["sampled"]) for i, prompt in enumerate(PROMPTS)]
    _, plain = run(build_tiny, 0, asked)
    tight, results = run(build_tiny, 4, asked, num_kv_blocks=41)
    assert tight.core.stats().preemptions > 0
    same(results, plain)
    for name in ("once", "again"):
        again = tight.run([request(name, REPEATING, 60, **WAYS["sampled"])])[name]
    assert again.finish.cached_tokens > 0
    assert again.token_ids == plain["0"].token_ids
    whole = plain["0"].token_ids
    resumed = request("r", REPEATING, 60, resumed_token_ids=whole[:23], **WAYS["sampled"])
    assert run(build_tiny, 4, [resumed])[1]["r"].token_ids == whole[23:]


def test_a_step_never_computes_more_than_allowed(build_tiny):
    built = build_tiny(speculative_tokens=8, max_num_batched_tokens=8, max_num_seqs=8)
    driver = Driver(built)
    for i in range(3):
        driver.add(request(str(i), REPEATING, 40))
    while driver.core.has_work:
        driver.step()
        assert driver.core.stats().scheduled_tokens <= 8


def test_no_guesses_where_the_engine_has_no_room_for_them(build_tiny):
    assert [draft_limit(4, decodes, 16) for decodes in (1, 3, 4, 5, 8, 9, 64)] == [4, 4, 3, 2, 1, 0, 0]
    driver = Driver(build_tiny(speculative_tokens=4))
    driver.core._scheduler.may_speculate = False
    driver.run([request("a", REPEATING, 40)])
    assert driver.core.stats().drafted_tokens == 0
    driver.core._scheduler.allow(Allowance(64, 8))


def test_guesses_that_do_not_pay_are_paused():
    drafter = Drafter()
    tokens = list(REPEATING)
    tried = 0
    for _ in range(100):
        if draft := drafter.propose(tokens, 4):
            tried += 1
            drafter.verified(len(draft), 0, len(tokens))
        tokens.append(tokens[-8])
    assert 3 <= tried <= 10
    eager = Drafter()
    for _ in range(100):
        draft = eager.propose(tokens, 4)
        assert draft == (tokens[-8], tokens[-7], tokens[-6], tokens[-5])
        eager.verified(4, 4, len(tokens))
        tokens.append(tokens[-8])


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 6))
def test_a_draft_is_what_followed_the_last_time(tokens, limit):
    draft = Drafter().propose(tokens, limit)
    places = [at for at in range(len(tokens) - 3) if tokens[at : at + 3] == tokens[-3:]]
    if not places:
        assert draft == ()
        return
    continued = list(tokens)
    for at in range(limit):
        continued.append(continued[places[-1] + 3 + at])
    assert list(draft) == continued[len(tokens) :]
