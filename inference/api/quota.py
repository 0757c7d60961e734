"""`GET /v1/quota`: what is left of every limit that binds this key, and when it is full again. Costs nothing."""

from __future__ import annotations

import msgspec
from django.http import HttpResponse

from inference.api.endpoint import ApiCall, endpoint
from tenants.principal import Scope
from tenants.quotas.types import BucketState


class QuotaLimitObject(msgspec.Struct, kw_only=True):
    scope: str
    """`tier`, `tenant`, `model` or `key`."""
    metric: str
    model: str | None
    limit: int
    """Per period: tokens, requests, slots, or millionths of a dollar."""
    period_s: int | None
    calendar: str | None
    """`day` or `month` of a budget, in the tenant's time zone; its `period_s` is null."""
    burst: int
    is_hard: bool
    remaining: int
    reset_after_ms: int


class Quota(msgspec.Struct, kw_only=True):
    tier: str
    data: list[QuotaLimitObject]
    object: str = "quota"


@endpoint("GET", scope=Scope.INFERENCE, answer=Quota)
async def quota(call: ApiCall) -> HttpResponse:
    """Every limit that binds the key, what is left of it, and when it is full again."""
    states = await call.runtime.quotas.peek(call.principal)
    return call.respond(Quota(tier=call.principal.tier.name, data=[_object(state) for state in states]))


def _object(state: BucketState) -> QuotaLimitObject:
    limit = state.limit
    return QuotaLimitObject(
        scope=str(limit.scope),
        metric=str(limit.metric),
        model=limit.owner_id if limit.scope == "model" else None,
        limit=limit.amount,
        period_s=limit.period_s or None,
        calendar=str(limit.calendar) if limit.calendar else None,
        burst=limit.burst,
        is_hard=limit.is_hard,
        remaining=state.remaining,
        reset_after_ms=state.reset_after_ms,
    )
