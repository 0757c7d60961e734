"""What quotas cost and whether they hold: several gateway processes, many clients, hard limits of every kind.

    python benchmarks/quotas.py [--gateways 4] [--clients 200] [--seconds 10]

Starts the embedded Valkey unless REDIS_URL names one. Three parts:

edge     every client asks for as much as it can get, uses a random part of it and settles (at another gateway's
         turn: in any order), until a limit on requests, a budget in tokens or a budget in money is used up.
         `overshoot` is what was used beyond what was granted, over all limits; `refund_errors` what the counters
         say at the end beyond or below the exact sum of what was used; `header_errors` counts refusals that came
         although the headers of the answer before, to the only client, had promised room, and the other way round.
load     the same clients against limits that never bind: decisions per second, one reserve and one settle each.
added    one client a gateway, so that no time is spent waiting for others of this benchmark: what a reserve adds.

The machine runs clients, gateways and Valkey at once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import uuid
from datetime import UTC, datetime
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "platform")]

from tenants.pricing import Price  # noqa: E402  # needs the path above
from tenants.principal import Calendar, LimitMetric, LimitScope, LimitSpec, Principal, TierSpec  # noqa: E402
from tenants.quotas.store import QuotaStore  # noqa: E402
from tenants.quotas.types import Admitted  # noqa: E402
from weir import embedded  # noqa: E402

PRICE = Price("bench", datetime(2020, 1, 1, tzinfo=UTC), 150_000, 75_000, 600_000)
PROMPT, OUTPUT = 900, 400
TIER = TierSpec("standard", 1, 1, 1000, 200, 300, 4096)


def rate(metric: LimitMetric, amount: int, period_s: int) -> LimitSpec:
    return LimitSpec(LimitScope.TENANT, "t", metric, amount, period_s, amount)


def budget(metric: LimitMetric, amount: int) -> LimitSpec:
    return LimitSpec(LimitScope.TENANT, "t", metric, amount, 0, amount, calendar=Calendar.MONTH)


LIMITS = {
    "requests": rate(LimitMetric.REQUESTS, 1500, 31 * 86_400),
    "tokens": budget(LimitMetric.TOKENS, 1_000_003),
    "cost": budget(LimitMetric.COST, 300_007),
}
NEVER = (
    rate(LimitMetric.REQUESTS, 10**9, 60),
    rate(LimitMetric.TOKENS, 10**11, 60),
    rate(LimitMetric.CONCURRENCY, 10**6, 0),
    budget(LimitMetric.TOKENS, 10**12),
    budget(LimitMetric.COST, 10**12),
)


def principal(tenant: str, *limits: LimitSpec) -> Principal:
    return Principal(1, tenant, "Bench", TIER, limits, frozenset())


async def ask(store: QuotaStore, who: Principal, rid: str) -> Any:
    return await store.reserve(
        reservation_id=rid,
        principal=who,
        prompt_tokens=PROMPT,
        max_output_tokens=OUTPUT,
        lease_ms=60_000,
        price=PRICE,
    )


async def settle(store: QuotaStore, who: Principal, rid: str, output: int) -> dict[str, int]:
    cost = PRICE.cost_microusd(prompt_tokens=PROMPT, cached_tokens=0, completion_tokens=output)
    await store.settle(
        tenant_public_id=who.tenant_public_id,
        reservation_id=rid,
        prompt_tokens=PROMPT,
        completion_tokens=output,
        cost_microusd=cost,
    )
    return {"requests": 1, "tokens": PROMPT + output, "cost": cost}


async def edge(store: QuotaStore, tenants: dict[str, str], clients: int, seed: int) -> dict[str, int]:
    used = dict.fromkeys(LIMITS, 0)

    async def client(number: int) -> None:
        dice = random.Random(f"{seed}-{number}")  # noqa: S311
        for name, limit in LIMITS.items():
            who = principal(tenants[name], limit)
            refusals = 0
            while refusals < 3:
                rid = uuid.uuid4().hex
                decision = await ask(store, who, rid)
                if not isinstance(decision, Admitted):
                    spent = decision.is_spent or limit.period_s
                    refusals += 3 if spent else 1
                    await asyncio.sleep(0 if spent else 0.05)
                    continue
                await asyncio.sleep(dice.random() * 0.01)
                output = dice.randint(0, decision.max_output_tokens)
                settled = await settle(store, who, rid, output)
                used[name] += settled[name]

    await asyncio.gather(*(client(number) for number in range(clients)))
    return used


async def load(store: QuotaStore, tenant: str, clients: int, seconds: float) -> tuple[int, list[float]]:
    who, ends_at, times = principal(tenant, *NEVER), time.perf_counter() + seconds, []

    async def client() -> None:
        while (began := time.perf_counter()) < ends_at:
            rid = uuid.uuid4().hex
            decision = await ask(store, who, rid)
            times.append(time.perf_counter() - began)
            assert isinstance(decision, Admitted)
            await settle(store, who, rid, 100)

    await asyncio.gather(*(client() for _ in range(clients)))
    return len(times), times


def gateway(
    url: str, number: int, clients: int, seconds: float, tenants: dict[str, str], start: Barrier, results: Any
) -> None:
    async def main() -> dict[str, Any]:
        store = QuotaStore(url, timeout_s=30, max_connections=64)
        start.wait(60)
        used = await edge(store, tenants, clients, number)
        start.wait(300)
        decisions, _ = await load(store, tenants["load"], clients, seconds)
        start.wait(300)
        _, times = await load(store, tenants["load"], 1, seconds / 2)
        await store.aclose()
        return {"used": used, "decisions": decisions, "times": times}

    results.put(asyncio.run(main()))


async def header_errors(url: str) -> int:
    """One client alone: each answer's headers against what the next request meets."""
    store, errors = QuotaStore(url), 0
    for limit in (rate(LimitMetric.REQUESTS, 30, 86_400), budget(LimitMetric.TOKENS, 30_000)):
        who, left = principal(uuid.uuid4().hex, limit), limit.burst
        while True:
            least = 1 if limit.metric is LimitMetric.REQUESTS else PROMPT + 1
            rid = uuid.uuid4().hex
            decision = await ask(store, who, rid)
            errors += isinstance(decision, Admitted) != (left >= least)
            if not isinstance(decision, Admitted):
                break
            await settle(store, who, rid, min(100, decision.max_output_tokens))
            left = (await store.peek(who))[0].remaining
    await store.aclose()
    return errors


