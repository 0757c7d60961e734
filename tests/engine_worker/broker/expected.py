"""What should be true of requests and counters after what was done: the plain model of the state machine's search."""

from __future__ import annotations

from dataclasses import dataclass, field

WEIGHTS = {"t1": 1, "t2": 3, "t3": 1000}


@dataclass
class Expected:
    """What should be true of one request."""

    rank: int
    arrival: int
    tenant: str
    is_put_off: bool = False
    lives: int = 1
    billed: list[tuple[str, int, int]] = field(default_factory=list)
    """Ends of its lives: reason, prompt and output tokens of that life."""
    state: str = "queued"
    epoch: int = 0
    attempts: int = 0
    output: list[int] = field(default_factory=list)
    max_output: int = 0
    charged: int = 0
    """So much output is in the counter."""
    counter: int = 0
    """Of its tenant, when it was handed over."""
    is_cancelled: bool = False
    end: str | None = None


class Counters:
    """One tier's virtual token counters, as the paper has them, with its prediction of lengths."""

    def __init__(self) -> None:
        self.served: dict[str, int] = {}
        self.lifts: dict[str, int] = {}
        self.lengths: dict[str, int] = {}
        self.level = 0

    def join(self, tenant: str, waiting: set[str]) -> None:
        if tenant not in waiting:
            floor = min((self.served[other] for other in waiting), default=self.level)
            before = self.served.get(tenant, 0)
            self.served[tenant] = max(floor, before)
            self.lifts[tenant] = self.lifts.get(tenant, 0) + self.served[tenant] - before

    def charge_output(self, of: Expected, count: int) -> None:
        self.served[of.tenant] += cost(of.tenant, 2 * count) - cost(of.tenant, 2 * of.charged)
        of.charged = count

    def expected_output(self, of: Expected) -> int:
        mean = self.lengths.get(of.tenant, self.lengths.get("", 0))
        return min(-(-mean // 1000), of.max_output)

    def learn(self, of: Expected) -> None:
        latest = 1000 * len(of.output)
        for key in (of.tenant, ""):
            mean = self.lengths.get(key)
            self.lengths[key] = latest if mean is None else mean + (latest - mean) // 8


def cost(tenant: str, weighted_tokens: int) -> int:
    return int(weighted_tokens * 1000 / WEIGHTS[tenant] + 0.5)
