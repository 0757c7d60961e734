"""A member without a person: a program that owns keys, whoever made them and wherever that person goes."""

from __future__ import annotations

import uuid_utils.compat
from django.conf import settings
from django.db import models
from django.db.models import Q

from tenants.models.tenant import Tenant
from tenants.scope import TenantScopedManager


class ServiceAccount(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="service_accounts")
    name = models.CharField(max_length=120)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="+",
        editable=False,
    )
    created_at = models.DateTimeField(auto_now_add=True)
    retired_at = models.DateTimeField(null=True, blank=True, editable=False)

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["name", "id"]
        constraints = [
            # Serves as well the list of a tenant's service accounts.
            models.UniqueConstraint(
                fields=["tenant", "name"],
                condition=Q(retired_at=None),
                name="service_account_name_once_per_tenant",
            ),
            models.CheckConstraint(condition=~Q(name=""), name="service_account_has_a_name"),
            # Lets a key point at (tenant, service account), so that it can't name another tenant's.
            models.UniqueConstraint(fields=["tenant", "id"], name="service_account_tenant_and_id"),
        ]

    def __str__(self) -> str:
        return self.name
