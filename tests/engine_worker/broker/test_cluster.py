"""The broker on a real cluster of three masters: no script and no command touches two slots at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from engine_worker.broker import (
    ControlBroker,
    GatewayBroker,
    Held,
    LiveChannel,
    OperatorBroker,
    UsageReader,
    WorkerBroker,
)
from engine_worker.broker.commands import ModelAnswer, ModelCommand, ProcessStatus
from engine_worker.protocol import GenerateRequest, SamplingParams
from tests import redis_fleets
from tests.engine_worker.broker.driving import card, last, publish, put, status, tokens

MODELS = [f"cluster-model-{n}" for n in range(6)]


@pytest.fixture(scope="module")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_fleets.cluster(tmp_path_factory.mktemp("cluster")) as url:
        yield url


def request(model: str, request_id: str, tenant: str, rank: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        model=model,
        tenant_id=tenant,
        tier=f"tier-{rank}",
        tier_rank=rank,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=8),
        created_at_ms=0,
        deadline_ms=60_000,
        reply_channel="weir:live:cluster",
    )


async def test_everything_works_on_a_cluster(cluster_url):
    gateway = GatewayBroker(cluster_url, timeout_s=10)
    operator = OperatorBroker(cluster_url, timeout_s=10)
    workers = [
        WorkerBroker(cluster_url, model=model, worker_id=f"w-{model}", timeout_s=10) for model in MODELS
    ]
    reader = UsageReader(cluster_url)
    try:
        async with gateway.live("weir:live:cluster") as live:
            for worker in workers:
                model = worker.model
                await worker.register(card(model), b"{}")
                assert await worker.heartbeat(status(worker), tokenizer_sha256=card(model).tokenizer_sha256)
                for n in range(4):
                    await put(gateway, request(model, f"{model}-{n}", f"t{n % 2}", n % 3))
                await gateway.cancel(model, f"{model}-3")
                claims = await worker.claim(2)
                assert len(claims) == 2
                await publish(worker, claims[0], tokens(claims[0], 0, 7))
                await heard(live, claims[0].request.request_id)
                await worker.publish(
                    [Held(claim.request.request_id, claim.epoch, [last(claim, seq, 8)])
                     for seq, claim in ((1, claims[0]), (0, claims[1]))]
                )  # fmt: skip
                (third,) = await worker.claim(1)
                await worker.release([Held(third.request.request_id, third.epoch)], failed=True)
                await worker.expire()
                assert (await operator.queue(model)).running == 0
                assert await gateway.model_of(f"{model}-0") == model
                assert (await gateway.request_state(model, f"{model}-0")).state == "finished"
                assert await gateway.read_log(model, claims[0].request.request_id)
            assert [found.model for found in await gateway.model_cards()] == MODELS
            assert {found.model for found in await gateway.workers()} == set(MODELS)
            assert await gateway.tokenizer_json(card(MODELS[0]).tokenizer_sha256) == b"{}"
            taken = reader.read(consumer="c1", count=100, block_ms=100)
            assert len(taken) == 3 * len(MODELS)
            reader.ack([ref for ref, _ in taken])
            assert reader.pending() == 0
            for worker in workers:
                await worker.farewell()
            assert await gateway.workers() == []
    finally:
        reader.close()
        for broker in (gateway, operator, *workers):
            await broker.aclose()


async def test_a_process_takes_commands_on_a_cluster(cluster_url):
    control = ControlBroker(cluster_url, timeout_s=10)
    process = ProcessStatus(worker_id="p", started_at_ms=1, updated_at_ms=2, max_models=2, models=["m"])
    other = ProcessStatus(worker_id="gone", started_at_ms=1, updated_at_ms=2, max_models=2, models=[])
    command = ModelCommand(command_id="c", action="unload", model="m")
    try:
        for each in (process, other):
            await control.heartbeat(each)
        await control.farewell("gone")
        assert await control.processes() == [process]
        await control.send("p", command)
        assert await control.waiting("p") == ["c"]
        assert await control.next_command("p") == command
        assert (await control.waiting("p"), await control.answer_to("c")) == ([], None)
        await control.answer(ModelAnswer(command_id="c", models=[]))
        assert await control.answer_to("c") == ModelAnswer(command_id="c", models=[])
    finally:
        await control.aclose()


async def heard(live: LiveChannel, request_id: str) -> None:
    """Until the first token of that request comes, whichever node it was published on."""
    async with asyncio.timeout(10):
        async for batch in live:
            assert isinstance(batch, list)
            if any(chunk.request_id == request_id and chunk.token_ids == [7] for chunk in batch):
                return
