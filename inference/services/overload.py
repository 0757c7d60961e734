"""Refusals before a prompt is tokenised and anything reserved: under a flood most requests end here, and cheaply."""

from __future__ import annotations

from typing import Final

from django.conf import settings

from engine_worker.broker import QueueFull
from engine_worker.protocol import Rung
from inference.errors import ApiError, Overloaded, RateLimited
from inference.models_served import ServedModel
from inference.runtime import Runtime
from tenants.principal import Principal, TierSpec

_OVERLOADED_RETRY_MS: Final = 5000
"""An engine comes down a rung per second at best."""


def refuse_early(runtime: Runtime, principal: Principal, model: ServedModel) -> None:
    """Raises ApiError where the model is being unloaded, or the engine takes the first tier only, or the queue has
    just refused its like."""
    runtime.models.refuse_leaving(model.card.model)
    if principal.tier.rank > 0 and model.rung >= Rung.REFUSING:
        raise Overloaded(
            f"'{model.card.model}' is overloaded and takes requests of the first tier only. Try again shortly.",
            retry_after_ms=_OVERLOADED_RETRY_MS,
        )
    try:
        runtime.broker.refuse_if_full(
            model.card.model,
            tier_rank=principal.tier.rank,
            tenant_id=principal.tenant_public_id,
            max_wait_ms=longest_wait_ms(principal.tier),
        )
    except QueueFull as error:
        raise queue_refusal(error) from error


def longest_wait_ms(tier: TierSpec) -> int:
    return (tier.max_wait_s or tier.deadline_s) * 1000


def waits_for_worker(tier: TierSpec, endpoint: str) -> bool:
    """Batches, and who asked to go in their tier, have time: they outlast a night without workers."""
    return endpoint == "batches" or tier.name == settings.BATCH_TIER


def queue_refusal(error: QueueFull) -> ApiError:
    if error.scope == "tenant":
        return RateLimited(
            "Too many requests wait: your tenant's share of the queue is full. Try again when some have ended.",
            kind="requests",
            retry_after_ms=error.retry_after_ms,
            headers={"x-weir-limit-scope": "tenant"},
        )
    if error.scope == "wait":
        return Overloaded(
            "Before this request's turn it would wait longer than your tier allows. Try again later.",
            retry_after_ms=error.retry_after_ms,
        )
    return Overloaded(
        "Too many requests wait: the tier's queue is full. Try again later.",
        retry_after_ms=error.retry_after_ms,
    )
