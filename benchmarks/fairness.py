"""Who gets the machine: shares of tenants, and what a realtime tenant feels of an overload below it.

    make bench-fairness                        # a minute per part, about six in all
    make bench-fairness ARGS="--seconds 8"     # to see that it runs

Real Valkey, one real worker process with the real engine and a tiny random model; the load is put
in at the broker, where order is decided, from this process, which shares the machine. Parts:

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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from benchmarks.engine.measure import percentile, processor
from benchmarks.fleet import MODEL, one_worker
from engine_worker.broker import Gap, GatewayBroker, QueueFull
from engine_worker.protocol import GenerateRequest, SamplingParams, UsageEvent, decode
from weir import embedded

CHANNEL = "weir:live:bench"
WEIGHT_PROMPT, WEIGHT_OUTPUT = 1, 2
SLOTS = 16
AGING_BOUND_S = 20.0
REALTIME_PER_S = 4.0
REALTIME_SIZE = (16, 8)
BATCH_SIZE = (32, 64)
OVERLOAD = 10

_numbers = itertools.count()


@dataclass
class Tally:
    """What was heard of everybody's requests."""

    tenant_of: dict[str, str] = field(default_factory=dict)
    prompt_of: dict[str, int] = field(default_factory=dict)
    asked_at: dict[str, float] = field(default_factory=dict)
    first_token_s: dict[str, float] = field(default_factory=dict)
    prompt_tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    output_tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    open: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    refused: int = 0
    is_counting: bool = False

    def service(self, tenant: str) -> int:
        return WEIGHT_PROMPT * self.prompt_tokens[tenant] + WEIGHT_OUTPUT * self.output_tokens[tenant]


async def listen(broker: GatewayBroker, tally: Tally, ended: asyncio.Event) -> None:
    async with broker.live(CHANNEL) as live:
        async for batch in live:
            if isinstance(batch, Gap):
                raise RuntimeError("the benchmark could not keep up with its own tokens")
            for chunk in batch:
                tenant = tally.tenant_of.get(chunk.request_id)
                if tenant is None:
                    continue
                if chunk.token_ids and chunk.request_id not in tally.first_token_s:
                    tally.first_token_s[chunk.request_id] = (
                        time.perf_counter() - tally.asked_at[chunk.request_id]
                    )
                    if tally.is_counting:
                        tally.prompt_tokens[tenant] += tally.prompt_of[chunk.request_id]
                if tally.is_counting:
                    tally.output_tokens[tenant] += len(chunk.token_ids)
                if chunk.finish:
                    tally.open[tenant].discard(chunk.request_id)
                    ended.set()


async def put(
    broker: GatewayBroker,
    tally: Tally,
    tenant: str,
    size: tuple[int, int],
    *,
    rank: int = 1,
    weight: int = 1,
    line: str | None = None,
    max_wait_s: float = 600.0,
    max_queued_per_tenant: int = 1000,
) -> str | None:
    """None when the queue refuses. `line` is the tenant that the broker sees, if another."""
    number = next(_numbers)
    rng = random.Random(number)  # noqa: S311
    request_id = f"bench-{number}"
    tally.tenant_of[request_id], tally.prompt_of[request_id] = tenant, size[0]
    tally.asked_at[request_id] = time.perf_counter()
    request = GenerateRequest(
        request_id=request_id,
        model=MODEL,
        tenant_id=line or tenant,
        tier=f"tier-{rank}",
        tier_rank=rank,
        prompt_token_ids=[rng.randrange(256) for _ in range(size[0])],  # no two share a prefix
        sampling=SamplingParams(max_tokens=size[1], temperature=0, ignore_eos=True),
        created_at_ms=0,
        deadline_ms=600_000,
        reply_channel=CHANNEL,
        endpoint=tenant,
    )
    try:
        await broker.enqueue(
            request,
            max_queued=100_000,
            max_queued_per_tenant=max_queued_per_tenant,
            weight=weight,
            max_wait_ms=int(max_wait_s * 1000),
        )
    except QueueFull:
        tally.refused += 1
        del tally.tenant_of[request_id]
        return None
    tally.open[tenant].add(request_id)
    return request_id


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


async def drop_all(broker: GatewayBroker, tally: Tally, listener: asyncio.Task[None]) -> None:
    for tenant in list(tally.open):
        for request_id in list(tally.open[tenant]):
            await broker.cancel(MODEL, request_id)
    deadline = time.monotonic() + 60
    while any(tally.open.values()):
        if time.monotonic() > deadline:
            raise TimeoutError("requests were left over")
        await asyncio.sleep(0.1)
    listener.cancel()
    await asyncio.gather(listener, return_exceptions=True)


