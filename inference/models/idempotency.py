"""What an `Idempotency-Key` stands for: one request, and for a day the answer that it got."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from tenants.models import Tenant
from tenants.scope import TenantScopedManager


class IdempotentRequest(models.Model):
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="idempotent_requests")
    key_public_id = models.UUIDField()
    """The API key's: two keys of a tenant never share a request."""
    key_digest = models.CharField(max_length=64)
    """SHA-256, hex, of the idempotency key."""
    body_digest = models.CharField(max_length=64)
    """The same of route and body."""
    request_hex = models.CharField(max_length=32)
    """Of the request's id, without the prefix that its route gives it."""
    content_type = models.CharField(max_length=80, default="")
    """Empty until the answer is whole."""
    body = models.BinaryField(default=b"")
    """The answer as the client got it; of a stream, its events."""
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["-id"]
        indexes = [
            # What the daily sweep deletes.
            models.Index(fields=["expires_at"], name="idempotent_by_expiry"),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "key_public_id", "key_digest"], name="idempotency_key_is_unique"
            ),
            models.CheckConstraint(condition=~Q(request_hex=""), name="idempotent_has_an_id"),
        ]

    def __str__(self) -> str:
        return self.request_hex
