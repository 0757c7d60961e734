"""The worker against a real server, with an engine whose every token is known beforehand."""

from __future__ import annotations

import asyncio

import pytest

from engine_worker.protocol import SamplingParams
from tests.engine_worker.broker.driving import put, until, usage_events
from tests.engine_worker.running_worker import (
    finished,
    is_idle,
    text,
    token_ids,
    tokens_logged,
)
from tests.engine_worker.scripted_engine import ScriptedEngine, expected_output


async def test_many_requests_through_few_slots_each_get_their_own_answer(
    start, gateway, make, model, redis_url
):
    start(ScriptedEngine(max_num_seqs=4, tokens_per_step=2))
    requests = [
        make(f"r{n}", prompt_token_ids=[n + 1], sampling=SamplingParams(max_tokens=5 + n, seed=n))
        for n in range(20)
    ]
    for request in requests:
        await put(gateway, request)
    await until(finished(gateway, model, *(request.request_id for request in requests)))
    for request in requests:
        log = await gateway.read_log(model, request.request_id)
        expected = expected_output(
            request.prompt_token_ids, request.sampling.seed, request.sampling.max_tokens
        )
        assert token_ids(log) == expected
        assert text(log) == "".join(map(chr, expected))
        assert log[-1].finish
        assert log[-1].finish.reason == "length"
    events = await usage_events(redis_url, model)
    assert sorted(event.request_id for event in events) == sorted(request.request_id for request in requests)
    assert {event.request_id: event.completion_tokens for event in events} == {
        f"r{n}": 5 + n for n in range(20)
    }


async def test_with_all_slots_taken_a_better_tier_is_let_in_and_the_lower_goes_on_after_it(
    start, gateway, make, model, redis_url
):
    """FAULTS 7, from the queue to the batch: nobody waits for a lower class to end by itself."""
    running = start(ScriptedEngine(max_num_seqs=2, step_s=0.005))
    low = [
        make(
            f"low-{n}", tier_rank=2, prompt_token_ids=[n + 1], sampling=SamplingParams(max_tokens=600, seed=n)
        )
        for n in range(4)
    ]
    for request in low:
        await put(gateway, request)
    await until(tokens_logged(gateway, model, "low-1", 5))
    for n in range(3):
        await put(gateway, make(f"high-{n}", tier_rank=0, sampling=SamplingParams(max_tokens=20)))
        await until(finished(gateway, model, f"high-{n}"))
    states = [await gateway.request_state(model, request.request_id) for request in low]
    assert [state.state for state in states] == ["running", "running", "queued", "queued"]
    assert max(state.tokens for state in states) < 600
    running.engine.tokens_per_step = 50
    await until(finished(gateway, model, *(request.request_id for request in low)))
    for request in low:
        log = await gateway.read_log(model, request.request_id)
        assert token_ids(log) == expected_output(request.prompt_token_ids, request.sampling.seed, 600)
    assert {event.attempts for event in await usage_events(redis_url, model)} == {1}


async def test_a_full_worker_claims_what_is_better_before_its_next_step(start, gateway, make, model):
    """Its step may be long: what better tiers wait for is at most that one, not the one after it as well."""
    engine = ScriptedEngine(max_num_seqs=2)
    start(engine, lease_ms=120_000)
    for n in range(3):
        await put(gateway, make(f"low-{n}", tier_rank=2, sampling=SamplingParams(max_tokens=100_000)))
    await until(tokens_logged(gateway, model, "low-1", 5))
    engine.pause()
    await asyncio.sleep(0.1)  # for the publish of the last step
    steps = engine.stats().steps
    await put(gateway, make("high", tier_rank=0, sampling=SamplingParams(max_tokens=5)))

    async def is_claimed() -> bool:
        return (await gateway.request_state(model, "high")).state == "running"

    await until(is_claimed)
    assert engine.stats().steps == steps
    engine.resume()
    await until(finished(gateway, model, "high"))
    assert (await gateway.request_state(model, "low-0")).state == "running"


