"""What ended at this gateway, settled together: all that ends in one turn of the event loop is one call per tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context

import structlog

from tenants.quotas.errors import QuotaUnavailable
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import Settlement

log = structlog.get_logger(__name__)


class Settlements:
    """One per event loop. `spawn` is the runtime's, which waits for the tasks at its end."""

    def __init__(self, quotas: QuotaStore, spawn: Callable[..., asyncio.Task[None]]) -> None:
        self._quotas = quotas
        self._spawn = spawn
        self._waiting: list[Settlement] = []

    def add(self, settlement: Settlement) -> None:
        if not self._waiting:
            # For all of them: not in the context of the request that ends first.
            self._spawn(self._settle(), name="settle", context=Context())
        self._waiting.append(settlement)

    async def _settle(self) -> None:
        # First the answers, which this turn of the loop makes: their clients wait. What they ask for next comes after.
        await asyncio.sleep(0)
        waiting, self._waiting = self._waiting, []
        try:
            await self._quotas.settle_many(waiting)
        except QuotaUnavailable:
            log.warning("settle_left_to_the_ledger", request_ids=[one.reservation_id for one in waiting])
