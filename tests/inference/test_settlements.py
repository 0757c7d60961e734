"""What ends in one turn of the event loop is settled together, after the answers; what can't be is the ledger's."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextvars import Context
from typing import Any

import pytest
from django.conf import settings
from structlog.testing import capture_logs

from inference.settlements import Settlements
from tenants.principal import LimitMetric, Principal
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import Settlement
from tests.factories import a_limit, a_principal


class CountedStore(QuotaStore):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.calls: list[list[str]] = []

    async def _call(self, verb: str, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        if verb == "settle":
            self.calls.append([key.rpartition(":")[2] for key in keys[1:]])
        return await super()._call(verb, keys, args)


@pytest.fixture
async def store() -> AsyncIterator[CountedStore]:
    store = CountedStore(settings.REDIS_URL)
    yield store
    await store.aclose()


def a_tenant() -> Principal:
    tenant = uuid.uuid4().hex
    limits = (
        a_limit(LimitMetric.TOKENS, 1000, period_s=86_400, owner_id=tenant),
        a_limit(LimitMetric.CONCURRENCY, 5, owner_id=tenant),
    )
    return a_principal(*limits, tenant_public_id=tenant)


async def reserve(store: QuotaStore, principal: Principal, *names: str) -> None:
    for name in names:
        await store.reserve(
            reservation_id=name, principal=principal, prompt_tokens=10, max_output_tokens=90, lease_ms=60_000
        )


async def left(store: QuotaStore, principal: Principal) -> list[int]:
    return [bucket.remaining for bucket in await store.peek(principal)]


class Tasks:
    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str, context: Context) -> asyncio.Task[None]:
        self._tasks.append(asyncio.create_task(work, name=name, context=context))
        return self._tasks[-1]

    async def done(self) -> None:
        await asyncio.gather(*self._tasks)


async def test_what_ends_in_one_turn_is_one_call_for_each_tenant(store):
    one, other = a_tenant(), a_tenant()
    await reserve(store, one, "r1", "r2", "r3")
    await reserve(store, other, "r4")
    tasks = Tasks()
    settlements = Settlements(store, tasks.spawn)
    for name in ("r1", "r2"):
        settlements.add(Settlement(one.tenant_public_id, name, 10, 20))
    settlements.add(Settlement(other.tenant_public_id, "r4", 10, 30))
    await asyncio.sleep(0)
    assert store.calls == []  # the turn in which the answers are written
    await tasks.done()
    assert store.calls == [["r1", "r2"], ["r4"]]
    assert await left(store, one) == [1000 - 2 * 30 - 100, 4]
    assert await left(store, other) == [1000 - 40, 5]

    settlements.add(Settlement(one.tenant_public_id, "r3", 10, 0))
    await tasks.done()
    assert store.calls[2:] == [["r3"]]
    assert await left(store, one) == [1000 - 2 * 30 - 10, 5]


async def test_without_redis_it_is_left_to_the_ledger(tmp_path):
    store = QuotaStore(f"unix://{tmp_path}/nobody.sock")
    tasks = Tasks()
    settlements = Settlements(store, tasks.spawn)
    with capture_logs() as lines:
        settlements.add(Settlement("t1", "r1", 10, 20))
        settlements.add(Settlement("t2", "r2", 10, 20))
        await tasks.done()
    assert [(line["event"], line["request_ids"]) for line in lines] == [
        ("settle_left_to_the_ledger", ["r1", "r2"])
    ]
    await store.aclose()