async def capacity(broker: GatewayBroker, seconds: float) -> float:
    """Batch requests per second that the worker ends when it has nothing else."""
    tally, ended = Tally(), asyncio.Event()
    listener = asyncio.create_task(listen(broker, tally, ended), name="bench-listen")
    await asyncio.sleep(0.2)
    done, began = 0, time.monotonic()
    while time.monotonic() < began + seconds:
        while len(tally.open["batch"]) < 2 * SLOTS:
            await put(broker, tally, "batch", BATCH_SIZE, rank=2)
        before = len(tally.open["batch"])
        await asyncio.sleep(0.02)
        done += before - len(tally.open["batch"])
    await drop_all(broker, tally, listener)
    return done / seconds


async def realtime_ttft(
    broker: GatewayBroker, seconds: float, *, batch_per_s: float = 0.0, is_fifo: bool = False
) -> tuple[list[float], int]:
    """Times to first token of the realtime tenant, and how many batch requests were refused."""
    tally, ended = Tally(), asyncio.Event()
    listener = asyncio.create_task(listen(broker, tally, ended), name="bench-listen")
    await asyncio.sleep(0.2)
    rng = random.Random(4)  # noqa: S311
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
    waited = time.monotonic() + 60
    while tally.open["realtime"] and time.monotonic() < waited:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    times = [
        seconds
        for request_id, seconds in tally.first_token_s.items()
        if tally.tenant_of[request_id] == "realtime"
    ]
    refused = tally.refused
    await drop_all(broker, tally, listener)
    return times, refused


async def batch_waits(redis_url: str) -> list[float]:
    """Seconds from acceptance to claim of every batch request so far, taken from the usage stream."""
    async with Redis.from_url(redis_url, protocol=2) as client:
        stream = f"weir:{{m:{MODEL}}}:usage"
        entries: Any = await client.xrange(stream)
        await client.delete(stream)
    events = [decode(fields[b"e"], UsageEvent) for _, fields in entries]
    return [
        (event.claimed_at_ms - event.created_at_ms) / 1000
        for event in events
        if event.tier == "tier-2" and event.claimed_at_ms is not None
    ]


async def run(redis_url: str, scratch: Path, seconds: float) -> dict[str, float]:
    flags = {"max_num_seqs": SLOTS, "max_model_len": 1024, "prefix_cache": "false"}
    async with one_worker(redis_url, scratch, **flags) as broker:
        print("equal weights")
        sizes = {"small": (8, 8), "long-prompt": (400, 8), "long-answer": (8, 200), "mixed": (100, 50)}
        equal = await shares(broker, {tenant: (1, size) for tenant, size in sizes.items()}, seconds)
        print("weights 1, 2, 4")
        weighted = await shares(
            broker, {"one": (1, (40, 20)), "two": (2, (8, 40)), "four": (4, (80, 10))}, seconds
        )
        can_do = await capacity(broker, max(5.0, seconds / 4))
        await realtime_ttft(broker, min(5.0, seconds))
        await batch_waits(redis_url)
        unloaded, _ = await realtime_ttft(broker, seconds)
        fair, refused = await realtime_ttft(broker, seconds, batch_per_s=OVERLOAD * can_do)
        waits = await batch_waits(redis_url)
        fifo, fifo_refused = await realtime_ttft(broker, seconds, batch_per_s=OVERLOAD * can_do, is_fifo=True)
    for name, times in (("unloaded", unloaded), ("fair", fair), ("fifo", fifo)):
        print(
            f"realtime {name:9} {len(times):4} requests, first token "
            f"p50 {percentile(times, 0.5) * 1000:8.1f} ms, p99 {percentile(times, 0.99) * 1000:8.1f} ms"
        )
    print(
        f"the worker can do {can_do:.1f} batch requests/s; offered {OVERLOAD} times that; "
        f"refused {refused} (fair), {fifo_refused} (fifo); {len(waits)} batch requests claimed"
    )
    base = percentile(unloaded, 0.99)
    return {
        "equal_share_spread": round(max(abs(share - 1) for share in equal.values()), 4),
        "weighted_share_error": round(max(abs(share - 1) for share in weighted.values()), 4),
        "realtime_p99_ttft_ratio": round(percentile(fair, 0.99) / base, 3),
        "fifo_p99_ttft_ratio": round(percentile(fifo, 0.99) / base, 3),
        "max_batch_wait_s": round(max(waits, default=0.0), 2),
        "aging_bound_s": AGING_BOUND_S,
    }


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
