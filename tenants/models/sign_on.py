"""A tenant's own sign-in: an OpenID Connect provider that vouches for the addresses of one domain."""

from __future__ import annotations

import uuid_utils.compat
from allauth.socialaccount.models import SocialApp
from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Q

from tenants.models.member import Role
from tenants.models.tenant import Tenant
from tenants.scope import TenantScopedManager


class TenantSignOn(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="sign_ons")
    domain = models.CharField(
        max_length=253,
        unique=True,
        validators=[RegexValidator(r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", "A domain such as example.com.")],
        help_text="Of the addresses that the provider vouches for. You, the operator, answer for its being theirs.",
    )
    app = models.OneToOneField(SocialApp, on_delete=models.CASCADE, related_name="sign_on", editable=False)
    default_role = models.CharField(
        max_length=16,
        choices=Role,
        default=Role.DEVELOPER,
        help_text="What people are who come by it for the first time.",
    )
    created_at = models.DateTimeField(auto_now_add=True)

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        verbose_name = "single sign-on"
        verbose_name_plural = "single sign-on"
        ordering = ["tenant", "domain"]
        constraints = [
            models.CheckConstraint(
                condition=Q(default_role__in=[role for role in Role if role is not Role.OWNER]),
                name="sign_on_makes_no_owners",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.domain} of {self.tenant}"
