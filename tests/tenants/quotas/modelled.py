"""A plain model of the buckets, in exact fractions, and the real scripts under a clock that the test turns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

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


@dataclass
class ModelBucket:
    limit: LimitSpec
    level: Fraction = field(init=False)
    at_ms: int = 0
    leases: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.level = Fraction(self.limit.burst)

    def advance(self, now: int) -> None:
        if self.limit.metric is LimitMetric.CONCURRENCY:
            self.leases = {rid: lapses for rid, lapses in self.leases.items() if lapses > now}
            return
        gained = Fraction(self.limit.amount * (now - self.at_ms), self.limit.period_s * 1000)
        self.level = min(Fraction(self.limit.burst), self.level + gained)
        self.at_ms = now

    def asks(self, prompt: int, output: int) -> int:
        if self.limit.metric is not LimitMetric.TOKENS:
            return 1
        whole = prompt + output
        return self.limit.burst if prompt <= self.limit.burst < whole else whole

    def fits(self, units: int) -> bool:
        if self.limit.metric is LimitMetric.CONCURRENCY:
            return len(self.leases) < self.limit.amount
        return self.level >= units

    def fits_ever(self, units: int) -> bool:
        return self.limit.metric is LimitMetric.CONCURRENCY or units <= self.limit.burst

    @property
    def remaining(self) -> int:
        if self.limit.metric is LimitMetric.CONCURRENCY:
            return max(0, self.limit.amount - len(self.leases))
        return max(0, int(self.level)) if self.level > 0 else 0

    def add(self, units: Fraction | int) -> None:
        self.level = min(Fraction(self.limit.burst), self.level + units)


@dataclass
class Record:
    state: str
    taken: list[int]


class Model:
    """What the four verbs should do, said as plainly as possible."""

    def __init__(self, limits: Sequence[LimitSpec], now: int) -> None:
        self.now = now
        self.buckets = [ModelBucket(limit, at_ms=now) for limit in limits]
        self.records: dict[str, Record] = {}

    def turn(self, ms: int) -> None:
        self.now += ms
        for bucket in self.buckets:
            bucket.advance(self.now)

    def reserve(self, rid: str, prompt: int, output: int, lease_ms: int) -> str:
        """'admitted', 'refused', 'never' or 'closed'."""
        record = self.records.get(rid)
        if record is not None:
            return "admitted" if record.state == "reserved" else "closed"
        asked = [bucket.asks(prompt, output) for bucket in self.buckets]
        pairs = list(zip(self.buckets, asked, strict=True))
        if not all(bucket.fits_ever(units) for bucket, units in pairs):
            return "never"
        if not all(bucket.fits(units) for bucket, units in pairs):
            return "refused"
        for bucket, units in pairs:
            if bucket.limit.metric is LimitMetric.CONCURRENCY:
                bucket.leases[rid] = self.now + lease_ms
            else:
                bucket.add(-units)
        self.records[rid] = Record("reserved", asked)
        return "admitted"

    def settle(self, rid: str, prompt: int, completion: int) -> None:
        record = self.records.get(rid)
        if record is None or record.state == "settled":
            return
        for bucket, taken in zip(self.buckets, record.taken, strict=False):
            if bucket.limit.metric is LimitMetric.CONCURRENCY:
                bucket.leases.pop(rid, None)
            else:
                exact = prompt + completion if bucket.limit.metric is LimitMetric.TOKENS else 1
                bucket.add((taken if record.state == "reserved" else 0) - exact)
        record.state = "settled"

    def release(self, rid: str) -> None:
        record = self.records.get(rid)
        if record is None:
            self.records[rid] = Record("released", [])
        elif record.state == "reserved":
            for bucket, taken in zip(self.buckets, record.taken, strict=True):
                if bucket.limit.metric is LimitMetric.CONCURRENCY:
                    bucket.leases.pop(rid, None)
                else:
                    bucket.add(taken)
            record.state = "released"
