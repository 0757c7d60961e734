"""A limit that is not set yet, played against the traffic that was: who would have been refused, and when.

Each request of the ledger asks when it was accepted, for its prompt and the output that it was then granted (what the
real script would have reserved), and gives back at its end what it did not use. One that the limit refuses is taken
out of the past with all it did, as if its client had not come again. The other limits are as they were: what they
refused is not in the ledger, and so not here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Final
from uuid import UUID
from zoneinfo import ZoneInfo

from django.db import transaction
from django.utils import timezone

from inference.models import UsageRecord
from inference.services.decision import from_text
from tenants.large_reads import some_at_a_time
from tenants.models import Tenant
from tenants.principal import LimitMetric, LimitSpec
from tenants.quotas.periods import period_at

DAYS_MAX: Final = 31
_ROWS_MAX: Final = 500_000
_EXAMPLES: Final = 20
_COLUMNS: Final = (
    "request_id", "created_at", "finished_at", "prompt_tokens", "completion_tokens", "cost_microusd", "decision",
)  # fmt: skip


class TooMuchTraffic(Exception):
    """More requests than can be played in a moment: ask for fewer days, or a key or model."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the limit sees it, times in seconds."""

    request_id: str
    at_s: float
    ends_s: float
    least: int
    """What must fit at all: the prompt."""
    reserved: int
    used: int


@dataclass(slots=True)
class DayTried:
    requests: int = 0
    refused: int = 0


@dataclass(slots=True)
class Tried:
    requests: int = 0
    refused: int = 0
    never: int = 0
    """Of the refused: larger than the limit itself."""
    used: int = 0
    """By those that would have been admitted, in the limit's unit."""
    longest_wait_s: float = 0.0
    """What a refused one would have been told at most; of a spent budget until the next period."""
    days: dict[date, DayTried] = field(default_factory=dict)
    """By the tenant's day."""
    examples: list[str] = field(default_factory=list)
    """Request ids of the first that would have been refused."""

    @property
    def longest_wait_ms(self) -> int:
        return round(self.longest_wait_s * 1000)


def try_limit(
    tenant: Tenant,
    limit: LimitSpec,
    *,
    days: int = 7,
    model: str = "",
    key: UUID | None = None,
    now: datetime | None = None,
) -> Tried:
    """`limit` against the traffic of the last `days`, of that model or key where it would be theirs.

    Raises TooMuchTraffic.
    """
    now = now or timezone.now()
    rows = UsageRecord.objects.filter(
        tenant=tenant, created_at__gte=now - timedelta(days=min(days, DAYS_MAX)), created_at__lt=now
    )
    if model:
        rows = rows.filter(model=model)
    if key is not None:
        rows = rows.filter(key_public_id=key)
    if rows[_ROWS_MAX:].exists():
        raise TooMuchTraffic(f"more than {_ROWS_MAX:,} requests")
    # Row by row: so many with their decisions would be a gigabyte.
    with transaction.atomic(using=rows.db):
        found = some_at_a_time(rows.order_by("created_at", "id").only(*_COLUMNS))
        asked = [_asked(row, limit.metric) for row in found]
    return play(limit, asked, tenant.timezone)


def play(limit: LimitSpec, requests: Sequence[Asked], zone: str = "UTC") -> Tried:
    """Pure: the requests in the order of their beginning."""
    gauge = _gauge(limit, zone)
    tried = Tried()
    running: list[tuple[float, int, Asked, int]] = []
    for number, asked in enumerate(requests):
        while running and running[0][0] <= asked.at_s:
            ends_s, _, ended, taken = heapq.heappop(running)
            gauge.settle(ended, taken, ends_s)
        moment = datetime.fromtimestamp(asked.at_s, tz=UTC)
        day = tried.days.setdefault(moment.astimezone(ZoneInfo(zone)).date(), DayTried())
        day.requests += 1
        tried.requests += 1
        taken, wait_s = gauge.take(asked)
        if wait_s is None or wait_s > 0:
            day.refused += 1
            tried.refused += 1
            tried.never += wait_s is None
            tried.longest_wait_s = max(tried.longest_wait_s, wait_s or 0.0)
            if len(tried.examples) < _EXAMPLES:
                tried.examples.append(asked.request_id)
            continue
        tried.used += asked.used
        heapq.heappush(running, (max(asked.ends_s, asked.at_s), number, asked, taken))
    return tried


