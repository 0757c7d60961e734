"""What a tenant used and what it cost, by day or hour and whatever else: read from the roll-ups, page by page.

A page is found by the last row of the one before, not by counting rows over: the thousandth costs what the
first does.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum
from typing import Any, Final

from django.db.models import CharField, F, Q, QuerySet, Sum, Value
from django.db.models.functions import Cast, Coalesce

from inference.models import LatencyMetric, bounds, histogram_sums, percentiles_ms
from inference.rollups import days_of, hours_of

SHARES: Final = (0.5, 0.95, 0.99)
"""The percentiles of latencies that reports give."""


class BadCursor(ValueError):
    """This page token is none of ours, or of another report."""


class Dimension(StrEnum):
    PROJECT = "project"
    KEY = "key"
    MODEL = "model"
    TIER = "tier"
    FINISH_REASON = "finish_reason"


class Width(StrEnum):
    DAY = "1d"
    """Of the tenant's time zone."""
    HOUR = "1h"
    """Of UTC."""


@dataclass(frozen=True, slots=True)
class Report:
    """What is asked for."""

    tenant_id: int
    since: datetime
    """Hours: from here. Days: those from this moment's date on."""
    until: datetime
    """Not included; of days the last one is the day before this moment's date."""
    width: Width = Width.DAY
    group_by: tuple[Dimension, ...] = ()
    filters: Mapping[Dimension, Sequence[str]] | None = None


@dataclass(frozen=True, slots=True)
class Line:
    starts: date | datetime
    groups: dict[Dimension, str]
    """By what it was asked to be grouped; an empty text where there is none (the console's chat has no key)."""
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_microusd: int
    adjustment_microusd: int
    latency_ms: dict[LatencyMetric, tuple[float | None, ...]]
    """Percentiles as in SHARES, right to 5 %; None of those that nothing is known of. Empty where not asked for."""

    @property
    def total_microusd(self) -> int:
        return self.cost_microusd + self.adjustment_microusd


@dataclass(frozen=True, slots=True)
class Page:
    lines: list[Line]
    next_cursor: str | None


_COLUMNS: Final = {
    Dimension.PROJECT: "project_public_id",
    Dimension.KEY: "key_public_id",
    Dimension.MODEL: "model",
    Dimension.TIER: "tier",
    Dimension.FINISH_REASON: "finish_reason",
}
_SUMS: Final = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cost_microusd",
    "adjustment_microusd",
)


def usage_page(report: Report, *, limit: int, cursor: str | None = None, with_latencies: bool = True) -> Page:
    """The next `limit` lines, oldest first. Two queries, one without latencies. Raises BadCursor."""
    names = ["at", *report.group_by]
    rows = _grouped(_rolled_up(report), report)
    if cursor is not None:
        rows = rows.filter(_after(names, _read_cursor(cursor, report)))
    found = list(
        rows.values(*names)
        .annotate(**{f"sum_{name}": Sum(name) for name in _SUMS}, **(bounds() if with_latencies else {}))
        .order_by(*names)[: limit + 1]
    )
    page, has_more = found[:limit], len(found) > limit
    latencies = _latencies(report, page) if with_latencies else {}
    lines = [
        Line(
            starts=row["at"],
            groups={dimension: row[dimension] for dimension in report.group_by},
            **{name: int(row[f"sum_{name}"]) for name in _SUMS},
            latency_ms=latencies[_key(row, names)] if with_latencies else {},
        )
        for row in page
    ]
    return Page(lines, _write_cursor(page[-1], report) if has_more else None)


def _rolled_up(report: Report) -> QuerySet[Any]:
    columns = [_COLUMNS[dimension] for dimension in (*report.group_by, *(report.filters or {}))]
    if report.width is Width.HOUR:
        rows: QuerySet[Any] = hours_of(report.tenant_id, columns).annotate(at=F("starts_at"))
        return rows.filter(at__gte=report.since, at__lt=report.until)
    rows = days_of(report.tenant_id, columns).annotate(at=F("day"))
    return rows.filter(at__gte=report.since.date(), at__lt=report.until.date())


def _grouped(rows: QuerySet[Any], report: Report) -> QuerySet[Any]:
    for dimension, wanted in (report.filters or {}).items():
        rows = rows.filter(**{f"{_COLUMNS[dimension]}__in": wanted})
    # `model` and `tier` are columns by their own names; ids become text, and none an empty one.
    ids = {
        dimension: Coalesce(Cast(_COLUMNS[dimension], CharField()), Value(""))
        for dimension in report.group_by
        if dimension in (Dimension.PROJECT, Dimension.KEY)
    }
    grouped: QuerySet[Any] = rows.order_by().annotate(**ids)
    return grouped


def _after(names: Sequence[str], values: Sequence[Any]) -> Q:
    """Rows whose (names) come after (values), as SQL's comparison of rows has it."""
    condition = Q()
    for depth in range(len(names)):
        equal = {names[i]: values[i] for i in range(depth)}
        condition |= Q(**equal, **{f"{names[depth]}__gt": values[depth]})
    # The first name's bound again, alone: that one an index can use.
    return Q(**{f"{names[0]}__gte": values[0]}) & condition


def _latencies(
    report: Report, page: Sequence[dict[str, Any]]
) -> dict[tuple[Any, ...], dict[LatencyMetric, tuple[float | None, ...]]]:
    if not page:
        return {}
    names, sums = ["at", *report.group_by], histogram_sums(page)
    rows = _grouped(_rolled_up(report), report).filter(at__gte=page[0]["at"], at__lte=page[-1]["at"])
    return {
        _key(row, names): {
            metric: percentiles_ms(sums[f"sum_{metric}"].histogram(row[f"sum_{metric}"]), SHARES)
            for metric in LatencyMetric
        }
        for row in rows.values(*names).annotate(**sums)
    }


def _key(row: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def _write_cursor(row: Mapping[str, Any], report: Report) -> str:
    values = [row["at"].isoformat(), *(row[dimension] for dimension in report.group_by)]
    text = json.dumps([report.width, list(report.group_by), values], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read_cursor(cursor: str, report: Report) -> list[Any]:
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        width, group_by, values = json.loads(text)
        if width != report.width or group_by != list(report.group_by) or len(values) != len(group_by) + 1:
            raise BadCursor("this page belongs to another report")
        if not all(isinstance(value, str) and "\x00" not in value for value in values):
            raise BadCursor("not a page of ours")
        first = (
            datetime.fromisoformat(values[0]) if report.width is Width.HOUR else date.fromisoformat(values[0])
        )
        if isinstance(first, datetime) and first.tzinfo is None:
            first = first.replace(tzinfo=UTC)
        return [first, *values[1:]]
    except BadCursor:
        raise
    except (ValueError, TypeError, binascii.Error, RecursionError) as error:
        raise BadCursor("not a page of ours") from error
