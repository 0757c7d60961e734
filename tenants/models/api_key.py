"""API keys: only a keyed digest is stored, the secret is shown once.

A key reads `wr_live_<lookup>_<secret><checksum>`. The lookup id finds the row by an index and is no
secret; see `tenants/key_format.py` for the rest.
"""

from __future__ import annotations

import uuid_utils.compat
from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q
from django.db.models.functions import Length
from django.db.models.lookups import Exact

from tenants.key_format import DIGEST_BYTES, PREFIX
from tenants.models.project import Project
from tenants.models.service_account import ServiceAccount
from tenants.models.tenant import Tenant
from tenants.models.tier import Tier
from tenants.principal import Scope
from tenants.scope import TenantScopedManager


class ApiKey(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="api_keys")
    name = models.CharField(max_length=120)
    lookup_id = models.CharField(max_length=16, unique=True, editable=False)
    digest = models.BinaryField(max_length=DIGEST_BYTES, editable=False)
    """HMAC-SHA256 of the whole key under the pepper: a stolen database alone gives no key, nor a way to guess."""
    scopes = ArrayField(models.CharField(max_length=32, choices=[(s.value, s.value) for s in Scope]))
    project = models.ForeignKey(
        Project, null=True, blank=True, on_delete=models.SET_NULL, related_name="api_keys"
    )
    service_account = models.ForeignKey(
        ServiceAccount,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="api_keys",
        editable=False,
    )
    """Whose it is, where it is no person's."""
    allowed_models = ArrayField(models.CharField(max_length=200), default=list, blank=True)
    """By the names that clients use; empty allows all."""
    allowed_networks = ArrayField(models.CharField(max_length=43), default=list, blank=True)
    """CIDR blocks that requests may come from; empty allows all."""
    max_tier = models.ForeignKey(Tier, null=True, blank=True, on_delete=models.PROTECT, related_name="+")
    """Its requests go no better than this, however good the tenant's tier is."""
    waits_for_rate = models.BooleanField(
        "waits its turn",
        default=False,
        db_default=False,
        help_text="Over a rate its requests wait, up to their deadline, instead of being refused (429).",
    )
    previous_digest = models.BinaryField(max_length=DIGEST_BYTES, null=True, editable=False)
    """The key before the last rotation: good until `previous_until`."""
    previous_until = models.DateTimeField(null=True, editable=False)
    rotation_digest = models.BinaryField(max_length=DIGEST_BYTES, null=True, editable=False)
    """Of the id under which it was rotated last: the same id again changes nothing."""
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+", editable=False
    )
    created_at = models.DateTimeField(auto_now_add=True)

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        verbose_name = "API key"
        ordering = ["-id"]
        indexes = [
            # A tenant's keys, newest first: the console's and the admin's list.
            models.Index(fields=["tenant", "-id"], name="api_key_by_tenant"),
        ]
        constraints = [
            models.CheckConstraint(condition=~Q(name=""), name="api_key_has_a_name"),
            models.CheckConstraint(
                condition=Exact(Length("digest"), DIGEST_BYTES), name="api_key_digest_is_sha256"
            ),
            models.CheckConstraint(
                condition=Q(scopes__contained_by=[s.value for s in Scope]) & Q(scopes__len__gte=1),
                name="api_key_scopes_are_known",
            ),
            models.CheckConstraint(
                condition=Q(expires_at__isnull=True) | Q(expires_at__gt=models.F("created_at")),
                name="api_key_expires_after_creation",
            ),
            models.CheckConstraint(
                condition=Q(previous_digest__isnull=True, previous_until__isnull=True)
                | Q(
                    previous_digest__isnull=False,
                    previous_until__isnull=False,
                    rotation_digest__isnull=False,
                ),
                name="api_key_previous_has_an_end",
            ),
            # Lets a key's limit point at (tenant, key), so that it can't name another tenant's key.
            models.UniqueConstraint(fields=["tenant", "id"], name="api_key_tenant_and_id"),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}...)"

    def __repr__(self) -> str:
        return f"<ApiKey {self.prefix}>"

    @property
    def prefix(self) -> str:
        """The part that may be shown: enough to find the key, nothing of the secret."""
        return f"{PREFIX}{self.lookup_id}"


class ApiKeyUse(models.Model):
    """When a key was last used. A table of its own: the key's row stays cold, and each gateway writes
    at most once a minute and key."""

    api_key = models.OneToOneField(ApiKey, primary_key=True, on_delete=models.CASCADE, related_name="use")
    last_used_at = models.DateTimeField()

    class Meta:
        verbose_name = "API key use"

    def __str__(self) -> str:
        return f"key {self.api_key_id} last used {self.last_used_at:%Y-%m-%d %H:%M}"
