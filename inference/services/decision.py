"""What the quota store decided about a request, kept so that it can be explained: with the ledger's row when it was
admitted, in Redis for a while when it was refused."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from tenants.pricing import PER_TOKENS, Price
from tenants.principal import Calendar, LimitMetric, LimitScope, LimitSpec
from tenants.quotas.types import GAP, Admitted, BucketState, Decision

TEXT_MAX: Final = 8000
"""Of a decision as text: some fifty limits."""
_NUMBER_MAX: Final = 16
"""Digits of what a limit has left: below 2^53."""


class LimitTold(msgspec.Struct, frozen=True, array_like=True):
    """A limit at that moment. Written as a list: a row of the ledger has one for each limit."""

    scope: str
    owner: str
    metric: str
    amount: int
    period_s: int
    burst: int
    calendar: str
    is_hard: bool
    asked: int
    """Taken from it, or what would have been."""
    remaining: int
    """Afterwards."""
    reset_after_ms: int

    @property
    def limit(self) -> LimitSpec:
        return LimitSpec(
            LimitScope(self.scope),
            self.owner,
            LimitMetric(self.metric),
            self.amount,
            self.period_s,
            self.burst,
            calendar=Calendar(self.calendar) if self.calendar else None,
            is_hard=self.is_hard,
        )


class Told(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    at_ms: int
    prompt_tokens: int
    max_output_tokens: int
    granted_output_tokens: int = 0
    limits: list[LimitTold]
    binding: int | None = None
    """Of a refusal: which of the limits refused."""
    requested: int = 0
    retry_after_ms: int | None = None
    is_spent: bool = False
    waited_ms: int = 0
    """In line for a rate, before."""
    seed: int | None = None
    """That the answer's noise follows from: the client's, or the one drawn for it. None of what is embedded."""
    model: str = ""
    key_id: str = ""
    request_id: str = ""
    """The last three of refusals alone: the ledger has them of the others."""

    @property
    def at(self) -> datetime:
        return datetime.fromtimestamp(self.at_ms / 1000, UTC)

    @property
    def refused_by(self) -> LimitTold | None:
        return None if self.binding is None else self.limits[self.binding]


def told(
    decision: Decision,
    *,
    at_ms: int,
    prompt_tokens: int,
    max_output_tokens: int,
    price: Price | None,
    seed: int | None,
    waited_ms: int = 0,
) -> Told:
    granted = decision.max_output_tokens if isinstance(decision, Admitted) else max_output_tokens
    values = {
        "at_ms": at_ms,
        "prompt_tokens": prompt_tokens,
        "max_output_tokens": max_output_tokens,
        "limits": [
            _limit(state, asked_of(state.limit, prompt_tokens, granted, price)) for state in decision.buckets
        ],
        "waited_ms": waited_ms,
        "seed": seed,
    }
    if isinstance(decision, Admitted):
        return Told(**values, granted_output_tokens=granted)  # type: ignore[arg-type]
    limits = [state.limit for state in decision.buckets]
    return Told(
        **values,  # type: ignore[arg-type]
        binding=limits.index(decision.binding),
        requested=decision.requested,
        retry_after_ms=decision.retry_after_ms,
        is_spent=decision.is_spent,
    )


def asked_of(limit: LimitSpec, prompt_tokens: int, output_tokens: int, price: Price | None) -> int:
    """What the script takes from such a limit (quotas/lua/reserve.lua), in its unit."""
    match limit.metric:
        case LimitMetric.REQUESTS | LimitMetric.CONCURRENCY:
            return 1
        case LimitMetric.INPUT_TOKENS:
            asked = least = prompt_tokens
        case LimitMetric.OUTPUT_TOKENS:
            asked, least = output_tokens, 0
        case LimitMetric.TOKENS:
            asked, least = prompt_tokens + output_tokens, prompt_tokens
        case LimitMetric.COST:
            if price is None:
                return 0
            output = -(-output_tokens * price.output_microusd_per_mtok // PER_TOKENS)
            return price.prompt_at_most_microusd(prompt_tokens) + output
    return asked if limit.is_budget else min(asked, max(least, limit.burst))


def _limit(state: BucketState, asked: int) -> LimitTold:
    limit = state.limit
    return LimitTold(
        scope=str(limit.scope),
        owner=limit.owner_id,
        metric=str(limit.metric),
        amount=limit.amount,
        period_s=limit.period_s,
        burst=limit.burst,
        calendar=str(limit.calendar or ""),
        is_hard=limit.is_hard,
        asked=asked,
        remaining=state.remaining,
        reset_after_ms=state.reset_after_ms,
    )


def told_beforehand(
    limits: Iterable[LimitSpec],
    *,
    at_ms: int,
    prompt_tokens: int,
    max_output_tokens: int,
    price: Price | None,
    seed: int | None,
) -> Told:
    """Of a request that is to be admitted with all that it asks for: with a GAP for each number that the reservation
    will say."""
    gap: Any = msgspec.Raw(GAP.encode())  # written as it is; no JSON has such a byte of its own
    states = tuple(BucketState(limit, remaining=gap, reset_after_ms=gap) for limit in limits)
    return told(
        Admitted("", states, max_output_tokens),
        at_ms=at_ms,
        prompt_tokens=prompt_tokens,
        max_output_tokens=max_output_tokens,
        price=price,
        seed=seed,
    )


def as_text(decision: Told) -> str:
    text = msgspec.json.encode(decision).decode()
    return text if len(text) + _NUMBER_MAX * text.count(GAP) <= TEXT_MAX else ""


def from_text(text: str | bytes) -> Told | None:
    """None for what is none: the row it comes with counts all the same."""
    try:
        return msgspec.json.decode(text, type=Told) if text else None
    except msgspec.MsgspecError:
        return None
