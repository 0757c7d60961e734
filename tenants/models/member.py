"""Who belongs to a tenant, and as what."""

from __future__ import annotations

import uuid_utils.compat
from django.conf import settings
from django.db import models

from tenants.models.tenant import Tenant
from tenants.scope import TenantScopedManager


class Role(models.TextChoices):
    OWNER = "owner"
    ADMIN = "admin"
    DEVELOPER = "developer"
    VIEWER = "viewer"
    BILLING = "billing"


class Membership(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=16, choices=Role)
    created_at = models.DateTimeField(auto_now_add=True)

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["tenant", "id"]
        constraints = [
            # Serves as well the look-up of one person's role in one tenant.
            models.UniqueConstraint(fields=["tenant", "user"], name="membership_once_per_tenant"),
            models.CheckConstraint(condition=models.Q(role__in=Role.values), name="membership_role_is_known"),
        ]

    def __str__(self) -> str:
        return f"{self.user} as {self.role} of {self.tenant}"
