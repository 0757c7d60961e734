"""Who goes next: tiers, aging, virtual token counters, and claims for which something is put aside."""

from __future__ import annotations

import asyncio
import random

import pytest
from redis.asyncio import Redis

from engine_worker.broker import Claim, GatewayBroker, Held, WorkerBroker
from engine_worker.protocol import Finish, SamplingParams
from tests.engine_worker.broker.driving import (
    backdate,
    claim_one,
    end_backoffs,
    lapse_leases,
    last,
    name,
    publish,
    put,
    tokens,
)

LONG = SamplingParams(max_tokens=100)


async def counter(redis_url: str, model: str, tenant: str, rank: int = 1) -> float | None:
    async with Redis.from_url(redis_url, protocol=2) as client:
        score: float | None = await client.zscore(f"weir:{{m:{model}}}:served:{rank}", tenant)
    return score


async def serve(
    gateway: GatewayBroker,
    worker: WorkerBroker,
    make,
    tenants: dict[str, int],
    sizes: dict[str, tuple[int, int]],
    rounds: int,
) -> dict[str, int]:
    """Everybody always has ten waiting, and four run at once; weighted tokens that each was served."""
    served = dict.fromkeys(tenants, 0)
    made: dict[str, int] = {}
    running: list[tuple[Claim, int]] = []
    number = 0

    async def refill(tenant: str) -> None:
        nonlocal number
        number += 1
        prompt, _ = sizes[tenant]
        request = make(f"r{number}", tenant_id=tenant, prompt_token_ids=[1] * prompt, deadline_ms=4_600_000)
        await put(gateway, request, weight=tenants[tenant])

    for tenant in tenants:
        for _ in range(10):
            await refill(tenant)
    for _ in range(rounds):
        for claim in await worker.claim(4 - len(running)):
            tenant = claim.request.tenant_id
            served[tenant] += sizes[tenant][0]
            running.append((claim, sizes[tenant][1]))
            made[name(claim)] = 0
            await refill(tenant)
        held, going = [], []
        for claim, left in running:
            seq = made[name(claim)]
            step = min(5, left)
            made[name(claim)] += step
            served[claim.request.tenant_id] += 2 * step
            chunk = (last if step == left else tokens)(claim, seq, *range(step))
            held.append(Held(name(claim), claim.epoch, [chunk]))
            if step < left:
                going.append((claim, left - step))
        await worker.publish(held)
        running = going
    return served


async def test_equal_tenants_get_equal_shares_whatever_the_size_of_their_requests(gateway, worker, make):
    sizes = {"small": (2, 5), "long-prompt": (80, 5), "long-answer": (4, 60), "mixed": (20, 20)}
    served = await serve(gateway, worker, make, dict.fromkeys(sizes, 1), sizes, rounds=400)
    fair = sum(served.values()) / len(served)
    assert all(abs(tokens / fair - 1) < 0.05 for tokens in served.values()), served


async def test_weights_are_shares(gateway, worker, make):
    weights = {"one": 1, "two": 2, "four": 4}
    sizes = {"one": (5, 30), "two": (30, 10), "four": (10, 20)}
    served = await serve(gateway, worker, make, weights, sizes, rounds=400)
    unit = sum(served.values()) / sum(weights.values())
    assert all(abs(served[tenant] / (unit * weight) - 1) < 0.1 for tenant, weight in weights.items()), served


async def test_a_hog_with_a_long_line_does_not_keep_a_newcomer_waiting(gateway, worker, make):
    for n in range(50):
        await put(gateway, make(f"hog-{n}", tenant_id="hog"))
    for _ in range(10):
        await claim_one(worker)
    assert await put(gateway, make("mine", tenant_id="newcomer")) == 1
    assert "mine" in [name(await claim_one(worker)) for _ in range(2)]


async def test_nobody_saves_up_turns_by_being_away(gateway, worker, make, model, redis_url):
    await put(gateway, make("old", tenant_id="idle"))
    await claim_one(worker)
    for n in range(20):
        await put(gateway, make(f"busy-{n}", tenant_id="busy", prompt_token_ids=[1] * 100))
    for _ in range(10):
        await claim_one(worker)
    for n in range(20):
        await put(gateway, make(f"back-{n}", tenant_id="idle", prompt_token_ids=[1] * 100))
    assert await counter(redis_url, model, "idle") == await counter(redis_url, model, "busy")
    turns = [name(await claim_one(worker)).split("-")[0] for _ in range(10)]
    assert turns.count("busy") == 5


async def test_after_everybody_was_idle_the_level_remains(gateway, worker, make, model, redis_url):
    for n in range(3):
        await put(gateway, make(f"a{n}", tenant_id="a", prompt_token_ids=[1] * 100))
        await claim_one(worker)
    await put(gateway, make("b0", tenant_id="b"))
    # Where the last claim stood, not zero: a has not lost its turn to whoever comes next.
    assert await counter(redis_url, model, "b") == 200_000
    assert await counter(redis_url, model, "a") == 300_000


