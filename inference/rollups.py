"""Which roll-up answers: the one place that chooses, so that no report reads a row for each key without need."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from django.db.models import QuerySet

from inference.models import UsageDay, UsageDayTotal, UsageHour, UsageHourTotal

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
