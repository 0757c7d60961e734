"""Many at once, several stores and processes, callers that vanish, a server that is away."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tenants.principal import LimitMetric
from tenants.quotas.buckets import open_key
from tenants.quotas.errors import QuotaUnavailable, ReservationClosed
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import Admitted, Decision, Settlement
from tests.factories import a_limit, a_principal

DAY = 86_400
ROOT = Path(__file__).resolve().parents[3]


async def reserve(store: QuotaStore, principal, rid: str, *, prompt=1, output=0, lease_ms=60_000) -> Decision:
    return await store.reserve(
        reservation_id=rid,
        principal=principal,
        prompt_tokens=prompt,
        max_output_tokens=output,
        lease_ms=lease_ms,
    )


@pytest.mark.parametrize(
    "limit",
    [
        a_limit(LimitMetric.REQUESTS, 37, period_s=DAY),
        a_limit(LimitMetric.TOKENS, 37, period_s=DAY),
        a_limit(LimitMetric.CONCURRENCY, 37),
    ],
    ids=lambda limit: limit.metric,
)
async def test_two_hundred_at_once_over_four_gateways(four_stores, limit):
    """FAULTS 50 and 58: exactly the limit is admitted."""
    principal = a_principal(limit)
    start = asyncio.Barrier(200)

    async def client(i: int) -> Decision:
        await start.wait()
        return await reserve(four_stores[i % 4], principal, f"r{i}")

    decisions = await asyncio.gather(*(client(i) for i in range(200)))
    assert sum(isinstance(decision, Admitted) for decision in decisions) == 37
    assert all(bucket.remaining >= 0 for decision in decisions for bucket in decision.buckets)


async def test_control_check_then_take_passes_the_limit(redis):
    """What the script guards against: reading first and taking then admits more than there is."""
    start, all_read = asyncio.Barrier(50), asyncio.Barrier(50)
    await redis.set("left", 10)

    async def client() -> bool:
        await start.wait()
        left = int(await redis.get("left"))
        await all_read.wait()
        if left < 1:
            return False
        await redis.decr("left")
        return True

    assert sum(await asyncio.gather(*(client() for _ in range(50)))) == 50
    assert int(await redis.get("left")) < 0


_GATEWAY = """
import asyncio, sys
import django
django.setup()
from tests.factories import a_limit, a_principal
from tenants.principal import LimitMetric
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import Settlement
from tenants.quotas.types import Admitted

async def main(url, name):
    store = QuotaStore(url, timeout_s=20)
    principal = a_principal(a_limit(LimitMetric.REQUESTS, 37, period_s=86400))
    print("ready", flush=True)
    sys.stdin.readline()
    decisions = await asyncio.gather(*(
        store.reserve(reservation_id=f"{name}-{i}", principal=principal, prompt_tokens=1, max_output_tokens=1,
                      lease_ms=60000) for i in range(50)))
    print(sum(isinstance(d, Admitted) for d in decisions), flush=True)
    await store.aclose()

