"""A customer, team or project that shares the machines: it owns keys, limits and usage."""

from __future__ import annotations

from functools import cache
from zoneinfo import ZoneInfo, available_timezones

import uuid_utils.compat
from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models

from tenants.models.tier import Tier


@cache
def zone_names() -> frozenset[str]:
    """Of the IANA database. Once a process: they are looked up file by file."""
    return frozenset(available_timezones())


class Tenant(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    name = models.CharField(max_length=120)
    slug = models.SlugField(max_length=63, unique=True)
    tier = models.ForeignKey(Tier, on_delete=models.PROTECT, related_name="tenants")
    weight = models.PositiveSmallIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(1000)],
        help_text="Its share against others of its tier, 1 to 1000. Empty: the tier's weight.",
    )
    members = models.ManyToManyField(
        settings.AUTH_USER_MODEL, through="tenants.Membership", related_name="tenants"
    )
    timezone = models.CharField(
        "time zone",
        max_length=64,
        default="UTC",
        help_text="Its days and months begin at midnight there: budgets, reports, statements.",
    )
    suspended_at = models.DateTimeField(null=True, blank=True, editable=False)
    suspended_reason = models.CharField(max_length=200, blank=True, editable=False)
    delete_at = models.DateTimeField(null=True, blank=True, editable=False)
    """When what it owns is deleted. Until then an owner can take that back; it is suspended meanwhile."""
    purged_at = models.DateTimeField(null=True, blank=True, editable=False)
    """When that was done. The row stays, nameless: the ledger refers to it."""
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["name", "id"]
        indexes = [
            # What is to be deleted.
            models.Index(
                fields=["delete_at"],
                condition=models.Q(delete_at__isnull=False, purged_at=None),
                name="tenant_to_delete",
            ),
        ]
        constraints = [
            models.CheckConstraint(condition=~models.Q(name=""), name="tenant_has_a_name"),
            models.CheckConstraint(
                condition=models.Q(weight=None) | models.Q(weight__range=(1, 1000)),
                name="tenant_weight_is_1_to_1000",
            ),
            models.CheckConstraint(
                condition=models.Q(suspended_at__isnull=False) | models.Q(suspended_reason=""),
                name="tenant_reason_only_while_suspended",
            ),
            models.CheckConstraint(
                condition=models.Q(delete_at=None) | models.Q(suspended_at__isnull=False),
                name="tenant_is_suspended_before_it_is_deleted",
            ),
            models.CheckConstraint(
                condition=models.Q(purged_at=None) | models.Q(delete_at__isnull=False),
                name="tenant_is_purged_only_when_due",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        if self.timezone not in zone_names():
            raise ValidationError({"timezone": "No time zone of the IANA database, as Europe/Berlin is."})

    @property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    @property
    def is_suspended(self) -> bool:
        return self.suspended_at is not None
