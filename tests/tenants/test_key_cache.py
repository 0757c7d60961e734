"""The cache of keys: no query when warm, no revoked key after a second."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from datetime import timedelta
from weakref import WeakSet

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.utils import timezone

from tenants import auth
from tenants.auth import RevokedKey, authenticate_bearer
from tenants.key_cache import KeyCache
from tenants.key_format import new_key_secret
from tenants.models import ApiKeyUse
from tenants.principal import LimitMetric
from tenants.principal_selectors import StoredKey, find_stored_key
from tenants.services import revoke_api_key, rotate_api_key
from tests.factories import TEST, make_key, make_tier, set_limit
from tests.tenants.key_loads import PATIENT, Clock, CountedLoads, secret_of

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_warm_key_costs_no_query_but_the_epoch():
    issued = make_key()
    loads, clock = CountedLoads(), Clock()

    async def main() -> None:
        cache = KeyCache(load_key=loads.key, load_epoch=loads.epoch, clock=clock, **PATIENT)
        for _ in range(100):
            assert await cache.get(*secret_of(issued))
        assert (loads.keys, loads.epochs) == (1, 1)
        for _ in range(10):
            clock.now += 0.6
            assert await cache.get(*secret_of(issued))
        assert (loads.keys, loads.epochs) == (1, 11)

    async_to_sync(main)()


def test_many_callers_of_a_cold_key_load_it_once_and_one_that_leaves_harms_none():
    issued = make_key()
    loads = CountedLoads()

    async def main() -> None:
        cache = KeyCache(load_key=loads.key, load_epoch=loads.epoch, **PATIENT)
        callers = [asyncio.create_task(cache.get(*secret_of(issued))) for _ in range(50)]
        await asyncio.sleep(0)
        callers[0].cancel()
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert all(isinstance(result, StoredKey) for result in results[1:])
        assert (loads.keys, loads.epochs) == (1, 1)

    async_to_sync(main)()


def test_a_new_secret_is_good_at_once_and_wrong_ones_cost_few_queries():
    """FAULTS 67: a rotation is not refused for the half second that an epoch may be old."""
    issued = make_key()
    loads, clock = CountedLoads(), Clock()

    async def main() -> None:
        cache = KeyCache(load_key=loads.key, load_epoch=loads.epoch, clock=clock, **PATIENT)
        assert await cache.get(*secret_of(issued))
        turned = await sync_to_async(rotate_api_key)(actor=TEST, api_key=issued.api_key, rotation_id="r" * 22)
        lookup_id, digest = secret_of(turned)
        stored = await cache.get(lookup_id, digest)
        assert stored is not None
        assert stored.digest == digest
        for _ in range(50):
            await cache.get(lookup_id, b"wrong" * 7)
        assert loads.keys == 2
        clock.now += 0.2
        await cache.get(lookup_id, b"wrong" * 7)
        assert loads.keys == 3

    async_to_sync(main)()


def test_the_cache_is_bounded_and_unknown_keys_are_remembered_for_a_second():
    loads, clock = CountedLoads(), Clock()

    async def main() -> None:
        cache = KeyCache(load_key=loads.key, load_epoch=loads.epoch, clock=clock, capacity=3, **PATIENT)
        for _ in range(5):
            assert await cache.get("unknown", b"") is None
        assert loads.keys == 1
        clock.now += 1.1
        assert await cache.get("unknown", b"") is None
        assert loads.keys == 2
        for i in range(10):
            await cache.get(f"unknown{i}", b"")
        assert len(cache._entries) == 3

    async_to_sync(main)()


@pytest.mark.parametrize("what", ["key", "tenant", "tier", "limit", "sql"])
def test_every_change_reaches_a_warm_cache_with_the_next_epoch(what):
    issued = make_key()
    tenant = issued.api_key.tenant
    clock = Clock()

    def change() -> None:
        match what:
            case "key":
                revoke_api_key(actor=TEST, api_key=issued.api_key)
            case "tenant":
                tenant.suspended_at = timezone.now()
                tenant.save()
            case "tier":
                make_tier("standard", deadline_s=7)
            case "limit":
                set_limit(tenant, LimitMetric.REQUESTS, 1)
            case "sql":
                from django.db import connection

                with connection.cursor() as cursor:
                    cursor.execute("UPDATE tenants_apikey SET revoked_at = now()")

    async def main() -> None:
        cache = KeyCache(clock=clock, **PATIENT)
        before = await cache.get(*secret_of(issued))
        await sync_to_async(change)()
        clock.now += 0.6
        after = await cache.get(*secret_of(issued))
        assert before is not None
        assert after is not None
        assert before != after

    async_to_sync(main)()
    if what == "tier":
        make_tier("standard", deadline_s=300)


class LateCache(KeyCache):
    """The control: files what it read under the epoch of the end of the load instead of its begin."""

    async def _load_once(self, lookup_id: str, digest: bytes) -> StoredKey | None:
        stored = await super()._load_once(lookup_id, digest)
        entry = self._entries[lookup_id]
        self._entries[lookup_id] = type(entry)(entry.stored, self._epoch, entry.loaded_at)
        return stored


@pytest.mark.parametrize(("kind", "comes_back"), [(KeyCache, False), (LateCache, True)])
def test_a_load_that_overlaps_the_revocation_does_not_bring_the_key_back(kind, comes_back):
    """FAULTS 66: the row was read before the revocation, and is filed after it."""
    issued, other = make_key(), make_key()
    was_read, may_return = threading.Event(), threading.Event()
    clock = Clock()

    def slow_load(lookup_id: str) -> StoredKey | None:
        stored = find_stored_key(lookup_id)
        if lookup_id == issued.api_key.lookup_id and not may_return.is_set():
            was_read.set()
            assert may_return.wait(10)
        return stored

    async def main() -> None:
        cache = kind(load_key=slow_load, clock=clock, **PATIENT)
        overlapping = asyncio.create_task(cache.get(*secret_of(issued)))
        assert await asyncio.to_thread(was_read.wait, 10)
        await sync_to_async(revoke_api_key)(actor=TEST, api_key=issued.api_key)
        clock.now += 0.6
        await cache.get(*secret_of(other))  # another request learns the new epoch meanwhile
        may_return.set()
        assert await overlapping  # this one began before the revocation
        clock.now += 0.1
        stored = await cache.get(*secret_of(issued))
        assert stored is not None
        assert (stored.revoked_at is None) == comes_back

    async_to_sync(main)()


class DeafCache(KeyCache):
    """The control: asks for the epoch once, and never hears of a change."""

    async def _refresh_epoch(self) -> None:
        if self._epoch_at == float("-inf"):
            await super()._refresh_epoch()


def test_a_revoked_key_is_refused_on_every_gateway_within_a_second():
    """FAULTS 66: four gateways in full use, and one that would not listen."""
    issued = make_key()

    async def gateway(cache: KeyCache, is_warm: asyncio.Event, ends_at: asyncio.Future[float]) -> float:
        """Returns when this gateway last accepted the key; it stops asking at `ends_at`, once that is known."""
        lookup_id, digest = secret_of(issued)
        accepted_at = 0.0
        while True:
            stored = await cache.get(lookup_id, digest)
            assert stored is not None
            if stored.revoked_at is not None:
                return accepted_at
            accepted_at = time.monotonic()
            is_warm.set()
            if ends_at.done() and accepted_at > ends_at.result():
                return accepted_at
            await asyncio.sleep(0.002)

    async def main() -> None:
        warm = [asyncio.Event() for _ in range(5)]
        ends_at = asyncio.get_running_loop().create_future()
        caches = [kind(**PATIENT) for kind in (*[KeyCache] * 4, DeafCache)]
        gateways = [
            asyncio.create_task(gateway(cache, event, ends_at))
            for cache, event in zip(caches, warm, strict=True)
        ]
        for event in warm:
            await asyncio.wait_for(event.wait(), 10)
        await sync_to_async(revoke_api_key)(actor=TEST, api_key=issued.api_key)
        revoked_at = time.monotonic()
        ends_at.set_result(revoked_at + 1.0)
        *listening, deaf = await asyncio.wait_for(asyncio.gather(*gateways), 10)
        assert max(listening) - revoked_at < 1.0
        assert deaf - revoked_at > 1.0

    async_to_sync(main)()


def test_caches_of_several_loops_do_not_meet_and_end_with_their_loops():
    issued = make_key()
    loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    async def refusal() -> str | None:
        loop = asyncio.get_running_loop()
        loops.add(loop)
        try:
            await authenticate_bearer(issued.secret)
        except RevokedKey as error:
            return error.code
        finally:
            assert loop in auth._caches
        return None

    assert asyncio.run(refusal()) is None
    revoke_api_key(actor=TEST, api_key=issued.api_key)
    assert asyncio.run(refusal()) == RevokedKey.code
    gc.collect()
    assert not loops


def test_last_use_is_written_once_a_minute_and_never_for_a_refused_key():
    issued, revoked = make_key(), make_key()
    revoke_api_key(actor=TEST, api_key=revoked.api_key)
    clock = Clock()

    async def main() -> None:
        cache = KeyCache(clock=clock, **PATIENT)
        lookup_id, digest = secret_of(issued)
        await cache.get(lookup_id, b"not the digest" * 2)
        assert not await ApiKeyUse.objects.aexists()
        await cache.get(lookup_id, digest)
        await cache.get(*secret_of(revoked))
        clock.now += 0.6
        await cache.get(lookup_id, digest)
        use = await ApiKeyUse.objects.aget()
        assert use.api_key_id == issued.api_key.pk
        long_ago = timezone.now() - timedelta(hours=1)
        await ApiKeyUse.objects.aupdate(last_used_at=long_ago)
        for _ in range(80):
            clock.now += 0.6
            await cache.get(lookup_id, digest)
        assert (await ApiKeyUse.objects.aget()).last_used_at == long_ago
        for _ in range(30):
            clock.now += 0.6
            await cache.get(lookup_id, digest)
        assert (await ApiKeyUse.objects.aget()).last_used_at > long_ago

    async_to_sync(main)()


def test_secrets_mask_themselves():
    issued = make_key()
    key = new_key_secret()
    stored = find_stored_key(issued.api_key.lookup_id)
    assert stored is not None
    for thing in (issued, key, stored, issued.api_key):
        for form in (repr(thing), str(thing)):
            assert issued.secret[21:] not in form
            assert key.reveal[21:] not in form
            assert repr(stored.digest) not in form