async def test_an_idle_worker_starts_at_once(start, gateway, make, model, monkeypatch):
    monkeypatch.setattr("engine_worker.claimer._WAIT_FOR_WORK_S", 5.0)
    start()
    await put(gateway, make("warm"))
    await until(finished(gateway, model, "warm"))
    loop = asyncio.get_running_loop()
    request = make("r1")
    async with gateway.live(request.reply_channel) as live:
        waits = []
        for n in range(10):
            began = loop.time()
            await put(gateway, make(f"n{n}"))
            while not any(chunk.request_id == f"n{n}" for chunk in await anext(live)):
                pass
            waits.append(loop.time() - began)
    # A worker that polled would take half its interval of five seconds.
    assert sorted(waits)[5] < 1.5


async def test_a_running_request_that_is_cancelled_ends_within_a_step_and_is_billed(
    start,
    gateway,
    make,
    model,
    redis_url,
):
    running = start(ScriptedEngine(step_s=0.005))
    request = make("r1", sampling=SamplingParams(max_tokens=100_000))
    async with gateway.live(request.reply_channel) as live:
        await put(gateway, request)
        await anext(live)
        await gateway.cancel(model, "r1")
        await gateway.cancel(model, "r1")
        steps_at_cancel = running.engine.stats().steps
        while not (last := (await anext(live))[-1]).finish:
            pass
    assert running.engine.stats().steps - steps_at_cancel < 20
    await until(is_idle(running))
    log = await gateway.read_log(model, "r1")
    assert last.finish.reason == "cancelled"
    assert last.finish.completion_tokens == len(token_ids(log)) > 0
    (event,) = await usage_events(redis_url, model)
    assert (event.finish_reason, event.completion_tokens) == ("cancelled", len(token_ids(log)))


async def test_what_the_engine_refuses_ends_with_a_typed_error(start, gateway, make, model, redis_url):
    start(ScriptedEngine(context_length=4))
    await put(gateway, make("long", prompt_token_ids=[1] * 10))
    await put(gateway, make("good", prompt_token_ids=[1]))
    await until(finished(gateway, model, "long", "good"))
    finish = (await gateway.request_state(model, "long")).finish
    assert finish.reason == "error"
    assert finish.error.code == "invalid_request"
    events = {event.request_id: event.error_code for event in await usage_events(redis_url, model)}
    assert events == {"long": "invalid_request", "good": None}


async def test_a_deadline_ends_a_running_request(start, gateway, make, model, redis_url):
    running = start(ScriptedEngine(step_s=0.005))
    await put(
        gateway, make("r1", created_at_ms=0, deadline_ms=600_000, sampling=SamplingParams(max_tokens=100_000))
    )
    await until(tokens_logged(gateway, model, "r1", 1))
    running.engine.clock_ahead_s = 600
    await until(finished(gateway, model, "r1"))
    (event,) = await usage_events(redis_url, model)
    assert event.finish_reason == "deadline"
    assert event.completion_tokens == len(token_ids(await gateway.read_log(model, "r1"))) > 0
    await until(is_idle(running))


async def test_a_stopping_worker_finishes_what_runs_and_claims_nothing_more(start, gateway, make, model):
    running = start(ScriptedEngine(max_num_seqs=1, step_s=0.005))
    await put(gateway, make("r1", sampling=SamplingParams(max_tokens=30)))
    await until(tokens_logged(gateway, model, "r1", 1))
    running.worker.stop()
    await put(gateway, make("r2"))
    assert await asyncio.wait_for(running.task, 10) == 0
    assert (await gateway.request_state(model, "r1")).finish.reason == "length"
    assert (await gateway.request_state(model, "r2")).state == "queued"
    assert not [status for status in await gateway.workers() if status.model == model]


async def test_what_comes_to_a_waiting_worker_that_was_told_to_stop_is_another_s(start, gateway, make, model):
    stopping = start(ScriptedEngine())
    await put(gateway, make("warm"))
    await until(finished(gateway, model, "warm"))
    stopping.worker.stop()
    await put(gateway, make("r1"))
    assert await asyncio.wait_for(stopping.task, 20) == 0
    state = await gateway.request_state(model, "r1")
    assert (state.state, state.attempts, state.tokens) == ("queued", 0, 0)
    start(ScriptedEngine(), worker_id="w2")
    await until(finished(gateway, model, "r1"))


