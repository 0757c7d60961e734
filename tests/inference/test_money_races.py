"""Redis flushed while requests run, and a request that ends twice at once; each with what it would be unguarded."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime
from typing import Any

import pytest

from inference.services.ledger import record_usage
from inference.services.recall import budget_spent, recall_from_ledger
from inference.services.reconcile import counter_differences
from tenants.models import Tenant
from tenants.principal import Calendar, LimitMetric
from tenants.quotas.buckets import bucket_of
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import Admitted
from tests.factories import make_tenant, set_limit
from tests.inference.ledger_driving import ledger_redis_url
from tests.inference.test_limits import in_thread, principal_of, used
from tests.inference.test_limits import redis as redis

pytestmark = pytest.mark.django_db(transaction=True)
GRANTED, PROMPT, MOST, CLIENTS = 3000, 10, 20, 24


async def spend_through_a_flush(tenant: Tenant, redis: Any, recall: Any) -> tuple[int, int, QuotaStore]:
    """What the ledger has in the end, what was in flight at the flush, and the store.

    Clients ask, use a part, have it recorded and settle, until the budget is spent; half way Redis forgets everything.
    """
    principal = await in_thread(principal_of, tenant)
    store = QuotaStore(ledger_redis_url(), timeout_s=30, recall=recall)
    dice, running, recorded, flushed = random.Random(5), set(), 0, asyncio.Event()
    in_flight = 0

    async def client(number: int) -> None:
        nonlocal recorded
        turn = 0
        while True:
            turn += 1
            rid = f"{tenant.pk}-{number}-{turn}"
            decision = await store.reserve(
                reservation_id=rid, principal=principal, prompt_tokens=PROMPT, max_output_tokens=MOST, lease_ms=60_000
            )  # fmt: skip
            if not isinstance(decision, Admitted):
                if decision.is_spent:
                    return
                await asyncio.sleep(0.01)
                continue
            running.add(rid)
            output = dice.randint(0, decision.max_output_tokens)
            await asyncio.sleep(0)
            event = used(tenant, rid, datetime.now(UTC), PROMPT, output, reservation_id=rid)
            await in_thread(record_usage, [event])
            running.discard(rid)
            recorded += PROMPT + output
            if recorded > GRANTED // 2:
                flushed.set()
            await store.settle(
                tenant_public_id=str(tenant.public_id), reservation_id=rid, prompt_tokens=PROMPT,
                completion_tokens=output,
            )  # fmt: skip

    async def flush() -> None:
        nonlocal in_flight
        await flushed.wait()
        await redis.flushdb()
        in_flight = len(running)

    async with asyncio.timeout(100):
        await asyncio.gather(flush(), *(client(number) for number in range(CLIENTS)))
    (limit,) = principal.limits
    return await in_thread(budget_spent, principal, limit, datetime.now(UTC)), in_flight, store


async def test_redis_flushed_under_load_is_never_full_again_for_free(redis):
    """The issue's recovery: what may go beyond is what was in flight at that moment, and no more."""
    tenant = await in_thread(make_tenant)
    await in_thread(set_limit, tenant, LimitMetric.TOKENS, GRANTED, calendar=Calendar.MONTH)
    spent, in_flight, store = await spend_through_a_flush(tenant, redis, recall_from_ledger)
    # The ledger may have been read between a row's commit and its client's word of it: one more a client.
    assert spent <= GRANTED + max(in_flight, CLIENTS) * (PROMPT + MOST)
    assert spent > GRANTED - (PROMPT + MOST)
    principal = await in_thread(principal_of, tenant)
    (limit,) = principal.limits
    counter = await redis.hget(bucket_of(principal, limit, datetime.now(UTC)).key, "spent")
    differences = await in_thread(counter_differences, ledger_redis_url())
    # What was in flight when it forgot is in the ledger alone: reconcile says whose it is, and how much.
    if int(counter) != spent:
        (difference,) = differences
        assert difference.whose.startswith(tenant.slug)
        assert difference.amounts == {"tokens": int(counter) - spent}
    else:
        assert differences == []
    await store.aclose()


async def test_control_without_the_ledger_a_flush_grants_the_budget_again(redis):
    tenant = await in_thread(make_tenant)
    await in_thread(set_limit, tenant, LimitMetric.TOKENS, GRANTED, calendar=Calendar.MONTH)
    spent, _, store = await spend_through_a_flush(tenant, redis, None)
    assert spent > GRANTED + CLIENTS * (PROMPT + MOST)
    await store.aclose()


async def test_a_request_that_ends_many_times_at_once_is_charged_once(redis):
    """The gateway at the end of the stream, the ledger's drain and its retry: whoever comes first."""
    tenant = await in_thread(make_tenant)
    await in_thread(set_limit, tenant, LimitMetric.TOKENS, 1000, calendar=Calendar.MONTH)
    principal = await in_thread(principal_of, tenant)
    stores = [QuotaStore(ledger_redis_url(), timeout_s=30, recall=recall_from_ledger) for _ in range(4)]
    for turn in range(10):
        rid = f"twice-{turn}"
        await stores[0].reserve(
            reservation_id=rid, principal=principal, prompt_tokens=10, max_output_tokens=40, lease_ms=60_000
        )
        start = asyncio.Barrier(24)

        async def end(number: int, rid: str = rid, start: asyncio.Barrier = start) -> None:
            await start.wait()
            await stores[number % 4].settle(
                tenant_public_id=str(tenant.public_id),
                reservation_id=rid,
                prompt_tokens=10,
                completion_tokens=7,
            )

        await asyncio.gather(*(end(number) for number in range(24)))
    assert [state.remaining for state in await stores[0].peek(principal)] == [1000 - 170]
    for store in stores:
        await store.aclose()


async def test_control_looking_first_and_charging_then_charges_twice(redis):
    await redis.set("state", "reserved")
    start, looked = asyncio.Barrier(8), asyncio.Barrier(8)

    async def end() -> None:
        await start.wait()
        state = await redis.get("state")
        await looked.wait()
        if state == b"reserved":
            await redis.incrby("spent", 17)
            await redis.set("state", "settled")

    await asyncio.gather(*(end() for _ in range(8)))
    assert int(await redis.get("spent")) == 8 * 17
