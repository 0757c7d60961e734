"""The cache of keys while the database is away or stands still: known keys go on, nobody gets a 401, nothing hangs."""

from __future__ import annotations

import asyncio
import time

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from tenants.auth import AuthUnavailable, authenticate_bearer
from tenants.key_cache import SERVE_STALE_S, KeyCache, KeyUnavailable
from tenants.services import IssuedKey, revoke_api_key
from tests.databases import paused_postgres
from tests.factories import TEST, make_key
from tests.tenants.key_loads import PATIENT_S, Clock, CountedLoads, secret_of

pytestmark = pytest.mark.django_db(transaction=True)


def test_with_the_database_down_known_keys_are_served_for_a_while_and_no_other():
    issued, unseen, changed = make_key(), make_key(), make_key()
    loads, clock = CountedLoads(), Clock()

    async def refused(key: IssuedKey, cache: KeyCache) -> None:
        with pytest.raises(KeyUnavailable):
            await cache.get(*secret_of(key))

    async def main() -> None:
        cache = KeyCache(
            load_key=loads.key, load_epoch=loads.epoch, clock=clock, database_timeout_s=PATIENT_S
        )
        assert await cache.get(*secret_of(changed))
        await sync_to_async(revoke_api_key)(actor=TEST, api_key=changed.api_key)
        clock.now += 0.6
        assert await cache.get(*secret_of(issued))  # it knows of a change now, and has read one key again
        loads.is_down = True
        for _ in range(5):
            clock.now += 0.6
            assert await cache.get(*secret_of(issued))
            await refused(unseen, cache)
            # It may be the one that was revoked (it is): not served unread, database or not.
            await refused(changed, cache)
        clock.now += SERVE_STALE_S
        await refused(issued, cache)
        loads.is_down = False
        clock.now += 1.1

        async def recovered() -> bool:
            try:
                return bool(await cache.get(*secret_of(issued)))
            except KeyUnavailable:
                return False

        async with asyncio.timeout(10):
            while not await recovered():  # noqa: ASYNC110  # a thread answers, no event of ours
                await asyncio.sleep(0.01)
        assert await cache.get(*secret_of(unseen))
        stored = await cache.get(*secret_of(changed))
        assert stored is not None
        assert stored.revoked_at is not None

    async_to_sync(main)()


def test_a_database_that_hangs_gives_503_and_no_hang():
    """FAULTS 61, with the real server standing still."""
    known, unknown = make_key(), make_key()

    async def main() -> None:
        assert await authenticate_bearer(known.secret)
        await asyncio.sleep(0.6)  # the epoch grows stale: that much time has to pass
        with paused_postgres():
            slowest = 0.0
            for _ in range(20):
                begin = time.monotonic()
                assert await authenticate_bearer(known.secret)
                slowest = max(slowest, time.monotonic() - begin)
                begin = time.monotonic()
                with pytest.raises(AuthUnavailable) as refusal:
                    await authenticate_bearer(unknown.secret)
                assert refusal.value.status == 503
                slowest = max(slowest, time.monotonic() - begin)
            assert slowest < 2.5
        async with asyncio.timeout(20):
            while True:
                try:
                    await authenticate_bearer(unknown.secret)
                    break
                except AuthUnavailable:
                    await asyncio.sleep(0.05)

    async_to_sync(main)()
