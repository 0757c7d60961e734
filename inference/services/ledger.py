"""Usage events to ledger rows: who used what, at which price, on which day; and corrections, as new rows."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import msgspec
from django.db import DataError, IntegrityError, connection, transaction
from django.utils import timezone

from engine_worker.protocol import UsageEvent, charged_prompt_tokens, encode
from inference.models import ParkedUsageEvent, RecordedRequest, UsageAdjustment, UsageRecord
from inference.services.decision import TEXT_MAX
from inference.services.partitions import ensure_partitions, lock_ledger
from tenants.models import Tenant
from tenants.pricing import Price, price_at
from tenants.principal_selectors import model_prices
from tenants.selectors import projects_of_keys
from tenants.services import Actor, record_audit

log = logging.getLogger(__name__)

_FIRST_MOMENT: Final = datetime(2020, 1, 1, tzinfo=UTC)
_LAST_MOMENT: Final = datetime(2100, 1, 1, tzinfo=UTC)
"""A request outside of them was stamped by a broken clock: its month gets no partition."""


NOBODY: Final = "00000000-0000-0000-0000-000000000000"
"""Whom the operator's own test prompts are for: no tenant, and so no row."""


_FIELDS: Final = [field.attname for field in UsageRecord._meta.concrete_fields if not field.primary_key]
"""Named as their columns are."""
_COLUMNS: Final = ", ".join(_FIELDS)
# All rows are one value: lists of each column's, as `bulk_create` sends them, take their sender several times as long.
_INSERT: Final = f"""
INSERT INTO {UsageRecord._meta.db_table} ({_COLUMNS})
SELECT {_COLUMNS} FROM json_populate_recordset(NULL::{UsageRecord._meta.db_table}, %s)
RETURNING request_id, id
"""  # noqa: S608 - no input


class UnfitEvent(Exception):
    """This event can't become a ledger row; the message says why."""


@dataclass(frozen=True, slots=True)
class _Books:
    """What the rows of a batch need to know, read once."""

    tenants: dict[str, Tenant]
    """By the public id as the events spell it."""
    prices: dict[str, list[Price]]
    projects: dict[tuple[int, UUID], UUID]
    """By tenant and key, the key's project."""

    @classmethod
    def of(cls, events: Sequence[UsageEvent]) -> _Books:
        named = {event.tenant_id for event in events}
        public_ids = {text: public_id for text in named if (public_id := _uuid_or_none(text))}
        found = {
            tenant.public_id: tenant for tenant in Tenant.objects.filter(public_id__in=public_ids.values())
        }
        return cls(
            tenants={text: found[public_id] for text, public_id in public_ids.items() if public_id in found},
            prices=model_prices({_storable(event.model) for event in events}),
            projects=projects_of_keys(
                {key_id for event in events if event.key_id and (key_id := _uuid_or_none(event.key_id))}
            ),
        )


@transaction.atomic
def record_usage(events: Sequence[UsageEvent]) -> tuple[list[UsageRecord], list[UsageEvent]]:
    """Writes each event's row, or parks it, in one transaction. Returns a row for each recorded event and the
    parked events; one whose request has its row already counts as recorded."""
    events = [event for event in events if event.tenant_id != NOBODY]
    books = _Books.of(events)
    rows: dict[str, UsageRecord] = {}
    recorded: list[UsageEvent] = []
    parked: list[tuple[UsageEvent, str]] = []
    for event in events:
        try:
            rows.setdefault(event.request_id, _row(event, books))
            recorded.append(event)
        except UnfitEvent as error:
            parked.append((event, str(error)))
    refused = _insert(list(rows.values()))
    parked += [(event, refused[event.request_id]) for event in recorded if event.request_id in refused]
    _park(parked)
    settled = [rows[event.request_id] for event in recorded if event.request_id not in refused]
    return settled, [event for event, _ in parked]


@transaction.atomic
def file_parked_event(*, actor: Actor, parked: ParkedUsageEvent) -> UsageRecord:
    """Records a parked event after its cause was repaired. Raises UnfitEvent when it still won't do."""
    event = msgspec.convert(parked.event, UsageEvent)
    row = _row(event, _Books.of([event]))
    refused = _insert([row])
    if refused:
        raise UnfitEvent(refused[event.request_id])
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


