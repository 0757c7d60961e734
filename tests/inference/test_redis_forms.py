"""Everything that a gateway, a worker and the ledger do with Redis, where Redis is a cluster, or fails over."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import kombu
import kombu.transport.redis  # not at its first use, in a thread: an import there can fail (python/cpython#106176)
import pytest
from channels_redis.core import RedisChannelLayer
from django.core.cache.backends.redis import RedisCache

from engine_worker.broker import GatewayBroker, OperatorBroker, UsageReader, WorkerBroker
from engine_worker.protocol import GenerateRequest, SamplingParams
from engine_worker.worker import Worker
from engine_worker.worker_config import WorkerConfig
from inference.streams import LiveStreams
from tenants.principal import LimitMetric
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import Admitted, Settlement
from tests import redis_fleets
from tests.engine_worker.broker.driving import card, until
from tests.engine_worker.scripted_engine import ScriptedEngine, expected_output
from tests.factories import a_limit, a_principal
from weir.environment import BadEnvironment
from weir.redis_urls import celery_broker, channels_host

# channels_redis and Django's cache never close their connections to the sentinels.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")

MODEL = "forms"
LONG = 400
TENANTS = [f"t{n}" for n in range(1, 7)]


def a_request(request_id: str, channel: str, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        model=MODEL,
        tenant_id="t1",
        tier="standard",
        tier_rank=1,
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(max_tokens=max_tokens, seed=5),
        created_at_ms=0,
        deadline_ms=600_000,
        reply_channel=channel,
    )


class Platform:
    """One gateway's parts and one worker, on one Redis."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = ScriptedEngine(step_s=0.01)

    async def __aenter__(self) -> Platform:
        self.stack = AsyncExitStack()
        self.gateway = GatewayBroker(self.url, timeout_s=10)
        self.streams = LiveStreams(self.gateway, "forms")
        self.quotas = QuotaStore(self.url, timeout_s=10)
        self.operator = OperatorBroker(self.url, timeout_s=10)
        broker = WorkerBroker(self.url, model=MODEL, worker_id="w", lease_ms=2000, timeout_s=10)
        for part in (broker, self.operator, self.quotas, self.gateway, self.streams):
            self.stack.push_async_callback(part.aclose)
        config = WorkerConfig(model=MODEL, redis_url=self.url, worker_id="w", lease_ms=2000, heartbeat_s=0.2)
        self.worker = Worker(self.engine, broker, card(MODEL), b"{}", config)
        self.running = asyncio.create_task(self.worker.run(), name="forms-worker")
        self.stack.push_async_callback(self._stop_worker)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stack.aclose()

    async def _stop_worker(self) -> None:
        self.worker.stop()
        self.worker.stop()
        await asyncio.wait([self.running], timeout=30)
        await self.engine.stop()

    async def generate(self, request_id: str, max_tokens: int, *, at_token=None, act=None) -> list[int]:  # type: ignore[no-untyped-def]
        """Its tokens as a client would have them; `act` is called when `at_token` came."""
        tokens: list[int] = []
        async with await self.streams.open(MODEL, request_id, is_new=True) as stream:
            await self.gateway.enqueue(
                a_request(request_id, self.streams.channel, max_tokens),
                max_queued=10,
                max_queued_per_tenant=10,
            )
            async with asyncio.timeout(100):
                while not stream.is_finished:
                    if (chunk := await stream.next(5)) is None:
                        continue
                    tokens += chunk.token_ids
                    if act is not None and len(tokens) >= at_token:
                        await asyncio.to_thread(act)
                        act = None
        return tokens

    async def spend(self, tenant: str) -> list[int]:
        """Reserves and settles, and what is left then."""
        limits = (a_limit(LimitMetric.TOKENS, 100, period_s=86_400), a_limit(LimitMetric.CONCURRENCY, 3))
        principal = a_principal(*limits, tenant_public_id=tenant)
        for rid in ("a", "b"):
            decision = await self.quotas.reserve(
                reservation_id=rid, principal=principal, prompt_tokens=10, max_output_tokens=20,
                lease_ms=60_000, accepted_at=datetime.now(UTC),
            )  # fmt: skip
            assert isinstance(decision, Admitted)
        await self.quotas.release(tenant_public_id=tenant, reservation_id="b")
        await self.quotas.settle_many([Settlement(tenant, "a", 10, 5)])
        return [bucket.remaining for bucket in await self.quotas.peek(principal)]

    async def usage(self) -> dict[str, int]:
        def read() -> dict[str, int]:
            reader = UsageReader(self.url)
            try:
                taken = reader.read(consumer="c", count=100, block_ms=0)
                reader.ack([ref for ref, _ in taken])
                assert reader.pending() == 0
            finally:
                reader.close()
            return {event.request_id: event.completion_tokens for _, event in taken}

        return await asyncio.to_thread(read)


