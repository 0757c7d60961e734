"""Models and workers make themselves known, and are known again after Redis came back empty."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from engine_worker.broker import TokenizerMissing, WorkerBroker, keys
from tests.engine_worker.broker.driving import card, status, until


async def test_a_registered_model_and_its_tokenizer_can_be_read(gateway, worker, model):
    await worker.register(card(model), b'{"tokenizer": 1}')
    assert [found for found in await gateway.model_cards() if found.model == model] == [card(model)]
    assert await gateway.tokenizer_json(f"sha-of-{model}") == b'{"tokenizer": 1}'
    with pytest.raises(TokenizerMissing):
        await gateway.tokenizer_json(f"sha-of-{model}-other")


async def test_a_worker_is_seen_while_its_heart_beats(gateway, worker, model, redis_url):
    await worker.register(card(model), b"{}")
    assert await worker.heartbeat(status(worker), tokenizer_sha256=f"sha-of-{model}")
    assert [found for found in await gateway.workers() if found.model == model] == [status(worker)]
    async with Redis.from_url(redis_url, protocol=2) as client:
        assert 0 < await client.pttl(f"weir:{{m:{model}}}:worker:w1") <= 15_000
        await client.pexpire(f"weir:{{m:{model}}}:worker:w1", 1)

    async def is_gone() -> bool:
        return not [found for found in await gateway.workers() if found.model == model]

    await until(is_gone)
    await worker.heartbeat(status(worker), tokenizer_sha256=f"sha-of-{model}")
    await worker.farewell()
    assert await is_gone()


async def test_a_model_goes_with_the_last_worker_that_goes_for_good(gateway, worker, model, redis_url):
    other = WorkerBroker(redis_url, model=model, worker_id="w2", timeout_s=10)

    async def known() -> tuple[bool, bool]:
        found = await gateway.known_models()
        return model in {card.model for card in found.cards}, model in found.withdrawn

    try:
        for each in (worker, other):
            await each.register(card(model), b"{}")
            await each.heartbeat(status(each), tokenizer_sha256=f"sha-of-{model}")
        assert not await worker.withdraw()
        assert await known() == (True, False)
        assert await other.withdraw()
        assert await known() == (False, True)
        # One that was silent for a while, and so not counted, is back with its next heartbeat.
        assert not await other.heartbeat(status(other), tokenizer_sha256=f"sha-of-{model}")
        await other.register(card(model), b"{}")
        assert await known() == (True, False)
        # Who only leaves leaves the model: its next worker may be on its way.
        await other.farewell()
        assert await known() == (True, False)
    finally:
        await other.aclose()


@pytest.mark.parametrize("lost", ["weir:{{m:{}}}:card", "weir:tokenizer:sha-of-{}", "weir:models"])
async def test_a_heartbeat_says_when_the_registration_is_lost(worker, model, redis_url, lost):
    await worker.register(card(model), b"{}")
    async with Redis.from_url(redis_url, protocol=2) as client:
        if lost == "weir:models":
            await client.srem(lost, model)
        else:
            await client.delete(lost.format(model))
    assert not await worker.heartbeat(status(worker), tokenizer_sha256=f"sha-of-{model}")
    await worker.register(card(model), b"{}")
    assert await worker.heartbeat(status(worker), tokenizer_sha256=f"sha-of-{model}")


async def test_an_impossible_model_name_is_refused(gateway):
    with pytest.raises(ValueError, match="brace"):
        await gateway.cancel("a}b", "r1")


async def test_how_long_a_models_workers_are_silent_is_the_servers_to_tell(gateway, worker, model, redis_url):
    async def silent_s() -> float:
        return (await gateway.known_models()).silent_s[model]

    await worker.register(card(model), b"{}")
    assert await silent_s() < 10
    async with Redis.from_url(redis_url, protocol=2) as client:
        await client.expire(f"weir:{{m:{model}}}:card", keys.CARD_TTL_S - 100)
    assert 100 <= await silent_s() < 110
    await worker.heartbeat(status(worker), tokenizer_sha256=f"sha-of-{model}")
    assert await silent_s() < 10
