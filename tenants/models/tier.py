"""A class of service that the operator defines: who goes first, how much may wait, for how long."""

from __future__ import annotations

import uuid_utils.compat
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q


class Tier(models.Model):
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    name = models.SlugField(max_length=32, unique=True)
    rank = models.PositiveSmallIntegerField(unique=True, help_text="0 goes first.")
    weight = models.PositiveIntegerField(
        default=1,
        validators=[MinValueValidator(1)],
        help_text="Of each of its tenants that has none of its own.",
    )
    max_queued = models.PositiveIntegerField(
        default=1000, validators=[MinValueValidator(1)], help_text="Requests that may wait, over all tenants."
    )
    max_queued_per_tenant = models.PositiveIntegerField(default=200, validators=[MinValueValidator(1)])
    deadline_s = models.PositiveIntegerField(
        default=300,
        validators=[MinValueValidator(1)],
        help_text="Default and largest time from acceptance to the last token.",
    )
    max_wait_s = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text="Longest wait in the queue that is promised: a request that would wait longer is refused, and one "
        "that has waited half of it may pass better tiers. Empty: the deadline.",
    )
    max_output_tokens = models.PositiveIntegerField(
        default=4096, validators=[MinValueValidator(1)], help_text="Cap on max_tokens."
    )
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["rank"]
        constraints = [
            models.CheckConstraint(condition=Q(weight__gte=1), name="tier_weight_is_positive"),
            models.CheckConstraint(condition=Q(max_queued__gte=1), name="tier_max_queued_is_positive"),
            models.CheckConstraint(
                condition=Q(max_queued_per_tenant__gte=1, max_queued_per_tenant__lte=models.F("max_queued")),
                name="tier_tenant_queue_fits_tier_queue",
                violation_error_message="A tenant's queue bound must lie between 1 and the tier's.",
            ),
            models.CheckConstraint(condition=Q(deadline_s__gte=1), name="tier_deadline_is_positive"),
            models.CheckConstraint(
                condition=Q(max_wait_s=None) | Q(max_wait_s__gte=1), name="tier_max_wait_is_positive"
            ),
            models.CheckConstraint(condition=Q(max_output_tokens__gte=1), name="tier_max_output_is_positive"),
        ]

    def __str__(self) -> str:
        return self.name
