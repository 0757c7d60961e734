"""The usage stream to the ledger: each event exactly one row, wherever this dies.

Read, commit the rows, settle the quotas, acknowledge: in that order. An event that was not acknowledged
comes again, to this consumer or another; its row is then there already (unique request id) and its
reservation settled (once by id), so doing any step twice changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol
from uuid import UUID

import msgspec
from django.conf import settings
from django.db import DatabaseError, DataError, IntegrityError, transaction
from django.utils import timezone

from engine_worker.broker import EntryRef, UsageReader
from engine_worker.protocol import UsageEvent, encode
from inference.models import ParkedUsageEvent, UsageRecord
from tenants.models import Tenant
from tenants.quotas.store import QuotaStore, Settlement
from tenants.services import Actor, record_audit

log = logging.getLogger(__name__)

BATCH: Final = 500
_BUDGET_S: Final = 20.0
"""A drain that has run so long lets the next one go on, well before the task's time limit."""
_SETTLE_TIMEOUT_S: Final = 10.0


class UnfitEvent(Exception):
    """This event can't become a ledger row; the message says why."""


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


def record_usage(events: Sequence[UsageEvent]) -> tuple[list[UsageEvent], list[UsageEvent]]:
    """Writes each event's row, or parks it, in one transaction. Returns the recorded and the parked ones."""
    tenant_ids = _tenant_ids(events)
    rows: dict[str, UsageRecord] = {}
    recorded: list[UsageEvent] = []
    parked: list[tuple[UsageEvent, str]] = []
    for event in events:
        try:
            rows[event.request_id] = _row(event, tenant_ids)
            recorded.append(event)
        except UnfitEvent as error:
            parked.append((event, str(error)))
    with transaction.atomic():
        # In one order: two drains with the same events would else wait for each other's keys.
        ordered = [rows[request_id] for request_id in sorted(rows)]
        refused = _insert(ordered)
        if refused:
            parked += [(e, refused[e.request_id]) for e in recorded if e.request_id in refused]
            recorded = [e for e in recorded if e.request_id not in refused]
        _park(parked)
    return recorded, [event for event, _ in parked]


@transaction.atomic
def file_parked_event(*, actor: Actor, parked: ParkedUsageEvent) -> UsageRecord:
    """Records a parked event after its cause was repaired. Raises UnfitEvent when it still won't do."""
    event = msgspec.convert(parked.event, UsageEvent)
    row = _row(event, _tenant_ids([event]))
    try:
        with transaction.atomic():
            UsageRecord.objects.bulk_create([row], ignore_conflicts=True)
    except (DatabaseError, ValueError) as error:
        raise UnfitEvent(str(error)) from error
    ParkedUsageEvent.objects.filter(pk=parked.pk, filed_at=None).update(filed_at=timezone.now())
    filed = UsageRecord.objects.get(tenant=row.tenant_id, request_id=row.request_id)
    record_audit(
        actor=actor,
        action="usage.filed",
        tenant=filed.tenant,
        target=filed,
        after={"request_id": filed.request_id, "reason_parked": parked.reason},
    )
    return filed


async def _settle(redis_url: str, events: Sequence[UsageEvent]) -> None:
    store = QuotaStore(redis_url, timeout_s=_SETTLE_TIMEOUT_S)
    try:
        await store.settle_many(
            [
                Settlement(
                    tenant_public_id=event.tenant_id,
                    reservation_id=event.reservation_id,
                    prompt_tokens=event.prompt_tokens,
                    completion_tokens=event.completion_tokens,
                )
                for event in events
                if event.reservation_id
            ]
        )
    finally:
        await store.aclose()


def _tenant_ids(events: Sequence[UsageEvent]) -> dict[str, int]:
    named = {event.tenant_id for event in events}
    public_ids = [public_id for public_id in map(_uuid_or_none, named) if public_id is not None]
    found = dict(Tenant.objects.filter(public_id__in=public_ids).values_list("public_id", "id"))
    # By the text of the event, not by the canonical form: the caller looks up what it was given.
    return {text: found[public_id] for text in named if (public_id := _uuid_or_none(text)) in found}


def _row(event: UsageEvent, tenant_ids: dict[str, int]) -> UsageRecord:
    if event.tenant_id not in tenant_ids:
        raise UnfitEvent(f"no tenant has the public id {event.tenant_id!r}")
    counts = (event.prompt_tokens, event.cached_tokens, event.completion_tokens, event.attempts)
    if min(counts) < 0:
        raise UnfitEvent("a count is negative")
    if event.cached_tokens > event.prompt_tokens:
        raise UnfitEvent("more cached than prompt tokens")
    return UsageRecord(
        request_id=event.request_id,
        tenant_id=tenant_ids[event.tenant_id],
        key_public_id=_uuid(event.key_id, "key_id"),
        user_public_id=_uuid(event.user_id, "user_id"),
        model=event.model,
        tier=event.tier,
        endpoint=event.endpoint,
        finish_reason=event.finish_reason,
        error_code=event.error_code or "",
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        completion_tokens=event.completion_tokens,
        reservation_id=event.reservation_id,
        worker_id=event.worker_id or "",
        attempts=event.attempts,
        created_at=_moment(event.created_at_ms),
        claimed_at=None if event.claimed_at_ms is None else _moment(event.claimed_at_ms),
        first_token_at=None if event.first_token_at_ms is None else _moment(event.first_token_at_ms),
        finished_at=_moment(event.finished_at_ms),
    )


def _insert(rows: Sequence[UsageRecord]) -> dict[str, str]:
    """Inserts all, or all that the database takes; returns why it refused each of the others."""
    try:
        with transaction.atomic():
            UsageRecord.objects.bulk_create(rows, ignore_conflicts=True)
        return {}
    except (DataError, IntegrityError, ValueError):
        pass  # one of them is at fault: find out which
    refused: dict[str, str] = {}
    for row in rows:
        try:
            with transaction.atomic():
                UsageRecord.objects.bulk_create([row], ignore_conflicts=True)
        except (DataError, IntegrityError, ValueError) as error:
            refused[row.request_id] = f"{type(error).__name__}: {error}"
    return refused


def _park(parked: Sequence[tuple[UsageEvent, str]]) -> None:
    ParkedUsageEvent.objects.bulk_create(
        [
            ParkedUsageEvent(
                fingerprint=hashlib.sha256(encode(event)).hexdigest(),
                request_id=_storable(event.request_id)[:200],
                reason=_storable(reason)[:400],
                event=_storable(msgspec.to_builtins(event)),
            )
            for event, reason in parked
        ],
        ignore_conflicts=True,
    )
    for event, reason in parked:
        log.error("usage event parked", extra={"request_id": event.request_id, "reason": reason})


def _storable(value: Any) -> Any:
    # PostgreSQL stores no NUL, neither in text nor in JSON.
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd")
    if isinstance(value, dict):
        return {key: _storable(item) for key, item in value.items()}
    return value


def _uuid_or_none(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _uuid(text: str | None, field: str) -> UUID | None:
    if not text:
        return None
    public_id = _uuid_or_none(text)
    if public_id is None:
        raise UnfitEvent(f"{field} is not a UUID: {text!r}")
    return public_id


def _moment(ms: int) -> datetime:
    try:
        return datetime.fromtimestamp(ms / 1000, tz=UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise UnfitEvent(f"not a time: {ms} ms") from error
