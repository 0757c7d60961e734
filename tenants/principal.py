"""Who is asking, resolved once per request: plain values that outlive the ORM rows and the request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """What an API key may do."""

    INFERENCE = "inference"
    USAGE_READ = "usage:read"
    KEYS_WRITE = "keys:write"
    ADMIN = "admin"


class LimitMetric(StrEnum):
    """What a limit counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"  # prompt and output together
    CONCURRENCY = "concurrency"


class LimitScope(StrEnum):
    """Whose limit it is, widest first."""

    TIER = "tier"
    TENANT = "tenant"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class LimitSpec:
    """One limit that binds a principal.

    A rate is a token bucket (capacity `burst`, refilled at `amount` per `period_s`); concurrency has
    period 0 and `amount` slots.
    """

    scope: LimitScope
    owner_id: str
    """Public id of what owns the bucket: the tenant (a tier's limit is counted per tenant) or the key."""
    metric: LimitMetric
    amount: int
    period_s: int
    burst: int


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
