"""The load of a fairness benchmark: requests of many tenants put in at the broker, and what is heard of them."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field

from benchmarks.fleet import MODEL
from engine_worker.broker import Gap, GatewayBroker, QueueFull
from engine_worker.protocol import GenerateRequest, SamplingParams

CHANNEL = "weir:live:bench"
WEIGHT_PROMPT, WEIGHT_OUTPUT = 1, 2

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
    rng = random.Random(number)
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
