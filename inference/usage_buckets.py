"""What a tenant used, in buckets of time as OpenAI's usage API has them: the empty ones too, some to a page.

A page ends with a whole bucket, and the next one begins where it ended.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from enum import StrEnum
from itertools import pairwise
from typing import Final

from django.db.models import Q, Sum

from engine_worker.protocol import FinishReason
from inference.reports import Dimension, Line, Report, Width, usage_page
from inference.rollups import days_of

_LINES_AT_ONCE: Final = 2000
"""Where there are more, a page has fewer buckets than were asked for."""
_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)


class Use(StrEnum):
    COMPLETIONS = "completions"
    """Whatever makes text, by any route."""
    EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class Bucket:
    starts_at: datetime
    ends_at: datetime
    lines: list[Line]


@dataclass(frozen=True, slots=True)
class BucketPage:
    buckets: list[Bucket]
    next_at: datetime | None
    """Where the next page begins; None after the last one."""


def bucket_page(report: Report, *, limit: int, use: Use | None = None) -> BucketPage:
    """The first `limit` buckets of the report, whose `since` begins one (see `bucket_start`), or fewer."""
    edges = [report.since]
    while len(edges) <= limit and edges[-1] < report.until:
        edges.append(_next_start(edges[-1], report.width))
    window = replace(report, until=edges[-1])
    if use is not None:
        window = replace(window, filters={**(report.filters or {}), Dimension.MODEL: _models(report, use)})
    lines, cut_at = _whole_buckets(window)
    by_start: dict[date | datetime, list[Line]] = defaultdict(list)
    for line in lines:
        by_start[line.starts].append(line)
    buckets: list[Bucket] = []
    for starts_at, ends_at in pairwise(edges):
        key = starts_at if report.width is Width.HOUR else starts_at.date()
        if key == cut_at:
            return BucketPage(buckets, starts_at)
        buckets.append(Bucket(starts_at, ends_at, by_start.get(key, [])))
    return BucketPage(buckets, edges[-1] if edges[-1] < report.until else None)


def bucket_start(moment: datetime, width: Width) -> datetime:
    """Of the bucket that holds the moment, in the moment's own zone."""
    if width is Width.HOUR:
        return moment.replace(minute=0, second=0, microsecond=0)
    return datetime.combine(moment.date(), time(), moment.tzinfo)


def _next_start(start: datetime, width: Width) -> datetime:
    if width is Width.HOUR:
        return start + _HOUR
    return datetime.combine(start.date() + _DAY, time(), start.tzinfo)


def _whole_buckets(window: Report) -> tuple[list[Line], date | datetime | None]:
    """The lines of the window, or of so many of its buckets as are whole, and where the next one begins."""
    lines: list[Line] = []
    cursor = None
    while True:
        page = usage_page(window, limit=_LINES_AT_ONCE, cursor=cursor, with_latencies=False)
        lines += page.lines
        cursor = page.next_cursor
        if cursor is None:
            return lines, None
        last = lines[-1].starts
        if lines[0].starts != last:
            return [line for line in lines if line.starts != last], last


def _models(report: Report, use: Use) -> list[str]:
    """Of those that the report asks for, the ones that were put to this use.

    An embedding ends well without one output token, a text never does: its end token counts. So the sums tell them
    apart, also of batches, and of months whose single requests are forgotten.
    """
    ended_well = Q(finish_reason=FinishReason.STOP)
    rows = (
        days_of(report.tenant_id)
        .filter(day__gte=report.since.date() - _DAY, day__lte=report.until.date() + _DAY)
        .order_by()
        .values("model")
        .annotate(
            ended=Sum("requests", filter=ended_well, default=0),
            made=Sum("completion_tokens", filter=ended_well, default=0),
        )
    )
    asked = (report.filters or {}).get(Dimension.MODEL)
    return [
        row["model"]
        for row in rows
        if (row["ended"] > 0 and row["made"] == 0) == (use is Use.EMBEDDINGS)
        and (asked is None or row["model"] in asked)
    ]
