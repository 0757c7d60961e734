"""What a tenant was told of, once: a budget nearly spent, a key that ends soon, a day that costs more than others."""

from __future__ import annotations

import uuid_utils.compat
from django.db import models

from tenants.models import Tenant
from tenants.scope import TenantScopedManager


class AlertKind(models.TextChoices):
    BUDGET = "budget"
    KEY_EXPIRY = "key_expiry"
    UNUSUAL_SPEND = "unusual_spend"


class Alert(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="alerts")
    kind = models.CharField(max_length=16, choices=AlertKind)
    subject = models.CharField(max_length=64)
    """What it is about: a budget's or key's public id."""
    period = models.CharField(max_length=16)
    """2026-11, 2026-11-29: the next one is told anew."""
    threshold = models.PositiveIntegerField()
    """Percent of a budget, days before a key's end, percent of the usual spend."""
    title = models.CharField(max_length=200)
    text = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)
    mailed_at = models.DateTimeField(null=True)
    """When the mail server took it."""

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["-id"]
        indexes = [
            # A tenant's alerts, newest first.
            models.Index(fields=["tenant", "-id"], name="alert_by_tenant"),
            # What still has to be mailed.
            models.Index(fields=["id"], condition=models.Q(mailed_at__isnull=True), name="alert_to_mail"),
        ]
        constraints = [
            # However often it is looked for, it is told once.
            models.UniqueConstraint(
                fields=["tenant", "kind", "subject", "period", "threshold"], name="alert_once"
            ),
            models.CheckConstraint(condition=models.Q(kind__in=AlertKind.values), name="alert_kind_is_known"),
        ]

    def __str__(self) -> str:
        return self.title
