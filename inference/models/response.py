"""What `/v1/responses` keeps for its tenant: the answer, and the conversation that it continues."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from tenants.models import Tenant
from tenants.scope import TenantScopedManager


class StoredResponse(models.Model):
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="stored_responses")
    response_id = models.CharField(max_length=128)
    """Also the id of its generation."""
    model = models.CharField(max_length=200)
    """Whose queue that is in."""
    is_final = models.BooleanField()
    """False only of a background response whose end nobody has seen yet."""
    items = models.BinaryField()
    """JSON. The whole conversation before the answer, as input items."""
    num_own_items = models.PositiveIntegerField()
    """So many of the last are this request's own input."""
    body = models.BinaryField()
    """JSON. The response as the client gets it."""
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
            models.Index(fields=["expires_at"], name="response_by_expiry"),
        ]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "response_id"], name="response_id_is_unique"),
            models.CheckConstraint(condition=~Q(response_id=""), name="response_has_an_id"),
        ]

    def __str__(self) -> str:
        return self.response_id