async def test_output_is_charged_as_it_is_served_and_cached_prompt_given_back(
    gateway, worker, make, model, redis_url
):
    await put(gateway, make("r1", prompt_token_ids=[1] * 10), weight=2)
    claim = await claim_one(worker)
    assert await counter(redis_url, model, "t1") == 10 * 1000 / 2
    await publish(worker, claim, tokens(claim, 0, 1, 2))
    await publish(worker, claim, tokens(claim, 0, 1, 2))  # a repeat
    assert await counter(redis_url, model, "t1") == (10 + 2 * 2) * 1000 / 2
    end = last(claim, 2, 3)
    end = end.__class__(
        **{field: getattr(end, field) for field in end.__struct_fields__ if field != "finish"},
        finish=Finish(reason="stop", prompt_tokens=10, completion_tokens=3, cached_tokens=8),
    )
    await publish(worker, claim, end)
    assert await counter(redis_url, model, "t1") == (10 - 8 + 3 * 2) * 1000 / 2


@pytest.fixture
async def known_length(gateway, worker, make):
    """An answer of 20 tokens: what the tier's next ones are taken to be, where they may be so long."""
    await put(gateway, make("known", tenant_id="known", prompt_token_ids=[1]))
    claim = await claim_one(worker)
    await publish(worker, claim, last(claim, 0, *range(20)))
    return 20


async def test_a_tenant_of_long_answers_does_not_take_all_slots_at_once(gateway, worker, make):
    """Its counter shows at the claim what it is about to be served: slots are shared from the first turn on."""
    for tenant, length in (("long", 90), ("short", 10)):
        await put(gateway, make(f"{tenant}-first", tenant_id=tenant, prompt_token_ids=[1]))
        claim = await claim_one(worker)
        await publish(worker, claim, last(claim, 0, *range(length)))
    for n in range(20):
        for tenant in ("long", "short"):
            request = make(f"{tenant}-{n}", tenant_id=tenant, prompt_token_ids=[1], sampling=LONG)
            await put(gateway, request)
    turns = [name(await claim_one(worker)).split("-")[0] for _ in range(20)]
    assert turns.count("long") == 2


@pytest.mark.parametrize("made", [0, 3, 20, 30])
@pytest.mark.parametrize("end", ["finish", "cancel", "drain", "fail", "lapse", "die"])
async def test_what_is_charged_ahead_is_settled_once_whatever_the_end(
    gateway, worker, make, model, redis_url, known_length, made, end
):
    await put(
        gateway, make("r1", prompt_token_ids=[1] * 10, sampling=LONG), max_attempts=1 if end == "die" else 3
    )
    at_first = await counter(redis_url, model, "t1")
    claim = await claim_one(worker)
    assert await counter(redis_url, model, "t1") == at_first + (10 + 2 * known_length) * 1000
    if made:
        await publish(worker, claim, tokens(claim, 0, *range(made)))
        await publish(worker, claim, tokens(claim, 0, *range(made)))  # a repeat
    assert await counter(redis_url, model, "t1") == at_first + (10 + 2 * max(made, known_length)) * 1000
    held = [Held("r1", claim.epoch)]
    for _ in range(2):  # a repeat changes nothing
        if end == "finish":
            await publish(worker, claim, last(claim, made))
        elif end == "cancel":
            await gateway.cancel(model, "r1")
            await publish(worker, claim, last(claim, made, reason="cancelled"))
        elif end in ("drain", "fail"):
            await worker.release(held, failed=end == "fail")
        else:
            await lapse_leases(redis_url, model)
            await worker.expire()
    assert await counter(redis_url, model, "t1") == at_first + (10 + 2 * made) * 1000


async def test_an_answer_is_not_expected_to_be_longer_than_it_may_be(
    gateway, worker, make, model, redis_url, known_length
):
    await put(gateway, make("r1", prompt_token_ids=[1] * 10, sampling=SamplingParams(max_tokens=2, n=2)))
    at_first = await counter(redis_url, model, "t1")
    await claim_one(worker)
    assert await counter(redis_url, model, "t1") == at_first + (10 + 2 * 2 * 2) * 1000


async def test_a_prompt_is_charged_once_however_often_it_is_claimed(gateway, worker, make, model, redis_url):
    await put(gateway, make("r1", prompt_token_ids=[1] * 10))
    await claim_one(worker)
    await lapse_leases(redis_url, model)
    await worker.expire()
    await end_backoffs(redis_url, model)
    assert (await claim_one(worker)).attempt == 2
    assert await counter(redis_url, model, "t1") == 10_000


