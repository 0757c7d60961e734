"""What a client hears of its limits: the error of a refused reservation, and the rate-limit headers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from inference.errors import ApiError, BudgetSpent, InvalidRequest, RateLimited
from tenants.counting import counted
from tenants.principal import LimitMetric, LimitScope, LimitSpec
from tenants.quotas.types import BucketState, Refused

_TOKENS: Final = frozenset({LimitMetric.TOKENS, LimitMetric.INPUT_TOKENS, LimitMetric.OUTPUT_TOKENS})


def refusal(refused: Refused, now: datetime | None = None, *, request_id: str = "") -> ApiError:
    """The error for a refused reservation: which limit binds, whose it is, and when this request would fit.

    `request_id` is what it can be explained by afterwards.
    """
    binding = refused.binding
    state = next(bucket for bucket in refused.buckets if bucket.limit == binding)
    whose, asked = _whose(binding), _amount(binding, refused.requested)
    scope = {"x-weir-limit-scope": str(binding.scope)}
    if request_id:
        scope["x-weir-request"] = request_id
    if refused.retry_after_ms is None:
        return InvalidRequest(
            f"This request needs {asked}, but {whose} limit holds at most {_amount(binding, binding.burst)}: it "
            "can never fit. Ask for less, or have the limit raised.",
            code="request_exceeds_limit",
            headers=scope,
        )
    headers = {**bucket_headers(refused.buckets), **scope}
    used = _amount(binding, max(0, binding.burst - state.remaining))
    limit = _amount(binding, binding.burst if binding.is_budget else binding.amount)
    wait_s = refused.retry_after_ms / 1000
    if refused.is_spent:
        resets_at = (now or datetime.now(UTC)) + timedelta(milliseconds=refused.retry_after_ms)
        return BudgetSpent(
            f"The budget of {whose} {binding.calendar} is spent: limit {limit}, used {used}, requested {asked}. "
            f"The next {binding.calendar} begins at {resets_at:%Y-%m-%d %H:%M} UTC; retrying before is "
            "pointless. Wait, or have it raised.",
            retry_after_ms=refused.retry_after_ms,
            headers=headers,
        )
    if binding.metric is LimitMetric.CONCURRENCY:
        message = (
            f"Limit {binding.amount}, used {binding.amount - state.remaining}: too many requests under {whose} "
            "limit run at once. Wait until one ends."
        )
    elif binding.is_budget:
        message = (
            f"What is left of {whose} budget per {binding.calendar} is reserved by requests that still run: limit "
            f"{limit}, used or reserved {used}, requested {asked}. Try again when one has ended."
        )
    else:
        message = (
            f"Rate limit reached under {whose} limit: {limit} per {_period(binding.period_s)}, used {used}, "
            f"requested {asked}. This request fits in {wait_s:.3g} s."
        )
    return RateLimited(
        message,
        kind="tokens" if binding.metric in _TOKENS else "requests",
        retry_after_ms=refused.retry_after_ms,
        headers=headers,
    )


def bucket_headers(buckets: tuple[BucketState, ...]) -> dict[str, str]:
    """OpenAI's rate-limit headers: of each kind the limit with the least left, which is the one that binds next."""
    headers: dict[str, str] = {}
    for metrics, name in ((frozenset({LimitMetric.REQUESTS}), "requests"), (_TOKENS, "tokens")):
        states = [bucket for bucket in buckets if bucket.limit.metric in metrics and bucket.limit.is_hard]
        if not states:
            continue
        least = min(states, key=lambda bucket: bucket.remaining)
        headers[f"x-ratelimit-limit-{name}"] = str(least.limit.burst)
        headers[f"x-ratelimit-remaining-{name}"] = str(least.remaining)
        headers[f"x-ratelimit-reset-{name}"] = duration(least.reset_after_ms)
        headers.setdefault("x-weir-limit-scope", str(least.limit.scope))
    return headers


def duration(ms: int) -> str:
    """As OpenAI writes them: `12ms`, `1s`, `1.5s`, `6m0s`, `1h0m0s`."""
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, seconds = divmod(-(-ms // 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + f"{minutes}m{seconds}s"


def _whose(limit: LimitSpec) -> str:
    return f"the model {limit.owner_id}'s" if limit.scope is LimitScope.MODEL else f"the {limit.scope}'s"


def _amount(limit: LimitSpec, amount: int) -> str:
    if limit.metric is LimitMetric.COST:
        return f"${amount / 1_000_000:.6f}"
    units = {LimitMetric.CONCURRENCY: "slots"}.get(limit.metric, str(limit.metric).replace("_", " "))
    return counted(amount, units.removesuffix("s"))


def _period(seconds: int) -> str:
    return {1: "second", 60: "minute", 3600: "hour", 86400: "day"}.get(seconds, f"{seconds} s")
