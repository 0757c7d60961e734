"""Latencies as histograms: how many requests took about how long, in buckets that grow by a tenth.

Bucket b counts those above LATENCY_STEP ** (b - 1) ms, up to LATENCY_STEP ** b ms; 0 those of a millisecond or less.
In PostgreSQL an `integer[]` with the buckets as subscripts, from the first that was met to the last (`[40:52]={3,...}`,
NULL where nothing fell). To add histograms up is one `sum(column[bucket])` for each bucket, over as many rows as the
sums beside them have: a row for each bucket was ten times as slow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F
from django.db.models.sql.compiler import SQLCompiler

LATENCY_STEP: Final = 1.1
"""Each bucket of a histogram is so many times as wide as the one before: a percentile is right to 5 %."""

Histogram = Mapping[int, int]
"""Requests by bucket."""

_ARRAY: Final = re.compile(r"(?:\[(-?\d+):-?\d+\]=)?\{(.*)\}")


class LatencyMetric(models.TextChoices):
    """The columns of a roll-up that are histograms, by name."""

    TTFT = "ttft"
    TOTAL = "total"


if TYPE_CHECKING:
    _Field = models.Field[Any, dict[int, int]]
else:
    _Field = models.Field


class HistogramField(_Field):
    def db_type(self, connection: BaseDatabaseWrapper) -> str:
        return "integer[]"

    def select_format(self, compiler: SQLCompiler, sql: str, params: Any) -> tuple[str, Any]:
        # As text: the driver's lists have lost the first subscript.
        return f"{sql}::text", params

    def from_db_value(self, value: str, *_: Any) -> dict[int, int]:
        parsed = _ARRAY.fullmatch(value)
        assert parsed is not None, value
        first, counts = int(parsed[1] or 1), parsed[2].split(",") if parsed[2] else []
        return {first + i: int(count) for i, count in enumerate(counts) if count != "NULL"}

    def get_prep_value(self, value: Any) -> str:
        if not value:
            return "{}"
        first, last = min(value), max(value)
        counts = (str(value.get(bucket, "NULL")) for bucket in range(first, last + 1))
        return f"[{first}:{last}]={{{','.join(counts)}}}"


def bounds() -> dict[str, models.Aggregate]:
    """Annotations: where the histograms of what is summed up begin and end."""
    found: dict[str, models.Aggregate] = {}
    for metric in LatencyMetric:
        for end, of in (("lower", models.Min), ("upper", models.Max)):
            bound = models.Func(F(metric), template=f"array_{end}(%(expressions)s, 1)")
            found[f"{metric}_{end}"] = of(bound, output_field=models.IntegerField())
    return found


def histogram_sums(bounded: Sequence[Mapping[str, Any]]) -> dict[str, HistogramSum]:
    """Annotations: the sum of each metric's histograms, of rows whose `bounds` are these."""
    sums: dict[str, HistogramSum] = {}
    for metric in LatencyMetric:
        met = [row for row in bounded if row[f"{metric}_lower"] is not None]
        first = min((row[f"{metric}_lower"] for row in met), default=0)
        last = max((row[f"{metric}_upper"] for row in met), default=0)
        sums[f"sum_{metric}"] = HistogramSum(metric, range(first, last + 1))
    return sums


class HistogramSum(models.Aggregate):
    """The sum of a HistogramField over rows: a list with the count of each bucket from `buckets.start` on."""

    def __init__(self, name: str, buckets: range) -> None:
        super().__init__(name, output_field=models.Field())
        self.buckets = buckets

    def as_sql(  # type: ignore[override]
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **_: Any
    ) -> tuple[str, tuple[Any, ...]]:
        column, _params = compiler.compile(self.get_source_expressions()[0])
        sums = ",".join(f"sum({column}[{bucket}])" for bucket in self.buckets)
        return f"ARRAY[{sums}]", ()

    def histogram(self, counts: Sequence[int | None]) -> dict[int, int]:
        return {self.buckets.start + i: int(count) for i, count in enumerate(counts) if count}


def percentiles_ms(histogram: Histogram, shares: Sequence[float]) -> tuple[float | None, ...]:
    """For each of `shares` (0 to 1, rising) the latency that so many of the requests did not exceed; None without
    requests. Off by half a bucket at most: by 5 %."""
    requests = sum(histogram.values())
    if not requests:
        return (None,) * len(shares)
    found: list[float | None] = []
    counted = 0
    for bucket in sorted(histogram):
        counted += histogram[bucket]
        while len(found) < len(shares) and counted >= math.ceil(shares[len(found)] * requests):
            # In the middle of the bucket, as a ratio.
            found.append(LATENCY_STEP ** (bucket - 0.5) if bucket > 0 else 1.0)
    return tuple(found)
