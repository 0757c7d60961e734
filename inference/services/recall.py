"""What the ledger knows of a tenant's limits, for a Redis that does not: it was flushed, or a period began.

Nothing comes back full for free. A rate is played back from the use of as long a span as it takes to fill; a
budget starts from what the ledger counted for its period. Requests that were in flight when Redis was lost are
lost with it, and so is what they held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import DatabaseError, InterfaceError, close_old_connections, connection
from django.db.models import Count, F, IntegerField, QuerySet, Sum
from django.db.models.functions import Cast, Extract, Floor

from inference.models import UsageRecord
from tenants.principal import LimitMetric, LimitScope, LimitSpec, Principal
from tenants.quotas.errors import QuotaUnavailable
from tenants.quotas.periods import period_at
from tenants.row_security import bound_to

_TIMEOUT_S: Final = 5.0
_STEPS: Final = 500
"""A rate's span is played back in so many steps, or by the second."""

_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="recall")
# Not Django's one shared thread: a hung database must not hold up whatever else waits for it.


async def recall_from_ledger(
    principal: Principal, limits: Sequence[LimitSpec], moment: datetime
) -> Sequence[int]:
    """A tenants.quotas.store.Recall."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await asyncio.get_running_loop().run_in_executor(
                _threads, _recall, principal, limits, moment
            )
    except (DatabaseError, InterfaceError, TimeoutError) as error:
        raise QuotaUnavailable(f"limits can't be recalled from the ledger: {error}") from error


def _recall(principal: Principal, limits: Sequence[LimitSpec], moment: datetime) -> list[int]:
    # These threads begin without the request's context.
    with bound_to(str(principal.tenant_id)):
        return _recalled(principal, limits, moment)


def _recalled(principal: Principal, limits: Sequence[LimitSpec], moment: datetime) -> list[int]:
    close_old_connections()
    try:
        return [
            budget_spent(principal, limit, moment)
            if limit.is_budget
            else _level_milli(principal, limit, moment)
            for limit in limits
        ]
    finally:
        connection.close()


def budget_spent(principal: Principal, limit: LimitSpec, moment: datetime) -> int:
    """What the ledger counts for the budget's period, in its unit."""
    assert limit.calendar is not None
    period = period_at(limit.calendar, moment, principal.zone)
    rows = _rows(principal, limit).filter(day__gte=period.first_day, day__lt=period.end_day)
    return int(rows.aggregate(used=_USED[limit.metric])["used"] or 0)


def _level_milli(principal: Principal, limit: LimitSpec, moment: datetime) -> int:
    if limit.metric is LimitMetric.CONCURRENCY:
        return 0  # its leases are gone with the requests that held them
    full = limit.burst * 1000
    span_s = limit.burst * limit.period_s // limit.amount + 1
    step_s = max(1, span_s // _STEPS)
    since = moment - timedelta(seconds=span_s)
    used = (
        _rows(principal, limit)
        .filter(created_at__gt=since, created_at__lte=moment)
        .annotate(step=Cast(Floor(Extract(F("created_at"), "epoch") / step_s), IntegerField()))
        .order_by("step")
        .values("step")
        .annotate(used=_USED[limit.metric])
    )
    level, at_s = full, since.timestamp()
    for row in used:
        # All of a step is charged at its end: what refilled during the step is counted before, never after.
        ends_s = min((row["step"] + 1) * step_s, moment.timestamp())
        level = min(full, level + int((ends_s - at_s) * limit.amount * 1000 / limit.period_s))
        level -= int(row["used"]) * 1000
        at_s = ends_s
    return min(full, level + int((moment.timestamp() - at_s) * limit.amount * 1000 / limit.period_s))


def _rows(principal: Principal, limit: LimitSpec) -> QuerySet[UsageRecord]:
    rows = UsageRecord.objects.filter(tenant_id=principal.tenant_id).order_by()
    if limit.scope is LimitScope.KEY:
        return rows.filter(key_public_id=limit.owner_id)
    if limit.scope is LimitScope.MODEL:
        return rows.filter(model=limit.owner_id)
    return rows


_USED: Final[dict[LimitMetric, Any]] = {
    LimitMetric.REQUESTS: Count("id"),
    LimitMetric.INPUT_TOKENS: Sum("prompt_tokens"),
    LimitMetric.OUTPUT_TOKENS: Sum("completion_tokens"),
    LimitMetric.TOKENS: Sum(F("prompt_tokens") + F("completion_tokens")),
    LimitMetric.COST: Sum("cost_microusd"),
}
