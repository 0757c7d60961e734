"""A tenant's statement of a month: what each project used of each model, every adjustment, and their sum.

Amounts are whole micro-USD: the sum is the ledger's, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from uuid import UUID

from django.db.models import Sum

from inference.models import UsageAdjustment
from inference.rollups import days_of_keys
from tenants.models import Project, Tenant


@dataclass(frozen=True, slots=True)
class StatementLine:
    project: str
    """Its name; empty where the request's key had none."""
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_microusd: int


@dataclass(frozen=True, slots=True)
class Statement:
    first_day: date
    last_day: date
    lines: list[StatementLine]
    adjustments: list[UsageAdjustment]

    @property
    def usage_microusd(self) -> int:
        return sum(line.cost_microusd for line in self.lines)

    @property
    def adjustment_microusd(self) -> int:
        return sum(adjustment.cost_microusd for adjustment in self.adjustments)

    @property
    def total_microusd(self) -> int:
        return self.usage_microusd + self.adjustment_microusd


def read_month(text: str, today: date) -> date:
    """Its first day, from `2026-11`. Raises ValueError for what is none, or out of reach."""
    month = date.fromisoformat(f"{text}-01")
    if not 2000 <= month.year <= today.year + 1:
        raise ValueError("no month of ours")
    return month


def statement_of(tenant: Tenant, month: date) -> Statement:
    """The month of `month`, in days of the tenant's zone."""
    first = month.replace(day=1)
    last = (first + timedelta(days=31)).replace(day=1) - timedelta(days=1)
    # Adjustments are told one by one: their roll-up rows, which hold no request, would only be empty lines.
    rows = (
        days_of_keys(tenant.pk)
        .filter(requests__gt=0, day__gte=first, day__lte=last)
        .order_by()
        .values("project_public_id", "model")
        .annotate(
            n=Sum("requests"),
            prompt=Sum("prompt_tokens"),
            cached=Sum("cached_tokens"),
            completion=Sum("completion_tokens"),
            cost=Sum("cost_microusd"),
        )
    )
    projects = Project.objects.for_tenant(tenant).values_list("public_id", "name")
    names: dict[UUID | None, str] = dict(projects)
    lines = [
        StatementLine(
            project=names.get(row["project_public_id"], str(row["project_public_id"] or "")),
            model=row["model"],
            requests=int(row["n"]),
            prompt_tokens=int(row["prompt"]),
            cached_tokens=int(row["cached"]),
            completion_tokens=int(row["completion"]),
            cost_microusd=int(row["cost"]),
        )
        for row in rows
    ]
    adjustments = UsageAdjustment.objects.filter(tenant=tenant, day__gte=first, day__lte=last).order_by("id")
    return Statement(
        first, last, sorted(lines, key=lambda line: (line.project, line.model)), list(adjustments)
    )
