"""Who changed what, from where, before and after. Append-only: a trigger refuses UPDATE and DELETE."""

from __future__ import annotations

import uuid_utils.compat
from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models

from tenants.models.tenant import Tenant
from tenants.scope import TenantScopedManager


class ActorKind(models.TextChoices):
    USER = "user"
    KEY = "key"
    SYSTEM = "system"


class AuditEntry(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, null=True, on_delete=models.PROTECT, related_name="audit_entries")
    """None: the operator's own affairs (tiers, users)."""
    actor_kind = models.CharField(max_length=8, choices=ActorKind)
    actor_user = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.PROTECT, related_name="+"
    )
    actor_label = models.CharField(max_length=254)
    """The e-mail, the key's prefix, or the program: readable even when the account is gone."""
    ip_address = models.GenericIPAddressField(null=True)
    action = models.CharField(max_length=64)
    target_type = models.CharField(max_length=32)
    target_public_id = models.UUIDField(null=True)
    target_label = models.CharField(max_length=254, blank=True)
    before = models.JSONField(null=True, encoder=DjangoJSONEncoder)
    after = models.JSONField(null=True, encoder=DjangoJSONEncoder)
    created_at = models.DateTimeField(auto_now_add=True)

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        verbose_name_plural = "audit entries"
        ordering = ["-id"]
        indexes = [
            # A tenant's history, newest first: console and admin.
            models.Index(fields=["tenant", "-id"], name="audit_by_tenant"),
            # "What happened to this key?": the history of one object.
            models.Index(fields=["target_public_id", "-id"], name="audit_by_target"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(actor_kind__in=ActorKind.values), name="audit_actor_kind_is_known"
            ),
            models.CheckConstraint(
                condition=~models.Q(actor_kind=ActorKind.USER) | models.Q(actor_user__isnull=False),
                name="audit_user_is_named",
            ),
            models.CheckConstraint(condition=~models.Q(action=""), name="audit_has_an_action"),
        ]

    def __str__(self) -> str:
        return f"{self.actor_label}: {self.action}"
