"""Corrections of the ledger: new rows, with a reason and an actor. Append-only, like the ledger itself."""

from __future__ import annotations

import uuid_utils.compat
from django.db import models
from django.db.models import Q

from tenants.models import Tenant
from tenants.scope import TenantScopedManager


class UsageAdjustment(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="usage_adjustments")
    request_id = models.CharField(max_length=128, blank=True)
    """The request that is corrected, if it is one."""
    project_public_id = models.UUIDField(null=True)
    key_public_id = models.UUIDField(null=True)
    model = models.CharField(max_length=200, blank=True)
    tier = models.CharField(max_length=32, blank=True)
    cost_microusd = models.BigIntegerField()
    """What is added to the tenant's cost; below 0 a credit."""
    reason = models.CharField(max_length=400)
    actor_label = models.CharField(max_length=254)
    """Who; the audit log has the account and the address."""
    day = models.DateField()
    """The day in the tenant's zone on which it counts: that of its writing, as in any book."""
    created_at = models.DateTimeField()

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["-id"]
        indexes = [
            # A tenant's adjustments of a month: its statement.
            models.Index(fields=["tenant", "day"], name="adjustment_by_tenant_and_day"),
        ]
        constraints = [
            models.CheckConstraint(condition=~Q(reason=""), name="adjustment_has_a_reason"),
            models.CheckConstraint(condition=~Q(actor_label=""), name="adjustment_has_an_actor"),
            models.CheckConstraint(condition=~Q(cost_microusd=0), name="adjustment_changes_something"),
        ]

    def __str__(self) -> str:
        return f"{self.cost_microusd:+} micro-USD: {self.reason}"
