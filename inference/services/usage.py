"""The usage stream to the ledger: each event exactly one row, wherever this dies.

Read, commit the rows, settle the quotas, acknowledge: in that order. An event that was not acknowledged
comes again, to this consumer or another; its row is then there already (unique request id) and its
reservation settled (once by id), so doing any step twice changes nothing.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from django.conf import settings

from engine_worker.broker import EntryRef, UsageReader
from engine_worker.protocol import UsageEvent
from inference.models import UsageRecord
from inference.services.ledger import record_usage
from tenants.quotas.store import QuotaStore, Settlement

BATCH: Final = 500
_BUDGET_S: Final = 20.0
"""A drain that has run so long lets the next one go on, well before the task's time limit."""
_SETTLE_TIMEOUT_S: Final = 10.0


class UsageSource(Protocol):
    """The part of UsageReader that a drain needs."""

    def read(self, *, consumer: str, count: int, block_ms: int) -> list[tuple[EntryRef, UsageEvent]]: ...
    def ack(self, refs: Sequence[EntryRef]) -> None: ...


@dataclass(frozen=True, slots=True)
class Drained:
    recorded: int
    """Events whose row is in the ledger now, those included that were there before."""
    parked: int


def drain_usage_stream(
    *, redis_url: str | None = None, consumer: str | None = None, budget_s: float = _BUDGET_S
) -> Drained:
    """Moves what waits in the stream to the ledger. Any number may run at once."""
    url = redis_url or settings.REDIS_URL
    reader = UsageReader(url)
    try:
        return drain_usage(
            reader=reader, redis_url=url, consumer=consumer or socket.gethostname(), budget_s=budget_s
        )
    finally:
        reader.close()


def drain_usage(
    *,
    reader: UsageSource,
    redis_url: str,
    consumer: str,
    count: int = BATCH,
    budget_s: float = _BUDGET_S,
) -> Drained:
    """Batch after batch until the stream is empty or the time is up."""
    recorded = parked = 0
    ends_at = time.monotonic() + budget_s
    while True:
        entries = reader.read(consumer=consumer, count=count, block_ms=0)
        if entries:
            rows, unfit = record_usage([event for _, event in entries])
            asyncio.run(_settle(redis_url, rows))
            reader.ack([ref for ref, _ in entries])
            recorded += len(rows)
            parked += len(unfit)
        if len(entries) < count or time.monotonic() > ends_at:
            return Drained(recorded=recorded, parked=parked)


async def _settle(redis_url: str, rows: Sequence[UsageRecord]) -> None:
    store = QuotaStore(redis_url, timeout_s=_SETTLE_TIMEOUT_S)
    try:
        await store.settle_many(
            [
                Settlement(
                    tenant_public_id=str(row.tenant.public_id),
                    reservation_id=row.reservation_id,
                    prompt_tokens=row.prompt_tokens,
                    completion_tokens=row.completion_tokens,
                    cost_microusd=row.cost_microusd,
                )
                for row in rows
                if row.reservation_id
            ]
        )
    finally:
        await store.aclose()
