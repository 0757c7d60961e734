"""An explanation as the API tells it."""

from __future__ import annotations

import msgspec

from inference.services.decision import LimitTold, Told
from inference.services.explain import Charge, Explanation


class ExplainedLimit(msgspec.Struct, kw_only=True):
    scope: str
    owner: str
    metric: str
    limit: int
    period_s: int | None
    calendar: str | None
    burst: int
    is_hard: bool
    asked: int
    """What this request took from it, or would have; in its unit (micro-USD for cost)."""
    remaining: int
    """Right afterwards."""
    reset_after_ms: int
    binding: bool


class ExplainedDecision(msgspec.Struct, kw_only=True):
    at_ms: int
    prompt_tokens: int
    max_output_tokens: int
    granted_output_tokens: int
    waited_ms: int
    seed: int | None
    """The request's own, modulo 2^63, or the one that was drawn for it: asked again with it, the same answer comes."""
    limits: list[ExplainedLimit]
    retry_after_ms: int | None
    is_spent: bool


class ExplainedPart(msgspec.Struct, kw_only=True):
    what: str
    tokens: int
    microusd_per_mtok: int


class ExplainedAdjustment(msgspec.Struct, kw_only=True):
    cost_microusd: int
    reason: str
    day: str


class ExplainedCharge(msgspec.Struct, kw_only=True):
    finish_reason: str
    day: str
    """Of the tenant's zone: budgets and reports count it there."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    price: str | None
    price_valid_from: int | None
    parts: list[ExplainedPart]
    cost_microusd: int
    """The parts' tokens x price, summed, over a million, rounded once, half up."""
    adjustments: list[ExplainedAdjustment]
    total_microusd: int


class RequestExplanation(msgspec.Struct, kw_only=True):
    id: str
    verdict: str
    """`admitted` or `refused`."""
    decision: ExplainedDecision | None
    charge: ExplainedCharge | None
    object: str = "request.explanation"


def explanation_object(explained: Explanation) -> RequestExplanation:
    return RequestExplanation(
        id=explained.request_id,
        verdict=explained.verdict,
        decision=None if explained.decision is None else _decision(explained.decision),
        charge=None if explained.charge is None else _charge(explained.charge),
    )


def _decision(told: Told) -> ExplainedDecision:
    return ExplainedDecision(
        at_ms=told.at_ms,
        prompt_tokens=told.prompt_tokens,
        max_output_tokens=told.max_output_tokens,
        granted_output_tokens=told.granted_output_tokens,
        waited_ms=told.waited_ms,
        seed=told.seed,
        limits=[_limit(limit, binding=number == told.binding) for number, limit in enumerate(told.limits)],
        retry_after_ms=told.retry_after_ms,
        is_spent=told.is_spent,
    )


def _limit(limit: LimitTold, *, binding: bool) -> ExplainedLimit:
    return ExplainedLimit(
        scope=limit.scope,
        owner=limit.owner,
        metric=limit.metric,
        limit=limit.amount,
        period_s=limit.period_s or None,
        calendar=limit.calendar or None,
        burst=limit.burst,
        is_hard=limit.is_hard,
        asked=limit.asked,
        remaining=limit.remaining,
        reset_after_ms=limit.reset_after_ms,
        binding=binding,
    )


def _charge(charge: Charge) -> ExplainedCharge:
    record, price = charge.record, charge.price
    return ExplainedCharge(
        finish_reason=record.finish_reason,
        day=record.day.isoformat(),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        price=None if price is None else str(price.public_id),
        price_valid_from=None if price is None else int(price.valid_from.timestamp()),
        parts=[
            ExplainedPart(what=part.what, tokens=part.tokens, microusd_per_mtok=part.microusd_per_mtok)
            for part in charge.parts
        ],
        cost_microusd=record.cost_microusd,
        adjustments=[
            ExplainedAdjustment(cost_microusd=row.cost_microusd, reason=row.reason, day=row.day.isoformat())
            for row in charge.adjustments
        ],
        total_microusd=charge.total_microusd,
    )
