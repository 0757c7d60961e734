"""Limits: what a tier, a tenant, a key, or a tenant with one model may use. All that apply bind."""

from __future__ import annotations

import uuid_utils.compat
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import ExpressionWrapper, F, Q
from django.db.models.functions import Cast
from django.db.models.lookups import LessThanOrEqual

from tenants.models.api_key import ApiKey
from tenants.models.tenant import Tenant
from tenants.models.tier import Tier
from tenants.principal import Calendar, LimitMetric, LimitScope
from tenants.scope import TenantScopedManager

AMOUNT_MAX = 1_000_000_000_000
PERIOD_S_MAX = 31 * 86_400
BURST_TIMES_PERIOD_MAX = 8_000_000_000_000
"""Keeps burst * 1000 * period_s under 2**53, with room for debt: Lua's numbers are exact up to there."""

_RATED = [
    LimitMetric.REQUESTS.value,
    LimitMetric.INPUT_TOKENS.value,
    LimitMetric.OUTPUT_TOKENS.value,
    LimitMetric.TOKENS.value,
]
_BUDGETED = [
    LimitMetric.INPUT_TOKENS.value,
    LimitMetric.OUTPUT_TOKENS.value,
    LimitMetric.TOKENS.value,
    LimitMetric.COST.value,
]


class QuotaLimit(models.Model):
    """A rate is a token bucket: it holds `burst` and gains `amount` per `period_s`. Concurrency has
    `amount` slots, period 0 and burst equal to the amount. A budget is an `amount` per calendar day or month of
    the tenant's time zone, in tokens or micro-USD; its period is 0 and its burst equal to the amount as well."""

    public_id = models.UUIDField(default=uuid_utils.compat.uuid7, unique=True, editable=False)
    scope = models.CharField(max_length=8, choices=[(s.value, s.value) for s in LimitScope])
    tier = models.ForeignKey(Tier, null=True, blank=True, on_delete=models.CASCADE, related_name="limits")
    """A tier's limit holds for each of its tenants, counted per tenant."""
    tenant = models.ForeignKey(Tenant, null=True, blank=True, on_delete=models.CASCADE, related_name="limits")
    api_key = models.ForeignKey(
        ApiKey, null=True, blank=True, on_delete=models.CASCADE, related_name="limits", verbose_name="API key"
    )
    model = models.CharField(max_length=200, blank=True)
    """Of scope `model`: the name that clients use."""
    metric = models.CharField(max_length=16, choices=[(m.value, m.value) for m in LimitMetric])
    amount = models.PositiveBigIntegerField(validators=[MinValueValidator(1)])
    period_s = models.PositiveIntegerField(
        "period (seconds)", default=60, help_text="60 is a minute, 86400 a day; concurrency has none (0)."
    )
    burst = models.PositiveBigIntegerField(
        validators=[MinValueValidator(1)], help_text="What may be used at once."
    )
    calendar = models.CharField(
        max_length=8,
        blank=True,
        choices=[(c.value, c.value) for c in Calendar],
        help_text="Makes it a budget of each day or month, in the tenant's time zone.",
    )
    is_hard = models.BooleanField(
        "hard", default=True, help_text="A soft budget refuses nothing: it only counts, and alerts."
    )
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    unscoped = models.Manager()
    objects = TenantScopedManager()

    class Meta:
        default_manager_name = "unscoped"
        base_manager_name = "unscoped"
        ordering = ["id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(
                    scope=LimitScope.TIER.value, tier__isnull=False, tenant__isnull=True, api_key__isnull=True
                )
                | Q(
                    scope=LimitScope.TENANT.value,
                    tier__isnull=True,
                    tenant__isnull=False,
                    api_key__isnull=True,
                )
                | Q(
                    scope=LimitScope.MODEL.value,
                    tier__isnull=True,
                    tenant__isnull=False,
                    api_key__isnull=True,
                )
                | Q(
                    scope=LimitScope.KEY.value, tier__isnull=True, tenant__isnull=False, api_key__isnull=False
                ),
                name="quota_limit_has_one_owner",
                violation_error_message="A limit belongs to a tier, a tenant (and perhaps a model), or a tenant's "
                "key: name just that.",
            ),
            models.CheckConstraint(
                condition=Q(scope=LimitScope.MODEL.value, model__gt="")
                | (~Q(scope=LimitScope.MODEL.value) & Q(model="")),
                name="quota_limit_model_fits_scope",
                violation_error_message="A limit of scope model names a model, and no other does.",
            ),
            models.CheckConstraint(
                condition=Q(
                    metric=LimitMetric.CONCURRENCY.value,
                    period_s=0,
                    burst=F("amount"),
                    calendar="",
                    is_hard=True,
                )
                | Q(metric__in=_RATED, period_s__gte=1, calendar="", is_hard=True)
                | Q(
                    metric__in=_BUDGETED,
                    period_s=0,
                    burst=F("amount"),
                    calendar__in=[c.value for c in Calendar],
                ),
                name="quota_limit_period_fits_metric",
                violation_error_message="A rate (requests, tokens) has a period; a budget (tokens, cost) a calendar; "
                "concurrency neither, and burst = amount without a period.",
            ),
            models.CheckConstraint(
                condition=Q(amount__gte=1, amount__lte=AMOUNT_MAX, burst__gte=1, burst__lte=AMOUNT_MAX),
                name="quota_limit_amount_in_range",
                violation_error_message=f"Amount and burst must lie between 1 and {AMOUNT_MAX}.",
            ),
            models.CheckConstraint(
                condition=Q(period_s__lte=PERIOD_S_MAX),
                name="quota_limit_period_in_range",
                violation_error_message=f"A period is at most {PERIOD_S_MAX} s (31 days).",
            ),
            models.CheckConstraint(
                condition=LessThanOrEqual(
                    # The cast counts where Django checks a form's values: two small ones are not yet bigints there.
                    ExpressionWrapper(
                        Cast(F("burst"), models.BigIntegerField()) * F("period_s"),
                        output_field=models.BigIntegerField(),
                    ),
                    BURST_TIMES_PERIOD_MAX,
                ),
                name="quota_limit_counts_exactly",
                violation_error_message=f"burst * period_s must not exceed {BURST_TIMES_PERIOD_MAX}.",
            ),
            # One limit per owner, metric and period; they serve as well the load of a principal's limits.
            models.UniqueConstraint(
                fields=["tier", "metric", "period_s", "calendar"],
                condition=Q(scope=LimitScope.TIER.value),
                name="quota_limit_once_per_tier",
            ),
            models.UniqueConstraint(
                fields=["tenant", "metric", "period_s", "calendar"],
                condition=Q(scope=LimitScope.TENANT.value),
                name="quota_limit_once_per_tenant",
            ),
            models.UniqueConstraint(
                fields=["tenant", "model", "metric", "period_s", "calendar"],
                condition=Q(scope=LimitScope.MODEL.value),
                name="quota_limit_once_per_model",
            ),
            models.UniqueConstraint(
                fields=["tenant", "api_key", "metric", "period_s", "calendar"],
                condition=Q(scope=LimitScope.KEY.value),
                name="quota_limit_once_per_key",
            ),
        ]

    def __str__(self) -> str:
        whose = f"{self.scope} {self.model}".strip()
        if self.metric == LimitMetric.CONCURRENCY:
            return f"{self.amount:,} at once per {whose}"
        if self.calendar:
            return f"{self.amount:,} {self.metric} per {self.calendar} per {whose}"
        return f"{self.amount:,} {self.metric} per {self.period_s} s per {whose}"
