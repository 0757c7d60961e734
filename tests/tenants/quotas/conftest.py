from __future__ import annotations

import pytest
from django.conf import settings
from redis.asyncio import Redis

from tenants.quotas.store import QuotaStore


@pytest.fixture
async def redis():
    client = Redis.from_url(settings.REDIS_URL)
    await client.flushdb()
    yield client
    await client.aclose()


@pytest.fixture
async def store(redis):
    store = QuotaStore(settings.REDIS_URL)
    yield store
    await store.aclose()
