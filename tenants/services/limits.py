"""Set and remove limits."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from tenants.models import ApiKey, QuotaLimit, Tenant, Tier
from tenants.principal import LimitMetric, LimitScope
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
) -> QuotaLimit:
    """Creates or changes the owner's limit of this metric and period. `burst` is `amount` unless given.

    Raises django.core.exceptions.ValidationError when a value won't do.
    """
    if metric is LimitMetric.CONCURRENCY:
        period_s, burst = 0, amount
    tenant, ownership = _ownership(owner)
    # Locked: two who set the same limit at once must each record the true value before.
    limit = (
        QuotaLimit.unscoped.select_for_update().filter(metric=metric, period_s=period_s, **ownership).first()
    )
    before = None if limit is None else _values(limit)
    if limit is None:
        limit = QuotaLimit(metric=metric.value, period_s=period_s, **ownership)
    limit.amount = amount
    limit.burst = amount if burst is None else burst
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
    record_audit(
        actor=actor, action="limit.removed", tenant=limit.tenant, target=limit, before=_values(limit)
    )
    limit.delete()


def _ownership(owner: Tier | Tenant | ApiKey) -> tuple[Tenant | None, dict[str, Any]]:
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
    }
