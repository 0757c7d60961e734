"""Who gets the machine: shares of tenants, and what a realtime tenant feels of an overload below it.

    make bench-fairness                        # a minute per part, about seven in all
    make bench-fairness ARGS="--seconds 8"     # to see that it runs

Real Valkey, one real worker process with the real engine; the load is put in at the broker, where order
is decided, from this process, which shares the machine. The first two parts count thousands of requests, so
they run a tiny random model; the others run the default model, because a model whose step costs no more than
the load generator measures that. They take turns three times, so that a noisy machine hits all of them. Parts:

    equal      four tenants of weight 1, requests of very different sizes, all always backlogged
    weighted   three tenants of weights 1, 2, 4
    unloaded   a realtime tenant alone, light load (Poisson arrivals)
    fair       the same, while batch tenants offer ten times what the worker can do
    fifo       the same again with everybody in one line by arrival: what others do

A tenant's service is prompt tokens + 2 * output tokens, which is what the order shares out; the raw
token counts are printed beside it. A request's prompt counts when its first token comes. The time to
first token runs from the call of enqueue to the token's arrival over the live channel. Batch waits are
from acceptance to claim, by the server's clock. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from benchmarks.engine.measure import percentile, processor
from benchmarks.fleet import MODEL, one_worker
from benchmarks.model import prepared
from benchmarks.offered_load import Tally, drop_all, listen, put
from engine_worker.broker import GatewayBroker
from engine_worker.protocol import FinishReason, UsageEvent, decode
from weir import embedded

SLOTS = 16
AGING_BOUND_S = 20.0
REALTIME_PER_S = 1.5
REALTIME_SIZE = (128, 8)
STEP_TARGET_MS = 250
"""The longest that a realtime request should wait for the step that runs when it comes: `--itl-targets-ms 0:250`.
Not less than its own prompt takes beside another's stream."""
ROUNDS = 3
BATCH_SIZE = (32, 64)
OVERLOAD = 10


async def shares(
    broker: GatewayBroker, tenants: Mapping[str, tuple[int, tuple[int, int]]], seconds: float
) -> dict[str, float]:
    """Each tenant's service per weight, over the mean of all: 1.0 is exactly fair."""
    tally, ended = Tally(), asyncio.Event()
    listener = asyncio.create_task(listen(broker, tally, ended), name="bench-listen")
    await asyncio.sleep(0.2)

    async def fill() -> None:
        # Always backlogged: more stands in line than all slots could take at once. In turn, so that at
        # the start nobody gets all slots for having come first.
        for depth in range(3 * SLOTS):
            for tenant, (weight, size) in tenants.items():
                if len(tally.open[tenant]) <= depth:
                    await put(broker, tally, tenant, size, weight=weight)

    await fill()
    warm_until, began = time.monotonic() + min(5.0, seconds / 4), 0.0
    while not began or time.monotonic() < began + seconds:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await ended.wait()
        ended.clear()
        if listener.done():
            listener.result()
        await fill()
        if not began and time.monotonic() > warm_until:
            began, tally.is_counting = time.monotonic(), True
    tally.is_counting = False
    await drop_all(broker, tally, listener)
    per_weight = {tenant: tally.service(tenant) / weight for tenant, (weight, _) in tenants.items()}
    mean = sum(per_weight.values()) / len(per_weight)
    for tenant in tenants:
        print(
            f"  {tenant:12} prompt {tally.prompt_tokens[tenant]:7} output {tally.output_tokens[tenant]:7} "
            f"service/weight {per_weight[tenant]:9.0f} share {per_weight[tenant] / mean:.3f}"
        )
    return {tenant: value / mean for tenant, value in per_weight.items()}


async def capacity(broker: GatewayBroker, seconds: float) -> float:
    """Batch requests per second that the worker ends when it has nothing else."""
    tally, ended = Tally(), asyncio.Event()
    listener = asyncio.create_task(listen(broker, tally, ended), name="bench-listen")
    await asyncio.sleep(0.2)
    began, gives_up_at = 0.0, time.monotonic() + 600
    while not began or time.monotonic() < began + seconds:
        while len(tally.open["batch"]) < 2 * SLOTS:
            await put(broker, tally, "batch", BATCH_SIZE, rank=2)
        before = len(tally.open["batch"])
        await asyncio.sleep(0.02)
        if not began and before > len(tally.open["batch"]):
            # With the first that ends: what filled the slots is not what they do.
            began, tally.is_counting = time.monotonic(), True
        elif not began and time.monotonic() > gives_up_at:
            raise TimeoutError("the worker ends nothing")
    # In tokens, for requests end in waves of as many as there are slots.
    done, took = tally.output_tokens["batch"] / BATCH_SIZE[1], time.monotonic() - began
    await drop_all(broker, tally, listener)
    return done / took


