"""The ledger's sums by hour and by day, and beside them its latencies as histograms: what reports read.

Kept twice: by project and key, and in total. A thousand busy keys make a thousand times as many rows, and most reports
ask for none of them. And days a third time, by project, key and model alone: who used most. `inference/rollups.py`
chooses.

Written by triggers on the ledger and its adjustments alone, in the transaction that adds their rows:
ledger and roll-ups can't disagree, whoever writes (`manage.py reconcile` proves it). A day is the tenant's
own, as fixed on the row; an hour is UTC's.
"""

from __future__ import annotations

from django.db import models

from inference.models.histogram import HistogramField
from tenants.models import Tenant
from tenants.scope import TenantScopedManager


class _Counts(models.Model):
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="+", db_index=False)
    requests = models.BigIntegerField(default=0)
    prompt_tokens = models.BigIntegerField(default=0)
    cached_tokens = models.BigIntegerField(default=0)
    completion_tokens = models.BigIntegerField(default=0)
    cost_microusd = models.BigIntegerField(default=0)
    adjustment_microusd = models.BigIntegerField(default=0)

    class Meta:
        abstract = True


class _Sums(_Counts):
    model = models.CharField(max_length=200)
    tier = models.CharField(max_length=32)
    finish_reason = models.CharField(max_length=32)
    """Empty for adjustments."""
    ttft = HistogramField(default=dict)
    """From acceptance to the first token, of every request that had one."""
    total = HistogramField(default=dict)
    """From acceptance to the end, of requests that ended well (stop, length)."""

    class Meta:
        abstract = True


class _ByKey(_Sums):
    project_public_id = models.UUIDField(null=True)
    key_public_id = models.UUIDField(null=True)

    class Meta:
        abstract = True


_TOTAL = ["model", "tier", "finish_reason"]
_BY_KEY = ["project_public_id", "key_public_id", *_TOTAL]


class UsageHour(_ByKey):
    starts_at = models.DateTimeField()

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        constraints = [
            # Found by the trigger's upsert; a tenant's report over a span of hours scans a part of it.
            models.UniqueConstraint(
                fields=["tenant", "starts_at", *_BY_KEY], name="usage_hour_once", nulls_distinct=False
            ),
        ]

    def __str__(self) -> str:
        return f"{self.starts_at:%Y-%m-%d %H}: {self.requests} requests"


class UsageDay(_ByKey):
    day = models.DateField()

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        constraints = [
            # As for hours.
            models.UniqueConstraint(
                fields=["tenant", "day", *_BY_KEY], name="usage_day_once", nulls_distinct=False
            ),
        ]
        indexes = [
            # What one key used, and which keys were used lately.
            models.Index(fields=["tenant", "key_public_id", "day"], name="usage_day_by_key"),
            # What one project used.
            models.Index(fields=["tenant", "project_public_id", "day"], name="usage_day_by_project"),
        ]

    def __str__(self) -> str:
        return f"{self.day}: {self.requests} requests"


class UsageHourTotal(_Sums):
    starts_at = models.DateTimeField()

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        constraints = [
            # As for hours by key.
            models.UniqueConstraint(fields=["tenant", "starts_at", *_TOTAL], name="usage_hour_total_once"),
        ]

    def __str__(self) -> str:
        return f"{self.starts_at:%Y-%m-%d %H}: {self.requests} requests"


class UsageDayTotal(_Sums):
    day = models.DateField()

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        constraints = [
            # As for hours by key.
            models.UniqueConstraint(fields=["tenant", "day", *_TOTAL], name="usage_day_total_once"),
        ]

    def __str__(self) -> str:
        return f"{self.day}: {self.requests} requests"


class UsageDayOfKey(_Counts):
    """A day of a key and a model, whatever the tier and end: half the rows of `UsageDay`, and short ones."""

    day = models.DateField()
    project_public_id = models.UUIDField(null=True)
    key_public_id = models.UUIDField(null=True)
    model = models.CharField(max_length=200)
    failed = models.BigIntegerField(default=0)
    """Of the requests, those that ended by an error or at their deadline."""

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        constraints = [
            # As for the other days.
            models.UniqueConstraint(
                fields=["tenant", "day", "project_public_id", "key_public_id", "model"],
                name="usage_day_of_key_once",
                nulls_distinct=False,
            ),
        ]
        indexes = [
            # What one key used, and the days of those that used most.
            models.Index(fields=["tenant", "key_public_id", "day"], name="usage_day_of_key_by_key"),
            # What one project used.
            models.Index(fields=["tenant", "project_public_id", "day"], name="usage_day_of_key_by_project"),
        ]

    def __str__(self) -> str:
        return f"{self.day}: {self.requests} requests"
