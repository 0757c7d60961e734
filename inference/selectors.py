"""Reads of the usage ledger. Every one names its tenant; none loads more rows than a page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from django.db.models import Aggregate, Count, Q, Sum
from django.db.models.functions import TruncDate
from django.utils import timezone

from inference.models import UsageRecord
from tenants.models import Tenant


@dataclass(frozen=True, slots=True)
class Totals:
    requests: int
    prompt_tokens: int
    completion_tokens: int

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

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


_FAILED = Q(finish_reason__in=("error", "deadline"))


def start_of_day(now: datetime | None = None) -> datetime:
    return timezone.localtime(now).replace(hour=0, minute=0, second=0, microsecond=0)


def today_and_this_month(tenant: Tenant, now: datetime | None = None) -> tuple[Totals, Totals]:
    """What the tenant used today and this month, in one query."""
    today = start_of_day(now)
    this_month = UsageRecord.objects.filter(tenant=tenant, finished_at__gte=today.replace(day=1))
    row = this_month.aggregate(**_sums("month"), **_sums("today", Q(finished_at__gte=today)))
    return _totals(row, "today"), _totals(row, "month")


def _sums(span: str, condition: Q | None = None) -> dict[str, Aggregate]:
    return {
        f"{span}_requests": Count("id", filter=condition),
        f"{span}_prompt": Sum("prompt_tokens", filter=condition, default=0),
        f"{span}_completion": Sum("completion_tokens", filter=condition, default=0),
    }


def _totals(row: dict[str, int], span: str) -> Totals:
    return Totals(row[f"{span}_requests"], row[f"{span}_prompt"], row[f"{span}_completion"])


def recent_requests(tenant: Tenant, *, limit: int) -> list[UsageRecord]:
    """The latest finished requests, newest first."""
    return list(UsageRecord.objects.filter(tenant=tenant).order_by("-finished_at", "-id")[:limit])


def usage_by_day_and_model(tenant: Tenant, *, days: int, now: datetime | None = None) -> list[DayOfModel]:
    """One row per day and model of the last `days` days, today included; newest day first, busiest model first."""
    since = start_of_day(now) - timedelta(days=days - 1)
    rows = (
        UsageRecord.objects.filter(tenant=tenant, finished_at__gte=since)
        .order_by()
        .values("model", day=TruncDate("finished_at"))
        .annotate(
            requests=Count("id"),
            failed=Count("id", filter=_FAILED),
            prompt=Sum("prompt_tokens"),
            completion=Sum("completion_tokens"),
        )
    )
    usage = [
        DayOfModel(row["day"], row["model"], row["requests"], row["failed"], row["prompt"], row["completion"])
        for row in rows
    ]
    return sorted(usage, key=lambda row: (-row.day.toordinal(), -row.total_tokens, row.model))


def total(rows: Sequence[DayOfModel]) -> Totals:
    return Totals(
        sum(row.requests for row in rows),
        sum(row.prompt_tokens for row in rows),
        sum(row.completion_tokens for row in rows),
    )