async def test_a_long_wait_raises_the_class_but_never_for_more_than_every_fourth_turn(
    gateway, worker, make, model, redis_url
):
    for n in range(4):
        await put(gateway, make(f"batch-{n}", tier_rank=2), max_wait_ms=60_000)
    for n in range(20):
        await put(gateway, make(f"rt-{n}", tier_rank=0, tenant_id="t2"))
    await backdate(redis_url, model, "batch-0", 29_000)
    assert [name(await claim_one(worker)) for _ in range(4)] == ["rt-0", "rt-1", "rt-2", "rt-3"]
    await backdate(redis_url, model, "batch-0", 2_000)
    await backdate(redis_url, model, "batch-1", 31_000)
    claims = [await claim_one(worker) for _ in range(8)]
    assert [name(claim) for claim in claims] == [
        "rt-4", "rt-5", "rt-6", "batch-0", "rt-7", "rt-8", "rt-9", "batch-1"
    ]  # fmt: skip
    # It keeps the raised class at the worker: it isn't put aside for the tier that it passed.
    assert [claim.tier_class for claim in claims] == [0] * 8


async def test_claimed_while_nothing_better_waits_it_keeps_its_own_class(
    gateway, worker, make, model, redis_url
):
    await put(gateway, make("batch", tier_rank=2), max_wait_ms=600_000)
    await backdate(redis_url, model, "batch", 500_000)
    assert (await claim_one(worker)).tier_class == 2


async def test_the_most_overdue_of_several_tiers_is_let_pass_first(gateway, worker, make, model, redis_url):
    await put(gateway, make("standard", tier_rank=1), max_wait_ms=100_000)
    await put(gateway, make("batch", tier_rank=2), max_wait_ms=600_000)
    for n in range(8):
        await put(gateway, make(f"rt-{n}", tier_rank=0, tenant_id="t2"))
    await backdate(redis_url, model, "standard", 60_000)
    await backdate(redis_url, model, "batch", 500_000)
    turns = [name(await claim_one(worker)) for _ in range(8)]
    assert [turns.index("batch"), turns.index("standard")] == [3, 7]


async def test_beyond_its_room_a_worker_gets_only_what_is_better_than_what_it_puts_aside(
    gateway, worker, make
):
    for n, rank in enumerate([2, 1, 0, 0, 0]):
        await put(gateway, make(f"r{n}", tier_rank=rank))
    assert [claim.tier_class for claim in await worker.claim(0, extra=2, put_aside=2)] == [0, 0]
    assert [claim.tier_class for claim in await worker.claim(0, extra=8, put_aside=2)] == [0, 1]
    assert await worker.claim(0, extra=8, put_aside=2) == []
    assert [claim.tier_class for claim in await worker.claim(1, extra=8, put_aside=2)] == [2]


async def test_publishing_tells_the_best_class_that_waits(gateway, worker, make):
    await put(gateway, make("r0", tier_rank=2))
    claim = await claim_one(worker)
    await publish(worker, claim)
    assert worker.waiting_class is None
    await put(gateway, make("r1", tier_rank=1))
    await put(gateway, make("r2", tier_rank=0))
    await publish(worker, claim)
    assert worker.waiting_class == 0


async def test_only_what_is_better_than_all_that_waits_is_called_out_to_full_workers(gateway, worker, make):
    heard = asyncio.create_task(worker.wait_for_better(5))
    for n, rank in enumerate([2, 2, 1, 2, 1, 0, 1]):
        await put(gateway, make(f"r{n}", tier_rank=rank))
    assert [await heard, await worker.wait_for_better(5), await worker.wait_for_better(5)] == [2, 0, 1]
    assert await worker.wait_for_better(0.01) is None
    assert len(await worker.claim(7)) == 7
    await put(gateway, make("r7", tier_rank=2))
    assert await worker.wait_for_better(5) == 2


async def test_claiming_stays_quick_with_a_long_queue(gateway, worker, make, redis_url):
    """O(log n): the server's own time for a claim hardly grows from 200 to 6,000 waiting requests."""
    rng = random.Random(4)

    async def cost_of_claims() -> float:
        async with Redis.from_url(redis_url, protocol=2) as client:
            await client.config_resetstat()
            for _ in range(100):
                await worker.claim(1)
            stats = await client.info("commandstats")
        return float(stats["cmdstat_evalsha"]["usec_per_call"])

    async def fill(count: int, start: int) -> None:
        for n in range(start, start + count):
            request = make(f"r{n}", tenant_id=f"t{rng.randrange(200)}", tier_rank=rng.randrange(3))
            await put(gateway, request, max_queued=10**6, max_queued_per_tenant=10**6)

    await fill(200, 0)
    few = await cost_of_claims()
    await fill(6000, 1000)
    assert await cost_of_claims() < 3 * few
