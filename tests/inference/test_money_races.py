"""Redis flushed while requests run, and a request that ends twice at once; each with what it would be unguarded."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from inference.services.ledger import record_usage
from inference.services.recall import budget_spent, recall_from_ledger
from inference.services.reconcile import counter_differences
from inference.services.repair import correct_counters
from inference.services.usage import settle_rows
from tenants.models import Tenant
from tenants.principal import Calendar, LimitMetric, Principal
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import Admitted, Recalled
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
            rows, _ = await in_thread(record_usage, [event])
            running.discard(rid)
            recorded += PROMPT + output
            if recorded > GRANTED // 2:
                flushed.set()
            await store.settle(
                tenant_public_id=str(tenant.public_id), reservation_id=rid, prompt_tokens=PROMPT,
                completion_tokens=output,
            )  # fmt: skip
            await in_thread(settle_rows, ledger_redis_url(), rows)

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
    # What was in flight when it forgot is booked with its row, under load and to the token: nothing is to be repaired.
    assert await in_thread(counter_differences, ledger_redis_url()) == []
    assert [state.remaining for state in await store.peek(principal)] == [max(0, GRANTED - spent)]
    await store.aclose()


@pytest.mark.parametrize("moment", ["before", "while", "after", "while, unguarded"])
async def test_a_row_that_comes_around_the_recall_counts_once(redis, moment):
    """Redis forgets a request that runs; its row is written before, while or after the ledger is read for the next."""
    tenant = await in_thread(make_tenant)
    await in_thread(set_limit, tenant, LimitMetric.TOKENS, GRANTED, calendar=Calendar.MONTH)
    principal = await in_thread(principal_of, tenant)
    rid = f"{tenant.pk}-runs"

    async def land() -> None:
        event = used(tenant, rid, datetime.now(UTC), PROMPT, MOST, reservation_id=rid)
        for _ in range(2):  # the drain that died before it acknowledged, and its heir
            rows, _ = await in_thread(record_usage, [event])
            await in_thread(settle_rows, ledger_redis_url(), rows)

    async def recall(*asked: Any) -> Recalled:
        known = await recall_from_ledger(*asked)
        if has_forgotten and moment.startswith("while"):
            await land()
        return replace(known, through=2**53) if moment.endswith("unguarded") else known

    has_forgotten = False

    store = QuotaStore(ledger_redis_url(), timeout_s=30, recall=recall)
    await store.reserve(
        reservation_id=rid, principal=principal, prompt_tokens=PROMPT, max_output_tokens=MOST, lease_ms=60_000
    )
    await redis.flushdb()
    has_forgotten = True
    if moment == "before":
        await land()
    await ask_alone(store, principal, f"{tenant.pk}-next")
    if moment == "after":
        await land()
    differences = await in_thread(counter_differences, ledger_redis_url())
    left = [state.remaining for state in await store.peek(principal)]
    if moment.endswith("unguarded"):
        assert [one.amounts for one in differences] == [{"tokens": -PROMPT - MOST}], "the control"
        assert await in_thread(correct_counters, ledger_redis_url()) == differences
        assert await in_thread(counter_differences, ledger_redis_url()) == []
    else:
        assert (differences, left) == ([], [GRANTED - PROMPT - MOST])
    await store.aclose()


async def test_control_without_the_ledger_a_flush_grants_the_budget_again(redis):
    tenant = await in_thread(make_tenant)
    await in_thread(set_limit, tenant, LimitMetric.TOKENS, GRANTED, calendar=Calendar.MONTH)
    spent, _, store = await spend_through_a_flush(tenant, redis, None)
    assert spent > GRANTED + CLIENTS * (PROMPT + MOST)
    await store.aclose()


@pytest.mark.parametrize("seed", range(3))
async def test_redis_flushed_against_settlements_frees_nothing_and_charges_nothing_twice(redis, seed):
    """The gateway and the drain settle each request, a new one asks, and Redis forgets, all at once."""
    tenant = await in_thread(make_tenant)
    await in_thread(set_limit, tenant, LimitMetric.TOKENS, GRANTED, calendar=Calendar.MONTH)
    principal = await in_thread(principal_of, tenant)
    stores = [QuotaStore(ledger_redis_url(), timeout_s=30, recall=recall_from_ledger) for _ in range(2)]
    dice, whose = random.Random(seed), str(tenant.public_id)
    uses = {f"{tenant.pk}-{number}": dice.randint(0, MOST) for number in range(CLIENTS)}
    for rid in uses:
        await stores[0].reserve(
            reservation_id=rid, principal=principal, prompt_tokens=PROMPT, max_output_tokens=MOST, lease_ms=60_000
        )  # fmt: skip
    before = [
        used(tenant, rid, datetime.now(UTC), PROMPT, output, reservation_id=rid)
        for rid, output in uses.items()
    ]
    await in_thread(record_usage, before)  # the first half of a drain: what is settled is in the ledger
    start = asyncio.Barrier(CLIENTS + 3)

    async def settle(rid: str, output: int, wait: int) -> None:
        await start.wait()
        for _ in range(wait):
            await asyncio.sleep(0)
        for store in stores:
            await store.settle(
                tenant_public_id=whose, reservation_id=rid, prompt_tokens=PROMPT, completion_tokens=output
            )

    async def flush() -> None:
        await start.wait()
        await redis.flushdb()

    async def ask(number: int) -> None:
        await start.wait()
        rid = f"{tenant.pk}-asks-{number}"
        await stores[number].reserve(
            reservation_id=rid, principal=principal, prompt_tokens=PROMPT, max_output_tokens=0, lease_ms=60_000
        )  # fmt: skip
        await stores[number].release(tenant_public_id=whose, reservation_id=rid)

    settling = [settle(rid, output, dice.randrange(40)) for rid, output in uses.items()]
    async with asyncio.timeout(60):
        await asyncio.gather(flush(), ask(0), ask(1), *settling)
    # Whoever asks next: the counter may have been lost after it was asked for.
    await ask_alone(stores[0], principal, f"{tenant.pk}-last")
    spent = sum(uses.values()) + PROMPT * CLIENTS
    assert [state.remaining for state in await stores[1].peek(principal)] == [GRANTED - spent]
    assert await in_thread(counter_differences, ledger_redis_url()) == []
    for store in stores:
        await store.aclose()


async def ask_alone(store: QuotaStore, principal: Principal, rid: str) -> None:
    await store.reserve(
        reservation_id=rid, principal=principal, prompt_tokens=1, max_output_tokens=0, lease_ms=60_000
    )
    await store.release(tenant_public_id=principal.tenant_public_id, reservation_id=rid)


async def test_control_without_the_ledger_a_settled_request_is_forgotten(redis):
    tenant = await in_thread(make_tenant)
    await in_thread(set_limit, tenant, LimitMetric.TOKENS, GRANTED, calendar=Calendar.MONTH)
    principal = await in_thread(principal_of, tenant)
    store = QuotaStore(ledger_redis_url(), timeout_s=30)
    rid = f"{tenant.pk}-once"
    await store.reserve(
        reservation_id=rid, principal=principal, prompt_tokens=PROMPT, max_output_tokens=MOST, lease_ms=60_000
    )
    await in_thread(record_usage, [used(tenant, rid, datetime.now(UTC), PROMPT, MOST, reservation_id=rid)])
    await redis.flushdb()
    await store.settle(
        tenant_public_id=str(tenant.public_id),
        reservation_id=rid,
        prompt_tokens=PROMPT,
        completion_tokens=MOST,
    )
    await ask_alone(store, principal, f"{tenant.pk}-next")
    assert [state.remaining for state in await store.peek(principal)] == [GRANTED]
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
