"""What the quota store answers."""

from __future__ import annotations

from dataclasses import dataclass

from tenants.principal import LimitMetric, LimitScope, LimitSpec


@dataclass(frozen=True, slots=True)
class BucketState:
    """One bucket after a decision, in whole units."""

    limit: LimitSpec
    remaining: int
    """Never negative."""
    reset_after_ms: int
    """Until the bucket is full again."""


@dataclass(frozen=True, slots=True)
class Admitted:
    reservation_id: str
    buckets: tuple[BucketState, ...]
    max_output_tokens: int
    """Granted: what was asked for, or as much of it as a hard budget has left."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was taken from any bucket."""

    buckets: tuple[BucketState, ...]
    binding: LimitSpec
    requested: int
    """What this request asks of the binding limit, in its unit."""
    retry_after_ms: int | None
    """When this very request would fit; None: it can never fit (answer 400, not 429)."""
    is_spent: bool = False
    """The binding limit is a budget that is used up: retrying before its next period is pointless."""


Decision = Admitted | Refused

__all__ = ["Admitted", "BucketState", "Decision", "LimitMetric", "LimitScope", "LimitSpec", "Refused"]
