"""Answers of `/v1/usage` and `/v1/usage/costs`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from inference.models import LatencyMetric
from inference.reports import Dimension, Line


class Percentiles(msgspec.Struct):
    p50: float | None
    p95: float | None
    p99: float | None


class UsageLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    object: str
    start: str
    """`2026-11-29`, a day of the tenant's; or `2026-11-29T13:00:00+00:00`, an hour."""
    project: str | msgspec.UnsetType | None = msgspec.UNSET
    key: str | msgspec.UnsetType | None = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    tier: str | msgspec.UnsetType = msgspec.UNSET
    finish_reason: str | msgspec.UnsetType = msgspec.UNSET
    requests: int | msgspec.UnsetType = msgspec.UNSET
    input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    cached_input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    output_tokens: int | msgspec.UnsetType = msgspec.UNSET
    cost_microusd: int
    adjustment_microusd: int
    total_microusd: int
    ttft_ms: Percentiles | msgspec.UnsetType = msgspec.UNSET
    total_ms: Percentiles | msgspec.UnsetType = msgspec.UNSET


class UsagePage(msgspec.Struct):
    data: list[UsageLine]
    has_more: bool
    next_page: str | None
    object: str = "page"


def usage_line(line: Line, *, with_counts: bool) -> UsageLine:
    ids = {Dimension.PROJECT, Dimension.KEY}
    fields: dict[str, Any] = {
        str(name): (value or None) if name in ids else value for name, value in line.groups.items()
    }
    if with_counts:
        fields |= {
            "requests": line.requests,
            "input_tokens": line.prompt_tokens,
            "cached_input_tokens": line.cached_tokens,
            "output_tokens": line.completion_tokens,
            "ttft_ms": _percentiles(line.latency_ms[LatencyMetric.TTFT]),
            "total_ms": _percentiles(line.latency_ms[LatencyMetric.TOTAL]),
        }
    return UsageLine(
        object="usage.line" if with_counts else "cost.line",
        start=line.starts.isoformat() if isinstance(line.starts, datetime) else f"{line.starts:%Y-%m-%d}",
        cost_microusd=line.cost_microusd,
        adjustment_microusd=line.adjustment_microusd,
        total_microusd=line.total_microusd,
        **fields,
    )


def _percentiles(values: tuple[float | None, ...]) -> Percentiles:
    return Percentiles(*(None if value is None else round(value, 1) for value in values))