asyncio.run(main(*sys.argv[1:]))
"""


def test_four_processes_share_one_limit(quota_redis_url):
    """FAULTS 58 with real processes, released together."""
    import os

    import redis as sync_redis

    with sync_redis.Redis.from_url(quota_redis_url) as client:
        client.flushdb()
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "weir.settings",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'platform'}",
    }
    gateways = [
        subprocess.Popen(
            [sys.executable, "-c", _GATEWAY, quota_redis_url, f"g{i}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for i in range(4)
    ]
    try:
        for gateway in gateways:
            assert gateway.stdout is not None
            assert gateway.stdout.readline() == "ready\n"
        for gateway in gateways:
            assert gateway.stdin is not None
            gateway.stdin.write("go\n")
            gateway.stdin.flush()
        admitted = [int(gateway.communicate(timeout=60)[0]) for gateway in gateways]
    finally:
        for gateway in gateways:
            gateway.kill()
            gateway.wait()
    assert sum(admitted) == 37


async def test_a_caller_that_vanishes_at_any_await_leaks_nothing(store, redis):
    """FAULTS 51, 59 and 76: cancelled at random, then released or settled; every unit comes back."""
    principal = a_principal(
        a_limit(LimitMetric.TOKENS, 10_000, period_s=DAY), a_limit(LimitMetric.CONCURRENCY, 500)
    )
    seed = random.Random(7)
    outcomes = {"admitted": 0, "cancelled": 0}

    async def life(i: int) -> None:
        rid = f"r{i}"
        call = asyncio.create_task(reserve(store, principal, rid, prompt=3, output=7))
        for _ in range(seed.randrange(12)):
            await asyncio.sleep(0)
        call.cancel()
        try:
            decision = await call
            # An answer must be this caller's own.
            assert isinstance(decision, Admitted)
            assert decision.reservation_id == rid
            outcomes["admitted"] += 1
        except asyncio.CancelledError:
            outcomes["cancelled"] += 1
        if i % 3 == 0:
            await store.settle(
                tenant_public_id="t1", reservation_id=rid, prompt_tokens=0, completion_tokens=0
            )
        await store.release(tenant_public_id="t1", reservation_id=rid)

    for batch in range(10):
        await asyncio.gather(*(life(batch * 40 + i) for i in range(40)))
    assert outcomes["cancelled"] > 50
    # A command that was sent and then cancelled may still arrive: the mark of its release stops it.
    await asyncio.sleep(0.05)
    assert [bucket.remaining for bucket in await store.peek(principal)] == [10_000, 500]


async def test_settle_and_release_at_once_count_one_of_them(store):
    principal = a_principal(a_limit(LimitMetric.TOKENS, 1000, period_s=DAY))
    for i in range(20):
        await reserve(store, principal, f"r{i}", prompt=10, output=10)
        settle = [
            store.settle(tenant_public_id="t1", reservation_id=f"r{i}", prompt_tokens=10, completion_tokens=0)
            for _ in range(3)
        ]
        release = [store.release(tenant_public_id="t1", reservation_id=f"r{i}") for _ in range(3)]
        calls = settle + release
        random.Random(i).shuffle(calls)
        await asyncio.gather(*calls)
    # Settled, or released and then settled: ten tokens each, exactly once.
    assert [bucket.remaining for bucket in await store.peek(principal)] == [1000 - 20 * 10]


async def test_a_batch_settles_as_one_by_one_would(store, redis, monkeypatch):
    principal = a_principal(
        a_limit(LimitMetric.TOKENS, 10_000, period_s=DAY), a_limit(LimitMetric.CONCURRENCY, 50)
    )
    monkeypatch.setattr("tenants.quotas.store._SETTLED_AT_ONCE", 12)  # so that it takes several calls
    for i in range(30):
        await reserve(store, principal, f"r{i}", prompt=10, output=90)
    await redis.script_flush()  # a server that restarted
    batch = [Settlement("t1", f"r{i}", 10, i) for i in range(30)]
    for _ in range(2):
        await store.settle_many([*batch, Settlement("t1", "unknown", 5, 5), Settlement("other", "r1", 5, 5)])
    spent = 30 * 10 + sum(range(30))
    assert [bucket.remaining for bucket in await store.peek(principal)] == [10_000 - spent, 50]
    await store.settle_many([])
    with pytest.raises(ValueError, match="negative"):
        await store.settle_many([Settlement("t1", "r1", -1, 0)])


@pytest.fixture
def dead_address(tmp_path):
    return f"unix://{tmp_path}/nobody.sock"


async def test_nobody_there_is_said_at_once(dead_address):
    """FAULTS 61."""
    store = QuotaStore(dead_address)
    begin = time.monotonic()
    with pytest.raises(QuotaUnavailable):
        await reserve(store, a_principal(a_limit(LimitMetric.REQUESTS, 1)), "r1")
    assert time.monotonic() - begin < 1
    await store.aclose()


async def test_a_server_that_does_not_answer_is_given_up(tmp_path):
    """FAULTS 61: connected, but no reply ever comes; many callers wait no longer than one."""

    answering: list[asyncio.Task[None]] = []

    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(asyncio.current_task())
        await reader.read()
        writer.close()
        await writer.wait_closed()

    path = str(tmp_path / "silent.sock")
    server = await asyncio.start_unix_server(silence, path)
    store = QuotaStore(f"unix://{path}", timeout_s=0.4, max_connections=4)
    begin = time.monotonic()
    results = await asyncio.gather(
        *(reserve(store, a_principal(a_limit(LimitMetric.REQUESTS, 1)), f"r{i}") for i in range(30)),
        return_exceptions=True,
    )
    assert all(isinstance(result, QuotaUnavailable) for result in results)
    assert time.monotonic() - begin < 2
    await store.aclose()
    server.close()
    await server.wait_closed()
    async with asyncio.timeout(30):
        await asyncio.gather(*answering)


async def test_a_server_that_forgot_its_scripts_and_cut_its_connections(store, redis):
    principal = a_principal(a_limit(LimitMetric.REQUESTS, 5, period_s=DAY))
    assert isinstance(await reserve(store, principal, "r1"), Admitted)
    await redis.script_flush()
    await redis.client_kill_filter(_type="normal", skipme=True)
    decision = await reserve(store, principal, "r2")
    assert isinstance(decision, Admitted)
    assert decision.buckets[0].remaining == 3


async def test_a_dead_holders_slot_comes_back_and_its_late_settlement_still_counts(store, redis):
    """FAULTS 51: killed after it reserved; the ledger settles later."""
    principal = a_principal(
        a_limit(LimitMetric.TOKENS, 100, period_s=DAY), a_limit(LimitMetric.CONCURRENCY, 1)
    )
    await reserve(store, principal, "dead", prompt=10, output=40, lease_ms=50)
    async with asyncio.timeout(5):
        while (await store.peek(principal))[1].remaining == 0:  # noqa: ASYNC110  # the server's clock decides
            await asyncio.sleep(0.01)
    assert (await store.peek(principal))[0].remaining == 50
    await store.settle(tenant_public_id="t1", reservation_id="dead", prompt_tokens=10, completion_tokens=7)
    assert [bucket.remaining for bucket in await store.peek(principal)] == [83, 1]
    with pytest.raises(ReservationClosed):
        await reserve(store, principal, "dead")


async def test_one_that_was_settled_but_still_stands_among_the_open_holds_nobody_up(store, redis):
    """However it came to that: else each reservation of the tenant would fail on it, and none ever take it away."""
    principal = a_principal(a_limit(LimitMetric.TOKENS, 1000, period_s=DAY))
    await reserve(store, principal, "settled", prompt=10, output=40)
    await store.settle(tenant_public_id="t1", reservation_id="settled", prompt_tokens=10, completion_tokens=7)
    await redis.zadd(open_key("t1"), {"settled": 1})
    assert isinstance(await reserve(store, principal, "next", prompt=10), Admitted)
    assert await redis.zscore(open_key("t1"), "settled") is None
    assert [bucket.remaining for bucket in await store.peek(principal)] == [1000 - 17 - 10]
