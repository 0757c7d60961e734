"""Several choices of one request: one log, one end, one row of usage, also through a cancel and a kill."""

from __future__ import annotations

from engine_worker.choices import choice_seed, joint_finish
from engine_worker.protocol import ChoiceEnd, Chunk, Finish, SamplingParams
from tests.engine_worker.broker.driving import lapse_leases, put, until, usage_events
from tests.engine_worker.running_worker import finished, is_idle, token_ids, tokens_logged
from tests.engine_worker.scripted_engine import ScriptedEngine, expected_output


def by_choice(log: list[Chunk]) -> dict[int, list[int]]:
    choices: dict[int, list[int]] = {}
    for chunk in log:
        choices.setdefault(chunk.index, []).extend(chunk.token_ids)
    return choices


def three(make, **sampling):
    return make("r1", sampling=SamplingParams(n=3, seed=5, **{"max_tokens": 6, **sampling}))


def expected(request) -> dict[int, list[int]]:
    sampling = request.sampling
    return {
        i: expected_output(request.prompt_token_ids, choice_seed(sampling.seed, i), sampling.max_tokens)
        for i in range(3)
    }


def test_the_joint_end_counts_every_choice_guesses():
    ends = [
        Finish(reason="stop", prompt_tokens=5, completion_tokens=9, drafted_tokens=8, accepted_tokens=taken)
        for taken in (6, 1)
    ]
    joint = joint_finish([ChoiceEnd("stop")] * 2, ends, 18)
    assert (joint.completion_tokens, joint.drafted_tokens, joint.accepted_tokens) == (18, 16, 7)


async def test_choices_share_one_log_and_one_end(start, gateway, make, model, redis_url):
    start(ScriptedEngine(tokens_per_step=4))
    request = three(make)
    await put(gateway, request)
    await until(finished(gateway, model, "r1"))
    log = await gateway.read_log(model, "r1")
    assert len(token_ids(log)) == 18
    assert by_choice(log) == expected(request)
    assert {chunk.index: chunk.choice_end.reason for chunk in log if chunk.choice_end} == {
        0: "length",
        1: "length",
        2: "length",
    }
    assert [chunk.finish is not None for chunk in log] == [False] * (len(log) - 1) + [True]
    (event,) = await usage_events(redis_url, model)
    assert (event.prompt_tokens, event.completion_tokens, event.finish_reason) == (3, 18, "length")


async def test_the_others_wait_for_the_first_ones_first_token(start, gateway, make, model):
    running = start(ScriptedEngine())
    running.engine.pause()
    await put(gateway, three(make))
    await until(lambda: _are(running, ["r1#1/0"]))
    running.engine.resume()
    await until(finished(gateway, model, "r1"))


async def _are(running, engine_ids) -> bool:
    return running.engine.active == engine_ids


async def test_a_cancel_ends_every_choice(start, gateway, make, model, redis_url):
    running = start(ScriptedEngine(step_s=0.005))
    await put(gateway, three(make, max_tokens=100_000))
    await until(tokens_logged(gateway, model, "r1", 20))
    await gateway.cancel(model, "r1")
    await until(finished(gateway, model, "r1"))
    await until(is_idle(running))
    log = await gateway.read_log(model, "r1")
    assert log[-1].finish.reason == "cancelled"
    (event,) = await usage_events(redis_url, model)
    assert event.completion_tokens == len(token_ids(log)) == log[-1].finish.completion_tokens


async def test_a_cancel_before_the_others_have_begun(start, gateway, make, model):
    running = start(ScriptedEngine())
    running.engine.pause()
    await put(gateway, three(make))
    await until(lambda: _are(running, ["r1#1/0"]))
    await gateway.cancel(model, "r1")
    await until(lambda: _is_cancelled(gateway, model))
    await until(lambda: _aborted(running))
    running.engine.resume()
    await until(finished(gateway, model, "r1"))
    assert (await gateway.request_state(model, "r1")).finish.reason == "cancelled"


async def _is_cancelled(gateway, model) -> bool:
    return bool((await gateway.request_state(model, "r1")).state == "running")


async def _aborted(running) -> bool:
    return all(sequence.aborted for sequence in running.engine._sequences.values())


async def test_another_worker_goes_on_with_each_choice(start, gateway, make, model, redis_url):
    first = start(ScriptedEngine(step_s=0.003), worker_id="w1")
    request = three(make, max_tokens=40)
    await put(gateway, request)
    await until(tokens_logged(gateway, model, "r1", 30))
    await first.kill()
    await lapse_leases(redis_url, model)
    start(ScriptedEngine(), worker_id="w2")
    await until(finished(gateway, model, "r1"))
    log = await gateway.read_log(model, "r1")
    assert len(token_ids(log)) == 120
    assert by_choice(log) == expected(request)
    (event,) = await usage_events(redis_url, model)
    assert (event.completion_tokens, event.attempts) == (120, 2)


async def test_choices_that_had_ended_are_not_made_again(start, gateway, make, model, redis_url):
    """One choice has ended when the worker dies; the log says which."""
    first = start(ScriptedEngine(max_num_seqs=1, step_s=0.003), worker_id="w1")
    request = three(make, max_tokens=20)
    await put(gateway, request)
    await until(tokens_logged(gateway, model, "r1", 24))
    await first.kill()
    await lapse_leases(redis_url, model)
    start(ScriptedEngine(), worker_id="w2")
    await until(finished(gateway, model, "r1"))
    log = await gateway.read_log(model, "r1")
    assert by_choice(log) == expected(request)
    assert sorted(chunk.index for chunk in log if chunk.choice_end) == [0, 1, 2]
