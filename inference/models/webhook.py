"""Where a tenant wants its alerts sent, and what became of each: the delivery's row is the job and its log."""

from __future__ import annotations

import uuid_utils.compat
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from inference.models.alert import Alert, AlertKind
from tenants.models import Tenant
from tenants.scope import TenantScopedManager


class WebhookEndpoint(models.Model):
    """Its secret is made from the server's own and `secret_serial` (services/webhooks.py): none is stored."""

    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="webhook_endpoints")
    url = models.CharField(max_length=1000)
    kinds = ArrayField(models.CharField(max_length=16, choices=AlertKind), default=list, blank=True)
    """Of the alerts that it gets; empty is all."""
    secret_serial = models.PositiveIntegerField(default=1)
    previous_until = models.DateTimeField(null=True, blank=True)
    """So long requests are signed with the secret before the last rotation too."""
    disabled_at = models.DateTimeField(null=True, blank=True)
    disabled_reason = models.CharField(max_length=200, blank=True)
    created_by = models.CharField(max_length=254)
    created_at = models.DateTimeField(auto_now_add=True)
    doubt = ""
    """Not stored: why nothing would arrive, by what could be told when its address was given."""

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["id"]
        indexes = [
            # A tenant's endpoints: the console's list, and whom an alert goes to.
            models.Index(fields=["tenant", "id"], name="webhook_by_tenant"),
        ]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "url"], name="webhook_url_once"),
            models.CheckConstraint(condition=Q(secret_serial__gte=1), name="webhook_serial_from_1"),
            models.CheckConstraint(
                condition=Q(kinds__contained_by=AlertKind.values), name="webhook_kinds_are_known"
            ),
        ]

    def __str__(self) -> str:
        return self.url


class DeliveryState(models.TextChoices):
    WAITING = "waiting"
    DELIVERED = "delivered"
    FAILED = "failed"
    """Given up after the last attempt."""


class WebhookDelivery(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    """The `webhook-id` of every attempt: a receiver that has seen it has seen the message."""
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="webhook_deliveries")
    endpoint = models.ForeignKey(WebhookEndpoint, on_delete=models.CASCADE, related_name="deliveries")
    alert = models.ForeignKey(Alert, null=True, on_delete=models.CASCADE, related_name="deliveries")
    """None: somebody tries the endpoint."""
    state = models.CharField(max_length=9, choices=DeliveryState, default=DeliveryState.WAITING)
    attempts = models.PositiveSmallIntegerField(default=0)
    due_at = models.DateTimeField()
    """Not before; while it is sent, when whoever sends it counts as dead."""
    log = models.JSONField(default=list)
    """One object an attempt: at, status or null, error, took_ms."""
    created_at = models.DateTimeField(auto_now_add=True)
    finished_at = models.DateTimeField(null=True)

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["-id"]
        indexes = [
            # An endpoint's deliveries, newest first.
            models.Index(fields=["endpoint", "-id"], name="delivery_by_endpoint"),
            # What still has to be sent.
            models.Index(fields=["due_at"], condition=Q(state="waiting"), name="delivery_due"),
        ]
        constraints = [
            # However often alerts are looked at, each goes to an endpoint once.
            models.UniqueConstraint(fields=["endpoint", "alert"], name="delivery_once"),
            models.CheckConstraint(
                condition=Q(state__in=DeliveryState.values), name="delivery_state_is_known"
            ),
            models.CheckConstraint(
                condition=Q(state="waiting", finished_at=None)
                | (~Q(state="waiting") & Q(finished_at__isnull=False)),
                name="delivery_ends_once",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.public_id}: {self.state}"