class _Gauge:
    """The arithmetic of the scripts in quotas/lua, for a clock that is played."""

    def __init__(self, limit: LimitSpec) -> None:
        self.limit = limit

    def take(self, asked: Asked) -> tuple[int, float | None]:
        """What was taken and 0, or 0 and the seconds until it would fit: None is never."""
        raise NotImplementedError

    def settle(self, asked: Asked, taken: int, at_s: float) -> None:
        raise NotImplementedError


def _gauge(limit: LimitSpec, zone: str) -> _Gauge:
    if limit.metric is LimitMetric.CONCURRENCY:
        return _Slots(limit)
    return _Budget(limit, zone) if limit.is_budget else _Rate(limit)


class _Rate(_Gauge):
    def __init__(self, limit: LimitSpec) -> None:
        super().__init__(limit)
        self._level, self._at_s = float(limit.burst), 0.0

    def take(self, asked: Asked) -> tuple[int, float | None]:
        self._refill(asked.at_s)
        if asked.least > self.limit.burst:
            return 0, None
        wanted = min(asked.reserved, max(asked.least, self.limit.burst))
        if self._level < wanted:
            return 0, (wanted - self._level) * self.limit.period_s / self.limit.amount
        self._level -= wanted
        return wanted, 0.0

    def settle(self, asked: Asked, taken: int, at_s: float) -> None:
        self._refill(at_s)
        self._level = min(float(self.limit.burst), self._level + taken - asked.used)

    def _refill(self, at_s: float) -> None:
        gained = max(0.0, at_s - self._at_s) * self.limit.amount / self.limit.period_s
        self._level, self._at_s = min(float(self.limit.burst), self._level + gained), max(at_s, self._at_s)


class _Slots(_Gauge):
    def __init__(self, limit: LimitSpec) -> None:
        super().__init__(limit)
        self._ends: list[float] = []

    def take(self, asked: Asked) -> tuple[int, float | None]:
        if len(self._ends) >= self.limit.amount:
            return 0, max(0.001, self._ends[0] - asked.at_s)
        heapq.heappush(self._ends, asked.ends_s)
        return 1, 0.0

    def settle(self, asked: Asked, taken: int, at_s: float) -> None:
        heapq.heappop(self._ends)  # they end in the order in which they are settled


class _Budget(_Gauge):
    def __init__(self, limit: LimitSpec, zone: str) -> None:
        super().__init__(limit)
        self._zone = zone
        self._held: dict[str, int] = {}
        """Spent and reserved, by period."""

    def take(self, asked: Asked) -> tuple[int, float | None]:
        assert self.limit.calendar is not None
        period = period_at(self.limit.calendar, datetime.fromtimestamp(asked.at_s, tz=UTC), self._zone)
        held = self._held.get(period.name, 0)
        if not self.limit.is_hard:
            self._held[period.name] = held + asked.reserved
            return asked.reserved, 0.0
        if asked.least > self.limit.amount:
            return 0, None
        left = self.limit.amount - held
        # A hard budget grants what it has left; an answer that used more would have been cut there.
        if left < max(asked.least, min(asked.used, 1)) or left < asked.used:
            return 0, max(0.001, period.ends_at_ms / 1000 - asked.at_s)
        taken = min(asked.reserved, left)
        self._held[period.name] = held + taken
        return taken, 0.0

    def settle(self, asked: Asked, taken: int, at_s: float) -> None:
        assert self.limit.calendar is not None
        period = period_at(self.limit.calendar, datetime.fromtimestamp(asked.at_s, tz=UTC), self._zone)
        self._held[period.name] += asked.used - taken


def _asked(row: UsageRecord, metric: LimitMetric) -> Asked:
    decision = from_text(row.decision)
    granted = max(row.completion_tokens, decision.granted_output_tokens if decision else 0)
    prompt = row.prompt_tokens
    least, reserved, used = {
        LimitMetric.REQUESTS: (1, 1, 1),
        LimitMetric.CONCURRENCY: (1, 1, 1),
        LimitMetric.INPUT_TOKENS: (prompt, prompt, prompt),
        LimitMetric.OUTPUT_TOKENS: (0, granted, row.completion_tokens),
        LimitMetric.TOKENS: (prompt, prompt + granted, row.total_tokens),
        # What the rest of the output would have cost is not told by a row: its cost stands for it.
        LimitMetric.COST: (0, row.cost_microusd, row.cost_microusd),
    }[metric]
    return Asked(
        row.request_id, row.created_at.timestamp(), row.finished_at.timestamp(), least, reserved, used
    )
