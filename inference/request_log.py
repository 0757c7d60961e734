"""A tenant's request log: the ledger's rows, newest first, found by the last row of the page before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from django.db.models import Exists, OuterRef, Q, QuerySet, Sum
from django.db.models.functions import Lower
from django.utils import timezone

from inference.models import UsageDay, UsageRecord
from inference.rollups import days_of
from tenants.models import ApiKey, Tenant
from tenants.selectors import api_key_names

PAGE = 50
_KEYS_OFFERED = 300
"""More are no list to choose from, and a third of a page's weight: a key's own page leads to its usage."""
_A_ZONE = timedelta(days=1)
"""More than any zone's day differs from UTC's."""


class Ending(StrEnum):
    COMPLETE = "complete"
    STOPPED = "stopped"
    FAILED = "failed"


_REASONS: Mapping[Ending, tuple[str, ...]] = {
    Ending.STOPPED: ("cancelled",),
    Ending.FAILED: ("error", "deadline"),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the log is narrowed to; empty is all."""

    ending: Ending | None = None
    model: str = ""
    key: UUID | None = None
    project: UUID | None = None
    """Of sums alone: the log has no index for it."""


def log_page(
    tenant: Tenant, wanted: Wanted, *, before: str = "", limit: int = PAGE
) -> tuple[list[UsageRecord], str]:
    """One page and, where more follow, the cursor to them. A cursor that is none of ours begins at the newest."""
    rows = _narrowed(UsageRecord.objects.filter(tenant=tenant), wanted)
    last = _read_cursor(before)
    if wanted != Wanted():
        span = _span(tenant, wanted, None if last is None else last[0].date(), limit)
        if span is None:
            return [], ""
        rows = rows.filter(created_at__gte=span[0], created_at__lt=span[1])
    if last:
        moment, row_id = last
        # The first condition alone lets the index and the partitions be used.
        rows = rows.filter(created_at__lte=moment).filter(
            Q(created_at__lt=moment) | Q(created_at=moment, id__lt=row_id)
        )
    page = list(rows.order_by("-created_at", "-id")[: limit + 1])
    more = len(page) > limit
    page = page[:limit]
    return page, f"{page[-1].created_at.isoformat()}_{page[-1].id}" if more else ""


def _narrowed(rows: QuerySet[Any], wanted: Wanted) -> QuerySet[Any]:
    """Of the ledger, or of its roll-ups: both have these columns."""
    if wanted.ending is Ending.COMPLETE:
        rows = rows.exclude(finish_reason__in=[reason for every in _REASONS.values() for reason in every])
    elif wanted.ending is not None:
        rows = rows.filter(finish_reason__in=_REASONS[wanted.ending])
    if wanted.model:
        rows = rows.filter(model=wanted.model)
    return rows.filter(key_public_id=wanted.key) if wanted.key else rows


def _span(
    tenant: Tenant, wanted: Wanted, cursor_day: date | None, limit: int
) -> tuple[datetime, datetime] | None:
    """Between which moments the next page lies, as the roll-ups have it; None: there is nothing.

    Without it, what a key did once would be looked for in every request that its tenant ever made.
    """
    columns = ["key_public_id"] if wanted.key else []
    days = _narrowed(days_of(tenant.pk, columns).filter(requests__gt=0), wanted)
    if cursor_day is not None:
        days = days.filter(day__lte=cursor_day + _A_ZONE)
    chosen: list[date] = []
    found = 0
    for day, requests in days.order_by("-day").values_list("day").annotate(n=Sum("requests")):
        chosen.append(day)
        # What lies on the cursor's own day may have been on the pages before.
        found += 0 if cursor_day is not None and day >= cursor_day - _A_ZONE else int(requests)
        if found > limit:
            break
    if not chosen:
        return None
    first, last = (datetime.combine(day, time.min, UTC) for day in (chosen[-1], chosen[0]))
    return first - _A_ZONE, last + 2 * _A_ZONE


def models_used(tenant: Tenant, *, days: int) -> list[str]:
    """Of late, by name: the choices to narrow by."""
    rows = days_of(tenant.pk).filter(day__gte=_since(days)).exclude(model="")
    return list(rows.values_list("model", flat=True).distinct().order_by("model"))


def keys_used(tenant: Tenant, *, days: int, chosen: UUID | None) -> list[tuple[UUID, str]]:
    """Public ids and names of keys used of late, by name: so many as fit a list, and the chosen one."""
    # Asked of each key, with an index for that: a list of all keys' days would be read to its end.
    days_of_key = UsageDay.objects.filter(
        tenant=tenant, key_public_id=OuterRef("public_id"), day__gte=_since(days)
    )
    keys = ApiKey.objects.for_tenant(tenant).filter(Exists(days_of_key)).order_by(Lower("name"), "id")
    found = list(keys.values_list("public_id", "name")[:_KEYS_OFFERED])
    if chosen is not None and chosen not in dict(found):
        found += api_key_names(tenant, {chosen}).items()
    return found


def _since(days: int) -> date:
    return timezone.now().date() - timedelta(days=days)


@dataclass(frozen=True, slots=True)
class Moment:
    """A step of a request's life."""

    name: str
    at: datetime | None
    after: timedelta | None
    """Since the step before that is known."""


def timeline(record: UsageRecord) -> list[Moment]:
    steps = (
        ("Accepted and queued", record.created_at),
        ("Claimed by a worker", record.claimed_at),
        ("First token", record.first_token_at),
        ("Finished", record.finished_at),
    )
    moments: list[Moment] = []
    last: datetime | None = None
    for name, at in steps:
        moments.append(Moment(name, at, at - last if at and last else None))
        last = at or last
    return moments


def _read_cursor(text: str) -> tuple[datetime, int] | None:
    moment, _, row_id = text.rpartition("_")
    try:
        at = datetime.fromisoformat(moment)
    except ValueError:
        return None
    if at.tzinfo is None or not row_id.isdecimal() or len(row_id) > 18:
        return None
    return at, int(row_id)
