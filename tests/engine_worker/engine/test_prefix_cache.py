"""The prefix cache: the same tokens on hit and miss, only for those who may know, and never a bad block."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from engine_worker.engine.build import build
from engine_worker.engine.prefix import PrefixKeys, root_key
from engine_worker.protocol import FinishReason
from tests.engine_worker.driving import Driver, request, run_tokens
from tests.engine_worker.models import make_tiny_model

_RANDOM = random.Random(11)
PROMPT = [_RANDOM.randrange(256) for _ in range(30)]
"""Seven blocks of 4, and two tokens more."""


def cached(driver: Driver, name: str) -> int:
    return driver.results[name].finish.cached_tokens


def test_fault_01_a_hit_gives_the_same_tokens_as_a_miss(build_tiny):
    off = run_tokens(build_tiny(prefix_cache=False), request("a", PROMPT, 20))
    driver = Driver(build_tiny())
    for name in "abc":
        assert driver.run([request(name, PROMPT, 20)])[name].token_ids == off[0]
    assert [cached(driver, name) for name in "abc"] == [0, 28, 28]


def test_fault_01_sampled_tokens_and_logprobs_are_the_same(build_tiny):
    asked = {"temperature": 1.0, "seed": 3, "logprobs": 2, "repetition_penalty": 1.2}
    off = Driver(build_tiny(prefix_cache=False)).run([request("a", PROMPT, 12, **asked)])["a"]
    driver = Driver(build_tiny())
    driver.run([request("a", PROMPT, 12, **asked)])
    on = driver.run([request("b", PROMPT, 12, **asked)])["b"]
    assert cached(driver, "b") == 28
    assert on.token_ids == off.token_ids
    for mine, theirs in zip(on.pieces, off.pieces, strict=True):
        assert mine.logprobs[0].chosen.logprob == pytest.approx(theirs.logprobs[0].chosen.logprob, abs=1e-4)


@pytest.mark.parametrize("shared", range(31))
def test_fault_02_a_hit_of_each_length(build_tiny, shared):
    other = PROMPT[:shared] + [(token + 1) % 256 for token in PROMPT[shared:]]
    alone = run_tokens(build_tiny(prefix_cache=False), request("b", other, 12))[0]
    driver = Driver(build_tiny(max_num_batched_tokens=8))
    driver.run([request("a", PROMPT, 1)])
    assert driver.run([request("b", other, 12)])["b"].token_ids == alone
    assert cached(driver, "b") == min(shared, 29) // 4 * 4


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_fault_03_windowed_layers_use_the_right_blocks(tmp_path, tiny_config, family):
    model_dir = make_tiny_model(tmp_path, family, sliding_window=8)
    config = replace(tiny_config, model_dir=model_dir)
    off = run_tokens(build(replace(config, prefix_cache=False)), request("a", PROMPT, 20))
    driver = Driver(build(config))
    for name in "abcd":
        assert driver.run([request(name, PROMPT, 20)])[name].token_ids == off[0]
    assert [cached(driver, name) for name in "abcd"] == [0, 28, 28, 28]


def test_the_last_prompt_token_is_always_computed(build_tiny):
    driver = Driver(build_tiny())
    driver.run([request("a", PROMPT[:28], 4)])
    driver.run([request("b", PROMPT[:28], 4)])
    assert cached(driver, "b") == 24


def test_an_answer_is_found_by_the_next_turn(build_tiny):
    driver = Driver(build_tiny())
    answer = driver.run([request("a", PROMPT, 11)])["a"].token_ids
    turn = [*PROMPT, *answer, 5, 6]
    expected = run_tokens(build_tiny(prefix_cache=False), request("b", turn, 8))[0]
    assert driver.run([request("b", turn, 8)])["b"].token_ids == expected
    # All but the last token of the answer was computed: 40 tokens, ten blocks.
    assert cached(driver, "b") == 40


def test_running_requests_share_blocks(build_tiny):
    alone = run_tokens(build_tiny(prefix_cache=False), request("a", PROMPT, 20))[0]
    driver = Driver(build_tiny())
    driver.add(request("first", PROMPT, 20))
    driver.step()
    for name in ("second", "third"):
        driver.add(request(name, PROMPT, 20))
    driver.step()
    # Seven blocks are common, each has one or two of its own.
    assert driver.core.stats().kv_blocks_used <= 7 + 3 * 2
    results = driver.run()
    assert [results[name].token_ids for name in ("first", "second", "third")] == [alone] * 3


def test_fault_33_tenants_find_only_what_is_theirs(build_tiny):
    driver = Driver(build_tiny())
    for name, salt in (("a1", "A"), ("b1", "B"), ("a2", "A"), ("b2", "B"), ("c1", "")):
        driver.run([request(name, PROMPT, 4, cache_salt=salt)])
    assert [cached(driver, name) for name in ("a1", "b1", "a2", "b2", "c1")] == [0, 0, 28, 28, 0]


def test_a_preempted_request_finds_its_own_blocks(build_tiny):
    plain = run_tokens(build_tiny(), request("low", PROMPT, 20), request("high", PROMPT[::-1], 4))
    driver = Driver(build_tiny(max_num_seqs=1, swap_memory=0))
    driver.add(request("low", PROMPT, 20, priority=(2, 0.0)))
    for _ in range(5):
        driver.step()
    driver.add(request("high", PROMPT[::-1], 4, priority=(0, 0.0)))
    computed = []
    while driver.core.has_work:
        driver.step()
        computed.append(driver.core.stats().scheduled_tokens)
    assert driver.core.stats().preemptions == 1
    assert [driver.results["low"].token_ids, driver.results["high"].token_ids] == plain
    # 34 tokens were computed when it was preempted: eight blocks are found, three tokens computed again.
    assert computed[:6] == [30, 1, 1, 1, 3, 1]
    assert cached(driver, "low") == 0


def test_a_resumed_request_finds_what_the_first_attempt_left(build_tiny):
    driver = Driver(build_tiny())
    whole = driver.run([request("a", PROMPT, 20)])["a"].token_ids
    resumed = driver.run([request("b", PROMPT, 20, resumed_token_ids=whole[:9])])["b"]
    assert resumed.token_ids == whole[9:]
    assert cached(driver, "b") == 30  # not more than the prompt has


def test_the_cache_gives_way_to_who_needs_the_memory(build_tiny):
    # 16 blocks: each request needs nine of them.
    driver = Driver(build_tiny(num_kv_blocks=17))
    others = [[(token + shift) % 256 for token in PROMPT] for shift in range(5)]
    for number, prompt in enumerate(others):
        driver.run([request(str(number), prompt, 4)])
        assert driver.core.stats().kv_blocks_used == 0
    driver.run([request("oldest", others[0], 4)])
    driver.run([request("newest", others[4], 4)])
    assert cached(driver, "oldest") == 0
    assert cached(driver, "newest") > 0


def test_the_end_of_a_chain_is_evicted_before_its_beginning(build_tiny):
    driver = Driver(build_tiny(num_kv_blocks=17))
    driver.run([request("a", PROMPT, 1)])
    driver.run([request("b", [1] * 48, 1)])  # takes twelve of sixteen: three of the seven are lost
    driver.run([request("c", PROMPT, 1)])
    assert cached(driver, "c") == 16


def test_an_aborted_prompt_leaves_nothing_half_done(build_tiny):
    expected = run_tokens(build_tiny(), request("b", PROMPT, 8))[0]
    driver = Driver(build_tiny(max_num_batched_tokens=8))
    uid = driver.add(request("a", PROMPT, 8))
    driver.step()
    driver.core.abort(uid)
    driver.step()
    assert driver.run([request("b", PROMPT, 8)])["b"].token_ids == expected
    assert cached(driver, "b") == 0


def test_blocks_of_a_failed_request_are_never_found(build_tiny):
    built = build_tiny()
    expected = run_tokens(built, request("good", PROMPT, 10))[0]
    runner = built.core.device.executor.runner
    execute, broken = runner.execute, [False]

    def poisoned(step):
        logits = execute(step)
        if broken[0]:
            for item in step:
                blocks = item.sequence.table.blocks[-1:]
                runner._decoder.keys[:, blocks] = torch.nan
                runner._decoder.values[:, blocks] = torch.nan
            logits[:] = torch.nan
        return logits

    runner.execute = poisoned
    driver = Driver(built)
    driver.run([request("a", PROMPT, 10)])
    broken[0] = True
    assert driver.run([request("bad", PROMPT, 10)])["bad"].finish.reason == FinishReason.ERROR
    broken[0] = False
    assert driver.run([request("b", PROMPT, 10)])["b"].token_ids == expected
    assert cached(driver, "a") == 28
    assert cached(driver, "b") == 0


def test_stats_count_what_was_found(build_tiny):
    driver = Driver(build_tiny())
    driver.run([request("a", PROMPT, 2)])
    driver.run([request("b", PROMPT, 2)])
    stats = driver.core.stats()
    assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.kv_blocks_cached) == (60, 28, 7)


def test_a_key_depends_on_everything_before_it():
    def keys(tokens, **root):
        return PrefixKeys(root_key(model_revision="r", **root), 4).of(tokens, len(tokens))

    plain = keys(range(12))
    assert len(set(plain)) == 3
    assert keys([*range(4), 99, *range(5, 12)])[0] == plain[0]
    assert not set(keys([*range(4), 99, *range(5, 12)])[1:]) & set(plain)
    for other in ({"salt": "s"}, {"adapter": "a"}, {"adapter": "s", "salt": ""}):
        assert not set(keys(range(12), **other)) & set(plain)
    assert root_key(model_revision="ab", adapter="c") != root_key(model_revision="a", adapter="bc")
