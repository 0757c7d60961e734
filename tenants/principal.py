"""Who is asking, resolved once per request: plain values that outlive the ORM rows and the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tenants.pricing import Price


class Scope(StrEnum):
    """What an API key may do."""

    INFERENCE = "inference"
    USAGE_READ = "usage:read"
    KEYS_WRITE = "keys:write"
    ADMIN = "admin"


class LimitMetric(StrEnum):
    """What a limit counts."""

    REQUESTS = "requests"
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    TOKENS = "tokens"  # prompt and output together
    CONCURRENCY = "concurrency"
    COST = "cost"  # micro-USD; budgets only


class Calendar(StrEnum):
    """What a budget's period is, in the tenant's time zone."""

    DAY = "day"
    MONTH = "month"


class LimitScope(StrEnum):
    """Whose limit it is, widest first."""

    TIER = "tier"
    TENANT = "tenant"
    MODEL = "model"  # one model's use by one tenant
    KEY = "key"


@dataclass(frozen=True, slots=True)
class LimitSpec:
    """One limit that binds a principal.

    A rate is a token bucket (capacity `burst`, refilled at `amount` per `period_s`); concurrency has
    period 0 and `amount` slots; a budget is an `amount` per calendar period, and period_s is 0 as well.
    """

    scope: LimitScope
    owner_id: str
    """Who has the bucket: the tenant's public id (a tier's limit is counted per tenant), the key's, a model's name."""
    metric: LimitMetric
    amount: int
    period_s: int
    burst: int
    calendar: Calendar | None = None
    is_hard: bool = True
    """A soft budget refuses nobody: it only counts, and alerts."""
    serial: int = 0
    """Of a budget: tells it from one that was removed before it was set, and did not count meanwhile."""

    @property
    def is_budget(self) -> bool:
        return self.calendar is not None

    def binds(self, model: str) -> bool:
        """Whether it applies to a request for that model."""
        return self.scope is not LimitScope.MODEL or self.owner_id == model


@dataclass(frozen=True, slots=True)
class TierSpec:
    name: str
    rank: int
    """0 goes first."""
    weight: int
    max_queued: int
    """Bound of the tier's queue, over all tenants."""
    max_queued_per_tenant: int
    deadline_s: int
    """Default and largest time from acceptance to the last token."""
    max_output_tokens: int
    """Cap on max_tokens."""
    max_wait_s: int | None = None
    """Longest wait in the queue that is promised; None is the deadline."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A tenant's key or a member's session, with everything the token path needs and no database row."""

    tenant_id: int
    tenant_public_id: str
    tenant_name: str
    tier: TierSpec
    limits: tuple[LimitSpec, ...]
    scopes: frozenset[Scope]
    key_id: int | None = None
    key_public_id: str | None = None
    user_id: int | None = None
    user_public_id: str | None = None
    weight: int = 1
    """Of the tenant, against others of its tier."""
    zone: str = "UTC"
    """The tenant's: where its budgets' days and months begin."""
    prices: Mapping[str, tuple[Price, ...]] = field(default_factory=dict)
    """By model, the one in force and those to come. Only where a limit counts money."""
    allowed_models: frozenset[str] = frozenset()
    """Empty allows all."""
    waits_for_rate: bool = False
    """A key's policy: its requests wait their turn instead of being refused by a rate or for want of slots."""
    is_restricted: bool = False
    """A key that may not do, or not use, what its tenant may: it can't issue keys, which could."""

    def allows(self, *names: str) -> bool:
        """A model by one of its names."""
        return not self.allowed_models or not self.allowed_models.isdisjoint(names)