@transaction.atomic
def adjust_usage(
    *, actor: Actor, tenant: Tenant, cost_microusd: int, reason: str, request: UsageRecord | None = None
) -> UsageAdjustment:
    """Adds to the tenant's cost (below 0: a credit) as of now. The rows it corrects stay as they are.

    Raises django.core.exceptions.ValidationError when a value won't do.
    """
    if request is not None and request.tenant_id != tenant.pk:
        raise ValueError("a tenant's adjustment can't correct another tenant's request")
    now = timezone.now()
    adjustment = UsageAdjustment(
        tenant=tenant,
        request_id="" if request is None else request.request_id,
        project_public_id=None if request is None else request.project_public_id,
        key_public_id=None if request is None else request.key_public_id,
        model="" if request is None else request.model,
        tier="" if request is None else request.tier,
        cost_microusd=cost_microusd,
        reason=reason.strip(),
        actor_label=actor.label,
        day=now.astimezone(tenant.zone).date(),
        created_at=now,
    )
    adjustment.full_clean(exclude=["project_public_id", "key_public_id"])
    lock_ledger()
    adjustment.save()
    record_audit(
        actor=actor,
        action="usage.adjusted",
        tenant=tenant,
        target=adjustment,
        after={
            "cost_microusd": cost_microusd,
            "reason": adjustment.reason,
            "request_id": adjustment.request_id,
        },
    )
    return adjustment


def row_to_be(event: UsageEvent) -> UsageRecord:
    """As it will stand in the ledger; it is not written. Raises UnfitEvent."""
    return _row(event, _Books.of([event]))


def _row(event: UsageEvent, books: _Books) -> UsageRecord:
    tenant = books.tenants.get(event.tenant_id)
    if tenant is None:
        raise UnfitEvent(f"no tenant has the public id {event.tenant_id!r}")
    counts = (event.prompt_tokens, event.cached_tokens, event.completion_tokens, event.attempts)
    if min(counts) < 0:
        raise UnfitEvent("a count is negative")
    if event.cached_tokens > event.prompt_tokens:
        raise UnfitEvent("more cached than prompt tokens")
    created_at = _moment(event.created_at_ms)
    if not _FIRST_MOMENT <= created_at < _LAST_MOMENT:
        raise UnfitEvent(f"accepted at an impossible time: {created_at}")
    prompt_tokens = charged_prompt_tokens(
        finish_reason=event.finish_reason,
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
    )
    cached_tokens = min(event.cached_tokens, prompt_tokens)
    price = price_at(books.prices.get(event.model, ()), created_at)
    cost = 0
    if price is not None:
        cost = price.cost_microusd(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=event.completion_tokens,
        )
    key_public_id = _uuid(event.key_id, "key_id")
    return UsageRecord(
        request_id=event.request_id,
        tenant=tenant,
        project_public_id=None if key_public_id is None else books.projects.get((tenant.pk, key_public_id)),
        key_public_id=key_public_id,
        user_public_id=_uuid(event.user_id, "user_id"),
        model=event.model,
        tier=event.tier,
        endpoint=event.endpoint,
        finish_reason=event.finish_reason,
        error_code=event.error_code or "",
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=event.completion_tokens,
        cost_microusd=cost,
        price_public_id=None if price is None else price.public_id,
        day=created_at.astimezone(tenant.zone).date(),
        reservation_id=event.reservation_id,
        worker_id=event.worker_id or "",
        decision=event.decision[:TEXT_MAX],
        attempts=event.attempts,
        created_at=created_at,
        claimed_at=None if event.claimed_at_ms is None else _moment(event.claimed_at_ms),
        first_token_at=None if event.first_token_at_ms is None else _moment(event.first_token_at_ms),
        finished_at=_moment(event.finished_at_ms),
        recorded_at=timezone.now(),
    )


def _insert(rows: Sequence[UsageRecord]) -> dict[str, str]:
    """Inserts those that are not there yet, or all that the database takes; returns why it refused the others."""
    lock_ledger()
    ensure_partitions(row.created_at.date() for row in rows)
    try:
        with transaction.atomic():
            _write(_not_recorded(rows))
        return {}
    except (DataError, IntegrityError, ValueError):
        pass  # one of them is at fault: find out which
    refused: dict[str, str] = {}
    for row in rows:
        try:
            with transaction.atomic():
                _write(_not_recorded([row]))
        except (DataError, IntegrityError, ValueError) as error:
            refused[row.request_id] = f"{type(error).__name__}: {error}"
    return refused


def _write(rows: Sequence[UsageRecord]) -> None:
    if not rows:
        return
    values = [{name: getattr(row, name) for name in _FIELDS} for row in rows]
    with connection.cursor() as cursor:
        cursor.execute(_INSERT, [msgspec.json.encode(values).decode()])
        ids = dict(cursor.fetchall())
    for row in rows:
        row.pk = ids[row.request_id]


def _not_recorded(rows: Sequence[UsageRecord]) -> list[UsageRecord]:
    known = RecordedRequest.objects.filter(request_id__in=[row.request_id for row in rows])
    recorded = set(known.values_list("request_id", flat=True))
    return [row for row in rows if row.request_id not in recorded]


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