async def test_what_the_grace_period_does_not_finish_goes_on_elsewhere(
    start, gateway, make, model, redis_url
):
    first = start(ScriptedEngine(step_s=0.005), drain_grace_s=0.05)
    request = make("r1", sampling=SamplingParams(max_tokens=200, seed=7))
    await put(gateway, request)
    await until(tokens_logged(gateway, model, "r1", 5))
    first.worker.stop()
    assert await asyncio.wait_for(first.task, 10) == 0
    state = await gateway.request_state(model, "r1")
    assert (state.state, state.attempts) == ("queued", 0)
    start(ScriptedEngine(tokens_per_step=10), worker_id="w2")
    await until(finished(gateway, model, "r1"))
    log = await gateway.read_log(model, "r1")
    assert token_ids(log) == expected_output(request.prompt_token_ids, 7, 200)
    assert text(log) == "".join(map(chr, token_ids(log)))
    (event,) = await usage_events(redis_url, model)
    assert (event.completion_tokens, event.attempts, event.worker_id) == (200, 1, "w2")


@pytest.mark.parametrize("for_good", [False, True])
async def test_a_worker_that_drains_says_at_once_whether_it_comes_back(start, gateway, make, model, for_good):
    running = start(ScriptedEngine(step_s=0.02), heartbeat_s=300)
    await put(gateway, make("r1", sampling=SamplingParams(max_tokens=200, seed=7)))
    await until(tokens_logged(gateway, model, "r1", 5))
    running.worker.stop(for_good=for_good)

    async def said() -> bool:
        (status,) = [each for each in await gateway.workers() if each.model == model]
        assert not status.goes_for_good or for_good
        return status.draining

    await until(said)
    (status,) = [each for each in await gateway.workers() if each.model == model]
    assert status.goes_for_good == for_good


async def test_a_whole_answer_comes_in_few_chunks_and_goes_on_elsewhere_all_the_same(
    start, gateway, make, model, redis_url
):
    first = start(ScriptedEngine(step_s=0.005), drain_grace_s=0.05)
    request = make("r1", sampling=SamplingParams(max_tokens=300, seed=7), is_streamed=False)
    await put(gateway, request)
    await until(tokens_logged(gateway, model, "r1", 5))
    first.worker.stop()
    assert await asyncio.wait_for(first.task, 10) == 0
    handed_back = (await gateway.request_state(model, "r1")).tokens
    assert handed_back >= 5
    start(ScriptedEngine(), worker_id="w2")
    await until(finished(gateway, model, "r1"))
    log = await gateway.read_log(model, "r1")
    assert token_ids(log) == expected_output(request.prompt_token_ids, 7, 300)
    assert text(log) == "".join(map(chr, token_ids(log)))
    assert len(log) < 100
    (event,) = await usage_events(redis_url, model)
    assert (event.completion_tokens, event.attempts) == (300, 1)


async def test_what_comes_while_it_stops_is_served_or_left_to_others(start, gateway, make, model):
    for n in range(5):
        running = start(worker_id=f"w{n}")
        await put(gateway, make(f"first-{n}"))
        await until(finished(gateway, model, f"first-{n}"))
        names = [f"r{n}-{k}" for k in range(30)]

        async def ask(names: list[str] = names) -> None:
            for name in names:
                await put(gateway, make(name))

        asking = asyncio.create_task(ask())
        while (await gateway.request_state(model, f"first-{n}")).state != "finished" or not asking.done():
            await asyncio.sleep(0.002)
            running.worker.stop()
        await asking
        assert await running.task == 0
        states = {name: (await gateway.request_state(model, name)).state for name in names}
        assert set(states.values()) <= {"finished", "queued"}
        assert states[names[0]] == "finished"


class Filling(ScriptedEngine):
    """Its requests turn out so large that few of them fill it."""

    def room(self) -> int:
        return super().room() if len(self._sequences) < 8 else 0


async def test_what_it_was_handed_counts_by_its_size(start, gateway, make, model):
    engine = Filling(max_num_seqs=1000)
    start(engine)
    await put(gateway, make("warm"))
    await until(finished(gateway, model, "warm"))
    await asyncio.sleep(0.2)  # it waits for work, and has offered to take 1000
    engine.pause()
    names = [f"r{n}" for n in range(40)]
    for name in names:
        await put(gateway, make(name))
    states = [(await gateway.request_state(model, name)).state for name in names]
    assert 8 <= states.count("running") < 40
    assert states[-1] == "queued"
    engine.resume()
    await until(finished(gateway, model, *names))
