"""The live channel: what it misses it says, and what it says to look up is in the log."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from redis.asyncio import Redis

from engine_worker.broker import GAP, BrokerUnavailable, GatewayBroker, LiveChannel
from engine_worker.protocol import Chunk
from tests.engine_worker.broker.driving import last, publish, put, tokens
from tests.engine_worker.broker.wire import Wire


async def next_chunks(live: LiveChannel) -> list[Chunk]:
    async with asyncio.timeout(10):
        batch = await anext(live)
    assert isinstance(batch, list)
    return batch


@pytest.mark.parametrize("fault", ["cut", "freeze"])
async def test_after_a_broken_connection_comes_a_gap_and_then_tokens_again(
    gateway, worker, make, model, redis_url, tmp_path, fault
):
    request = make("r1")
    await put(gateway, request)
    (claim,) = await worker.claim(1)
    async with (
        Wire(redis_url, tmp_path) as wire,
        LiveChannel(wire.url, request.reply_channel, timeout_s=1, ping_interval_s=0.1) as live,
    ):
        await publish(worker, claim, tokens(claim, 0, 1))
        assert await next_chunks(live) == [tokens(claim, 0, 1)]
        getattr(wire, fault)()
        await publish(worker, claim, tokens(claim, 1, 2))  # nobody hears this one
        if fault == "freeze":
            # The frozen connection can't be told from a silent one but by its unanswered ping.
            waiting = asyncio.create_task(anext(live))
            done, _ = await asyncio.wait([waiting], timeout=0.5)
            assert not done
            wire.cut()
            wire.mend()
            assert await waiting is GAP
        else:
            wire.mend()
            async with asyncio.timeout(10):
                assert await anext(live) is GAP
        assert await gateway.read_log(model, "r1", from_seq=1) == [tokens(claim, 1, 2)]
        await publish(worker, claim, last(claim, 2, 3))
        assert await next_chunks(live) == [last(claim, 2, 3)]


async def test_a_silent_connection_is_probed_and_kept_while_it_answers(
    gateway, worker, make, redis_url, tmp_path
):
    request = make("r1")
    await put(gateway, request)
    (claim,) = await worker.claim(1)
    async with (
        Wire(redis_url, tmp_path) as wire,
        LiveChannel(wire.url, request.reply_channel, timeout_s=1, ping_interval_s=0.02) as live,
    ):
        await asyncio.sleep(0.3)  # many intervals of silence
        await publish(worker, claim, tokens(claim, 0, 1))
        assert await next_chunks(live) == [tokens(claim, 0, 1)]
        assert wire.connections == 1


async def test_a_slow_reader_costs_bounded_memory_and_loses_nothing(gateway, worker, make, model, redis_url):
    """FAULTS 75: tokens take no channel that drops them silently."""
    request = make("r1")
    await put(gateway, request)
    (claim,) = await worker.claim(1)
    async with LiveChannel(redis_url, request.reply_channel, timeout_s=5, max_messages=10) as live:
        for n in range(500):
            await publish(worker, claim, tokens(claim, n, n))
        await publish(worker, claim, last(claim, 500))
        seen: list[int] = []
        gaps = 0
        async with asyncio.timeout(10):
            async for batch in live:
                if batch is GAP:
                    gaps += 1
                    batch = await gateway.read_log(model, "r1", from_seq=len(seen))
                for chunk in batch:
                    if chunk.seq == len(seen):
                        seen += chunk.token_ids
                if batch[-1].finish:
                    break
        assert gaps
        assert seen == list(range(500))


async def test_no_server_is_said_within_the_timeout(tmp_path):
    gateway = GatewayBroker(f"unix://{tmp_path}/nothing.sock", timeout_s=0.5)
    with pytest.raises(BrokerUnavailable):
        async with gateway.live("weir:live:g"):
            pass
    await gateway.aclose()


async def test_leaving_ends_the_task(gateway):
    async with gateway.live("weir:live:g"):
        assert "live-channel" in {task.get_name() for task in asyncio.all_tasks()}
    assert "live-channel" not in {task.get_name() for task in asyncio.all_tasks()}


@pytest.mark.parametrize(
    "message", [b"garbage", msgspec.msgpack.encode([{"request_id": "r", "epoch": 1, "seq": 0, "v": 9}])]
)
async def test_a_message_that_is_not_understood_is_a_gap_and_hurts_no_other(
    gateway, worker, make, redis_url, message
):
    request = make("r1")
    await put(gateway, request)
    (claim,) = await worker.claim(1)
    async with gateway.live(request.reply_channel) as live, Redis.from_url(redis_url, protocol=2) as client:
        await client.publish(request.reply_channel, message)
        assert await anext(live) is GAP
        await publish(worker, claim, tokens(claim, 0, 1))
        assert await next_chunks(live) == [tokens(claim, 0, 1)]
