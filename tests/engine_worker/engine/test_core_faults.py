"""Faults that engines of this kind really had, on a tiny model, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine_worker.engine.build import Built
from engine_worker.engine.errors import EngineDead, InvalidRequest
from engine_worker.protocol import FinishReason
from tests.engine_worker.driving import Driver, request, run_tokens

PROMPT = [7, 50, 101, 30, 9]


def text_of(token_ids: list[int]) -> str:
    return bytes(token_ids).decode("utf-8", errors="replace")


def with_eos(built: Built, *eos: int) -> Built:
    return replace(built, admission=replace(built.admission, eos_token_ids=frozenset(eos)))


def test_fault_05_a_preempted_stream_is_neither_cut_nor_doubled(build_tiny):
    free = Driver(build_tiny()).run([request(str(i), [i + 1, 2, 3], 40, logprobs=1) for i in range(4)])
    tight = Driver(build_tiny(num_kv_blocks=19))
    results = tight.run([request(str(i), [i + 1, 2, 3], 40, logprobs=1) for i in range(4)])
    assert tight.core.stats().preemptions > 0
    for name, result in free.items():
        assert results[name].token_ids == result.token_ids
        assert results[name].text == result.text
        assert [piece.seq for piece in results[name].pieces if piece.token_ids] == list(range(40))
        assert sum(len(piece.logprobs) for piece in results[name].pieces) == 40


def test_fault_11_no_stop_string_before_min_tokens(build_tiny):
    built = build_tiny()
    letters = {i: -100.0 for i in range(258) if i not in (97, 98, 99)}
    plain = Driver(built).run([request("a", PROMPT, 30, logit_bias=letters)])["a"]
    stop = plain.text[0]
    stopped = Driver(built).run([request("b", PROMPT, 30, logit_bias=letters, stop=(stop,))])["b"]
    assert (stopped.text, stopped.finish.completion_tokens) == ("", 1)
    later = Driver(built).run([request("c", PROMPT, 30, logit_bias=letters, stop=(stop,), min_tokens=5)])["c"]
    expected = plain.text.find(stop, 5)
    assert expected > 5
    assert later.text == plain.text[:expected]
    assert later.finish.stop_reason == stop


def test_fault_12_two_end_tokens_and_min_tokens(build_tiny):
    built = build_tiny()
    plain = run_tokens(built, request("a", PROMPT, 12))[0]
    built = with_eos(built, plain[0], plain[1])
    assert run_tokens(built, request("b", PROMPT, 12, ignore_eos=False)) == [plain[:1]]
    longer = run_tokens(built, request("c", PROMPT, 12, ignore_eos=False, min_tokens=4))[0]
    assert len(longer) >= 5
    assert not {plain[0], plain[1]} & set(longer[:4])


@pytest.mark.parametrize(
    "changes",
    [
        {"stop_token_ids": (258 + 7,)},
        {"stop_token_ids": (-1,)},
        {"logit_bias": {258 + 7: 1.0}},
        {"logit_bias": {3: float("nan")}},
        {"resumed_token_ids": [999]},
        {"max_tokens": -1},
        {"n": 2},
        {"bad_words": (" ",)},
        {"prompt_logprobs": 21},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-40},
        {"temperature": 1e39},
        {"frequency_penalty": 1e39},
        {"logit_bias": {3: -1e39}},
        {"min_tokens": 9},
        {"stop": ("",)},
        {"logprobs": 21},
    ],
    ids=str,
)
def test_fault_13_a_bad_parameter_is_refused_and_the_next_request_works(build_tiny, changes):
    driver = Driver(build_tiny())
    with pytest.raises(InvalidRequest):
        driver.add(request("bad", PROMPT, **{"max_tokens": 8, **changes}))
    assert len(driver.run([request("good", PROMPT)])["good"].token_ids) == 8


def test_fault_13_a_prompt_with_an_unknown_id_is_refused(build_tiny):
    with pytest.raises(InvalidRequest, match="token id 300"):
        Driver(build_tiny()).add(request("bad", [1, 300]))


def test_fault_15_an_empty_prompt_is_refused(build_tiny):
    driver = Driver(build_tiny())
    with pytest.raises(InvalidRequest, match="empty"):
        driver.add(request("a", []))
    assert not driver.core.has_work


def test_fault_16_prompts_around_the_limit(build_tiny):
    driver = Driver(build_tiny(max_model_len=32))
    for length in (32, 33):
        with pytest.raises(InvalidRequest, match=rf"{length} tokens.*32 tokens"):
            driver.add(request("long", [1] * length))
    result = driver.run([request("fits", [1] * 31, 8)])["fits"]
    assert (len(result.token_ids), result.finish.reason) == (1, FinishReason.LENGTH)


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_fault_17_18_exactly_max_tokens(build_tiny, max_tokens):
    result = Driver(build_tiny()).run([request("a", PROMPT, max_tokens)])["a"]
    assert len(result.token_ids) == max_tokens
    assert result.finish.completion_tokens == max_tokens
    assert result.finish.prompt_tokens == len(PROMPT)


def test_fault_17_output_ends_where_the_context_does(build_tiny):
    result = Driver(build_tiny(max_model_len=64)).run([request("a", PROMPT, 10_000)])["a"]
    assert len(result.token_ids) == 64 - len(PROMPT)
    assert result.finish.reason == FinishReason.LENGTH


def test_fault_21_abort_in_each_state_frees_everything(build_tiny):
    driver = Driver(build_tiny(max_num_seqs=2, max_num_batched_tokens=8))
    decoding = driver.add(request("decoding", [1, 2], 50))
    driver.step()
    prefilling = driver.add(request("prefilling", [1] * 40, 50))
    driver.step()
    waiting = driver.add(request("waiting", [1] * 10, 50))
    for uid in (decoding, prefilling, waiting):
        driver.core.abort(uid)
    driver.step()
    assert driver.core.stats().kv_blocks_used == 0
    assert not driver.core.has_work
    for name, prompt, tokens in (("decoding", 2, 2), ("prefilling", 40, 0), ("waiting", 0, 0)):
        finish = driver.results[name].finish
        assert (finish.reason, finish.completion_tokens) == (FinishReason.CANCELLED, tokens)
        assert finish.prompt_tokens == prompt  # what never began has cost nothing
    driver.core.abort(decoding)
    driver.core.abort(12345)


def test_fault_28_seeds(build_tiny):
    built = build_tiny()
    crowd = [request(f"x{i}", [i] * (i + 1), 12, temperature=1.0, seed=i) for i in range(6)]
    mine = request("mine", PROMPT, 12, temperature=1.0, seed=42)
    alone = run_tokens(built, mine)[0]
    assert run_tokens(built, mine)[0] == alone
    assert run_tokens(built, *crowd, mine)[-1] == alone
    assert run_tokens(built, request("other", PROMPT, 12, temperature=1.0, seed=43))[0] != alone


@pytest.mark.parametrize("at", [0, 1, 5, 11])
def test_resume_of_a_sampled_request(build_tiny, at):
    built = build_tiny()
    sampling = {"temperature": 1.0, "seed": 42, "top_p": 0.9, "frequency_penalty": 0.5}
    whole = run_tokens(built, request("a", PROMPT, 12, **sampling))[0]
    resumed = request("b", PROMPT, 12, resumed_token_ids=whole[:at], **sampling)
    assert run_tokens(built, resumed)[0] == whole[at:]


def test_resume_after_the_last_token_ends_at_once(build_tiny):
    driver = Driver(build_tiny())
    result = driver.run([request("a", PROMPT, 3, resumed_token_ids=[1, 2, 3])])["a"]
    assert result.token_ids == []
    assert (result.finish.reason, result.finish.completion_tokens) == (FinishReason.LENGTH, 3)


def test_resume_in_the_middle_of_a_character(build_tiny):
    built = build_tiny()
    emoji = list("😀".encode())
    forced = {emoji[3]: 1000.0}
    driver = Driver(built)
    result = driver.run([request("a", PROMPT, 5, resumed_token_ids=[65, *emoji[:3]], logit_bias=forced)])["a"]
    assert result.text == "😀"


def test_fault_36_a_full_cache_delays_and_fails_nobody(build_tiny):
    # Room for one request and a half, of 5 + 27 tokens: 8 blocks each.
    driver = Driver(build_tiny(num_kv_blocks=13))
    results = driver.run(request(str(i), PROMPT, 27) for i in range(3))
    alone = run_tokens(build_tiny(), request("a", PROMPT, 27))[0]
    assert [results[str(i)].token_ids for i in range(3)] == [alone] * 3


def test_fault_38_abort_between_schedule_and_update(build_tiny):
    built = build_tiny()
    driver = Driver(built)
    leaves = driver.add(request("leaves", PROMPT, 20))
    runner = built.core.device.executor.runner
    execute = runner.execute

    def abort_in_flight(step):
        logits = execute(step)
        driver.core.abort(leaves)
        return logits

    runner.execute = abort_in_flight
    stays = run_tokens(build_tiny(), request("stays", PROMPT, 6))[0]
    results = driver.run([request("stays", PROMPT, 6)])
    assert results["leaves"].finish.reason == FinishReason.CANCELLED
    assert results["leaves"].token_ids == []
    assert results["stays"].token_ids == stays


def test_a_deadline_ends_waiting_and_running(build_tiny):
    now = [1000.0]
    built = build_tiny(max_num_seqs=1)
    built.core._clock = lambda: now[0]
    driver = Driver(built)
    driver.add(request("runs", PROMPT, 50, deadline_ms=1_001_000))
    driver.add(request("waits", PROMPT, 50, deadline_ms=1_000_500))
    driver.step()
    now[0] = 1000.6
    driver.step()
    assert driver.results["waits"].finish.reason == FinishReason.DEADLINE
    assert driver.results["runs"].finish is None
    now[0] = 1001.0
    driver.step()
    assert driver.results["runs"].finish.reason == FinishReason.DEADLINE
    assert driver.results["runs"].finish.completion_tokens == 2
    assert driver.core.stats().kv_blocks_used == 0


class _Poisoned:
    """A runner that raises, or gives NaN, for steps with a certain prompt."""

    def __init__(self, runner, *, raises: bool, poison: int = 99) -> None:
        self._runner, self._raises, self._poison = runner, raises, poison
        self.scrub = runner.scrub

    def execute(self, step):
        logits = self._runner.execute(step).clone()  # the runner's own can't be changed
        rows = [item for item in step if item.samples]
        if self._raises and any(item.sequence.token_ids[0] == self._poison for item in step):
            raise RuntimeError("boom")
        for at, item in enumerate(rows):
            if item.sequence.token_ids[0] == self._poison:
                logits[at] = torch.nan
        return logits


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "nan"])
def test_a_poisoned_request_fails_alone(build_tiny, raises):
    expected = run_tokens(build_tiny(), request("good", PROMPT, 10))[0]
    built = build_tiny()
    built.core.device.executor.runner = _Poisoned(built.core.device.executor.runner, raises=raises)
    driver = Driver(built)
    driver.add(request("good", PROMPT, 10))
    driver.step()
    # That tokens are forbidden as well does not make it the client's fault.
    results = driver.run([request("bad", [99, 1], 10, bad_words=("a",)), request("late", PROMPT, 10)])
    assert results["bad"].finish.reason == FinishReason.ERROR
    assert results["bad"].finish.error.code == "engine_error"
    assert ("not a number" in results["bad"].finish.error.message) == (not raises)
    assert results["good"].token_ids == results["late"].token_ids == expected


def test_an_engine_that_can_compute_nothing_dies(build_tiny):
    built = build_tiny()
    built.core.device.executor.runner = _Poisoned(built.core.device.executor.runner, raises=True)
    driver = Driver(built)
    for i in range(2):
        driver.run([request(str(i), [99, 1], 10)])
    driver.add(request("last", [99, 1], 10))
    with pytest.raises(EngineDead):
        driver.step()


def _fill_with_nan(decoder, blocks):
    for cache in (decoder.keys, decoder.values):
        cache[:, list(blocks)] = 255  # the caches are bytes, and all of a number's bits set are NaN
    assert decoder.keys[0, blocks[0]].view(torch.float32).isnan().all()


def test_blocks_that_held_nan_are_clean_for_the_next(build_tiny):
    built = build_tiny(prefix_cache=False)
    expected = run_tokens(built, request("a", PROMPT, 10))[0]
    decoder = built.core.device.executor.runner._decoder
    _fill_with_nan(decoder, range(1, 9))
    decoder.scrub(range(1, 9))
    assert run_tokens(built, request("b", PROMPT, 10))[0] == expected


def test_fault_34_nan_in_the_scratch_block_reaches_nobody(build_tiny):
    built = build_tiny()
    expected = run_tokens(built, request("a", PROMPT, 10))[0]
    decoder = built.core.device.executor.runner._decoder
    _fill_with_nan(decoder, [0])
    assert run_tokens(built, *(request(str(i), PROMPT, 10) for i in range(3))) == [expected] * 3
