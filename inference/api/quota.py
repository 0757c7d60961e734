"""`GET /v1/quota`: what is left of every limit that binds this key, and when it is full again. Costs nothing.

`POST /v1/quota/try`: what a limit that is not set yet would have done to the last days' traffic.
"""

from __future__ import annotations

from functools import partial
from uuid import UUID

import msgspec
from asgiref.sync import sync_to_async
from django.core.exceptions import ValidationError
from django.http import HttpResponse

from inference.api.endpoint import ApiCall, endpoint
from inference.errors import InvalidRequest
from inference.schemas.try_limit import LimitToTry, TriedLimit, tried_object
from inference.services.try_limit import TooMuchTraffic, Tried, try_limit
from tenants.models import Tenant
from tenants.principal import Scope
from tenants.quotas.types import BucketState
from tenants.services.limits import proposed_limit


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


@endpoint("POST", scope=Scope.ADMIN, body=LimitToTry, answer=TriedLimit)
async def try_out(call: ApiCall) -> HttpResponse:
    """What a limit that is not set would have done to the last days' traffic."""
    tried = await sync_to_async(partial(_tried, call.principal.tenant_id, call.read(LimitToTry)))()
    return call.respond(tried_object(tried))


def _tried(tenant_id: int, asked: LimitToTry) -> Tried:
    tenant = Tenant.objects.get(pk=tenant_id)
    try:
        key = None if asked.key is None else UUID(asked.key)
    except ValueError:
        raise InvalidRequest("'key' must be the id of one: GET /v1/keys lists yours.", param="key") from None
    try:
        limit = proposed_limit(
            tenant=tenant, metric=asked.metric, amount=asked.amount, period_s=asked.period_s, burst=asked.burst,
            calendar=asked.calendar,
        )  # fmt: skip
        return try_limit(tenant, limit, days=asked.days, model=asked.model.replace("\0", ""), key=key)
    except ValidationError as error:
        raise InvalidRequest(" ".join(error.messages)) from None
    except TooMuchTraffic as error:
        raise InvalidRequest(f"There were {error}: ask for fewer days, or for a key or a model.") from None