async def realtime_ttft(
    broker: GatewayBroker, seconds: float, *, batch_per_s: float = 0.0, is_fifo: bool = False
) -> tuple[list[float], int]:
    """Times to first token of the realtime tenant, and how many batch requests were refused."""
    tally, ended = Tally(), asyncio.Event()
    listener = asyncio.create_task(listen(broker, tally, ended), name="bench-listen")
    await asyncio.sleep(0.2)
    rng = random.Random(4)
    ends_at = time.monotonic() + seconds
    lead = min(5.0, seconds / 4) if batch_per_s else 0.0

    async def arrivals(rate: float, tenants: Sequence[str], size: tuple[int, int], rank: int) -> None:
        at = time.monotonic()
        for tenant in itertools.cycle(tenants):
            at += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            if at > ends_at:
                return
            await put(
                broker,
                tally,
                tenant,
                size,
                rank=1 if is_fifo else rank,
                line="everybody" if is_fifo else None,
                max_wait_s=AGING_BOUND_S,
                max_queued_per_tenant=8 * SLOTS,
            )

    batch = [f"batch-{n}" for n in range(4)]
    tasks = [asyncio.create_task(arrivals(batch_per_s, batch, BATCH_SIZE, 2))] if batch_per_s else []
    await asyncio.sleep(lead)
    tasks.append(asyncio.create_task(arrivals(REALTIME_PER_S, ["realtime"], REALTIME_SIZE, 0)))
    await asyncio.gather(*tasks)
    with suppress(TimeoutError):
        async with asyncio.timeout(60):
            while tally.open["realtime"]:
                ended.clear()
                await ended.wait()
    times = [
        seconds
        for request_id, seconds in tally.first_token_s.items()
        if tally.tenant_of[request_id] == "realtime"
    ]
    refused = tally.refused
    await drop_all(broker, tally, listener)
    return times, refused


async def batch_waits(redis_url: str) -> tuple[list[float], int]:
    """Seconds from acceptance to claim of every batch request so far, taken from the usage stream; and how many waited
    as long as was promised and were ended unserved."""
    async with Redis.from_url(redis_url, protocol=2) as client:
        stream = f"weir:{{m:{MODEL}}}:usage"
        entries: Any = await client.xrange(stream)
        await client.delete(stream)
    events = [decode(fields[b"e"], UsageEvent) for _, fields in entries]
    batch = [event for event in events if event.tier == "tier-2"]
    waits = [
        (event.claimed_at_ms - event.created_at_ms) / 1000
        for event in batch
        if event.claimed_at_ms is not None
    ]
    return waits, sum(
        event.claimed_at_ms is None and event.finish_reason == FinishReason.DEADLINE for event in batch
    )


async def fair_shares(redis_url: str, scratch: Path, seconds: float) -> dict[str, float]:
    flags = {"max_num_seqs": SLOTS, "max_model_len": 1024, "prefix_cache": "false"}
    async with one_worker(redis_url, scratch, **flags) as broker:
        print("equal weights")
        sizes = {"small": (8, 8), "long-prompt": (400, 8), "long-answer": (8, 200), "mixed": (100, 50)}
        equal = await shares(broker, {tenant: (1, size) for tenant, size in sizes.items()}, seconds)
        print("weights 1, 2, 4")
        weighted = await shares(
            broker, {"one": (1, (40, 20)), "two": (2, (8, 40)), "four": (4, (80, 10))}, seconds
        )
    return {
        "equal_share_spread": round(max(abs(share - 1) for share in equal.values()), 4),
        "weighted_share_error": round(max(abs(share - 1) for share in weighted.values()), 4),
    }


async def isolation(redis_url: str, scratch: Path, seconds: float) -> dict[str, float]:
    times: dict[str, list[float]] = {"unloaded": [], "fair": [], "fifo": []}
    refused = dict.fromkeys(times, 0)
    waits: list[float] = []
    unserved = 0
    flags = {"max_num_seqs": SLOTS, "max_model_len": 1024, "itl_targets_ms": f"0:{STEP_TARGET_MS}"}
    model_dir = prepared()
    async with one_worker(redis_url, scratch, model_dir=model_dir, **flags) as broker:
        can_do = await capacity(broker, max(6.0, seconds / 4))
        await realtime_ttft(broker, min(5.0, seconds))
        await batch_waits(redis_url)
        for _ in range(ROUNDS):
            for part in times:
                found, missed = await realtime_ttft(
                    broker,
                    seconds / ROUNDS,
                    batch_per_s=0.0 if part == "unloaded" else OVERLOAD * can_do,
                    is_fifo=part == "fifo",
                )
                times[part] += found
                refused[part] += missed
                waited, gave_up = await batch_waits(redis_url)
                if part == "fair":
                    waits += waited
                    unserved += gave_up
    for part, found in times.items():
        print(
            f"realtime {part:9} {len(found):4} requests, first token p50 {percentile(found, 0.5) * 1000:8.1f} ms, "
            f"p99 {percentile(found, 0.99) * 1000:8.1f} ms; {refused[part]} requests refused"
        )
    print(
        f"the worker can do {can_do:.1f} batch requests/s; offered {OVERLOAD} times that; "
        f"{len(waits)} batch requests claimed beside realtime ones, {unserved} ended after the wait they were promised"
    )
    base = percentile(times["unloaded"], 0.99)
    return {
        "realtime_p99_ttft_ratio": round(percentile(times["fair"], 0.99) / base, 3),
        "fifo_p99_ttft_ratio": round(percentile(times["fifo"], 0.99) / base, 3),
        "max_batch_wait_s": round(max(waits, default=0.0), 2),
        "aging_bound_s": AGING_BOUND_S,
        "batch_ended_unserved": unserved,
    }


async def run(redis_url: str, scratch: Path, seconds: float) -> dict[str, float]:
    shared = await fair_shares(redis_url, scratch, seconds)
    return shared | await isolation(redis_url, scratch, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weir-fairness-") as directory:
        scratch = Path(directory)
        server = embedded.prepare_valkey(scratch, durable=False)
        process = embedded.start(server)
        try:
            print(f"{processor()}; {SLOTS} slots, {arguments.seconds:g} s per part")
            results = asyncio.run(run(server.url, scratch, arguments.seconds))
        finally:
            process.terminate()
            process.wait()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
