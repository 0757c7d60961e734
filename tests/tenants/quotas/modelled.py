"""A plain model of the buckets, in exact fractions, and the real scripts under a clock that the test turns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from tenants.pricing import Price
from tenants.principal import LimitMetric, LimitSpec
from tenants.quotas import scripts

CLOCK_KEY = "weir:{t:t1}:test-clock"

# Shadows `redis` in front of the real script: time comes from a key, and no key expires (its life is real time).
_CLOCK = f"""
local server = redis
local redis = {{call = function(command, ...)
  if command == 'TIME' then
    local ms = tonumber(server.call('GET', '{CLOCK_KEY}'))
    return {{string.format('%.0f', math.floor(ms / 1000)), string.format('%.0f', (ms % 1000) * 1000)}}
  end
  if command == 'PEXPIRE' or command == 'PEXPIREAT' then return 1 end
  return server.call(command, ...)
end}}
"""


def clocked(verb: str) -> scripts.Script:
    text = _CLOCK + _real_load(verb).text
    return scripts.Script(text=text, sha1=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


_real_load = scripts.load


DEAD_AFTER_MS = 60_000
DAY_MS = 86_400_000


@dataclass
class ModelBucket:
    limit: LimitSpec
    level: Fraction = field(init=False)
    at_ms: int = 0
    leases: dict[str, int] = field(default_factory=dict)
    spent: dict[int, int] = field(default_factory=dict)
    """Of a budget, by the day since 1970: the model's tenants live in UTC and have budgets of days."""
    reserved: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.level = Fraction(self.limit.burst)

    def advance(self, now: int) -> None:
        if self.limit.metric is LimitMetric.CONCURRENCY:
            self.leases = {rid: lapses for rid, lapses in self.leases.items() if lapses > now}
        elif not self.limit.is_budget:
            gained = Fraction(self.limit.amount * (now - self.at_ms), self.limit.period_s * 1000)
            self.level = min(Fraction(self.limit.burst), self.level + gained)
        self.at_ms = now

    @property
    def day(self) -> int:
        return self.at_ms // DAY_MS

    def used(self, prompt: int, output: int, price: Price) -> int:
        match self.limit.metric:
            case LimitMetric.INPUT_TOKENS:
                return prompt
            case LimitMetric.OUTPUT_TOKENS:
                return output
            case LimitMetric.TOKENS:
                return prompt + output
            case LimitMetric.COST:
                return price.cost_microusd(prompt_tokens=prompt, cached_tokens=0, completion_tokens=output)
        return 1

    def at_most(self, prompt: int, output: int, price: Price) -> int:
        if self.limit.metric is LimitMetric.COST:
            whole = price.prompt_at_most_microusd(prompt)
            return whole + -(-output * price.output_microusd_per_mtok // 1_000_000)
        return self.used(prompt, output, price)

    @property
    def left(self) -> int:
        return self.unspent - self.reserved.get(self.day, 0)

    @property
    def unspent(self) -> int:
        return self.limit.amount - self.spent.get(self.day, 0)

    def asks(self, prompt: int, output: int, price: Price) -> int:
        least, whole = self.at_most(prompt, 0, price), self.at_most(prompt, output, price)
        if self.limit.is_budget:
            return whole
        return min(whole, max(least, self.limit.burst))

    def fits(self, units: int) -> bool:
        if self.limit.metric is LimitMetric.CONCURRENCY:
            return len(self.leases) < self.limit.amount
        if self.limit.is_budget:
            return not self.limit.is_hard or units <= self.left
        return self.level >= units

    def fits_ever(self, prompt: int, output: int, price: Price) -> bool:
        if self.limit.metric is LimitMetric.CONCURRENCY or not self.limit.is_hard:
            return True
        if self.limit.is_budget:
            return self.at_most(prompt, min(1, output), price) <= self.limit.amount
        return self.at_most(prompt, 0, price) <= self.limit.burst

    @property
    def remaining(self) -> int:
        if self.limit.metric is LimitMetric.CONCURRENCY:
            return max(0, self.limit.amount - len(self.leases))
        if self.limit.is_budget:
            return max(0, self.left)
        return max(0, int(self.level)) if self.level > 0 else 0

    def add(self, units: Fraction | int) -> None:
        self.level = min(Fraction(self.limit.burst), self.level + units)


@dataclass
class Record:
    state: str
    taken: list[int]
    granted: int = 0
    day: int = 0
    dead_at: int = 0


class Model:
    """What the four verbs should do, said as plainly as possible."""

    def __init__(self, limits: Sequence[LimitSpec], now: int, price: Price) -> None:
        self.now = now
        self.price = price
        self.buckets = [ModelBucket(limit, at_ms=now) for limit in limits]
        self.records: dict[str, Record] = {}

    def turn(self, ms: int) -> None:
        self.now += ms
        for bucket in self.buckets:
            bucket.advance(self.now)

    @property
    def hard_budgets(self) -> list[ModelBucket]:
        return [bucket for bucket in self.buckets if bucket.limit.is_budget and bucket.limit.is_hard]

    def granted(self, prompt: int, output: int) -> int:
        """How much of the output every hard budget has room for that does not refuse."""
        least = min(1, output)
        budgets = [b for b in self.hard_budgets if b.at_most(prompt, least, self.price) <= b.left]
        return max(
            (
                n
                for n in range(output + 1)
                if all(b.at_most(prompt, n, self.price) <= b.left for b in budgets)
            ),
            default=0,
        )

    def reserve(self, rid: str, prompt: int, output: int, lease_ms: int) -> str:
        """'admitted', 'refused', 'spent', 'never' or 'closed'."""
        for other, dead in self.records.items():
            if dead.state == "reserved" and dead.dead_at <= self.now:
                self.release(other)
        record = self.records.get(rid)
        if record is not None:
            return "admitted" if record.state == "reserved" else "closed"
        if not all(bucket.fits_ever(prompt, output, self.price) for bucket in self.buckets):
            return "never"
        least = min(1, output)
        wanted = [(budget, budget.at_most(prompt, least, self.price)) for budget in self.hard_budgets]
        if any(units > budget.unspent for budget, units in wanted):
            return "spent"
        granted = self.granted(prompt, output)
        asked = [bucket.asks(prompt, granted, self.price) for bucket in self.buckets]
        pairs = list(zip(self.buckets, asked, strict=True))
        has_room = all(units <= budget.left for budget, units in wanted)
        if not has_room or not all(bucket.fits(units) for bucket, units in pairs):
            return "refused"
        for bucket, units in pairs:
            if bucket.limit.metric is LimitMetric.CONCURRENCY:
                bucket.leases[rid] = self.now + lease_ms
            elif bucket.limit.is_budget:
                bucket.reserved[bucket.day] = bucket.reserved.get(bucket.day, 0) + units
            else:
                bucket.add(-units)
        day, dead_at = self.now // DAY_MS, self.now + lease_ms + DEAD_AFTER_MS
        self.records[rid] = Record("reserved", asked, granted, day, dead_at)
        return "admitted"

    def settle(self, rid: str, prompt: int, completion: int) -> int:
        """Returns the cost to settle with."""
        cost = self.price.cost_microusd(prompt_tokens=prompt, cached_tokens=0, completion_tokens=completion)
        record = self.records.get(rid)
        if record is None or record.state == "settled":
            return cost
        for bucket, units in zip(self.buckets, record.taken, strict=False):
            taken = units if record.state == "reserved" else 0
            exact = bucket.used(prompt, completion, self.price)
            if bucket.limit.metric is LimitMetric.CONCURRENCY:
                bucket.leases.pop(rid, None)
            elif bucket.limit.is_budget:
                bucket.reserved[record.day] = bucket.reserved.get(record.day, 0) - taken
                bucket.spent[record.day] = bucket.spent.get(record.day, 0) + exact
            else:
                bucket.add(taken - exact)
        record.state = "settled"
        return cost

    def release(self, rid: str) -> None:
        record = self.records.get(rid)
        if record is None:
            self.records[rid] = Record("released", [])
        elif record.state == "reserved":
            for bucket, taken in zip(self.buckets, record.taken, strict=True):
                if bucket.limit.metric is LimitMetric.CONCURRENCY:
                    bucket.leases.pop(rid, None)
                elif bucket.limit.is_budget:
                    bucket.reserved[record.day] -= taken
                else:
                    bucket.add(taken)
            record.state = "released"