async def left_over(url: str, tenants: dict[str, str]) -> dict[str, int]:
    store = QuotaStore(url)
    left = {
        name: (await store.peek(principal(tenants[name], limit)))[0].remaining
        for name, limit in LIMITS.items()
    }
    await store.aclose()
    return left


def bench(url: str, gateways: int, clients: int, seconds: float) -> dict[str, Any]:
    tenants = {name: uuid.uuid4().hex for name in (*LIMITS, "load")}
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(gateways), context.Queue()
    processes = [
        context.Process(
            target=gateway, args=(url, n, clients // gateways, seconds, tenants, start, results), daemon=True
        )
        for n in range(gateways)
    ]
    for process in processes:
        process.start()
    told = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join(60)
    used = {name: sum(one["used"][name] for one in told) for name in LIMITS}
    left = asyncio.run(left_over(url, tenants))
    times = sorted(t for one in told for t in one["times"])
    return {
        "overshoot": sum(max(0, used[name] - limit.burst) for name, limit in LIMITS.items()),
        # A rate refills a little meanwhile: less than one in its half hour.
        "refund_errors": sum(
            error
            for name, limit in LIMITS.items()
            if (error := abs(limit.burst - used[name] - left[name])) > (0 if limit.is_budget else 1)
        ),
        "header_errors": asyncio.run(header_errors(url)),
        "granted": {name: limit.burst for name, limit in LIMITS.items()},
        "used": used,
        "decisions_per_s": round(sum(one["decisions"] for one in told) / seconds, 1),
        "added_p50_ms": round(statistics.median(times) * 1000, 3),
        "added_p99_ms": round(times[int(len(times) * 0.99)] * 1000, 3),
        "gateways": gateways,
        "clients": clients,
        "limits_per_decision": len(NEVER),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10)
    arguments = parser.parse_args()
    process = None
    url = os.environ.get("REDIS_URL")
    if not url:
        server = embedded.prepare_valkey(Path(tempfile.mkdtemp(prefix="weir-bench-")), durable=False)
        process, url = embedded.start(server), server.url
    try:
        results = bench(url, arguments.gateways, arguments.clients, arguments.seconds)
    finally:
        if process:
            process.terminate()
            process.wait()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    )
    for name, value in results.items():
        print(f"{name:20} {value}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
