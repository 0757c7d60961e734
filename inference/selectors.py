"""Reads of the usage ledger and its roll-ups. Every one names its tenant; none loads more rows than a page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from enum import Enum, auto
from typing import Any
from uuid import UUID

from django.db.models import Aggregate, F, Q, Sum
from django.utils import timezone

from inference.models import Alert, UsageRecord, bounds, histogram_sums, percentiles_ms
from inference.rollups import days_of, days_of_keys, failed_in
from tenants.models import Tenant


@dataclass(frozen=True, slots=True)
class Totals:
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost_microusd: int
    """Adjustments included."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class DayOfModel:
    day: date
    model: str
    requests: int
    failed: int
    """Ended by an error or at their deadline."""
    prompt_tokens: int
    completion_tokens: int
    cost_microusd: int
    """Adjustments included."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


COST = F("cost_microusd") + F("adjustment_microusd")


def today_of(tenant: Tenant, now: datetime | None = None) -> date:
    """The day it is where the tenant is."""
    return (now or timezone.now()).astimezone(tenant.zone).date()


def today_and_this_month(tenant: Tenant, now: datetime | None = None) -> tuple[Totals, Totals]:
    """What the tenant used today and this month, in its own time zone, in one query."""
    today = today_of(tenant, now)
    this_month = days_of(tenant.pk).filter(day__gte=today.replace(day=1), day__lte=today)
    row = this_month.aggregate(**_sums("month"), **_sums("today", Q(day=today)))
    return _totals(row, "today"), _totals(row, "month")


def _sums(span: str, condition: Q | None = None) -> dict[str, Aggregate]:
    return {
        f"{span}_requests": Sum("requests", filter=condition, default=0),
        f"{span}_prompt": Sum("prompt_tokens", filter=condition, default=0),
        f"{span}_completion": Sum("completion_tokens", filter=condition, default=0),
        f"{span}_cost": Sum(COST, filter=condition, default=0),
    }


def _totals(row: dict[str, int], span: str) -> Totals:
    return Totals(*(int(row[f"{span}_{name}"]) for name in ("requests", "prompt", "completion", "cost")))


class Past(Enum):
    """What the ledger knows of a request."""

    NONE = auto()
    REFUSED = auto()
    """It ended before its first token."""
    ANSWERED = auto()


def past_of(tenant_id: int, request_id: str) -> Past:
    rows = UsageRecord.objects.filter(tenant_id=tenant_id, request_id=request_id)
    known = rows.values_list("completion_tokens", "finish_reason").first()
    if known is None:
        return Past.NONE
    tokens, reason = known
    return Past.ANSWERED if tokens > 0 or reason in ("stop", "length") else Past.REFUSED


def recent_requests(tenant: Tenant, *, limit: int) -> list[UsageRecord]:
    """The latest accepted requests that have ended, newest first."""
    return list(UsageRecord.objects.filter(tenant=tenant).order_by("-created_at", "-id")[:limit])


@dataclass(frozen=True, slots=True)
class Health:
    """How a month's requests went so far."""

    failed_percent: float | None
    """Ended by an error or at their deadline, of all; None without requests."""
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None


def month_health(tenant: Tenant, now: datetime | None = None) -> Health:
    """Two queries, of roll-ups."""
    this_month = days_of(tenant.pk).filter(day__gte=today_of(tenant, now).replace(day=1))
    counts = this_month.aggregate(every=Sum("requests", default=0), failed=failed_in(this_month), **bounds())
    ttft = histogram_sums([counts])["sum_ttft"]
    histogram = ttft.histogram(this_month.aggregate(counts=ttft)["counts"])
    p50, p95 = percentiles_ms(histogram, (0.5, 0.95))
    return Health(
        failed_percent=100 * counts["failed"] / counts["every"] if counts["every"] else None,
        ttft_p50_ms=p50,
        ttft_p95_ms=p95,
    )


def usage_by_day_and_model(
    tenant: Tenant,
    *,
    days: int,
    model: str = "",
    key: UUID | None = None,
    project: UUID | None = None,
    now: datetime | None = None,
) -> list[DayOfModel]:
    """One row per day and model of the last `days` days, today included; newest day first, busiest model first."""
    since = today_of(tenant, now) - timedelta(days=days - 1)
    narrowed = Q(day__gte=since)
    if model:
        narrowed &= Q(model=model)
    if key:
        narrowed &= Q(key_public_id=key)
    if project:
        narrowed &= Q(project_public_id=project)
    days_kept = days_of_keys(tenant.pk) if key or project else days_of(tenant.pk)
    rows = (
        days_kept.filter(narrowed)
        .values("day", "model")
        .annotate(
            all_requests=Sum("requests"),
            all_failed=failed_in(days_kept),
            prompt=Sum("prompt_tokens"),
            completion=Sum("completion_tokens"),
            cost=Sum(COST),
        )
    )
    usage = [
        DayOfModel(
            day=row["day"],
            model=row["model"],
            requests=int(row["all_requests"]),
            failed=int(row["all_failed"]),
            prompt_tokens=int(row["prompt"]),
            completion_tokens=int(row["completion"]),
            cost_microusd=int(row["cost"]),
        )
        for row in rows
    ]
    return sorted(usage, key=lambda row: (-row.day.toordinal(), -row.total_tokens, row.model))


def month_by_project(tenant: Tenant, now: datetime | None = None) -> dict[UUID | None, Totals]:
    """What each project used this month, by its public id; None: what belongs to none."""
    first = today_of(tenant, now).replace(day=1)
    rows = (
        days_of_keys(tenant.pk)
        .filter(day__gte=first)
        .values("project_public_id")
        .annotate(**_sums("month"))
        .order_by()
    )
    found: dict[UUID | None, Totals] = {}
    for row in rows:
        sums: dict[str, Any] = dict(row)
        found[sums["project_public_id"]] = _totals(sums, "month")
    return found


def total(rows: Sequence[DayOfModel]) -> Totals:
    return Totals(
        sum(row.requests for row in rows),
        sum(row.prompt_tokens for row in rows),
        sum(row.completion_tokens for row in rows),
        sum(row.cost_microusd for row in rows),
    )


def latest_alerts(tenant_id: int, *, limit: int = 100) -> list[Alert]:
    """The last ones told, newest first."""
    return list(Alert.objects.for_tenant(tenant_id)[:limit])


def recent_alerts(tenant: Tenant, now: datetime | None = None) -> list[Alert]:
    """What the tenant was told in the last week, newest first; a handful."""
    since = (now or timezone.now()) - timedelta(days=7)
    return list(Alert.objects.filter(tenant=tenant, created_at__gte=since)[:5])
