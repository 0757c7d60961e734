"""The contract of the engine's interface: ours, and our side of vLLM's (with vLLM itself: test_vllm.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_worker.config import EngineConfig
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.engine.errors import EngineDead, InvalidRequest, UnsupportedModel
from engine_worker.engine.sequence import Sequence
from engine_worker.engine.types import Engine
from engine_worker.vllm_engine import VLLMEngine
from tests.engine_worker.contract import PROMPT, EngineContract, follow, run
from tests.engine_worker.driving import request


class ModelSource:
    """Stands for vLLM's AsyncLLM: the same shape of outputs, greedy tokens of `transformers`, some at a time."""

    max_model_len = 256
    num_blocks = 64
    tells_times = True

    def __init__(self, model: Any, *, at_once: int = 1) -> None:
        self.is_dead = False
        self.error: Exception | None = None
        self.open = 0
        self._model = model
        self._at_once = at_once

    async def generate(self, sequence: Sequence) -> AsyncGenerator[Any, None]:
        self.open += 1
        try:
            tokens = list(sequence.token_ids)
            left = max(1, sequence.max_tokens - sequence.num_output)
            while left:
                await asyncio.sleep(0.002)
                if self.error is not None:
                    raise self.error
                made, logprobs = [], []
                for _ in range(min(left, self._at_once)):
                    scores = self._scores(tokens)
                    if len(tokens) - sequence.num_prompt < sequence.sampling.min_tokens:
                        scores[-1, list(sequence.stop_ids)] = float("-inf")
                    made.append(int(scores[-1].argmax()))
                    logprobs.append(self._told(scores[-1], made[-1], sequence.sampling.logprobs or 0))
                    tokens.append(made[-1])
                left -= len(made)
                yield SimpleNamespace(
                    outputs=[SimpleNamespace(token_ids=made, logprobs=logprobs)],
                    num_cached_tokens=2,
                    metrics=SimpleNamespace(queued_ts=50.0, scheduled_ts=50.001)
                    if self.tells_times
                    else None,
                    prompt_logprobs=self._prompt(sequence),
                )
        finally:
            self.open -= 1

    def _prompt(self, sequence: Sequence) -> list[Any] | None:
        if not sequence.is_scoring:
            return None
        ids = sequence.token_ids[: sequence.num_prompt]
        scores, count = self._scores(ids), sequence.sampling.prompt_logprobs or 0
        return [None, *(self._told(row, token, count) for row, token in zip(scores, ids[1:], strict=False))]

    @torch.no_grad()
    def _scores(self, ids: list[int]) -> torch.Tensor:
        return self._model(torch.tensor([ids])).logits[0].log_softmax(-1).clone()

    @staticmethod
    def _told(row: torch.Tensor, chosen: int, count: int) -> dict[int, Any]:
        ids = [chosen, *row.topk(count).indices.tolist()]
        return {
            token: SimpleNamespace(logprob=float(row[token]), rank=int((row > row[token]).sum()) + 1)
            for token in ids
        }

    def shutdown(self) -> None:
        self.is_dead = True


class TestOurs(EngineContract):
    @pytest.fixture
    async def engine(self, tiny_config: EngineConfig) -> AsyncIterator[Engine]:
        made = AsyncEngine(tiny_config)
        await made.start()
        yield made
        await made.stop()


class TestOursOverlapped(EngineContract):
    @pytest.fixture
    async def engine(self, tiny_config: EngineConfig) -> AsyncIterator[Engine]:
        made = AsyncEngine(replace(tiny_config, overlap=True))
        await made.start()
        yield made
        await made.stop()


@pytest.fixture(params=[1, 3])
def source(request, tiny_reference) -> ModelSource:
    return ModelSource(tiny_reference, at_once=request.param)


class TestOursideOfVLLM(EngineContract):
    """Everything but AsyncLLM itself and the translation of sampling parameters."""

    @pytest.fixture
    async def engine(self, tiny_config: EngineConfig, source: ModelSource) -> AsyncIterator[VLLMEngine]:
        made = VLLMEngine(replace(tiny_config, backend="vllm"), lambda _: source)
        await made.start()
        yield made
        await made.stop()

    @pytest.mark.parametrize("tells_times", [True, False])
    async def test_what_vllm_tells_is_measured(self, engine, source, tells_times):
        source.tells_times = tells_times
        await run(engine, request("a", PROMPT, 12))
        meter = engine.meter
        assert meter.scheduled_tokens == len(PROMPT) - 2 + 11, (
            "cached ones and the last one's are not computed"
        )
        assert sum(meter.prefill.counts) == sum(meter.decode.counts) == 1
        assert meter.queue.sum == pytest.approx(0.001 if tells_times else 0.0)
        assert sum(meter.queue.counts) == tells_times
        assert meter.prefill.sum == pytest.approx(meter.time_to_first_token.sum - meter.queue.sum)

    async def test_what_ends_here_ends_there(self, engine, source):
        engine.add(request("a", PROMPT, 200))
        while not source.open:  # noqa: ASYNC110 (state of a task)
            await asyncio.sleep(0.001)
        engine.abort("a")
        await follow(engine, ["a"])
        text = (await run(engine, request("b", PROMPT, 30)))["b"].text
        await run(engine, request("c", PROMPT, 200, stop=(text[3:5],)))
        async with asyncio.timeout(10):
            while source.open:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def test_a_request_that_fails_there_fails_alone(self, engine, source):
        source.error = RuntimeError("unlucky")
        failed = (await run(engine, request("a", PROMPT, 5)))["a"]
        assert (failed.finish.reason, failed.finish.error.code) == ("error", "engine_error")
        source.error = ValueError("no such thing")
        assert (await run(engine, request("b", PROMPT, 5)))["b"].finish.error.code == "invalid_request"
        source.error = None
        assert (await run(engine, request("c", PROMPT, 5)))["c"].finish.reason == "length"

    async def test_when_vllm_dies_the_steps_say_so(self, engine, source):
        """FAULTS 31."""
        engine.add(request("a", PROMPT, 200))
        source.error, source.is_dead = RuntimeError("gone"), True
        async with asyncio.timeout(10):
            with pytest.raises(EngineDead, match="gone"):
                async for _ in engine.steps():
                    pass
        assert engine.room() == 0

    async def test_grammars_are_refused(self, engine):
        with pytest.raises(InvalidRequest, match="grammars"):
            engine.add(request("a", PROMPT, 5, grammar="{}"))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
async def test_without_vllm_the_start_says_what_is_missing(tiny_config):
    with pytest.raises(UnsupportedModel, match="needs vLLM"):
        await VLLMEngine(replace(tiny_config, backend="vllm")).start()


def test_what_vllm_does_not_get_is_refused_by_name(tiny_config):
    for changes in ({"adapters": "a=/x"}, {"itl_targets_ms": "0:100"}, {"precision": "int8"}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            replace(tiny_config, backend="vllm", **changes)


def test_what_vllm_gets_of_its_own_is_json_of_one_kind(tiny_config):
    made = replace(tiny_config, backend="vllm", vllm_args='{"tensor_parallel_size": 2}')
    assert made.vllm_fields() == {"tensor_parallel_size": 2}
    for backend, given in (("vllm", "{"), ("vllm", "[1]"), ("weir", '{"tensor_parallel_size": 2}')):
        with pytest.raises(ValueError, match="vllm_args"):
            replace(tiny_config, backend=backend, vllm_args=given)
