"""Someone is asked to join a tenant. The link's secret is derived, not stored: see services/invitations.py."""

from __future__ import annotations

import uuid_utils.compat
from django.conf import settings
from django.db import models
from django.db.models import Q

from tenants.models.member import Role
from tenants.models.tenant import Tenant
from tenants.models.user import LoginEmailField
from tenants.scope import TenantScopedManager


class Invitation(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="invitations")
    email = LoginEmailField()
    role = models.CharField(max_length=16, choices=Role)
    serial = models.PositiveSmallIntegerField(default=1)
    """Counts the links that were made for it: only the last one works."""
    invited_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    mailed_at = models.DateTimeField(null=True)
    """Of the last link. None: it waits for the mail server, or there is none."""
    mail_tried_at = models.DateTimeField(null=True)
    accepted_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["-id"]
        indexes = [
            # What still has to be mailed.
            models.Index(
                fields=["id"],
                condition=Q(mailed_at=None, accepted_at=None, revoked_at=None),
                name="invitation_to_mail",
            ),
        ]
        constraints = [
            # Serves as well the list of a tenant's open invitations.
            models.UniqueConstraint(
                fields=["tenant", "email"],
                condition=Q(accepted_at=None, revoked_at=None),
                name="invitation_open_once_per_address",
            ),
            models.CheckConstraint(condition=Q(role__in=Role.values), name="invitation_role_is_known"),
            models.CheckConstraint(
                condition=Q(accepted_at=None) | Q(revoked_at=None), name="invitation_ends_in_one_way"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.email} as {self.role}"
