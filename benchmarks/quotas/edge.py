"""Hard limits under many clients at several gateways: what was used, what the counters say, what headers promised."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import httpx
from asgiref.sync import sync_to_async
from django.db.models import F, Sum

from benchmarks.quotas.product import ENDS_AFTER, MODEL
from inference.models import UsageRecord
from inference.services.usage import drain_usage_stream
from tenants.models import ApiKey, ModelPrice, Tenant, Tier
from tenants.principal import Calendar, LimitMetric, Principal
from tenants.principal_selectors import find_stored_key
from tenants.quotas.store import QuotaStore
from tenants.services import Actor, create_tenant, issue_api_key, set_quota_limit

_ACTOR: Final = Actor.system("bench")
LONG_S: Final = 31 * 86_400
_PROMPT: Final = "p" * 60
_MOST: Final = 300
"""The largest answer asked for; the worker ends it after ENDS_AFTER."""
_SETTLED_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Payer:
    """A tenant with one hard limit that will bind, and limits beside it that never do."""

    tenant: Tenant
    api_key: ApiKey
    secret: str
    metric: LimitMetric
    granted: int

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"}

    def principal(self) -> Principal:
        stored = find_stored_key(self.api_key.lookup_id)
        assert stored is not None
        return stored.principal


@dataclass
class Counted:
    """What the clients saw, by metric."""

    used: dict[LimitMetric, int] = field(default_factory=dict)
    admitted: int = 0
    refused: int = 0
    cut: int = 0
    """Left in mid-stream by their client."""
    unexpected: int = 0
    """Answers that are neither a result nor a refusal by a limit."""
    refusal_s: list[float] = field(default_factory=list)


def make_price() -> None:
    ModelPrice.objects.create(
        model=MODEL,
        valid_from=datetime(2020, 1, 1, tzinfo=UTC),
        input_microusd_per_mtok=150_000,
        cached_input_microusd_per_mtok=75_000,
        output_microusd_per_mtok=600_000,
    )


def make_payer(metric: LimitMetric, amount: int, **how: Any) -> Payer:
    """`how`: period_s of a rate, calendar of a budget."""
    tier = Tier.objects.get(name="standard")
    Tier.objects.filter(pk=tier.pk).update(max_queued=100_000, max_queued_per_tenant=100_000)
    tenant = create_tenant(actor=_ACTOR, name=f"{metric} {amount} {time.time_ns()}", tier=tier)
    set_quota_limit(actor=_ACTOR, owner=tenant, metric=metric, amount=amount, **how)
    for never in (LimitMetric.REQUESTS, LimitMetric.TOKENS):
        if never is not metric:
            set_quota_limit(actor=_ACTOR, owner=tenant, metric=never, amount=10**9, period_s=3600)
    issued = issue_api_key(actor=_ACTOR, tenant=tenant, name="bench")
    return Payer(tenant, issued.api_key, issued.secret, metric, amount)


async def spend(urls: Sequence[str], payer: Payer, clients: int, seed: int) -> Counted:
    """Every client asks at gateway after gateway until the limit is used up; a third reads streams, of which some
    are left half way."""
    seen = Counted()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(headers=payer.headers(), timeout=120, limits=limits) as http:

        async def client(number: int) -> None:
            dice, ends = random.Random(f"{seed}-{number}"), 0
            while ends < 3:
                url = f"{urls[(number + ends + seen.admitted) % len(urls)]}/v1/completions"
                body = {"model": MODEL, "prompt": _PROMPT, "max_tokens": dice.randint(1, _MOST)}
                began = time.perf_counter()
                if dice.random() < 0.3:
                    status, code = await _stream(http, url, body, leave=dice.random() < 0.5, seen=seen)
                else:
                    answer = await http.post(url, json=body)
                    status, code = answer.status_code, _code(answer.content)
                if status == 200:
                    seen.admitted += 1
                    continue
                seen.refusal_s.append(time.perf_counter() - began)
                seen.refused += 1
                if status != 429:
                    seen.unexpected += 1
                is_over = code == "insufficient_quota" or payer.metric is LimitMetric.REQUESTS
                ends += 1 if is_over or status != 429 else 0
                await asyncio.sleep(0 if is_over else 0.05)

        await asyncio.gather(*(client(number) for number in range(clients)))
    return seen


async def _stream(
    http: httpx.AsyncClient, url: str, body: dict[str, Any], *, leave: bool, seen: Counted
) -> tuple[int, str]:
    async with http.stream("POST", url, json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            return answer.status_code, _code(await answer.aread())
        events = 0
        async for line in answer.aiter_lines():
            events += line.startswith("data: {")
            if leave and events == 2:
                seen.cut += 1
                break
    return 200, ""


def _code(content: bytes) -> str:
    return str(json.loads(content).get("error", {}).get("code", ""))


async def settled(payer: Payer) -> tuple[int, int]:
    """When all is settled: what the ledger has in the limit's unit, and what the counter says is left."""
    store = QuotaStore(_redis_url())
    try:
        ends_at, before = time.monotonic() + _SETTLED_S, None
        while True:
            await sync_to_async(drain_usage_stream)()
            left = next(
                state.remaining
                for state in await store.peek(await sync_to_async(payer.principal)())
                if state.limit.metric is payer.metric
            )
            now = (await sync_to_async(_ledger)(payer), left)
            if now == before or time.monotonic() > ends_at:
                return now
            before = now
            await asyncio.sleep(1.5)
    finally:
        await store.aclose()


