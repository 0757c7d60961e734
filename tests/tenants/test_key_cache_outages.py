"""The cache of keys while the database is away or stands still: known keys go on, nobody gets a 401, nothing hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from tenants.auth import AuthUnavailable, authenticate_bearer
from tenants.key_cache import SERVE_STALE_S, KeyCache, KeyUnavailable
from tenants.services import IssuedKey, revoke_api_key
from tests.databases import paused_postgres
from tests.factories import TEST, make_key
from tests.tenants.key_loads import PATIENT, Clock, CountedLoads, secret_of

pytestmark = pytest.mark.django_db(transaction=True)


def test_with_the_database_down_known_keys_are_served_for_a_while_and_no_other():
    issued, unseen, changed = make_key(), make_key(), make_key()
    loads, clock = CountedLoads(), Clock()

    async def refused(key: IssuedKey, cache: KeyCache) -> None:
        with pytest.raises(KeyUnavailable):
            await cache.get(*secret_of(key))

    async def main() -> None:
        cache = KeyCache(load_key=loads.key, load_epoch=loads.epoch, clock=clock, **PATIENT)
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


def test_a_slow_database_serves_cold_keys_and_holds_up_no_known_one():
    """Just after a deployment all keys are cold and the database is busy: that is no outage."""
    known, cold = make_key(), make_key()
    loads, clock, go_on = CountedLoads(), Clock(), threading.Event()
    is_slow = False

    def epoch() -> UUID | None:
        if is_slow:
            assert go_on.wait(60)
        return loads.epoch()

    async def main() -> None:
        nonlocal is_slow
        cache = KeyCache(
            load_key=loads.key, load_epoch=epoch, clock=clock, **PATIENT | {"known_wait_s": 0.05}
        )
        assert await cache.get(*secret_of(known))
        is_slow = True
        clock.now += 0.6
        for _ in range(3):
            assert await cache.get(*secret_of(known))
        assert loads.keys == 1, "as last seen"
        assert await cache.get(*secret_of(cold))
        assert (loads.keys, loads.epochs) == (2, 1)
        go_on.set()

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
            assert slowest < 4.5, "a cold key waits three seconds for a row, and a known one none"
        async with asyncio.timeout(20):
            while True:
                try:
                    await authenticate_bearer(unknown.secret)
                    break
                except AuthUnavailable:
                    await asyncio.sleep(0.05)

    async_to_sync(main)()
