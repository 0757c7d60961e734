"""Whose turn it is: claims what can start now, takes what it is handed, and hears of what is better than what runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from engine_worker.broker import BrokerUnavailable, Channel, Claim, Held, WorkerBroker
from engine_worker.engine.types import Engine
from engine_worker.outbox import Outbox
from engine_worker.waiting import Backoff, wait

_WAIT_FOR_WORK_S: Final = 1.0
_WAIT_FOR_BETTER_S: Final = 5.0
_TOO_MANY: Final = 8
"""So many more than it has room for a worker may be handed: Redis knows how many they are, not how large."""


class Claimer:
    """Three of the worker's tasks. `start` is called with each claim, in order."""

    def __init__(
        self,
        engine: Engine,
        broker: WorkerBroker,
        outbox: Outbox,
        *,
        start: Callable[[Claim], None],
        stopping: asyncio.Event,
    ) -> None:
        self._engine = engine
        self._broker = broker
        self._outbox = outbox
        self._start = start
        self._stopping = stopping
        self._stepped = asyncio.Event()
        self._is_full = asyncio.Event()  # without room what is better is news
        self._handed: Channel[Claim] | None = None
        self._offered = 0
        """So many more Redis takes it to have room for."""

    def wake(self) -> None:
        """There may be room, or something better waits."""
        self._stepped.set()

    async def run(self) -> None:
        """Ends by itself when stopping: a claim that is cancelled half way would strand what it took."""
        backoff = Backoff()
        while not self._stopping.is_set():
            self._stepped.clear()
            room = self._engine.room()
            try:
                if room <= 0:
                    self._is_full.set()
                    if not await self._claim_better():
                        await wait(self._stepped, _WAIT_FOR_WORK_S)
                    continue
                num_claimed = await self._claim(room, offers=self._handed is not None)
                if num_claimed < room and not self._stopping.is_set():
                    await self._broker.wait_for_work(_WAIT_FOR_WORK_S)
                backoff.reset()
            except BrokerUnavailable:
                await backoff.sleep()

    async def _claim(self, room: int, *, offers: bool) -> int:
        claims = await self._broker.claim(room, offers=offers)
        self._offered = room - len(claims) if offers else 0
        await self._start_all(claims)
        return len(claims)

    async def _start_all(self, claims: Sequence[Claim]) -> None:
        """What arrives meanwhile is not kept waiting for all: beginning with a grammar may take a while."""
        left = deque(claims)
        try:
            while left:
                self._start(left.popleft())
                await asyncio.sleep(0)
        finally:  # also when cancelled: they are claimed
            while left:
                self._start(left.popleft())

    async def take_no_more(self) -> None:
        """Once stopping: nothing comes after this that was not claimed."""
        with suppress(BrokerUnavailable):  # then nobody hands anything over either, or to nobody by and by
            await self._broker.claim(0)
        if self._handed is not None:
            await self._handed.caught_up()

    async def take(self) -> None:
        """What comes while the worker has room and nothing waits is not claimed, but handed to it."""
        backoff = Backoff()
        while True:
            try:
                async with self._broker.handed() as handed:
                    self._handed = handed
                    backoff.reset()
                    async for claim in handed:
                        # After a gap: what was lost in it nobody renews, and others get it.
                        if isinstance(claim, Claim):
                            await self._take(claim)
            except BrokerUnavailable:
                await backoff.sleep()
            finally:
                self._handed = None

    async def _take(self, claim: Claim) -> None:
        self._offered -= 1
        # When Redis is away: what is not handed back lapses, as does the offer.
        with suppress(BrokerUnavailable):
            if self._stopping.is_set():
                await self._broker.release([Held(claim.request.request_id, claim.epoch)], failed=False)
                return
            self._start(claim)
            room = max(0, self._engine.room())
            if self._offered > room + _TOO_MANY or self._offered < room / 2:
                await self._claim(room, offers=True)

    async def _claim_better(self) -> bool:
        """Without room: takes what is of a better class than something held, which the engine then preempts.

        Asks only when the last publish said that such a request waits: a full worker costs no extra calls.
        """
        extra, worst = self._outbox.to_put_aside(self._engine.stats().running)
        waiting, self._broker.waiting_class = self._broker.waiting_class, None
        if not extra or waiting is None or waiting >= worst:
            return False
        claims = await self._broker.claim(0, extra=extra, put_aside=worst)
        await self._start_all(claims)
        return bool(claims)

    async def hear(self) -> None:
        """A better class than all that waited does not have to wait for the next publish to be heard of."""
        backoff = Backoff()
        while True:
            await self._is_full.wait()
            self._is_full.clear()
            if self._stopping.is_set():
                await asyncio.sleep(_WAIT_FOR_BETTER_S)
                continue
            try:
                better = await self._broker.wait_for_better(_WAIT_FOR_BETTER_S)
                backoff.reset()
            except BrokerUnavailable:
                await backoff.sleep()
                continue
            if better is not None:
                waiting = self._broker.waiting_class
                self._broker.waiting_class = better if waiting is None else min(better, waiting)
                self._stepped.set()
