"""The worker when its engine, its server, the wire between them or a colleague fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from engine_worker.broker import GatewayBroker, WorkerBroker
from engine_worker.protocol import SamplingParams
from tests.engine_worker.broker.driving import lapse_leases, put, until, usage_events
from tests.engine_worker.broker.wire import Wire
from tests.engine_worker.running_worker import (
    finished,
    is_idle,
    token_ids,
    tokens_logged,
)
from tests.engine_worker.scripted_engine import ScriptedEngine, expected_output
from weir import embedded


async def test_a_dead_engine_hands_back_and_exits_for_the_supervisor(start, gateway, make, model, redis_url):
    first = start(ScriptedEngine(die_at_step=8))
    request = make("r1", sampling=SamplingParams(max_tokens=40, seed=3))
    await put(gateway, request)
    assert await asyncio.wait_for(first.task, 10) == 1
    state = await gateway.request_state(model, "r1")
    assert (state.state, state.tokens, state.attempts) == ("queued", 7, 1)
    start(worker_id="w2")
    await until(finished(gateway, model, "r1"))
    assert token_ids(await gateway.read_log(model, "r1")) == expected_output(request.prompt_token_ids, 3, 40)
    (event,) = await usage_events(redis_url, model)
    assert (event.completion_tokens, event.attempts) == (40, 2)


async def test_a_request_that_kills_every_engine_ends_with_an_error_not_a_stop(
    start, gateway, make, model, redis_url
):
    """FAULTS 70: every worker that has it dies in mid-stream."""
    request = make("poison", sampling=SamplingParams(max_tokens=100))
    async with gateway.live(request.reply_channel) as live:
        await put(gateway, request)
        for n in range(3):
            running = start(ScriptedEngine(die_at_step=3), worker_id=f"w{n}")
            assert await asyncio.wait_for(running.task, 10) == 1
        while not (last := (await anext(live))[-1]).finish:
            pass
    assert last.finish.reason == "error"
    assert last.finish.error.code == "engine_failed"
    (event,) = await usage_events(redis_url, model)
    assert (event.finish_reason, event.completion_tokens, event.attempts) == ("error", 6, 3)


async def test_a_stalled_engine_counts_as_dead(start, gateway, make, model):
    engine = ScriptedEngine()
    engine.pause()
    running = start(engine, stall_s=0.2)
    await put(gateway, make("r1"))
    assert await asyncio.wait_for(running.task, 10) == 1
    assert (await gateway.request_state(model, "r1")).state == "queued"


async def test_a_killed_workers_request_is_resumed_to_the_same_tokens(start, gateway, make, model, redis_url):
    first = start(ScriptedEngine(step_s=0.005))
    request = make("r1", sampling=SamplingParams(max_tokens=100, seed=11))
    await put(gateway, request)
    await until(tokens_logged(gateway, model, "r1", 10))
    await first.kill()
    start(ScriptedEngine(tokens_per_step=7), worker_id="w2")
    await lapse_leases(redis_url, model)
    await until(finished(gateway, model, "r1"))
    log = await gateway.read_log(model, "r1")
    assert token_ids(log) == expected_output(request.prompt_token_ids, 11, 100)
    assert {chunk.epoch for chunk in log} == {1, 2}
    (event,) = await usage_events(redis_url, model)
    assert (event.completion_tokens, event.attempts) == (100, 2)


async def test_a_worker_that_was_only_slow_can_not_write_into_anothers_request(
    start, gateway, make, model, redis_url
):
    slow = start(ScriptedEngine(step_s=0.002))
    request = make("r1", sampling=SamplingParams(max_tokens=50, seed=5))
    await put(gateway, request)
    await until(tokens_logged(gateway, model, "r1", 5))
    slow.engine.pause()
    slow.worker.stop()  # so that it does not claim its own request back
    second = WorkerBroker(redis_url, model=model, worker_id="w2", timeout_s=5)

    async def taken() -> bool:
        await lapse_leases(redis_url, model)
        await second.expire()
        claims.extend(await second.claim(1))
        return bool(claims)

    claims = []
    await until(taken)
    slow.engine.resume()
    await until(is_idle(slow))  # fenced, so aborted
    assert await asyncio.wait_for(slow.task, 10) == 0
    assert token_ids(await gateway.read_log(model, "r1")) == list(claims[0].logged_token_ids)
    assert await usage_events(redis_url, model) == []
    await second.aclose()


async def test_a_claim_that_the_server_forgot_and_gave_to_the_same_worker_again_goes_on(
    start, gateway, make, model, redis_url
):
    """The epoch is that of the first claim, so the engine would be given the same id twice."""
    request = make("r1", sampling=SamplingParams(max_tokens=40, seed=5))
    await put(gateway, request)
    prefix = f"weir:{{m:{model}}}:"
    async with Redis.from_url(redis_url, protocol=2) as client:
        kept = {
            key: await client.dump(key) async for key in client.scan_iter(match=f"weir:[{{]m:{model}[}}]:*")
        }
        running = start(ScriptedEngine(step_s=0.005))
        await until(tokens_logged(gateway, model, "r1", 5))
        running.engine.pause()
        await asyncio.sleep(2 * running.engine.step_s)  # the step that runs; its timer is before this one
        await until(tokens_logged(gateway, model, "r1", running.engine.stats().steps))
        async with client.pipeline(transaction=True) as pipe:
            pipe.delete(prefix + "log:r1", prefix + "leases")
            for key, dump in kept.items():
                pipe.restore(key, 0, dump, replace=True)
            pipe.lpush(prefix + "wake", 1)
            await pipe.execute()

        async def is_claimed_again() -> bool:
            return bool(await client.zcard(prefix + "leases"))

        await until(is_claimed_again)
    running.engine.resume()
    await until(finished(gateway, model, "r1"))
    log = await gateway.read_log(model, "r1")
    assert token_ids(log) == expected_output(request.prompt_token_ids, 5, 40)
    assert log[-1].finish.reason == "length"
    (event,) = await usage_events(redis_url, model)
    assert event.completion_tokens == 40


@pytest.mark.parametrize("fault", ["cut", "freeze"])
async def test_a_broken_wire_neither_loses_nor_doubles_tokens(
    start,
    gateway,
    make,
    model,
    redis_url,
    tmp_path,
    fault,
):
    async with Wire(redis_url, tmp_path) as wire:
        running = start(ScriptedEngine(step_s=0.002), url=wire.url, broker_timeout_s=0.3, lease_ms=60_000)
        requests = [make(f"r{n}", sampling=SamplingParams(max_tokens=400, seed=n)) for n in range(4)]
        for request in requests:
            await put(gateway, request)
        for round_ in range(3):
            await until(tokens_logged(gateway, model, "r0", 40 * (round_ + 1)))
            getattr(wire, fault)()
            steps = running.engine.stats().steps

            async def goes_on(steps: int = steps) -> bool:
                return running.engine.stats().steps > steps + 5 or not running.engine.active

            await until(goes_on)  # computing does not wait for Redis
            wire.mend()
        await until(finished(gateway, model, *(request.request_id for request in requests)))
        for request in requests:
            log = await gateway.read_log(model, request.request_id)
            assert token_ids(log) == expected_output(request.prompt_token_ids, request.sampling.seed, 400)
        assert len(await usage_events(redis_url, model)) == 4
        assert {event.attempts for event in await usage_events(redis_url, model)} == {1}
        await running.close()


async def test_without_redis_for_too_long_the_worker_drops_all_and_recovers(
    start,
    gateway,
    make,
    model,
    redis_url,
    tmp_path,
):
    async with Wire(redis_url, tmp_path) as wire:
        running = start(
            ScriptedEngine(step_s=0.002),
            url=wire.url,
            broker_timeout_s=0.3,
            redis_grace_s=0.3,
            lease_ms=60_000,
        )
        request = make("r1", sampling=SamplingParams(max_tokens=2000, seed=1))
        await put(gateway, request)
        await until(tokens_logged(gateway, model, "r1", 10))
        wire.cut()
        await until(is_idle(running))
        wire.mend()
        await lapse_leases(redis_url, model)
        running.engine.tokens_per_step = 100
        await until(finished(gateway, model, "r1"))
        assert token_ids(await gateway.read_log(model, "r1")) == expected_output(
            request.prompt_token_ids, 1, 2000
        )
        (event,) = await usage_events(redis_url, model)
        assert (event.completion_tokens, event.attempts) == (2000, 2)
        await running.close()


async def test_a_server_that_comes_back_empty_is_registered_with_again(start, make, model, tmp_path: Path):
    server = embedded.prepare_valkey(tmp_path, durable=False)
    process = embedded.start(server)
    gateway = GatewayBroker(server.url, timeout_s=1)
    try:
        running = start(ScriptedEngine(step_s=0.002), url=server.url, broker_timeout_s=0.5)
        await put(gateway, make("r1", sampling=SamplingParams(max_tokens=100_000)))
        await until(tokens_logged(gateway, model, "r1", 3))
        process.kill()
        process.wait()
        process = embedded.start(server)

        async def is_back() -> bool:
            return [found.model for found in await gateway.model_cards()] == [model]

        await until(is_back)
        await until(is_idle(running))  # nobody knows that request any more
        await put(gateway, make("r2"))
        await until(finished(gateway, model, "r2"))
        await running.close()
    finally:
        await gateway.aclose()
        process.kill()
        process.wait()
