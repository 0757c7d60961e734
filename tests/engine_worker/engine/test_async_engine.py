"""The engine over asyncio: streams, aborts, ids, output kinds, death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
import pytest

from engine_worker.config import EngineConfig
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.engine.errors import DuplicateRequest, EngineDead, InvalidRequest, UnsupportedModel
from engine_worker.engine.types import Engine, OutputKind, RequestOutput
from engine_worker.protocol import FinishReason, SamplingParams
from tests.engine_worker.driving import request
from tests.engine_worker.models import greedy

PROMPT = [7, 50, 101, 30, 9]
WAIT_S = 60


@pytest.fixture
async def engine(tiny_config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    made = AsyncEngine(tiny_config)
    await made.start()
    yield made
    await made.stop()


def sampling(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **changes})


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    async with asyncio.timeout(WAIT_S):
        return [output async for output in stream]


async def idle(engine: AsyncEngine) -> None:
    """Waits until every block is back."""
    async with asyncio.timeout(WAIT_S):
        while engine.stats().kv_blocks_used or engine.stats().running:  # noqa: ASYNC110 (state of a thread)
            await asyncio.sleep(0.005)


async def test_it_is_an_engine_and_streams_deltas(engine, tiny_reference):
    typed: Engine = engine
    outputs = await collect(engine.generate("a", PROMPT, sampling(10)))
    assert [token for output in outputs for token in output.token_ids] == greedy(tiny_reference, PROMPT, 10)
    assert [output.seq for output in outputs] == list(range(10))
    assert outputs[-1].finish.reason == FinishReason.LENGTH
    assert all(output.finish is None for output in outputs[:-1])
    assert typed.stats().steps >= 10


async def test_output_kinds_say_the_same(engine):
    deltas = await collect(engine.generate("a", PROMPT, sampling(10, logprobs=1)))
    cumulative = await collect(engine.generate("b", PROMPT, sampling(10, logprobs=1), OutputKind.CUMULATIVE))
    (final,) = await collect(engine.generate("c", PROMPT, sampling(10, logprobs=1), OutputKind.FINAL))
    assert len(cumulative) == 10
    for output in (cumulative[-1], final):
        assert output.token_ids == [token for delta in deltas for token in delta.token_ids]
        assert output.text == "".join(delta.text for delta in deltas)
        assert len(output.logprobs) == 10
        # By now the prompt is cached.
        assert msgspec.structs.replace(output.finish, cached_tokens=0) == deltas[-1].finish
    assert [len(output.token_ids) for output in cumulative] == list(range(1, 11))


async def test_a_text_prompt_is_tokenised(engine):
    (from_text,) = await collect(engine.generate("a", "héllo", sampling(5), OutputKind.FINAL))
    (from_ids,) = await collect(engine.generate("b", list("héllo".encode()), sampling(5), OutputKind.FINAL))
    assert from_text.token_ids == from_ids.token_ids


async def test_fault_15_an_empty_text_is_refused(engine):
    with pytest.raises(InvalidRequest, match="empty"):
        await collect(engine.generate("a", "", sampling(5)))
    assert len(await collect(engine.generate("a", PROMPT, sampling(5)))) == 5


async def test_fault_17_without_max_tokens_the_context_is_the_limit(engine):
    (final,) = await collect(engine.generate("a", [*PROMPT, 1], output_kind=OutputKind.FINAL))
    ended = final.finish.reason == FinishReason.STOP
    assert ended or len(final.token_ids) == engine.limits.max_model_len - 6
    assert len(final.token_ids) > 16


async def test_many_join_and_leave(engine, tiny_reference):
    expected = {i: greedy(tiny_reference, [i + 1, 2, 3], 12) for i in range(20)}

    async def one(i: int) -> None:
        for _ in range(i % 4):
            await asyncio.sleep(0.002)
        (final,) = await collect(engine.generate(f"r{i}", [i + 1, 2, 3], sampling(12), OutputKind.FINAL))
        assert final.token_ids == expected[i]

    async def leaver(i: int) -> None:
        async with aclosing(engine.generate(f"l{i}", PROMPT, sampling(200))) as stream:
            async for output in stream:
                if output.seq >= i:
                    break

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for i in range(20):
            group.create_task(one(i))
            if i % 2:
                group.create_task(leaver(i))
    await idle(engine)


async def test_fault_20_a_closed_stream_is_gone_within_a_step(engine):
    async with aclosing(engine.generate("a", PROMPT, sampling(240))) as stream:
        async for output in stream:
            if output.seq == 3:
                break
    steps = engine.stats().steps
    await idle(engine)
    # The step in flight, and one that was scheduled before the abort was seen.
    assert engine.stats().steps <= steps + 2
    assert len(await collect(engine.generate("a", PROMPT, sampling(3)))) == 3


async def test_fault_22_a_late_abort_does_not_hit_the_new_request(engine):
    engine.add(request("a", PROMPT, 200))
    engine.abort("a")
    engine.add(request("a", PROMPT, 6))
    tokens, finishes = [], []
    async with asyncio.timeout(WAIT_S):
        async for step in engine.steps():
            for output in step.outputs:
                tokens += output.token_ids
                finishes += [output.finish] if output.finish else []
            if len(finishes) == 2:
                break
    assert [finish.reason for finish in finishes] == [FinishReason.CANCELLED, FinishReason.LENGTH]
    assert finishes[1].completion_tokens == 6
    # An abort that comes when the id is no longer in use is ignored.
    engine.abort("a")
    engine.abort("never seen")
    assert len(await collect(engine.generate("a", PROMPT, sampling(3)))) == 3


async def test_fault_23_a_duplicate_id_is_refused(engine):
    engine.add(request("a", PROMPT, 200))
    with pytest.raises(DuplicateRequest):
        engine.add(request("a", PROMPT, 3))
    with pytest.raises(DuplicateRequest):
        await collect(engine.generate("a", PROMPT, sampling(3)))
    assert len(await collect(engine.generate("b", PROMPT, sampling(3)))) == 3


async def test_cancel_after_and_deadline(engine):
    late = await collect(engine.generate("a", PROMPT, sampling(240), deadline=time.time() - 1))
    assert [(output.token_ids, output.finish.reason) for output in late] == [([], FinishReason.DEADLINE)]
    (cancelled,) = await collect(
        engine.generate("b", PROMPT, sampling(240), OutputKind.FINAL, cancel_after=7)
    )
    assert cancelled.finish.reason == FinishReason.CANCELLED
    assert len(cancelled.token_ids) == cancelled.finish.completion_tokens == 7
    (shorter,) = await collect(engine.generate("c", PROMPT, sampling(5), OutputKind.FINAL, cancel_after=7))
    assert (shorter.finish.reason, len(shorter.token_ids)) == (FinishReason.LENGTH, 5)
    with pytest.raises(InvalidRequest, match="cancel_after"):
        await collect(engine.generate("d", PROMPT, sampling(5), cancel_after=0))
    await idle(engine)


async def test_steps_gives_all_requests_of_a_step_at_once(engine):
    for name in ("a", "b", "c"):
        engine.add(request(name, PROMPT, 8))
    together = 0
    open_requests = {"a", "b", "c"}
    async with asyncio.timeout(WAIT_S):
        async for step in engine.steps():
            together = max(together, len(step.outputs))
            open_requests -= {output.request_id for output in step.outputs if output.finish}
            if not open_requests:
                break
    assert together == 3


async def test_room_counts_slots_and_blocks(engine, tiny_config):
    assert engine.room() == tiny_config.max_num_seqs
    engine.add(request("a", PROMPT, 200))
    assert engine.room() == tiny_config.max_num_seqs - 1


async def test_stop_ends_everything(tiny_config):
    engine = AsyncEngine(tiny_config)
    with pytest.raises(EngineDead):
        engine.add(request("early", PROMPT))
    await engine.start()
    engine.add(request("a", PROMPT, 200))
    stream = asyncio.create_task(collect(engine.generate("b", PROMPT, sampling(200))))
    await asyncio.sleep(0)
    await engine.stop()
    assert (await stream)[-1].finish.reason == FinishReason.CANCELLED
    async with asyncio.timeout(WAIT_S):
        finishes = [
            output.finish async for step in engine.steps() for output in step.outputs if output.finish
        ]
    assert [finish.reason for finish in finishes] == [FinishReason.CANCELLED]
    assert engine.stats().kv_blocks_used == 0
    with pytest.raises(EngineDead):
        engine.add(request("late", PROMPT))
    assert engine.room() == 0
    await engine.stop()


async def test_a_dead_loop_tells_everyone(engine, monkeypatch):
    from engine_worker.engine.scheduler import Scheduler

    def broken(self):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Scheduler, "schedule", broken)
    engine.add(request("a", PROMPT, 5))
    with pytest.raises(EngineDead, match="a bug"):
        await collect(engine.generate("b", PROMPT, sampling(5)))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(EngineDead):
            await anext(engine.steps())
    assert engine.room() == 0


async def test_start_says_what_is_wrong_with_a_model(tmp_path, tiny_config):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    engine = AsyncEngine(EngineConfig(model_dir=tmp_path))
    with pytest.raises(UnsupportedModel, match="'gpt2' is not served"):
        await engine.start()
    with pytest.raises(EngineDead):
        engine.add(request("a", PROMPT))
    await engine.stop()
