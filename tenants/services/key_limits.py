"""A key's own limits, as its form shows them: each of a few kinds once, set, changed or taken away together."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from django.db import transaction

from tenants.models import ApiKey, QuotaLimit
from tenants.principal import Calendar, LimitMetric, LimitScope
from tenants.services.audit import Actor
from tenants.services.limits import lock_limits_of, remove_quota_limit, set_quota_limit


class KeyLimit(StrEnum):
    """What a key can be limited to in the console; the API and the operator know more."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    REQUESTS_AT_ONCE = "requests_at_once"
    COST_PER_MONTH = "cost_per_month"
    """Micro-USD; a hard budget."""


_KINDS: Final[Mapping[KeyLimit, tuple[LimitMetric, int, Calendar | None]]] = {
    KeyLimit.REQUESTS_PER_MINUTE: (LimitMetric.REQUESTS, 60, None),
    KeyLimit.TOKENS_PER_MINUTE: (LimitMetric.TOKENS, 60, None),
    KeyLimit.REQUESTS_AT_ONCE: (LimitMetric.CONCURRENCY, 0, None),
    KeyLimit.COST_PER_MONTH: (LimitMetric.COST, 0, Calendar.MONTH),
}


def key_limits(api_key: ApiKey) -> dict[KeyLimit, int]:
    """Those of these kinds that it has."""
    return {kind: limit.amount for kind, limit in _rows(api_key).items()}


@transaction.atomic
def set_key_limits(*, actor: Actor, api_key: ApiKey, wanted: Mapping[KeyLimit, int | None]) -> None:
    """None takes a limit away; kinds that are not named stay. Only what differs is written, and audited.

    Raises django.core.exceptions.ValidationError when an amount won't do.
    """
    lock_limits_of(api_key)
    there = _rows(api_key)
    for kind, amount in wanted.items():
        limit = there.get(kind)
        if amount is None and limit is not None:
            remove_quota_limit(actor=actor, limit=limit)
        elif amount is not None and (limit is None or limit.amount != amount):
            metric, period_s, calendar = _KINDS[kind]
            set_quota_limit(
                actor=actor,
                owner=api_key,
                metric=metric,
                amount=amount,
                period_s=period_s,
                calendar=calendar,
            )


def _rows(api_key: ApiKey) -> dict[KeyLimit, QuotaLimit]:
    rows = QuotaLimit.objects.filter(tenant=api_key.tenant_id, api_key=api_key, scope=LimitScope.KEY.value)
    by_kind = {(row.metric, row.period_s, row.calendar): row for row in rows}
    found = {}
    for kind, (metric, period_s, calendar) in _KINDS.items():
        row = by_kind.get((metric.value, period_s, calendar.value if calendar else ""))
        if row is not None:
            found[kind] = row
    return found
