"""The usage ledger: one row per request, whatever its end. Append-only: a trigger refuses UPDATE and DELETE.

Corrections are new rows. Keys and users are kept by public id, not by reference: the ledger outlives
them, and a row must never be lost because one of them is gone.
"""

from __future__ import annotations

import uuid_utils.compat
from django.db import models
from django.db.models import F, Q

from tenants.models import Tenant
from tenants.scope import TenantScopedManager


class UsageRecord(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    request_id = models.CharField(max_length=128, unique=True)
    """Unique: an event that is delivered twice is billed once."""
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="usage_records")
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
    reservation_id = models.CharField(max_length=128, blank=True)
    worker_id = models.CharField(max_length=128, blank=True)
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
            # A tenant's usage over a span of time: reports and the console's request log.
            models.Index(fields=["tenant", "-finished_at"], name="usage_by_tenant_and_time"),
            # The operator's list, newest first, and retention.
            models.Index(fields=["-finished_at"], name="usage_by_time"),
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
