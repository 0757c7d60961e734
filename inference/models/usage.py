"""The usage ledger: one row per request, whatever its end. Append-only: a trigger refuses UPDATE and DELETE.

The table is partitioned by the month in which a request was accepted (services/partitions.py); that moment
decides as well which price holds, and to which day and month of its tenant the request belongs. Both are
fixed on the row. A trigger adds each new row to the roll-ups (rollup.py), in the same transaction, and
notes its request id in RecordedRequest, whose primary key spans all partitions: one row per request.

Corrections are rows of another table (adjustment.py). Keys and users are kept by public id, not by
reference: the ledger outlives them, and a row must never be lost because one of them is gone.
"""

from __future__ import annotations

import uuid_utils.compat
from django.db import models
from django.db.models import F, Q

from tenants.models import Tenant
from tenants.scope import TenantScopedManager


class UsageRecord(models.Model):
    # In the database the primary key is (id, created_at): a partitioned table's must hold its partition key.
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, editable=False)
    request_id = models.CharField(max_length=128)
    """Unique by RecordedRequest: an event that is delivered twice is billed once."""
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="usage_records")
    project_public_id = models.UUIDField(null=True)
    """The project of its key, at that time."""
    key_public_id = models.UUIDField(null=True)
    user_public_id = models.UUIDField(null=True)
    model = models.CharField(max_length=200)
    tier = models.CharField(max_length=32)
    endpoint = models.CharField(max_length=64, blank=True)
    finish_reason = models.CharField(max_length=32)
    error_code = models.CharField(max_length=64, blank=True)
    prompt_tokens = models.PositiveIntegerField()
    cached_tokens = models.PositiveIntegerField(default=0)
    completion_tokens = models.PositiveIntegerField()
    cost_microusd = models.PositiveBigIntegerField(default=0)
    """By the price that held when the request was accepted; never reckoned anew."""
    price_public_id = models.UUIDField(null=True)
    """That price; null where the model had none."""
    day = models.DateField()
    """The day of acceptance in the tenant's time zone as it was then: budgets and daily reports count by it."""
    reservation_id = models.CharField(max_length=128, blank=True)
    worker_id = models.CharField(max_length=128, blank=True)
    decision = models.TextField(default="", db_default="", blank=True)
    """Why it was admitted: services/decision.py's, as JSON."""
    attempts = models.PositiveIntegerField(default=0)
    created_at = models.DateTimeField()
    """Accepted by the gateway."""
    claimed_at = models.DateTimeField(null=True)
    first_token_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField()
    recorded_at = models.DateTimeField(auto_now_add=True)

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["-id"]
        indexes = [
            # A tenant's requests over a span of time: the console's request log, exports.
            models.Index(fields=["tenant", "-created_at", "-id"], name="usage_by_tenant_and_time"),
            # A tenant's budgets, rebuilt after Redis was lost; the statement's check.
            models.Index(fields=["tenant", "day"], name="usage_by_tenant_and_day"),
            # The operator's list, newest first.
            models.Index(fields=["-created_at", "-id"], name="usage_by_time"),
            # One request, by the id that its client has.
            models.Index(fields=["request_id"], name="usage_by_request"),
        ]
        constraints = [
            models.CheckConstraint(condition=~Q(request_id=""), name="usage_has_a_request"),
            models.CheckConstraint(
                condition=Q(cached_tokens__lte=F("prompt_tokens")), name="usage_cached_within_prompt"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.request_id}: {self.prompt_tokens} + {self.completion_tokens} tokens"

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class RecordedRequest(models.Model):
    """The request ids that the ledger has. Written by the ledger's trigger alone."""

    request_id = models.CharField(max_length=128, primary_key=True)
    created_at = models.DateTimeField()
    """As the ledger row's: goes when its month goes."""

    def __str__(self) -> str:
        return self.request_id


class ParkedUsageEvent(models.Model):
    """A usage event that can't become a ledger row (unknown tenant, impossible values): put aside so that
    it neither blocks the stream nor gets lost. An operator repairs the cause and files it again."""

    fingerprint = models.CharField(max_length=64, unique=True, editable=False)
    """SHA-256 of the event: one that comes again is parked once, whatever is wrong with its ids."""
    request_id = models.CharField(max_length=200)
    reason = models.CharField(max_length=400)
    event = models.JSONField()
    """All of protocol.UsageEvent's fields."""
    parked_at = models.DateTimeField(auto_now_add=True)
    filed_at = models.DateTimeField(null=True)
    """When it became a ledger row after all."""

    class Meta:
        ordering = ["-id"]
        indexes = [
            # The operator's list of what still waits.
            models.Index(fields=["-id"], condition=Q(filed_at__isnull=True), name="parked_usage_open"),
        ]

    def __str__(self) -> str:
        return f"{self.request_id}: {self.reason}"