async def test_a_gateway_on_a_cluster(tmp_path):
    """Tenants' limits lie on all of its nodes; the ledger settles them in one call."""
    with redis_fleets.cluster(tmp_path) as url:
        async with Platform(url) as platform:
            assert await platform.generate("r1", 30) == expected_output([1, 2], 5, 30)
            assert await asyncio.gather(*map(platform.spend, TENANTS)) == [[85, 3]] * len(TENANTS)
            settled = [Settlement(tenant, "a", 10, 9) for tenant in TENANTS]
            await platform.quotas.settle_many(settled)  # settled before: changes nothing
            assert await platform.usage() == {"r1": 30}
            assert (await platform.operator.queue(MODEL)).running == 0


@pytest.mark.timeout(300)
async def test_a_stream_outlives_the_master(tmp_path):
    """The master is killed in the middle of a stream: its replica goes on with it, to the same tokens, and
    everything else finds it by itself."""
    with redis_fleets.sentinel(tmp_path) as guarded:
        async with Platform(guarded.url) as platform:
            assert await platform.spend("before") == [85, 3]
            tokens = await platform.generate("r1", LONG, at_token=LONG // 4, act=guarded.fail_over)
            assert tokens == expected_output([1, 2], 5, LONG)
            assert await platform.generate("r2", 20) == expected_output([1, 2], 5, 20)
            assert await platform.spend("after") == [85, 3]
            assert await platform.usage() == {"r1": LONG, "r2": 20}

            async def is_seen() -> bool:
                return [status.worker_id for status in await platform.gateway.workers()] == ["w"]

            await until(is_seen)
        await through_the_channel_layer(guarded.url)
        await asyncio.to_thread(through_celerys_queue, guarded.url)
        await asyncio.to_thread(through_the_cache, guarded.url)


async def through_the_channel_layer(url: str) -> None:
    layer = RedisChannelLayer(hosts=[channels_host("WEIR_CHANNELS_URL", url)], prefix="forms")
    await layer.send("forms", {"type": "hello"})
    async with asyncio.timeout(30):
        assert await layer.receive("forms") == {"type": "hello"}
    await layer.flush()


def through_the_cache(url: str) -> None:
    cache = RedisCache([url], {"OPTIONS": {"pool_class": "weir.redis_urls.CachePool", "socket_timeout": 5}})
    cache.set("forms", 1, timeout=60)
    assert cache.incr("forms") == 2


def through_celerys_queue(url: str) -> None:
    broker_url, options = celery_broker("WEIR_CELERY_URL", url)
    with (
        kombu.Connection(broker_url, transport_options=options) as connection,
        connection.SimpleQueue("forms") as queue,
    ):
        queue.put("hello")
        message = queue.get(timeout=30)
        assert message.payload == "hello"
        message.ack()


def test_celery_and_the_channel_layer_follow_sentinel_and_refuse_a_cluster_by_name():
    gc.collect()  # what was left open is found here, where it may be, and not by whatever test comes later
    url = "redis+sentinel://u:p%40ss@a:1,b/weir/3?sentinel_password=s"
    broker_url, options = celery_broker("WEIR_CELERY_URL", url)
    assert broker_url == "sentinel://u:p%40ss@a:1/3;sentinel://u:p%40ss@b:26379/3"
    assert (options["master_name"], options["sentinel_kwargs"]["password"]) == ("weir", "s")
    host = channels_host("WEIR_CHANNELS_URL", url)
    assert (host["sentinels"], host["master_name"], host["db"]) == ([("a", 1), ("b", 26379)], "weir", 3)
    assert (host["username"], host["password"]) == ("u", "p@ss")
    for use, name in ((celery_broker, "WEIR_CELERY_URL"), (channels_host, "WEIR_CHANNELS_URL")):
        for bad in ("redis+cluster://:secret@a:1", "redis+sentinel://:secret@a", "http://:secret@a"):
            with pytest.raises(BadEnvironment, match=name) as refused:
                use(name, bad)
            assert "secret" not in str(refused.value)
