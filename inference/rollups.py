"""Which roll-up answers: the one place that chooses, so that no report reads a row for each key without need."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from django.db.models import Q, QuerySet, Sum

from inference.models import UsageDay, UsageDayOfKey, UsageDayTotal, UsageHour, UsageHourTotal

FAILED: Final = Q(finish_reason__in=("error", "deadline"))
_OF_KEYS: Final = frozenset({"project_public_id", "key_public_id"})


def days_of(tenant_id: int, columns: Collection[str] = ()) -> QuerySet[Any]:
    """A tenant's sums by day, in as few rows as can be grouped and narrowed by these columns."""
    by_key = not _OF_KEYS.isdisjoint(columns)
    days: QuerySet[Any] = (UsageDay if by_key else UsageDayTotal).objects.filter(tenant_id=tenant_id)
    return days


def hours_of(tenant_id: int, columns: Collection[str] = ()) -> QuerySet[Any]:
    """As `days_of`, by UTC's hours."""
    by_key = not _OF_KEYS.isdisjoint(columns)
    hours: QuerySet[Any] = (UsageHour if by_key else UsageHourTotal).objects.filter(tenant_id=tenant_id)
    return hours


def days_of_keys(tenant_id: int) -> QuerySet[Any]:
    """As `days_of`, for what asks for keys or projects, and for neither tier nor finish reason."""
    return UsageDayOfKey.objects.filter(tenant_id=tenant_id)


def failed_in(rows: QuerySet[Any]) -> Sum:
    """Annotation: how many requests of these sums ended by an error or at their deadline."""
    if rows.model is UsageDayOfKey:
        return Sum("failed", default=0)
    return Sum("requests", filter=FAILED, default=0)
