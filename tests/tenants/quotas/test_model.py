"""Any sequence of calls at any time: the Lua decides and counts exactly as the plain model."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
from django.conf import settings
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from tenants.pricing import Price
from tenants.principal import LimitMetric, LimitScope
from tenants.quotas import scripts
from tenants.quotas.errors import ReservationClosed
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import Admitted, Refused
from tests.factories import a_budget, a_limit, a_principal
from tests.tenants.quotas.modelled import CLOCK_KEY, DAY_MS, Model, clocked

START_MS = 4_000_000_000_000
PRICE = Price("p", datetime(2020, 1, 1, tzinfo=UTC), 333_333, 100_000, 777_777)

scopes = st.sampled_from([LimitScope.TIER, LimitScope.TENANT, LimitScope.KEY])
rates = st.builds(
    a_limit,
    st.sampled_from(
        [LimitMetric.REQUESTS, LimitMetric.INPUT_TOKENS, LimitMetric.OUTPUT_TOKENS, LimitMetric.TOKENS]
    ),
    st.integers(1, 500),
    period_s=st.sampled_from([1, 7, 60, 86_400]),
    burst=st.integers(1, 300),
    scope=scopes,
)
slots = st.builds(a_limit, st.just(LimitMetric.CONCURRENCY), st.integers(1, 3), scope=scopes)
budgets = st.builds(
    a_budget,
    st.sampled_from(
        [LimitMetric.INPUT_TOKENS, LimitMetric.OUTPUT_TOKENS, LimitMetric.TOKENS, LimitMetric.COST]
    ),
    st.integers(1, 1500),
    scope=scopes,
    is_hard=st.booleans(),
)
limit_sets = st.lists(
    st.one_of(rates, slots, budgets),
    min_size=1,
    max_size=4,
    unique_by=lambda x: (x.scope, x.metric, x.period_s, x.calendar),
)
ids = st.sampled_from(["r1", "r2", "r3", "r4", "r5", "r6"])
tokens = st.integers(0, 350)
calls = st.one_of(
    st.tuples(st.just("reserve"), ids, tokens, tokens, st.integers(1, 20_000)),
    st.tuples(st.just("settle"), ids, tokens, tokens),
    st.tuples(st.just("release"), ids),
    st.tuples(st.just("turn"), st.one_of(st.integers(0, 50), st.integers(0, 100_000), st.just(10**8))),
)


class Rig:
    """Model and store side by side."""

    def __init__(self, redis_url: str, limits) -> None:
        self.limits = limits
        self.principal = a_principal(*limits)
        self.model = Model(limits, START_MS, PRICE)
        self.store = QuotaStore(redis_url)
        self.redis = Redis.from_url(redis_url)

    async def __aenter__(self) -> Rig:
        await self.redis.flushdb()
        await self.redis.set(CLOCK_KEY, self.model.now)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.store.aclose()
        await self.redis.aclose()

    async def turn(self, ms: int) -> None:
        self.model.turn(ms)
        await self.redis.set(CLOCK_KEY, self.model.now)

    async def reserve(self, rid: str, prompt: int, output: int, lease_ms: int):
        try:
            return await self.store.reserve(
                reservation_id=rid,
                principal=self.principal,
                prompt_tokens=prompt,
                max_output_tokens=output,
                lease_ms=lease_ms,
                price=PRICE,
                accepted_at=datetime.fromtimestamp(self.model.now / 1000, tz=UTC),
            )
        except ReservationClosed:
            return "closed"

    async def apply(self, call) -> None:
        match call:
            case ("turn", ms):
                await self.turn(ms)
            case ("reserve", rid, prompt, output, lease_ms):
                expected = self.model.reserve(rid, prompt, output, lease_ms)
                decision = await self.reserve(rid, prompt, output, lease_ms)
                if expected == "spent" and verdict(decision) == "refused":
                    # A rate that refuses even longer than the budget's day lasts binds instead.
                    assert decision.retry_after_ms >= DAY_MS - self.model.now % DAY_MS
                else:
                    assert verdict(decision) == expected
                if isinstance(decision, Admitted):
                    assert decision.max_output_tokens == self.model.records[rid].granted
                if isinstance(decision, Refused) and decision.retry_after_ms is not None:
                    await self.check_retry_after(decision, prompt, output, lease_ms)
            case ("settle", rid, prompt, completion):
                cost = self.model.settle(rid, prompt, completion)
                await self.store.settle(
                    tenant_public_id="t1",
                    reservation_id=rid,
                    prompt_tokens=prompt,
                    completion_tokens=completion,
                    cost_microusd=cost,
                )
            case ("release", rid):
                self.model.release(rid)
                await self.store.release(tenant_public_id="t1", reservation_id=rid)

    async def check_retry_after(self, decision: Refused, prompt: int, output: int, lease_ms: int) -> None:
        """A rate that binds: this very request fits after that time, and not a millisecond earlier."""
        wait = decision.retry_after_ms
        assert wait is not None
        assert wait >= 1
        if decision.binding.metric is LimitMetric.CONCURRENCY:
            assert wait <= 1000
            return
        bound = self.model.buckets[self.limits.index(decision.binding)]
        if decision.binding.is_budget:
            least = bound.at_most(prompt, min(1, output), PRICE)
            if not decision.is_spent:
                assert wait <= 1000
                return
            await self.turn(wait - 1)
            assert least > bound.unspent
            await self.turn(1)
            assert least <= bound.unspent
            return
        units = bound.asks(prompt, self.model.granted(prompt, output), PRICE)
        await self.turn(wait - 1)
        assert not bound.fits(units)
        await self.turn(1)
        assert bound.fits(units)

    async def check_levels(self) -> None:
        states = await self.store.peek(self.principal, datetime.fromtimestamp(self.model.now / 1000, tz=UTC))
        assert [state.remaining for state in states] == [bucket.remaining for bucket in self.model.buckets]
        for state in states:
            assert 0 <= state.remaining <= max(state.limit.burst, state.limit.amount)
            assert state.reset_after_ms >= 0


def verdict(decision) -> str:
    if decision == "closed":
        return "closed"
    if isinstance(decision, Refused):
        if decision.is_spent:
            return "spent"
        return "never" if decision.retry_after_ms is None else "refused"
    return "admitted"


@pytest.fixture
def turned_clock(monkeypatch):
    monkeypatch.setattr(scripts, "load", clocked)


@given(limits=limit_sets, sequence=st.lists(calls, max_size=25))
@hypothesis_settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_the_scripts_do_what_the_model_does(turned_clock, limits, sequence):
    url = settings.REDIS_URL + ("&" if "?" in settings.REDIS_URL else "?") + "db=9"

    async def main() -> None:
        async with Rig(url, limits) as rig:
            for call in sequence:
                await rig.apply(call)
                await rig.check_levels()

    asyncio.run(main())


async def test_many_small_steps_lose_nothing(turned_clock, redis, quota_redis_url):
    """Integers, but no drift: a rate that does not divide evenly gains its exact amount (FAULTS 80)."""
    limit = a_limit(LimitMetric.TOKENS, 7, period_s=60, burst=7_000)
    async with Rig(quota_redis_url, [limit]) as rig:
        await rig.apply(("reserve", "r1", 7_000, 0, 60_000))
        for _ in range(600):
            await rig.turn(97)
            await rig.apply(("reserve", "touch", 1, 0, 1000))
            await rig.apply(("settle", "touch", 0, 0))
            rig.model.records.pop("touch", None)
            await rig.redis.delete("weir:{t:t1}:reservation:touch")
        await rig.turn(1_000_000)
        await rig.check_levels()
        bucket = rig.model.buckets[0]
        assert int(bucket.level) == 7 * (bucket.at_ms - START_MS) // 60_000