def _ledger(payer: Payer) -> int:
    rows = UsageRecord.objects.for_tenant(payer.tenant)
    sums = rows.aggregate(t=Sum(F("prompt_tokens") + F("completion_tokens")), c=Sum("cost_microusd"))
    used = {
        LimitMetric.REQUESTS: rows.count(),
        LimitMetric.TOKENS: sums["t"],
        LimitMetric.COST: sums["c"],
    }
    return int(used[payer.metric] or 0)


def _redis_url() -> str:
    from django.conf import settings

    return str(settings.REDIS_URL)


async def broken_promises(urls: Sequence[str]) -> tuple[int, int]:
    """One client alone: how often what an answer's headers said is not what the next request meets; and of how many.

    What is left of requests and tokens; that who comes back a little before `retry-after-ms` is refused, and who
    comes back then is not.
    """
    kept: list[bool] = []
    rate = await sync_to_async(make_payer)(LimitMetric.REQUESTS, 6, period_s=12)
    tokens = await sync_to_async(make_payer)(LimitMetric.TOKENS, 1000, period_s=86_400)
    budget = await sync_to_async(make_payer)(LimitMetric.TOKENS, 1000, calendar=Calendar.MONTH)
    async with httpx.AsyncClient(timeout=60) as http:

        async def ask(payer: Payer, number: int, most: int = 1) -> httpx.Response:
            body = {"model": MODEL, "prompt": _PROMPT, "max_tokens": most}
            url = f"{urls[number % len(urls)]}/v1/completions"
            return await http.post(url, json=body, headers=payer.headers())

        left: int | None = None
        for number in range(10):  # six fit; what refills meanwhile is counted by the header itself
            answer = await ask(rate, number)
            if left is not None and left > 0:
                kept.append(answer.status_code == 200)
            left = int(answer.headers["x-ratelimit-remaining-requests"])
            if answer.status_code == 429:
                break
        wait_s = int(answer.headers["retry-after-ms"]) / 1000
        await asyncio.sleep(wait_s * 0.5)
        kept.append((await ask(rate, 1)).status_code == 429)
        await asyncio.sleep(wait_s * 0.5 + 0.02)
        kept.append((await ask(rate, 2)).status_code == 200)
        for payer in (tokens, budget):
            left, most = None, 90
            for number in range(12):
                answer = await ask(payer, number, most)
                needed = len(_PROMPT) + (most if payer is tokens else 1)
                if left is not None:
                    kept.append((answer.status_code == 200) == (left >= needed))
                if answer.status_code != 200:
                    break
                await asyncio.sleep(0.1)  # what was reserved is settled at the answer's end
                quota = await http.get(f"{urls[0]}/v1/quota", headers=payer.headers())
                left = min(one["remaining"] for one in quota.json()["data"] if one["metric"] == "tokens")
                kept.append(left >= int(answer.headers["x-ratelimit-remaining-tokens"]))
    return kept.count(False), len(kept)


def percentiles_ms(times: Sequence[float]) -> tuple[float, float]:
    """P50 and P99."""
    ordered = sorted(times)
    return (
        round(statistics.median(ordered) * 1000, 3),
        round(ordered[int(len(ordered) * 0.99)] * 1000, 3),
    )


LIMITS: Final = {
    LimitMetric.REQUESTS: {"period_s": LONG_S},
    LimitMetric.TOKENS: {"calendar": Calendar.MONTH},
    LimitMetric.COST: {"calendar": Calendar.MONTH},
}
COST_OF_ONE: Final = round(60 * 0.15 + ENDS_AFTER * 0.6)
"""About what a request costs, micro-USD."""
