"""What the ledger knows of a tenant's limits, for a Redis that does not: it was flushed, or a period began.

Nothing comes back full for free. A rate is played back from the use of as long a span as it takes to fill; a
budget starts from what the ledger counted for its period. What still runs is taken again by its gateway
(inference/reservation_watch.py); rows that the ledger gets after it was read are booked (services/usage.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import DatabaseError, InterfaceError, close_old_connections, connection, transaction
from django.db.models import Count, F, IntegerField, QuerySet, Sum
from django.db.models.functions import Cast, Extract, Floor

from inference.models import UsageRecord
from inference.rollups import days_of
from tenants.principal import LimitMetric, LimitScope, LimitSpec, Principal
from tenants.quotas.errors import QuotaUnavailable
from tenants.quotas.periods import period_at
from tenants.quotas.types import Recalled
from tenants.row_security import EVERYBODY, bound_to

_TIMEOUT_S: Final = 5.0
_STEPS: Final = 500
"""A rate's span is played back in so many steps, or by the second."""

_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="recall")
# Not Django's one shared thread: a hung database must not hold up whatever else waits for it.


async def recall_from_ledger(principal: Principal, limits: Sequence[LimitSpec], moment: datetime) -> Recalled:
    """A tenants.quotas.store.Recall."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await asyncio.get_running_loop().run_in_executor(
                _threads, _recall, principal, limits, moment
            )
    except (DatabaseError, InterfaceError, TimeoutError) as error:
        raise QuotaUnavailable(f"limits can't be recalled from the ledger: {error}") from error


def _recall(principal: Principal, limits: Sequence[LimitSpec], moment: datetime) -> Recalled:
    close_old_connections()
    try:
        with transaction.atomic():
            with connection.cursor() as cursor:
                # Amounts and the last row that they tell of, of one moment.
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            # Whosever it is, so that an index finds it: rows are numbered in the order in which they are committed.
            with bound_to(EVERYBODY), connection.cursor() as cursor:
                cursor.execute("SELECT coalesce(max(id), 0) FROM inference_usagerecord")
                (through,) = cursor.fetchone()
            # These threads begin without the request's context.
            with bound_to(str(principal.tenant_id)):
                amounts = tuple(
                    budget_spent(principal, limit, moment)
                    if limit.is_budget
                    else _level_milli(principal, limit, moment)
                    for limit in limits
                )
        return Recalled(amounts, through)
    finally:
        connection.close()


def budget_spent(principal: Principal, limit: LimitSpec, moment: datetime) -> int:
    """What the ledger counts for the budget's period, in its unit: read from its sums by day."""
    assert limit.calendar is not None
    period = period_at(limit.calendar, moment, principal.zone)
    columns = ["key_public_id"] if limit.scope is LimitScope.KEY else []
    days = _narrowed(days_of(principal.tenant_id, columns), limit)
    days = days.filter(day__gte=period.first_day, day__lt=period.end_day)
    return int(days.aggregate(used=_SUMMED[limit.metric])["used"] or 0)


def _level_milli(principal: Principal, limit: LimitSpec, moment: datetime) -> int:
    if limit.metric is LimitMetric.CONCURRENCY:
        return 0  # its leases are gone with the requests that held them
    full = limit.burst * 1000
    span_s = limit.burst * limit.period_s // limit.amount + 1
    step_s = max(1, span_s // _STEPS)
    since = moment - timedelta(seconds=span_s)
    used = (
        _narrowed(UsageRecord.objects.filter(tenant_id=principal.tenant_id), limit)
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


def _narrowed(rows: QuerySet[Any], limit: LimitSpec) -> QuerySet[Any]:
    """Of the ledger, or of its roll-ups: both have these columns."""
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
_SUMMED: Final[dict[LimitMetric, Any]] = {**_USED, LimitMetric.REQUESTS: Sum("requests")}
"""The same of roll-ups, whose rows are many requests."""
