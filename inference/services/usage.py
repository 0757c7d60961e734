"""The usage stream to the ledger: each event exactly one row, wherever this dies.

Read, commit the rows, settle the quotas, acknowledge: in that order. An event that was not acknowledged comes again,
to this consumer or another: after a minute, or, where an outage kept it from the ledger, with the next drain. Its row
is then there already (unique request id) and its reservation settled (once by id), so doing any step twice changes
nothing.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol

import structlog
from django.conf import settings
from redis.exceptions import RedisError

from engine_worker.broker import EntryRef, UsageReader
from engine_worker.protocol import UsageEvent
from inference.models import UsageRecord
from inference.outages import outage
from inference.services.failures import tell_of_failures
from inference.services.ledger import record_usage
from tenants.principal import LimitMetric, LimitScope
from tenants.principal_selectors import budgets_of
from tenants.quotas.buckets import Bucket, bucket_of
from tenants.quotas.store import QuotaStore
from tenants.quotas.types import Settlement

log = structlog.get_logger(__name__)

BATCH: Final = 500
_BUDGET_S: Final = 20.0
"""A drain that has run so long lets the next one go on, well before the task's time limit."""
_SETTLE_TIMEOUT_S: Final = 10.0


class UsageSource(Protocol):
    """The part of UsageReader that a drain needs."""

    def read(self, *, consumer: str, count: int, block_ms: int) -> list[tuple[EntryRef, UsageEvent]]: ...
    def ack(self, refs: Sequence[EntryRef]) -> None: ...
    def give_back(self, refs: Sequence[EntryRef], *, consumer: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Drained:
    recorded: int
    """Events whose row is in the ledger now, those included that were there before."""
    parked: int


def drain_usage_stream(
    *, redis_url: str | None = None, consumer: str | None = None, budget_s: float = _BUDGET_S
) -> Drained:
    """Ends what outlived its deadline, and moves what waits in the stream to the ledger. Any number may run at once."""
    url = redis_url or settings.REDIS_URL
    reader = UsageReader(url)
    try:
        reader.sweep()
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
            refs = [ref for ref, _ in entries]
            with _given_back(reader, refs, consumer):
                tell_of_failures([event for _, event in entries])
                rows, unfit = record_usage([event for _, event in entries])
                settle_rows(redis_url, rows)
                reader.ack(refs)
            recorded += len(rows)
            parked += len(unfit)
        if len(entries) < count or time.monotonic() > ends_at:
            return Drained(recorded=recorded, parked=parked)


@contextmanager
def _given_back(reader: UsageSource, refs: Sequence[EntryRef], consumer: str) -> Iterator[None]:
    """Where an outage ends it. What fails for another reason would fail again, and new events wait behind it."""
    try:
        yield
    except Exception as error:
        if outage(error) is not None:
            with suppress(RedisError):
                reader.give_back(refs, consumer=consumer)
        raise


def settle_rows(redis_url: str, rows: Sequence[UsageRecord]) -> None:
    """What was reserved for them is charged as they say. A reservation that Redis has forgotten, it being lost while
    the request ran, holds nothing any more: its row is booked in the tenant's budgets instead."""
    forgotten = asyncio.run(_settle(redis_url, [row for row in rows if row.reservation_id]))
    for row in forgotten:
        log.warning("reservation_forgotten", request_id=row.request_id)
    if forgotten:
        # Looked up here: a thread beside the loop would keep a database connection that nobody looks after.
        asyncio.run(_book(redis_url, [(row, _budgets_of(row)) for row in forgotten]))


async def _settle(redis_url: str, reserved: Sequence[UsageRecord]) -> list[UsageRecord]:
    """Those to book. Without a number a row was in the ledger before this event came: it was settled or booked then."""
    async with _store(redis_url) as store:
        known = await store.settle_many([_settlement(row) for row in reserved])
    return [row for row, is_known in zip(reserved, known, strict=True) if not is_known and row.pk is not None]


async def _book(redis_url: str, rows: Sequence[tuple[UsageRecord, list[tuple[LimitMetric, Bucket]]]]) -> None:
    async with _store(redis_url) as store:
        for row, budgets in rows:
            await store.book(row.pk, _settlement(row), budgets)


@asynccontextmanager
async def _store(redis_url: str) -> AsyncIterator[QuotaStore]:
    store = QuotaStore(redis_url, timeout_s=_SETTLE_TIMEOUT_S)
    try:
        yield store
    finally:
        await store.aclose()


def _settlement(row: UsageRecord) -> Settlement:
    return Settlement(
        tenant_public_id=str(row.tenant.public_id),
        reservation_id=row.reservation_id,
        prompt_tokens=row.prompt_tokens,
        completion_tokens=row.completion_tokens,
        cost_microusd=row.cost_microusd,
    )


def _budgets_of(row: UsageRecord) -> list[tuple[LimitMetric, Bucket]]:
    """Those that the row counts in, of the period in which it was accepted."""
    return [
        (limit.metric, bucket_of(principal, limit, row.created_at))
        for principal, limit in budgets_of(row.tenant)
        if limit.binds(row.model)
        and (limit.scope is not LimitScope.KEY or limit.owner_id == str(row.key_public_id))
    ]
