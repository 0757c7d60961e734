"""What the quota store answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

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


GAP: Final = "\1"
"""In the last argument of what follows a reservation: a number that only the reservation's reply has."""


@dataclass(slots=True)
class Then:
    """A script of the same server that runs in the call of a reservation, where all that it asks for is granted."""

    text: str
    key: str
    args: Sequence[str | bytes | int]
    """The last one is a text whose GAPs become, of each limit in turn, what remains and the ms until it is full."""
    reply: Any = None
    """What it returned; None: it did not run."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """What the ledger knows of some limits at one moment."""

    amounts: tuple[int, ...]
    """Of a rate its level in thousandths, of a budget what is spent of the current period."""
    through: int = 0
    """The last row that they count: those written since are booked one by one."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a reservation turned out to use."""

    tenant_public_id: str
    reservation_id: str
    prompt_tokens: int
    completion_tokens: int
    cost_microusd: int = 0

    def units(self, metric: LimitMetric) -> int:
        match metric:
            case LimitMetric.INPUT_TOKENS:
                return self.prompt_tokens
            case LimitMetric.OUTPUT_TOKENS:
                return self.completion_tokens
            case LimitMetric.TOKENS:
                return self.prompt_tokens + self.completion_tokens
            case LimitMetric.COST:
                return self.cost_microusd
        return 1


__all__ = [
    "GAP",
    "Admitted",
    "BucketState",
    "Decision",
    "LimitMetric",
    "LimitScope",
    "LimitSpec",
    "Recalled",
    "Refused",
    "Settlement",
    "Then",
]
