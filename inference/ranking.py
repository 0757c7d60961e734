"""Which models, keys or projects used most: the first ones by rank, the others together, and the first ones' days."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from django.db.models import Count, F, QuerySet, Sum, Window

from inference.reports import Dimension
from inference.request_log import Wanted
from inference.rollups import days_of, days_of_keys, failed_in
from inference.selectors import COST, DayOfModel, today_of, total
from tenants.models import Tenant
from tenants.selectors import api_key_names, project_names

COLUMNS: Final = {
    Dimension.MODEL: "model",
    Dimension.KEY: "key_public_id",
    Dimension.PROJECT: "project_public_id",
}
_NONE: Final = {
    Dimension.MODEL: "Adjustments",
    Dimension.KEY: "Without a key: the chat",
    Dimension.PROJECT: "Without a project",
}
_GONE: Final = {Dimension.KEY: "A deleted key", Dimension.PROJECT: "A deleted project"}


class Measure(StrEnum):
    TOKENS = "tokens"
    COST = "cost"
    REQUESTS = "requests"


_ORDER: Final = {Measure.TOKENS: "-tokens", Measure.COST: "-cost", Measure.REQUESTS: "-all_requests"}


@dataclass(frozen=True, slots=True)
class Rank:
    """One of those ranked, or the others together."""

    value: str
    """The model, or the public id of a key or project; "" for what has none."""
    name: str
    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    cost_microusd: int
    """Adjustments included."""
    days: dict[date, tuple[int, int]] = field(default_factory=dict)
    """Tokens and micro-USD of the days that have any."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def of(self, measure: Measure) -> int:
        return {
            Measure.TOKENS: self.total_tokens,
            Measure.COST: self.cost_microusd,
            Measure.REQUESTS: self.requests,
        }[measure]


@dataclass(frozen=True, slots=True)
class Ranking:
    first: list[Rank]
    others: Rank | None
    number_of_others: int


def ranking(
    tenant: Tenant,
    every: list[DayOfModel],
    by: Dimension,
    measure: Measure,
    *,
    days: int,
    wanted: Wanted,
    limit: int,
    drawn: int = 0,
    now: datetime | None = None,
) -> Ranking:
    """The first `limit`, the first `drawn` of them with their days. `every`: the same use by day and model, whose sum
    less the first ones' is the others'. Three queries at most, whatever the number of keys."""
    rows = _narrowed(tenant, by, days=days, wanted=wanted, now=now)
    column = COLUMNS[by]
    sums = (
        rows.values(column)
        .annotate(
            all_requests=Sum("requests"),
            all_failed=failed_in(rows),
            prompt=Sum("prompt_tokens"),
            completion=Sum("completion_tokens"),
            cost=Sum(COST),
            tokens=Sum(F("prompt_tokens") + F("completion_tokens")),
            groups=Window(Count("*")),
        )
        .order_by(_ORDER[measure], column)[:limit]
    )
    found: list[dict[str, Any]] = list(sums)
    names = _names(tenant, by, [row[column] for row in found])
    of_days = _days(rows, column, [row[column] for row in found[:drawn]])
    first = [
        Rank(
            value="" if row[column] is None else str(row[column]),
            name=names[row[column]],
            requests=int(row["all_requests"]),
            failed=int(row["all_failed"]),
            prompt_tokens=int(row["prompt"]),
            completion_tokens=int(row["completion"]),
            cost_microusd=int(row["cost"]),
            days=of_days.get(row[column], {}),
        )
        for row in found
    ]
    number = int(found[0]["groups"]) - len(first) if found else 0
    return Ranking(first, _others(every, first) if number else None, number)


def _narrowed(
    tenant: Tenant, by: Dimension, *, days: int, wanted: Wanted, now: datetime | None
) -> QuerySet[Any]:
    of_keys = by is not Dimension.MODEL or wanted.key or wanted.project
    every = days_of_keys(tenant.pk) if of_keys else days_of(tenant.pk)
    rows = every.filter(day__gte=today_of(tenant, now) - timedelta(days=days - 1))
    if wanted.model:
        rows = rows.filter(model=wanted.model)
    if wanted.key:
        rows = rows.filter(key_public_id=wanted.key)
    return rows.filter(project_public_id=wanted.project) if wanted.project else rows


def _days(rows: QuerySet[Any], column: str, values: list[Any]) -> dict[Any, dict[date, tuple[int, int]]]:
    if not values:
        return {}
    chosen = rows.filter(**{f"{column}__in": [value for value in values if value is not None]})
    if None in values:
        chosen |= rows.filter(**{f"{column}__isnull": True})
    sums = chosen.values(column, "day").annotate(
        tokens=Sum(F("prompt_tokens") + F("completion_tokens")), cost=Sum(COST)
    )
    found: dict[Any, dict[date, tuple[int, int]]] = {}
    for row in sums.order_by():
        found.setdefault(row[column], {})[row["day"]] = (int(row["tokens"]), int(row["cost"]))
    return found


def _names(tenant: Tenant, by: Dimension, values: Iterable[Any]) -> dict[Any, str]:
    values = list(values)
    ids: set[UUID] = {value for value in values if isinstance(value, UUID)}
    known: dict[UUID, str] = {}
    if by is Dimension.KEY:
        known = api_key_names(tenant, ids)
    elif by is Dimension.PROJECT:
        known = project_names(tenant, ids)
    return {
        value: _NONE[by] if not value else known.get(value, _GONE[by]) if isinstance(value, UUID) else value
        for value in values
    }


def _others(every: list[DayOfModel], first: list[Rank]) -> Rank:
    whole = total(every)
    return Rank(
        value="",
        name="Others",
        requests=whole.requests - sum(rank.requests for rank in first),
        failed=sum(row.failed for row in every) - sum(rank.failed for rank in first),
        prompt_tokens=whole.prompt_tokens - sum(rank.prompt_tokens for rank in first),
        completion_tokens=whole.completion_tokens - sum(rank.completion_tokens for rank in first),
        cost_microusd=whole.cost_microusd - sum(rank.cost_microusd for rank in first),
    )
