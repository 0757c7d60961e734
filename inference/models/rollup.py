"""The ledger's sums by hour and by day, and its latencies as histograms: what reports read.

Written by triggers on the ledger and its adjustments alone, in the transaction that adds their rows:
ledger and roll-ups can't disagree, whoever writes (`manage.py reconcile` proves it). A day is the tenant's
own, as fixed on the row; an hour is UTC's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from django.db import models

from tenants.models import Tenant
from tenants.scope import TenantScopedManager

LATENCY_STEP: Final = 1.1
"""Each bucket of a histogram is so many times as wide as the one before: a percentile is right to 5 %."""


class _Sums(models.Model):
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="+", db_index=False)
    project_public_id = models.UUIDField(null=True)
    key_public_id = models.UUIDField(null=True)
    model = models.CharField(max_length=200)
    tier = models.CharField(max_length=32)
    finish_reason = models.CharField(max_length=32)
    """Empty for adjustments."""
    requests = models.BigIntegerField(default=0)
    prompt_tokens = models.BigIntegerField(default=0)
    cached_tokens = models.BigIntegerField(default=0)
    completion_tokens = models.BigIntegerField(default=0)
    cost_microusd = models.BigIntegerField(default=0)
    adjustment_microusd = models.BigIntegerField(default=0)

    class Meta:
        abstract = True


_DIMENSIONS = ["project_public_id", "key_public_id", "model", "tier", "finish_reason"]


class UsageHour(_Sums):
    starts_at = models.DateTimeField()

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        constraints = [
            # Found by the trigger's upsert; a tenant's report over a span of hours scans a part of it.
            models.UniqueConstraint(
                fields=["tenant", "starts_at", *_DIMENSIONS], name="usage_hour_once", nulls_distinct=False
            ),
        ]

    def __str__(self) -> str:
        return f"{self.starts_at:%Y-%m-%d %H}: {self.requests} requests"


class UsageDay(_Sums):
    day = models.DateField()

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        constraints = [
            # As for hours.
            models.UniqueConstraint(
                fields=["tenant", "day", *_DIMENSIONS], name="usage_day_once", nulls_distinct=False
            ),
        ]

    def __str__(self) -> str:
        return f"{self.day}: {self.requests} requests"


class LatencyMetric(models.TextChoices):
    TTFT = "ttft"
    """From acceptance to the first token, of every request that had one."""
    TOTAL = "total"
    """From acceptance to the end, of requests that ended well (stop, length)."""


class LatencyDay(models.Model):
    """How many requests of a day took between LATENCY_STEP ** (bucket - 1) and LATENCY_STEP ** bucket ms."""

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="+", db_index=False)
    day = models.DateField()
    project_public_id = models.UUIDField(null=True)
    key_public_id = models.UUIDField(null=True)
    model = models.CharField(max_length=200)
    tier = models.CharField(max_length=32)
    metric = models.CharField(max_length=8, choices=LatencyMetric)
    bucket = models.SmallIntegerField()
    requests = models.BigIntegerField()

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        constraints = [
            # As for hours.
            models.UniqueConstraint(
                fields=[
                    "tenant",
                    "day",
                    "project_public_id",
                    "key_public_id",
                    "model",
                    "tier",
                    "metric",
                    "bucket",
                ],
                name="latency_day_once",
                nulls_distinct=False,
            ),
            models.CheckConstraint(
                condition=models.Q(metric__in=LatencyMetric.values), name="latency_metric_is_known"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.day} {self.metric}: {self.requests} in bucket {self.bucket}"


def percentile_ms(histogram: Mapping[int, int], share: float) -> float | None:
    """The latency that `share` (0 to 1) of the requests did not exceed; None without requests."""
    wanted = math.ceil(share * sum(histogram.values()))
    for bucket in sorted(histogram):
        wanted -= histogram[bucket]
        if wanted <= 0:
            # In the middle of the bucket, as a ratio: wrong by at most half a step either way.
            return float(LATENCY_STEP ** (bucket - 0.5)) if bucket > 0 else 1.0
    return None
