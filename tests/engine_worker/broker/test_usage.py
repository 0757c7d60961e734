"""The ledger's reader: nothing lost, nothing kept longer than needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from engine_worker.broker import EntryRef, GatewayBroker, UsageReader, WorkerBroker, keys
from engine_worker.protocol import UsageEvent
from tests.engine_worker.broker.driving import card, last, publish, put


@pytest.fixture
def fresh_redis_url(redis_url: str) -> Iterator[str]:
    """A database of its own: the reader drains every model there is."""
    url = redis_url + "?db=7"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        yield url
        client.flushdb()


async def finish(redis_url: str, model: str, make, *request_ids: str) -> None:
    gateway = GatewayBroker(redis_url, timeout_s=5)
    worker = WorkerBroker(redis_url, model=model, worker_id="w1", timeout_s=5)
    await worker.register(card(model), b"{}")
    for request_id in request_ids:
        await put(gateway, make(request_id, model=model))
        (claim,) = await worker.claim(1)
        await publish(worker, claim, last(claim, 0, 1, 2))
    await worker.aclose()
    await gateway.aclose()


def ids(entries: list[tuple[EntryRef, UsageEvent]]) -> list[str]:
    return [event.request_id for _, event in entries]


async def test_events_are_read_once_and_gone_when_acknowledged(fresh_redis_url, model, make):
    await finish(fresh_redis_url, model, make, "r1", "r2", "r3")
    reader = UsageReader(fresh_redis_url)
    first = reader.read(consumer="c1", count=2, block_ms=0)
    second = reader.read(consumer="c2", count=10, block_ms=0)
    assert (ids(first), ids(second)) == (["r1", "r2"], ["r3"])
    assert reader.pending() == 3
    reader.ack([ref for ref, _ in first + second])
    reader.ack([ref for ref, _ in first])  # a repeat is harmless
    assert reader.pending() == 0
    assert reader.read(consumer="c1", count=10, block_ms=10) == []
    reader.close()


async def test_what_a_dead_consumer_took_goes_to_another(fresh_redis_url, model, make):
    await finish(fresh_redis_url, model, make, "r1", "r2")
    dead = UsageReader(fresh_redis_url)
    assert ids(dead.read(consumer="dead", count=1, block_ms=0)) == ["r1"]
    dead.close()
    patient = UsageReader(fresh_redis_url)
    assert ids(patient.read(consumer="alive", count=10, block_ms=0)) == ["r2"]  # it may still be alive
    patient.close()
    heir = UsageReader(fresh_redis_url, abandoned_after_ms=0)
    taken = heir.read(consumer="alive", count=10, block_ms=0)
    assert ids(taken) == ["r1", "r2"]
    heir.ack([ref for ref, _ in taken])
    assert heir.pending() == 0
    heir.close()


async def test_what_is_given_back_is_anybodys_at_once(fresh_redis_url, model, make):
    await finish(fresh_redis_url, model, make, "r1", "r2", "r3")
    reader = UsageReader(fresh_redis_url)
    taken = reader.read(consumer="one", count=2, block_ms=0)
    reader.give_back([ref for ref, _ in taken], consumer="one")
    assert ids(reader.read(consumer="two", count=10, block_ms=0)) == ["r1", "r2", "r3"]
    assert reader.read(consumer="one", count=10, block_ms=0) == []
    assert reader.pending() == 3
    reader.close()


async def test_all_models_are_read(fresh_redis_url, model, make):
    other = model + "-other"
    await finish(fresh_redis_url, model, make, "r1")
    await finish(fresh_redis_url, other, make, "r2")
    reader = UsageReader(fresh_redis_url)
    taken = reader.read(consumer="c1", count=10, block_ms=0)
    assert {(event.model, event.request_id) for _, event in taken} == {(model, "r1"), (other, "r2")}
    reader.close()


def test_nothing_there_is_an_empty_list(fresh_redis_url):
    reader = UsageReader(fresh_redis_url)
    assert reader.read(consumer="c1", count=10, block_ms=10) == []
    reader.close()


async def test_an_entry_that_cannot_be_read_holds_up_no_other(fresh_redis_url, model, make):
    await finish(fresh_redis_url, model, make, "r1")
    stream = keys.model_prefix(model) + "usage"
    with redis.Redis.from_url(fresh_redis_url) as server:
        server.xadd(stream, {"e": b"\xc1 not MessagePack"})
        server.xadd(stream, {"other": b"x"})
    await finish(fresh_redis_url, model, make, "r2")
    reader = UsageReader(fresh_redis_url, abandoned_after_ms=0)
    seen = {
        event.request_id for _ in range(2) for _, event in reader.read(consumer="c", count=10, block_ms=0)
    }
    assert seen == {"r1", "r2"}
    reader.ack([ref for ref, _ in reader.read(consumer="c", count=10, block_ms=0)])
    assert reader.pending() == 2  # kept for a reader that can
    reader.close()


async def test_who_waits_ends_at_its_deadline_though_its_gateway_is_gone(fresh_redis_url, model, make):
    gateway = GatewayBroker(fresh_redis_url, timeout_s=5)
    worker = WorkerBroker(fresh_redis_url, model=model, worker_id="w1", timeout_s=5)
    await worker.register(card(model), b"{}")
    many = [make(f"late-{index:03}", created_at_ms=1000, deadline_ms=1000) for index in range(150)]
    for request in [*many, make("in-time")]:
        await put(gateway, request)
    await gateway.aclose()
    await worker.aclose()
    reader = UsageReader(fresh_redis_url)
    reader.sweep()
    ended = [event for _, event in reader.read(consumer="c1", count=1000, block_ms=0)]
    reader.close()
    assert [event.request_id for event in ended] == [request.request_id for request in many]
    assert {event.finish_reason for event in ended} == {"deadline"}
