"""What every implementation of the engine's interface must do. A test class inherits it and gives `engine`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine_worker.engine.errors import DuplicateRequest, EngineDead, InvalidRequest
from engine_worker.engine.types import Engine, EngineRequest
from engine_worker.protocol import FinishReason
from tests.engine_worker.driving import Collected, request
from tests.engine_worker.models import greedy

PROMPT = [7, 50, 101, 30, 9]
WAIT_S = 60


async def run(engine: Engine, *requests: EngineRequest) -> dict[str, Collected]:
    """Adds them, and follows the steps until each has ended."""
    for each in requests:
        engine.add(each)
    return await follow(engine, [each.request_id for each in requests])


async def follow(engine: Engine, names: list[str]) -> dict[str, Collected]:
    found = {name: Collected() for name in names}
    async with asyncio.timeout(WAIT_S):
        async for step in engine.steps():
            for output in step.outputs:
                one = found[output.request_id]
                assert one.finish is None, "an output came after the last"
                one.pieces.append(output)
                assert output.seq == one.pieces[0].seq + len(one.token_ids)
                one.token_ids += output.token_ids
                one.text += output.text
                one.finish = output.finish
            if all(each.finish for each in found.values()):
                return found
    raise AssertionError("the steps ended before the requests did")


async def stop_and_see_all_end(engine: Engine) -> None:
    engine.add(request("a", PROMPT, 200))
    await engine.stop()
    async with asyncio.timeout(WAIT_S):
        reasons = [o.finish.reason async for step in engine.steps() for o in step.outputs if o.finish]
    assert reasons == ["cancelled"]
    assert engine.room() == 0
    with pytest.raises(EngineDead):
        engine.add(request("late", PROMPT))
    await engine.stop()


class LifeContract:
    """Of every engine, whatever it makes."""

    END = FinishReason.LENGTH
    """How a request ends that has all it asked for."""

    async def test_what_is_cancelled_or_late_ends(self, engine: Engine):
        for name in ("cancelled", "other"):
            engine.add(request(name, PROMPT, 200))
        engine.add(request("late", PROMPT, 200, deadline_ms=1))
        engine.abort("cancelled")
        engine.abort("never seen")
        engine.abort("other", FinishReason.DEADLINE)
        found = await follow(engine, ["cancelled", "other", "late"])
        reasons = {name: each.finish.reason for name, each in found.items()}
        assert reasons == {"cancelled": "cancelled", "other": "deadline", "late": "deadline"}
        assert found["late"].token_ids == []

    async def test_an_id_is_free_once_aborted_and_not_before(self, engine: Engine):
        """FAULTS 22, 23."""
        engine.add(request("a", PROMPT, 200))
        with pytest.raises(DuplicateRequest):
            engine.add(request("a", PROMPT, 3))
        engine.abort("a")
        engine.add(request("a", PROMPT, 6))
        reasons = []
        async with asyncio.timeout(WAIT_S):
            async for step in engine.steps():
                reasons += [output.finish.reason for output in step.outputs if output.finish]
                if len(reasons) == 2:
                    break
        assert reasons == ["cancelled", self.END]

    @pytest.mark.parametrize("prompt", [[], [1] * 5000, [999]])
    async def test_bad_prompts_are_refused_at_once(self, engine: Engine, prompt: list[int]):
        with pytest.raises(InvalidRequest):
            engine.add(request("x", prompt, 3))
        assert (await run(engine, request("x", PROMPT, 3)))["x"].finish.reason == self.END

    async def test_room_counts_what_is_there(self, engine: Engine):
        free = engine.room()
        assert free > 0
        engine.add(request("a", PROMPT, 200))
        assert engine.room() == free - 1


class EngineContract(LifeContract):
    """Of engines that make tokens."""

    async def test_many_at_once_give_each_what_it_gives_alone(self, engine: Engine, tiny_reference: Any):
        asked = [request(f"r{i}", [i + 1, 2, 3], 12) for i in range(6)]
        made, ended = engine.meter.output_tokens, engine.meter.finished["length"]
        found = await run(engine, *asked)
        for i in range(6):
            assert found[f"r{i}"].token_ids == greedy(tiny_reference, [i + 1, 2, 3], 12)
            finish = found[f"r{i}"].finish
            assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("length", 3, 12)
        assert engine.stats().running == engine.stats().waiting == 0
        assert engine.stats().steps > 0
        assert engine.meter.output_tokens - made == 72
        assert engine.meter.finished["length"] - ended == 6

    async def test_a_stop_string_never_shows(self, engine: Engine):
        whole = (await run(engine, request("whole", PROMPT, 24)))["whole"]
        stop = whole.text[4:6]
        cut = (await run(engine, request("cut", PROMPT, 24, stop=(stop,))))["cut"]
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert (cut.finish.reason, cut.finish.stop_reason) == (FinishReason.STOP, stop)
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]

    async def test_end_tokens_of_ones_own_wait_for_min_tokens(self, engine: Engine, tiny_reference: Any):
        tokens = greedy(tiny_reference, PROMPT, 8)
        early = (await run(engine, request("a", PROMPT, 8, stop_token_ids=(tokens[0],))))["a"]
        assert (early.finish.stop_reason, early.finish.completion_tokens) == (tokens[0], 1)
        late = (await run(engine, request("b", PROMPT, 8, stop_token_ids=(tokens[0],), min_tokens=3)))["b"]
        assert tokens[0] not in late.token_ids[:3]
        assert late.finish.completion_tokens > 3

    async def test_log_probabilities_of_output_and_prompt(self, engine: Engine):
        asked = request("a", PROMPT, 3, logprobs=2, prompt_logprobs=1)
        found = (await run(engine, asked))["a"]
        told = [position for piece in found.pieces for position in piece.logprobs or ()]
        assert [position.chosen.token_id for position in told] == found.token_ids
        for position in told:
            assert len(position.top) == 2
            assert position.top[0] == position.chosen, "greedy takes the likeliest"
            assert 0 >= position.top[0].logprob >= position.top[1].logprob
        (scored,) = [piece.prompt_logprobs for piece in found.pieces if piece.prompt_logprobs is not None]
        assert [position.chosen.token_id for position in scored] == PROMPT[1:]
        assert {len(position.top) for position in scored} == {1}
        assert all((position.rank == 1) == (position.chosen == position.top[0]) for position in scored)

    async def test_nothing_to_make_is_an_end_too(self, engine: Engine):
        found = (await run(engine, request("a", PROMPT, 0)))["a"]
        assert (found.token_ids, found.finish.reason) == ([], FinishReason.LENGTH)

    async def test_an_attempt_takes_over_where_another_stopped(self, engine: Engine):
        whole = (await run(engine, request("a", PROMPT, 16)))["a"]
        rest = (await run(engine, request("b", PROMPT, 16, resumed_token_ids=whole.token_ids[:7])))["b"]
        assert rest.token_ids == whole.token_ids[7:]
        assert rest.pieces[0].seq == 7
        assert whole.text.endswith(rest.text)
        assert rest.finish.completion_tokens == 16
        done = (await run(engine, request("c", PROMPT, 16, resumed_token_ids=whole.token_ids)))["c"]
        assert (done.token_ids, done.finish.reason) == ([], FinishReason.LENGTH)

    async def test_bad_requests_are_refused_at_once(self, engine: Engine):
        for changes in ({"top_p": 0.0}, {"adapter": "none"}):
            with pytest.raises(InvalidRequest):
                engine.add(request("x", PROMPT, 3, **changes))
        assert (await run(engine, request("x", PROMPT, 3)))["x"].finish.completion_tokens == 3

    async def test_stop_ends_everything(self, engine: Engine):
        await stop_and_see_all_end(engine)
