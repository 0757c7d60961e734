"""The contract of the engine's interface with vLLM itself, where it is installed: `make test-vllm`.

All tests share one engine: vLLM takes half a minute to start, and a process of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine_worker.config import EngineConfig
from engine_worker.engine.types import Engine
from engine_worker.vllm_engine import VLLMEngine
from tests.engine_worker.contract import PROMPT, EngineContract, run
from tests.engine_worker.driving import request
from tests.engine_worker.models import EOS, make_tiny_model

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make test-vllm)"),
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32, the smallest that vLLM's attention on a CPU has."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-32"), hidden_size=64, head_dim=32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny_config: EngineConfig) -> AsyncIterator[VLLMEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        made = VLLMEngine(
            replace(tiny_config, backend="vllm", max_model_len=256, vllm_args='{"enforce_eager": true}')
        )
        await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: VLLMEngine) -> AsyncIterator[Engine]:
    yield shared
    for name in list(shared._live):
        shared.abort(name)
    shared._news.clear()


async def test_each_sampling_parameter_arrives(engine: Engine, tiny_reference: Any):
    """What the translation forgets would be ignored without a word."""
    plain = (await run(engine, request("plain", PROMPT, 12)))["plain"].token_ids
    first = plain[0]

    async def made(name: str, **changes: Any) -> list[int]:
        return (await run(engine, request(name, PROMPT, 12, **changes)))[name].token_ids

    assert (await made("bias", logit_bias={first: -100.0}))[0] != first
    assert (await made("likely", logit_bias={77: 100.0})) == [77] * 12
    assert len(set(await made("no_again", logit_bias={77: 30.0}, frequency_penalty=2.0))) > 1
    assert len(set(await made("no_repeat", logit_bias={77: 30.0}, repetition_penalty=50.0))) > 1
    assert first not in await made("bad", bad_words=(chr(first),))
    hot = {"temperature": 1.5}
    sampled = await made("hot", seed=5, **hot)
    assert sampled == await made("again", seed=5, **hot)
    assert sampled != await made("else", seed=6, **hot)
    assert await made("top_k", seed=5, top_k=1, **hot) == plain
    assert await made("top_p", seed=5, top_p=1e-6, **hot) == plain
    assert await made("min_p", seed=5, min_p=1.0, **hot) == plain
    ended = (await run(engine, request("end", PROMPT, 12, logit_bias={EOS: 100.0}, ignore_eos=False)))["end"]
    assert (ended.finish.reason, ended.finish.completion_tokens) == ("stop", 1)
    on = await made("on", logit_bias={EOS: 100.0})
    assert on == [EOS] * 12


class TestVLLM(EngineContract):
    """Everything that our own engine is held to; the last of it stops the engine."""
