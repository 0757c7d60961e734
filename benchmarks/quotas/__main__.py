"""What quotas cost and whether they hold: real gateways, many clients, hard limits of every kind.

    make bench-quotas                         # or python -m benchmarks.quotas [--gateways 4] [--clients 200]

Starts PostgreSQL, Valkey, Daphne processes and one worker that makes letters in a scratch directory. In turn:

edge      200 clients at 4 gateways use up a rate of requests, a budget in tokens and a budget in money; some read
          streams, some leave them half way, answers end sooner than was reserved. `overshoot` is what the ledger has
          beyond what was granted, `refund_errors` what counters and ledger differ by afterwards (a rate refills
          meanwhile: it may differ by that), both in the limits' units.
promises  one client alone: `header_errors` counts answers whose headers, or whose time to come back, were not what the
          next request then met.
refusals  all clients at a limit that is used up: refusals a second through HTTP.
call      the quota call without HTTP, in as many processes: `decisions_per_s` with all clients, `added_p50_ms` and
          `added_p99_ms` of a reserve against five limits with one client a process.
litellm   LiteLLM's proxy, as many processes on one Redis, the same clients: a limit of requests and one of tokens a
          minute, `added` as the difference that a limit makes to the latency of one client. Where it is installed:
          python -m venv var/peers/litellm && var/peers/litellm/bin/pip install 'litellm[proxy]'
          (or WEIR_LITELLM_VENV names its environment)

The machine runs clients, gateways and servers at once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.quotas import call, product

ROOT = Path(__file__).resolve().parents[2]


async def edges(urls: list[str], clients: int, requests: int) -> dict[str, Any]:
    from asgiref.sync import sync_to_async

    from benchmarks.quotas import edge
    from tenants.principal import LimitMetric

    await sync_to_async(edge.make_price)()
    amounts = {
        LimitMetric.REQUESTS: requests,
        LimitMetric.TOKENS: requests * 150 + 3,
        LimitMetric.COST: requests * edge.COST_OF_ONE + 7,
    }
    overshoot = refund_errors = unexpected = 0
    limits: dict[str, Any] = {}
    for metric, how in edge.LIMITS.items():
        payer = await sync_to_async(edge.make_payer)(metric, amounts[metric], **how)
        began = time.time()
        seen = await edge.spend(urls, payer, clients, seed=7)
        used, left = await edge.settled(payer)
        overshoot += max(0, used - payer.granted)
        refilled = payer.granted * (time.time() - began) / how["period_s"] if "period_s" in how else 0
        off = abs(payer.granted - used - left)
        refund_errors += 0 if off <= refilled + 1 and refilled else off
        unexpected += seen.unexpected
        limits[str(metric)] = {
            "granted": payer.granted, "used": used, "left": left,
            "admitted": seen.admitted, "cut_by_client": seen.cut, "refused": seen.refused,
        }  # fmt: skip
    header_errors, promises = await edge.broken_promises(urls)
    closed = await sync_to_async(edge.make_payer)(LimitMetric.REQUESTS, 1, period_s=edge.LONG_S)
    began = time.perf_counter()
    refusals = [await edge.spend(urls, closed, clients, seed) for seed in range(3)]
    refused, took_s = sum(seen.refused for seen in refusals), time.perf_counter() - began
    p50, p99 = edge.percentiles_ms([t for seen in refusals for t in seen.refusal_s])
    return {
        "overshoot": overshoot,
        "refund_errors": refund_errors,
        "header_errors": header_errors,
        "promises": promises,
        "unexpected_answers": unexpected,
        "limits": limits,
        "refusals_per_s": round(refused / took_s, 1),
        "refusal_p50_ms": p50,
        "refusal_p99_ms": p99,
    }


def bench(gateways: int, clients: int, requests: int, seconds: float, *, with_peer: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch:
        with product.servers(Path(scratch)) as redis_url:
            with product.gateways(Path(scratch), gateways) as urls:
                results = asyncio.run(edges(urls, clients, requests))
            results |= call.measure(redis_url, processes=gateways, clients=clients, seconds=seconds)
        results |= {"gateways": gateways, "clients": clients, "litellm": None}
        if with_peer:
            from benchmarks.quotas import peer

            if peer.is_installed():
                print(f"without LiteLLM: {json.dumps(results)}", flush=True)  # kept, however that ends
                with peer.proxies(Path(scratch), gateways) as urls:
                    results["litellm"] = asyncio.run(
                        peer.measure(
                            urls,
                            clients=clients,
                            requests=requests,
                            tokens=requests * 20,
                            alone=requests // 4,
                        )
                    )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1000, help="about so many fit each limit")
    parser.add_argument("--seconds", type=float, default=10, help="of the quota call")
    parser.add_argument("--no-peer", action="store_true")
    given = parser.parse_args()
    for name in ("DATABASE_URL", "REDIS_URL"):
        os.environ.pop(name, None)  # nobody's real ledger is filled with this
    results = bench(given.gateways, given.clients, given.requests, given.seconds, with_peer=not given.no_peer)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    )
    for name, value in results.items():
        print(f"{name:20} {value}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
