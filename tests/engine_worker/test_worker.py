"""The worker against a real server, with an engine whose every token is known beforehand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from engine_worker.broker import GatewayBroker, WorkerBroker
from engine_worker.protocol import Chunk, SamplingParams
from engine_worker.worker import Worker
from engine_worker.worker_config import WorkerConfig
from tests.engine_worker.broker.driving import card, lapse_leases, put, until, usage_events
from tests.engine_worker.broker.wire import Wire
from tests.engine_worker.scripted_engine import ScriptedEngine, expected_output
from weir import embedded


class Running:
    """A worker in a task, and its engine."""

    def __init__(self, url: str, model: str, engine: ScriptedEngine, **config: float | int | str) -> None:
        settings = {"worker_id": "w1", "heartbeat_s": 0.05, "drain_grace_s": 20.0} | config
        self.config = WorkerConfig(model=model, redis_url=url, **settings)  # type: ignore[arg-type]  # a test's mix
        self.engine = engine
        self.broker = WorkerBroker(
            url,
            model=model,
            worker_id=self.config.worker_id,
            lease_ms=self.config.lease_ms,
            timeout_s=self.config.broker_timeout_s,
        )
        self.worker = Worker(engine, self.broker, card(model), b"{}", self.config)
        self.task = asyncio.create_task(self.worker.run())

    async def close(self) -> None:
        if not self.task.done():
            self.worker.stop()
            self.worker.stop()
            self.engine.resume()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.task, 10)
        await self.engine.stop()
        await self.broker.aclose()

    async def kill(self) -> None:
        """As kill -9: nothing is said to anybody."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


Start = Callable[..., Running]


@pytest.fixture
async def start(redis_url: str, model: str) -> AsyncIterator[Start]:
    started: list[Running] = []

    def build(
        engine: ScriptedEngine | None = None, *, url: str = redis_url, **config: float | int | str
    ) -> Running:
        running = Running(url, model, engine or ScriptedEngine(), **config)
        started.append(running)
        return running

    yield build
    for running in started:
        await running.close()


def token_ids(chunks: list[Chunk]) -> list[int]:
    """The tokens in a log, which must be without hole and without repeat."""
    tokens: list[int] = []
    for chunk in chunks:
        assert chunk.seq == len(tokens)
        tokens += chunk.token_ids
    return tokens


def text(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def finished(gateway: GatewayBroker, model: str, *request_ids: str) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        states = [await gateway.request_state(model, request_id) for request_id in request_ids]
        return all(state.state == "finished" for state in states)

    return check


def tokens_logged(
    gateway: GatewayBroker, model: str, request_id: str, count: int
) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return (await gateway.request_state(model, request_id)).tokens >= count

    return check


def is_idle(running: Running) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return not running.engine.active

    return check


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
        await put(gateway, make(f"low-{n}", tier_rank=2, sampling=SamplingParams(max_tokens=600)))
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


async def test_an_idle_worker_starts_at_once(start, gateway, make, model):
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
    # A worker that polled would take half its interval of a second.
    assert sorted(waits)[5] < 0.2


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
        gateway, make("r1", created_at_ms=0, deadline_ms=300, sampling=SamplingParams(max_tokens=100_000))
    )
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
