"""A limit to be tried, and what it would have done."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from inference.services.try_limit import DAYS_MAX, Tried
from tenants.principal import Calendar, LimitMetric


class LimitToTry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    metric: LimitMetric
    amount: Annotated[int, Meta(ge=1, le=10**12)]
    period_s: Annotated[int, Meta(ge=0, le=31 * 86_400)] = 60
    """Of a rate."""
    burst: Annotated[int, Meta(ge=1, le=10**12)] | None = None
    """Absent: the amount."""
    calendar: Calendar | None = None
    """Makes it a budget."""
    model: Annotated[str, Meta(max_length=200)] = ""
    key: str | None = None
    days: Annotated[int, Meta(ge=1, le=DAYS_MAX)] = 7


class DayObject(msgspec.Struct, kw_only=True):
    day: str
    requests: int
    refused: int


class TriedLimit(msgspec.Struct, kw_only=True):
    requests: int
    admitted: int
    refused: int
    never: int
    """Of the refused: larger than the limit itself."""
    used: int
    longest_wait_s: float
    days: list[DayObject]
    examples: list[str]
    """Request ids of the first that would have been refused."""
    object: str = "quota.trial"


def tried_object(tried: Tried) -> TriedLimit:
    return TriedLimit(
        requests=tried.requests,
        admitted=tried.requests - tried.refused,
        refused=tried.refused,
        never=tried.never,
        used=tried.used,
        longest_wait_s=round(tried.longest_wait_s, 3),
        days=[
            DayObject(day=day.isoformat(), requests=of.requests, refused=of.refused)
            for day, of in sorted(tried.days.items())
        ],
        examples=tried.examples,
    )
