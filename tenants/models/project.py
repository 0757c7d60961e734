"""A label inside a tenant: keys belong to one, and reports are grouped by it."""

from __future__ import annotations

import uuid_utils.compat
from django.db import models

from tenants.models.tenant import Tenant
from tenants.scope import TenantScopedManager


class Project(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="projects")
    name = models.CharField(max_length=120)
    created_at = models.DateTimeField(auto_now_add=True)

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["name", "id"]
        constraints = [
            # Serves as well the list of a tenant's projects.
            models.UniqueConstraint(fields=["tenant", "name"], name="project_name_once_per_tenant"),
            models.CheckConstraint(condition=~models.Q(name=""), name="project_has_a_name"),
            # Lets a key point at (tenant, project), so that it can't name another tenant's.
            models.UniqueConstraint(fields=["tenant", "id"], name="project_tenant_and_id"),
        ]

    def __str__(self) -> str:
        return self.name
