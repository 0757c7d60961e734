"""What the operator says about the whole installation: which models whom, maintenance, announcements."""

from __future__ import annotations

import uuid_utils.compat
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q

from tenants.models import Tenant


class ModelSetting(models.Model):
    """Of a served model, by its name, or a further name for one."""

    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    name = models.CharField(max_length=200, unique=True, help_text="What clients ask for.")
    target = models.CharField(
        "alias of",
        max_length=200,
        blank=True,
        help_text="The served model that answers to this name. Keys, prices and the ledger know it by its own name. "
        "Empty: the name is a model's own.",
    )
    is_public = models.BooleanField(
        "for every tenant",
        default=True,
        help_text="Otherwise for those chosen below; to others it does not exist.",
    )
    tenants = models.ManyToManyField(Tenant, blank=True, related_name="+")
    context_length = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text="Tokens of prompt and answer together. Empty, or more than the model has: the model's own.",
    )
    temperature = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0), MaxValueValidator(2)],
        help_text="Where a request names none. Empty: as the model's generation_config.json says, else 1.",
    )
    top_p = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0.01), MaxValueValidator(1)],
        help_text="The same.",
    )
    max_tokens = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text="Longest answer where a request names none. Empty: what the context and the tier leave.",
    )
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(condition=~Q(name=""), name="model_setting_names_a_model"),
            models.CheckConstraint(
                condition=~Q(target=F("name")),
                name="model_setting_is_no_alias_of_itself",
                violation_error_message="A model is no alias of itself: leave the target empty.",
            ),
            models.CheckConstraint(
                condition=Q(temperature=None) | Q(temperature__range=(0, 2)), name="model_setting_temperature"
            ),
            models.CheckConstraint(
                condition=Q(top_p=None) | Q(top_p__gt=0, top_p__lte=1), name="model_setting_top_p"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class Announcement(models.Model):
    """A line above every page of the console."""

    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    text = models.CharField(max_length=500)
    is_warning = models.BooleanField(default=False)
    begins_at = models.DateTimeField(null=True, blank=True, help_text="Empty: at once.")
    ends_at = models.DateTimeField(null=True, blank=True, help_text="Empty: until it is deleted.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=~Q(text=""), name="announcement_says_something"),
            models.CheckConstraint(
                condition=Q(begins_at=None) | Q(ends_at=None) | Q(ends_at__gt=F("begins_at")),
                name="announcement_ends_after_it_begins",
                violation_error_message="It must end after it begins.",
            ),
        ]

    def __str__(self) -> str:
        return self.text[:60]


class Maintenance(models.Model):
    """One row. While it is on, no gateway takes new work; what was taken is finished."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    is_on = models.BooleanField("on", default=False)
    message = models.CharField(
        max_length=300, default="Weir is being maintained.", help_text="What clients and people are told."
    )
    retry_after_s = models.PositiveIntegerField(
        "back in (seconds)",
        default=300,
        validators=[MinValueValidator(1), MaxValueValidator(86_400)],
        help_text="Told to clients as Retry-After.",
    )
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        verbose_name_plural = "maintenance"
        constraints = [
            models.CheckConstraint(condition=Q(id=1), name="maintenance_is_one_row"),
            models.CheckConstraint(
                condition=Q(retry_after_s__range=(1, 86_400)), name="maintenance_retry_after_in_range"
            ),
        ]

    def __str__(self) -> str:
        return f"maintenance is {'on' if self.is_on else 'off'}"
