"""The quota call itself, without HTTP in front: one reserve and one settle each, in several processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import uuid
from datetime import UTC, datetime
from multiprocessing.synchronize import Barrier
from typing import Any

from tenants.pricing import Price
from tenants.principal import Calendar, LimitMetric, LimitScope, LimitSpec, Principal, TierSpec
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import Admitted

PRICE = Price("bench", datetime(2020, 1, 1, tzinfo=UTC), 150_000, 75_000, 600_000)
PROMPT, OUTPUT, USED = 900, 400, 100
TIER = TierSpec("standard", 1, 1, 1000, 200, 300, 4096)


def _limit(
    metric: LimitMetric, amount: int, period_s: int = 0, calendar: Calendar | None = None
) -> LimitSpec:
    return LimitSpec(LimitScope.TENANT, "t", metric, amount, period_s, amount, calendar=calendar)


NEVER = (
    _limit(LimitMetric.REQUESTS, 10**9, 60),
    _limit(LimitMetric.TOKENS, 10**11, 60),
    _limit(LimitMetric.CONCURRENCY, 10**6),
    _limit(LimitMetric.TOKENS, 10**12, calendar=Calendar.MONTH),
    _limit(LimitMetric.COST, 10**12, calendar=Calendar.MONTH),
)
"""Limits that never bind: what is measured is the asking."""


async def _load(store: QuotaStore, who: Principal, clients: int, seconds: float) -> list[float]:
    """Seconds of each reserve."""
    ends_at, times = time.perf_counter() + seconds, []
    cost = PRICE.cost_microusd(prompt_tokens=PROMPT, cached_tokens=0, completion_tokens=USED)

    async def client() -> None:
        while (began := time.perf_counter()) < ends_at:
            rid = uuid.uuid4().hex
            decision = await store.reserve(
                reservation_id=rid, principal=who, prompt_tokens=PROMPT, max_output_tokens=OUTPUT,
                lease_ms=60_000, price=PRICE,
            )  # fmt: skip
            times.append(time.perf_counter() - began)
            assert isinstance(decision, Admitted)
            await store.settle(
                tenant_public_id=who.tenant_public_id, reservation_id=rid, prompt_tokens=PROMPT,
                completion_tokens=USED, cost_microusd=cost,
            )  # fmt: skip

    await asyncio.gather(*(client() for _ in range(clients)))
    return times


def _process(url: str, tenant: str, clients: int, seconds: float, start: Barrier, results: Any) -> None:
    async def main() -> tuple[int, list[float]]:
        store = QuotaStore(url, timeout_s=30, max_connections=64)
        who = Principal(1, tenant, "Bench", TIER, NEVER, frozenset())
        start.wait(60)
        many = await _load(store, who, clients, seconds)
        start.wait(300)
        alone = await _load(store, who, 1, seconds / 2)
        await store.aclose()
        return len(many), alone

    results.put(asyncio.run(main()))


def measure(url: str, *, processes: int, clients: int, seconds: float) -> dict[str, float]:
    """Decisions a second of all clients together; what a reserve takes with one client a process."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(processes), context.Queue()
    arguments = (url, uuid.uuid4().hex, clients // processes, seconds, start, results)
    running = [context.Process(target=_process, args=arguments, daemon=True) for _ in range(processes)]
    for process in running:
        process.start()
    told = [results.get(timeout=600) for _ in running]
    for process in running:
        process.join(60)
    times = sorted(t for _, alone in told for t in alone)
    return {
        "decisions_per_s": round(sum(count for count, _ in told) / seconds, 1),
        "added_p50_ms": round(times[len(times) // 2] * 1000, 3),
        "added_p99_ms": round(times[int(len(times) * 0.99)] * 1000, 3),
        "limits_per_decision": len(NEVER),
    }
