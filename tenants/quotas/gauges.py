"""What is left of a principal's limits, for pages. The token path asks the store itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, time

import structlog
from asgiref.sync import async_to_sync
from django.conf import settings
from django.utils import timezone

from tenants.models import Tenant
from tenants.principal import LimitSpec, Principal
from tenants.quotas.errors import QuotaUnavailable
from tenants.quotas.periods import period_at
from tenants.quotas.store import QuotaStore, Recall
from tenants.quotas.types import BucketState

log = structlog.get_logger(__name__)

_TOO_YOUNG = 0.02
"""Of a period: half a day of a month, half an hour of a day. Before that one request would say too much."""
_TIMEOUT_S = 1.0
"""A page would rather say that it does not know than wait longer."""


def limits_left(principal: Principal, recall: Recall) -> tuple[BucketState, ...] | None:
    """None when Redis, or the ledger for what Redis forgot, can't say."""
    try:
        return async_to_sync(_limits_left)(principal, recall)
    except QuotaUnavailable as error:
        log.warning("limits.unavailable", error=str(error))
        return None


@dataclass(frozen=True, slots=True)
class Gauge:
    """A limit as a page shows it."""

    limit: LimitSpec
    remaining: int
    at_this_rate: int | None
    """What a budget's period will have taken at its end; None for other limits, and while it is too young to tell."""
    full_again_ms: int = 0
    """Until a rate's bucket is full, a budget's period over."""
    binds: bool = False
    """Of all limits the one with the least left, as the API's headers name it; none while all are full."""

    @property
    def will_not_do(self) -> bool:
        return self.at_this_rate is not None and self.at_this_rate > self.limit.burst


def forecast(
    states: tuple[BucketState, ...] | None, tenant: Tenant, now: datetime | None = None
) -> list[Gauge] | None:
    """Where each budget will end if the rest of its period goes as it went so far."""
    if states is None:
        return None
    now = now or timezone.now()
    least = min(states, key=_share_left, default=None)
    return [
        Gauge(
            state.limit,
            state.remaining,
            _at_this_rate(state, tenant, now),
            full_again_ms=state.reset_after_ms,
            binds=state is least and state.remaining < state.limit.burst,
        )
        for state in states
    ]


def limit_gauges(principal: Principal, tenant: Tenant, recall: Recall) -> list[Gauge] | None:
    """Every limit that binds the principal, as it is now; None when that can't be said."""
    return forecast(limits_left(principal, recall), tenant)


def _share_left(state: BucketState) -> float:
    return state.remaining / state.limit.burst


def _at_this_rate(state: BucketState, tenant: Tenant, now: datetime) -> int | None:
    if state.limit.calendar is None:
        return None
    period = period_at(state.limit.calendar, now, tenant.timezone)
    begins_at = datetime.combine(period.first_day, time.min, tenant.zone).timestamp()
    elapsed_s, length_s = now.timestamp() - begins_at, period.ends_at_ms / 1000 - begins_at
    if elapsed_s < length_s * _TOO_YOUNG:
        return None
    return round((state.limit.burst - state.remaining) * length_s / elapsed_s)


async def _limits_left(principal: Principal, recall: Recall) -> tuple[BucketState, ...]:
    # A store of its own: a page runs on whatever event loop its thread was given.
    store = QuotaStore(settings.REDIS_URL, timeout_s=_TIMEOUT_S, max_connections=1, recall=recall)
    try:
        return await store.peek(principal)
    finally:
        await store.aclose()
