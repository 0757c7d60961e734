"""The overlapped loop: one step ahead of its tokens, and the same tokens as the synchronous one."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from engine_worker.engine.block_pool import BlockPool
from engine_worker.engine.core import EngineCore
from engine_worker.engine.errors import EngineDead
from engine_worker.engine.grammar import GrammarError
from engine_worker.engine.scheduler import Scheduler
from engine_worker.engine.swap import HostBlocks
from engine_worker.protocol import FinishReason
from tests.engine_worker.driving import Driver, request
from tests.engine_worker.engine.test_scheduler import sequence
from tests.engine_worker.engine.test_speculation import LETTERS, PROMPTS, WAYS, same
from tests.engine_worker.late_device import LateDevice, continuation

_ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(1, 30),  # prompt
            st.integers(0, 20),  # max_tokens
            st.integers(0, 2),  # class
            st.sampled_from([None, "A", "B"]),  # prefix cache
            st.booleans(),  # an end token
            st.integers(1, 2),  # what the prompt is made of
        ),
        st.tuples(st.just("step")),
        st.tuples(st.just("step")),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("fail")),
    ),
    max_size=80,
)


@given(
    _ACTIONS,
    st.integers(14, 40),
    st.integers(1, 5),
    st.integers(5, 40),
    st.booleans(),
    st.sampled_from([0, 3, 9, 40]),
    st.sampled_from([0, 2, 5]),
)
@settings(max_examples=int(os.environ.get("WEIR_HISTORIES", "300")), deadline=None)
def test_fault_24_25_any_history_gives_the_tokens_of_each_alone(
    actions, num_blocks, seqs, budget, overlap, host_blocks, guesses
):
    """Arrivals, aborts, preemptions, swaps, guesses, failing steps; blocks are read and written as late as can be."""
    device = LateDevice()
    pool = BlockPool(num_blocks, 4)
    host = HostBlocks(host_blocks, block_size=4) if host_blocks else None
    scheduler = Scheduler(
        pool, max_num_seqs=seqs, max_num_batched_tokens=budget, host=host, speculative_tokens=guesses
    )
    core = EngineCore(device, scheduler, pool, overlap=overlap)
    asked: dict[int, tuple[list[int], int, tuple[int, ...]]] = {}
    got: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}

    def step() -> None:
        for uid, output in core.step().outputs:
            assert uid not in reasons, "an output came after the last"
            assert output.seq == len(got[uid])
            got[uid] += output.token_ids
            if output.finish is not None:
                reasons[uid] = output.finish.reason
                assert output.finish.completion_tokens == len(got[uid])
        core.check()

    for name, *values in actions:
        if name == "add":
            prompt, max_tokens, rank, salt, ends, token = values
            uid = len(asked) + 1
            item = sequence(uid, prompt, max_tokens, (rank, 0.0), token=token, salt=salt)
            item.stop_ids = frozenset([ord("a")] if ends else [])
            asked[uid], got[uid] = (list(item.token_ids), max_tokens, tuple(item.stop_ids)), []
            core.add(item)
        elif name == "step":
            step()
        elif name == "fail":
            device.fails = _once()
        elif asked:
            core.abort(1 + values[0] % len(asked))
    for _ in range(5000):
        if not core.has_work:
            break
        step()
    assert not core.has_work
    assert pool.available == pool.total
    assert host is None or host.used == 0
    assert device.most_in_flight == 0 or device.most_in_flight <= 1 + overlap
    for uid, (prompt, max_tokens, stop) in asked.items():
        expected = continuation(prompt, max_tokens, stop)
        if reasons[uid] == FinishReason.CANCELLED:
            expected = expected[: len(got[uid])]
        assert got[uid] == expected


def run(core: EngineCore) -> None:
    for _ in range(5000):
        if not core.has_work:
            return
        core.step()
    raise AssertionError("it never ends")


def _once():
    """Fails the next step, and nothing after it."""
    left = [1]
    return lambda plan: bool(left and left.pop())


def test_fault_25_a_request_that_breaks_steps_fails_alone_in_both_loops():
    for overlap in (False, True):
        device = LateDevice(fails=lambda plan: any(item.sequence.uid == 2 for item in plan))
        pool = BlockPool(60, 4)
        core = EngineCore(
            device, Scheduler(pool, max_num_seqs=4, max_num_batched_tokens=16), pool, overlap=overlap
        )
        items = [sequence(uid, 5 + uid, 12) for uid in (1, 2, 3)]
        core.add(items[0])
        core.step()
        for item in items[1:]:
            core.add(item)
        run(core)
        for item in (items[0], items[2]):
            assert item.token_ids[item.num_prompt :] == continuation([1] * item.num_prompt, 12)
        assert items[1].finish.reason == FinishReason.ERROR
        assert pool.available == pool.total


def test_steps_are_launched_before_the_one_before_has_told_its_tokens():
    device = LateDevice()
    pool = BlockPool(60, 4)
    core = EngineCore(device, Scheduler(pool, max_num_seqs=4, max_num_batched_tokens=16), pool, overlap=True)
    item = sequence(1, 5, 9)
    core.add(item)
    run(core)
    assert device.most_in_flight == 2
    # One that ends by its length is known to end: no step is wasted on it.
    assert core.stats().steps == 9
    assert core.meter.wasted_tokens == 0
    ends = sequence(2, 5, 9)
    ends.stop_ids = frozenset(continuation([1] * 5, 4)[-1:])
    core.add(ends)
    run(core)
    assert ends.finish.reason == FinishReason.STOP
    assert core.meter.wasted_tokens == 1


def test_an_engine_whose_device_fails_for_all_dies():
    pool = BlockPool(60, 4)
    scheduler = Scheduler(pool, max_num_seqs=4, max_num_batched_tokens=16)
    core = EngineCore(LateDevice(fails=lambda plan: True), scheduler, pool, overlap=True)
    for uid in range(20):
        core.add(sequence(uid, 5, 9))
    with pytest.raises(EngineDead):
        run(core)


GRAMMAR = LLMatcher.grammar_from_regex("[abc]{5,20}")


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_fault_25_26_27_the_same_tokens_from_the_model(build_tiny, kernels):
    """Penalties see the token in flight; grammars, drafts and scores make the loop wait for it."""
    ways: dict[str, Any] = dict(WAYS)
    ways["grammar"] = {"grammar": GRAMMAR, "ignore_eos": False, "temperature": 0.8, "seed": 3}
    ways["scored"] = {"prompt_logprobs": 1, "logprobs": 1}
    asked = [
        request(f"{name} {i}", prompt, 24 + i, **way)
        for name, way in ways.items()
        for i, prompt in enumerate(PROMPTS)
    ]
    plain = _history(build_tiny(kernels=kernels), asked)
    for changes in ({}, {"num_kv_blocks": 45}, {"speculative_tokens": 3}):
        built = build_tiny(kernels=kernels, overlap=True, **changes)
        try:
            same(_history(built, asked), plain)
            assert "num_kv_blocks" not in changes or built.core.stats().preemptions > 0
        finally:
            built.core.device.close()


def _history(built, asked):
    """Some at once, some later; one is aborted between two steps."""
    driver, rng = Driver(built), random.Random(4)
    for item in asked:
        driver.add(item)
        if rng.random() < 0.3:
            driver.step()
    gone = driver.add(request("gone", PROMPTS[2], 200, logit_bias=LETTERS))
    driver.step()
    driver.core.abort(gone)
    results = driver.run()
    assert results.pop("gone").finish.reason == FinishReason.CANCELLED
    return results


def test_fault_38_an_abort_between_launch_and_landing(build_tiny):
    built = build_tiny(overlap=True)
    driver = Driver(built)
    expected = Driver(build_tiny()).run([request("stays", PROMPTS[0], 12)])["stays"]
    leaves = driver.add(request("leaves", PROMPTS[1], 50))
    driver.add(request("stays", PROMPTS[0], 12))
    driver.step()
    driver.step()  # a step is in flight from here on
    driver.core.abort(leaves)
    driver.add(request("takes its blocks", PROMPTS[3], 12))
    results = driver.run()
    assert results["leaves"].finish.reason == FinishReason.CANCELLED
    assert results["stays"].token_ids == expected.token_ids
    assert built.core.meter.wasted_tokens == 1
    built.core.device.close()


def test_fault_27_a_matcher_that_refuses_ends_the_request_in_both_loops(build_tiny):
    for overlap in (False, True):
        built = build_tiny(overlap=overlap)
        driver = Driver(built)
        uid = driver.add(request("a", PROMPTS[0], 50, grammar=GRAMMAR, ignore_eos=False))
        driver.add(request("b", PROMPTS[1], 12))
        driver.step()
        sequence = driver.core._live[uid]
        sequence.matcher = _Refuses(sequence.matcher)
        results = driver.run()
        assert (results["a"].finish.reason, results["a"].finish.error.code) == ("error", "grammar_failed")
        assert len(results["b"].token_ids) == 12
        built.core.device.close()


class _Refuses:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.is_complete = False
        self.allowed = matcher.allowed

    def accept(self, token_id: int) -> None:
        raise GrammarError("not that one")


def test_a_sequence_that_will_end_is_not_scheduled_again():
    item = replace(sequence(1, 4, 3), max_tokens=1)
    pool = BlockPool(20, 4)
    scheduler = Scheduler(pool, max_num_seqs=2, max_num_batched_tokens=8)
    scheduler.add(item)
    assert len(scheduler.schedule()) == 1
    assert scheduler.schedule() == []
