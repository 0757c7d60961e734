"""How the console writes numbers: grouped, with units, the same on every page."""

from __future__ import annotations

from datetime import datetime, timedelta

from django import template

from tenants.principal import LimitMetric, LimitScope, LimitSpec

register = template.Library()

_UNKNOWN = "\N{EN DASH}"
_PERIODS = {1: "second", 60: "minute", 3600: "hour", 86400: "day"}


@register.filter
def count(value: int | None) -> str:
    """1234567 -> 1,234,567."""
    return _UNKNOWN if value is None else f"{value:,}"


@register.filter
def usd(microusd: int | None) -> str:
    """1234567 -> $1.23; less than a dollar as 745678 -> $0.7457, less than a cent as 42 -> $0.000042."""
    if microusd is None:
        return _UNKNOWN
    sign, whole = ("-" if microusd < 0 else ""), abs(microusd)
    if whole >= 1_000_000 or whole == 0:
        cents = (whole + 5_000) // 10_000
        return f"{sign}${cents // 100:,}.{cents % 100:02}"
    if whole >= 10_000:
        return f"{sign}${whole / 1_000_000:.4f}"
    return f"{sign}$0.{whole:06}"


@register.filter
def usd_exact(microusd: int) -> str:
    """1234567 -> $1.234567: for books, that add up."""
    whole = abs(microusd)
    return f"{'-' if microusd < 0 else ''}${whole // 1_000_000:,}.{whole % 1_000_000:06}"


@register.filter
def duration(value: timedelta | int | None) -> str:
    """A timedelta or milliseconds, in the unit that reads best: 340 ms, 1.2 s, 4 min, 3 h."""
    if value is None:
        return _UNKNOWN
    ms = value / timedelta(milliseconds=1) if isinstance(value, timedelta) else value
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = ms / 1000
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


@register.filter
def since(later: datetime | None, earlier: datetime | None) -> timedelta | None:
    """The time between two moments, if both are known."""
    return later - earlier if later is not None and earlier is not None else None


_METRICS = {
    LimitMetric.REQUESTS: "Requests",
    LimitMetric.INPUT_TOKENS: "Input tokens",
    LimitMetric.OUTPUT_TOKENS: "Output tokens",
    LimitMetric.TOKENS: "Tokens",
    LimitMetric.CONCURRENCY: "Requests",
    LimitMetric.COST: "Cost",
}


@register.filter
def limit_title(limit: LimitSpec) -> str:
    """Requests per minute; Requests at once; Cost per month; Tokens per hour of llama-3."""
    what = _METRICS[limit.metric]
    if limit.metric is LimitMetric.CONCURRENCY:
        period = "at once"
    elif limit.calendar is not None:
        period = f"per {limit.calendar}"
    else:
        period = f"per {_PERIODS.get(limit.period_s) or duration(limit.period_s * 1000)}"
    whose = f" of {limit.owner_id}" if limit.scope is LimitScope.MODEL else ""
    return f"{what} {period}{whose}"


@register.filter
def units(value: int, limit: LimitSpec) -> str:
    """An amount of what the limit counts: money as money."""
    return usd(value) if limit.metric is LimitMetric.COST else count(value)


@register.filter
def share(value: int, percent: int) -> int:
    """That many percent of the value, rounded down."""
    return value * percent // 100
