"""A key's secret is changed while two gateways use it: what each answers, and what one without the guard would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from tenants.key_cache import KeyCache
from tenants.key_verdict import Verdict, judge
from tenants.services import IssuedKey, rotate_api_key
from tests.factories import TEST, make_key
from tests.tenants.key_loads import PATIENT, secret_of

pytestmark = pytest.mark.django_db(transaction=True)
GATEWAYS = 2
WATCHED_S = 1.2
"""Longer than a gateway may take to learn of a change."""


def gateway() -> KeyCache:
    return KeyCache(**PATIENT)


def deaf_gateway() -> KeyCache:
    return KeyCache(**PATIENT, load_epoch=lambda: UUID(int=1))


@dataclass
class User:
    """Asks one gateway with one secret, again and again."""

    cache: KeyCache
    issued: IssuedKey
    seen: list[tuple[float, Verdict]] = field(default_factory=list)
    has_asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        lookup_id, digest = secret_of(self.issued)
        while True:
            verdict = judge(await self.cache.get(lookup_id, digest), digest)
            self.seen.append((time.monotonic(), verdict))
            self.has_asked.set()
            await asyncio.sleep(0.002)

    @property
    def verdicts(self) -> set[Verdict]:
        return {verdict for _, verdict in self.seen}

    def accepted_until(self) -> float:
        return max(at for at, verdict in self.seen if verdict is Verdict.GOOD)


def rotate_under_use(
    overlap: timedelta, make_gateway: Callable[[], KeyCache], *, with_new: bool = True
) -> tuple[list[User], list[User], float]:
    """Who used the old secret all the time, who the new one as soon as there was one, and when that was."""
    issued = make_key()

    async def main() -> tuple[list[User], list[User], float]:
        caches = [make_gateway() for _ in range(GATEWAYS)]
        old = [User(cache, issued) for cache in caches]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(user.run()) for user in old]
            for user in old:
                await asyncio.wait_for(user.has_asked.wait(), 30)
            turned = await sync_to_async(rotate_api_key)(
                actor=TEST, api_key=issued.api_key, rotation_id="r" * 22, overlap=overlap
            )
            rotated_at = time.monotonic()
            new = [User(cache, turned) for cache in caches if with_new]
            running += [tasks.create_task(user.run()) for user in new]
            await asyncio.sleep(WATCHED_S)
            for user in new:
                await asyncio.wait_for(user.has_asked.wait(), 30)
            for task in running:
                task.cancel()
        return old, new, rotated_at

    return async_to_sync(main)()


def test_with_an_overlap_nobody_is_refused():
    """FAULTS 67: neither who still has the old secret nor who has the new one already, from the first moment on."""
    old, new, _ = rotate_under_use(timedelta(hours=1), gateway)
    for user in (*old, *new):
        assert user.verdicts == {Verdict.GOOD}


def test_without_an_overlap_the_old_secret_ends_within_a_second_on_every_gateway():
    old, new, rotated_at = rotate_under_use(timedelta(0), gateway)
    for user in old:
        assert user.seen[-1][1] is not Verdict.GOOD
        assert user.accepted_until() - rotated_at < 1.0
    for user in new:
        assert user.verdicts == {Verdict.GOOD}


def test_control_a_gateway_that_hears_of_no_change_goes_on_taking_the_old_secret():
    """What the auth epoch guards against."""
    old, _, rotated_at = rotate_under_use(timedelta(0), deaf_gateway, with_new=False)
    for user in old:
        assert user.verdicts == {Verdict.GOOD}
        assert user.accepted_until() - rotated_at > 1.0
