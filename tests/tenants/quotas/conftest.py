from __future__ import annotations

import pytest
from django.conf import settings
from redis.asyncio import Redis

from tenants.quotas.store import QuotaStore


@pytest.fixture
def quota_redis_url():
    """A database of its own, emptied before each test."""
    return settings.REDIS_URL + ("&" if "?" in settings.REDIS_URL else "?") + "db=9"


@pytest.fixture
async def redis(quota_redis_url):
    client = Redis.from_url(quota_redis_url)
    await client.flushdb()
    yield client
    await client.aclose()


@pytest.fixture
async def store(redis, quota_redis_url):
    store = QuotaStore(quota_redis_url)
    yield store
    await store.aclose()


@pytest.fixture
async def four_stores(redis, quota_redis_url):
    """As of four gateways."""
    stores = [QuotaStore(quota_redis_url, timeout_s=20) for _ in range(4)]
    yield stores
    for store in stores:
        await store.aclose()
