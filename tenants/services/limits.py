"""Set and remove limits."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction

from tenants.models import ApiKey, QuotaLimit, Tenant, Tier
from tenants.principal import Calendar, LimitMetric, LimitScope, LimitSpec
from tenants.services.audit import Actor, record_audit


@transaction.atomic
def set_quota_limit(
    *,
    actor: Actor,
    owner: Tier | Tenant | ApiKey,
    metric: LimitMetric,
    amount: int,
    period_s: int = 60,
    burst: int | None = None,
    model: str = "",
    calendar: Calendar | None = None,
    is_hard: bool = True,
) -> QuotaLimit:
    """Creates or changes the owner's limit of this metric and period. `burst` is `amount` unless given.

    With `calendar` it is a budget of each such period, in the metric's unit (micro-USD for cost); with `model`
    a tenant's limit holds for that model alone.

    Raises django.core.exceptions.ValidationError when a value won't do.
    """
    if metric is LimitMetric.CONCURRENCY or calendar is not None:
        period_s, burst = 0, amount
    locked = lock_limits_of(owner)
    if isinstance(locked, ApiKey) and locked.revoked_at is not None:
        raise ValidationError(
            "This key is revoked, a limit of it would hold for nobody: set it on another key."
        )
    tenant, ownership = _ownership(owner, model)
    ownership["calendar"] = "" if calendar is None else calendar.value
    limit = QuotaLimit.unscoped.filter(metric=metric, period_s=period_s, **ownership).first()
    before = None if limit is None else _values(limit)
    if limit is None:
        limit = QuotaLimit(metric=metric.value, period_s=period_s, **ownership)
    limit.amount = amount
    limit.burst = amount if burst is None else burst
    limit.is_hard = is_hard
    limit.full_clean()
    limit.save()
    record_audit(
        actor=actor,
        action="limit.set",
        tenant=tenant,
        target=limit,
        before=before,
        after=_values(limit) | {"owner": str(owner)},
    )
    return limit


@transaction.atomic
def remove_quota_limit(*, actor: Actor, limit: QuotaLimit) -> None:
    """Once: of two who remove it, one finds it gone."""
    deleted, _ = QuotaLimit.unscoped.filter(pk=limit.pk).delete()
    if deleted:
        record_audit(
            actor=actor, action="limit.removed", tenant=limit.tenant, target=limit, before=_values(limit)
        )


def lock_limits_of(owner: Tier | Tenant | ApiKey) -> Tier | Tenant | ApiKey:
    """The owner as it is. Until the transaction ends nobody else sets a limit of its: of two who set the same one at
    once each records the true value before, and none meets the other's row."""
    locked: Tier | Tenant | ApiKey = type(owner)._base_manager.select_for_update(no_key=True).get(pk=owner.pk)
    return locked


def proposed_limit(
    *, tenant: Tenant, metric: str, amount: int, period_s: int, burst: int | None, calendar: str | None
) -> LimitSpec:
    """A tenant's limit as it would be, checked and not set. Raises ValidationError."""
    if metric == LimitMetric.CONCURRENCY or calendar:
        period_s, burst = 0, amount
    limit = QuotaLimit(
        scope=LimitScope.TENANT.value, tenant=tenant, metric=metric, amount=amount, period_s=period_s,
        burst=amount if burst is None else burst, calendar=calendar or "",
    )  # fmt: skip
    limit.clean_fields()
    limit.validate_constraints(exclude={"tenant"})  # one that is set already may be tried with another amount
    return LimitSpec(
        scope=LimitScope.TENANT,
        owner_id=str(tenant.public_id),
        metric=LimitMetric(metric),
        amount=amount,
        period_s=period_s,
        burst=limit.burst,
        calendar=Calendar(calendar) if calendar else None,
    )


def _ownership(owner: Tier | Tenant | ApiKey, model: str) -> tuple[Tenant | None, dict[str, Any]]:
    if model:
        if not isinstance(owner, Tenant):
            raise ValueError("only a tenant's limit can be for one model")
        return owner, {"scope": LimitScope.MODEL.value, "tenant": owner, "model": model}
    if isinstance(owner, Tier):
        return None, {"scope": LimitScope.TIER.value, "tier": owner}
    if isinstance(owner, Tenant):
        return owner, {"scope": LimitScope.TENANT.value, "tenant": owner}
    return owner.tenant, {"scope": LimitScope.KEY.value, "tenant": owner.tenant, "api_key": owner}


def _values(limit: QuotaLimit) -> dict[str, Any]:
    return {
        "scope": limit.scope,
        "metric": limit.metric,
        "amount": limit.amount,
        "period_s": limit.period_s,
        "burst": limit.burst,
        "model": limit.model,
        "calendar": limit.calendar,
        "is_hard": limit.is_hard,
    }
