"""Several models in one process, on a real queue: loaded and unloaded by command, drained, and dead together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine_worker import control
from engine_worker.broker import ControlBroker, GatewayBroker, WorkerBroker
from engine_worker.broker.commands import Refusal
from engine_worker.config import EngineConfig
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.host_memory import available_bytes, bytes_needed, refuse_what_does_not_fit
from engine_worker.model_card import read_model_card
from engine_worker.protocol import SamplingParams
from engine_worker.served_models import Refused, ServedModels
from engine_worker.worker_config import WorkerConfig
from tests.engine_worker.broker.driving import card, put, status, until
from tests.engine_worker.broker.durable import DurableValkey
from tests.engine_worker.models import VOCAB_SIZE, greedy, make_tiny_model, reference
from tests.engine_worker.scripted_engine import ScriptedEngine

PROMPT = [7, 77, 177]


def long_answer(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


@pytest.mark.timeout(900)
async def test_models_come_and_go_and_answer_as_they_do_alone(gateway, make, model, redis_url, tmp_path):
    sources = {f"{model}-{i}": make_tiny_model(tmp_path / str(i), seed=i) for i in range(3)}
    first, second, third = sources
    engines: dict[str, AsyncEngine] = {}

    def make_engine(name, source):
        config = EngineConfig(
            model_dir=Path(source),
            block_size=4,
            num_kv_blocks=1 << 40 if name == "unforeseen" else 129,
            kv_cache_memory=1 << 60 if name == "huge" else 1 << 20,
            threads=1,
            kernels="torch",
            precision="fp32",
        )
        refuse_what_does_not_fit(config)
        engines[name] = engine = AsyncEngine(config)
        return engine, lambda: read_model_card(
            name, config.model_dir, context_length=engine.limits.max_model_len, dtype="fp32"
        )

    config = WorkerConfig(model=first, redis_url=redis_url, worker_id=f"w-{model}", drain_grace_s=300)
    served = ServedModels(make_engine, config, most=2)
    await served.load(first, str(sources[first]))
    running = asyncio.create_task(served.run())
    operator = ControlBroker(redis_url, timeout_s=20)

    async def ask(action, name, source=""):
        return await operator.ask(config.worker_id, action, name, str(source), timeout_s=300)

    async def tokens(name, request_id):
        return [token for chunk in await gateway.read_log(name, request_id) for token in chunk.token_ids]

    async def ended(name, request_id):
        async def is_finished():
            return (await gateway.request_state(name, request_id)).state == "finished"

        await until(is_finished, 300)
        return await tokens(name, request_id)

    try:
        command = [config.worker_id, "load", f"{second}={sources[second]}", "--wait-s", "300"]
        (tmp_path / "url").write_text(f"{redis_url}\n")
        environ = {"REDIS_URL_FILE": str(tmp_path / "url")}
        assert await asyncio.to_thread(control.main, command, environ) == 0
        assert served.names == [first, second]
        assert served.engines() == {name: engines[name] for name in (first, second)}
        assert {first, second} <= {card.model for card in await gateway.model_cards()}
        assert (await ask("load", third, sources[third])).code == Refusal.FULL
        again = await ask("load", second, sources[second])
        assert (again.error, again.models) == ("", [first, second]), "what is so already is done"
        assert "already" in (await ask("load", second, sources[third])).error
        assert (await ask("unload", third)).code == Refusal.NOT_SERVED
        assert "unknown action" in (await ask("paint", third)).error
        (process,) = [one for one in await operator.processes() if one.worker_id == config.worker_id]
        assert (process.models, process.max_models) == ([first, second], 2)

        for name in (first, second):
            await put(
                gateway,
                make("r", model=name, prompt_token_ids=PROMPT, sampling=long_answer(240), deadline_ms=9**13),
            )

        async def both_run():
            return all([len(await tokens(name, "r")) > 2 for name in (first, second)])

        await until(both_run, 300)
        # What runs is finished before its model is gone.
        answer = await ask("unload", first)
        assert (answer.error, answer.models) == ("", [second])
        for name in (first, second):
            assert await ended(name, "r") == greedy(reference(sources[name]), PROMPT, 240)
        assert not [one for one in await gateway.workers() if one.model == first]
        known = await gateway.known_models()
        assert first not in {card.model for card in known.cards}
        assert known.withdrawn & set(sources) == {first}

        assert (await ask("load", third, tmp_path / "nowhere")).error
        # Whatever a load fails with, the process and its other model go on.
        assert (await ask("load", "huge", sources[third])).code == Refusal.MEMORY
        assert (await ask("load", "unforeseen", sources[third])).code == Refusal.MEMORY
        assert (await ask("load", "{odd}", sources[third])).code == Refusal.MALFORMED
        # Others that serve another model under a name are not told otherwise; gone, they don't count.
        other = WorkerBroker(redis_url, model=third, worker_id=f"other-{model}")
        theirs, tokenizer = read_model_card(third, sources[first], context_length=64, dtype="fp32")
        await other.register(theirs, tokenizer)
        await other.heartbeat(status(other), tokenizer_sha256=theirs.tokenizer_sha256)
        assert (await ask("load", third, sources[third])).code == Refusal.SERVED
        assert theirs in await gateway.model_cards()
        await other.farewell()
        await other.aclose()
        assert (await ask("load", third, sources[third])).models == [second, third]
        await put(gateway, make("s", model=third, prompt_token_ids=PROMPT, sampling=long_answer(5)))
        assert await ended(third, "s") == greedy(reference(sources[third]), PROMPT, 5)

        # One engine that dies takes the process with it, for a supervisor to start it again.
        def dies(core):
            raise RuntimeError("gone")

        engines[third]._commands.put(dies)
        async with asyncio.timeout(300):
            assert await running == 1
        assert served.names == []
        assert config.worker_id not in [one.worker_id for one in await operator.processes()]
    finally:
        served.stop()
        await asyncio.gather(running, return_exceptions=True)
        await operator.aclose()


@pytest.mark.timeout(300)
async def test_a_model_unloaded_while_redis_is_away_is_gone_once_it_is_back(tmp_path):
    valkey = DurableValkey(tmp_path / "valkey")
    valkey.start()
    names = ("stays", "goes", "comes-back")
    config = WorkerConfig(
        model="stays", redis_url=valkey.url, worker_id="w1", heartbeat_s=0.05, broker_timeout_s=0.5
    )
    served = ServedModels(lambda name, _: (ScriptedEngine(), lambda: (card(name), b"{}")), config, most=3)
    gateway = GatewayBroker(valkey.url, timeout_s=20)
    for name in names:
        await served.load(name, "source")
    running = asyncio.create_task(served.run())

    async def is_withdrawn() -> bool:
        return bool((await gateway.known_models()).withdrawn)

    try:
        valkey.kill()
        await served.unload("goes")
        await served.unload("comes-back")
        again = asyncio.create_task(served.load("comes-back", "source"))
        await asyncio.sleep(0.1)
        valkey.start()
        await again
        await until(is_withdrawn)
        known = await gateway.known_models()
        assert known.withdrawn == {"goes"}
        assert {card.model for card in known.cards} == {"stays", "comes-back"}
    finally:
        served.stop()
        await asyncio.gather(running, return_exceptions=True)
        await gateway.aclose()
        valkey.kill()


async def test_a_first_model_that_can_not_be_loaded_is_an_error(redis_url, tmp_path):
    def make_engine(name, source):
        return AsyncEngine(EngineConfig(model_dir=tmp_path)), None

    served = ServedModels(make_engine, WorkerConfig(model="m", redis_url=redis_url), most=2)
    with pytest.raises(Refused, match=r"config\.json"):
        await served.load("m", str(tmp_path))
    assert served.names == []


def test_what_a_model_needs_is_known_before_it_is_loaded(tmp_path):
    directory = make_tiny_model(tmp_path / "model", seed=1)
    weights = sum(weight.numel() for weight in reference(directory).state_dict().values())
    needs = {
        precision: bytes_needed(
            EngineConfig(model_dir=directory, precision=precision, kv_cache_memory=1000, kernels="torch")
        )
        for precision in ("fp32", "fp16", "int8")
    }
    tied = reference(directory).config.tie_word_embeddings * VOCAB_SIZE * 32
    assert needs == {
        kind: (weights - tied) * each + 1000 for kind, each in (("fp32", 4), ("fp16", 6), ("int8", 5))
    }
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.safetensors").write_bytes(b"no header")
    assert bytes_needed(EngineConfig(model_dir=tmp_path / "bare", kv_cache_memory=7)) == 7


def test_a_containers_limit_counts(tmp_path):
    everything = available_bytes(tmp_path)
    for name, text in {
        "memory.max": "5000000",
        "memory.current": "4000000",
        "memory.stat": "anon 1\ninactive_file 300000",
    }.items():
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == 1_300_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 1_300_000
    assert everything > 1_300_000
