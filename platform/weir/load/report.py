"""What a run amounts to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from weir.load.client import End, Outcome


@dataclass(frozen=True, slots=True)
class Objective:
    """What a user would call good: the first token, and the mean time between two, within these."""

    ttft_s: float = 5.0
    itl_s: float = 0.5

    def is_met(self, outcome: Outcome) -> bool:
        return outcome.end is End.DONE and outcome.ttft_s <= self.ttft_s and outcome.itl_s <= self.itl_s


@dataclass(frozen=True, slots=True)
class Report:
    """Rates count what ended within the time in which requests came; what drains afterwards is not counted in them."""

    duration_s: float
    sent: int
    offered_per_s: float
    done: int
    refused: int
    failed: int
    lost: int
    refused_without_retry_after: int
    done_per_s: float
    goodput_per_s: float
    """Answers a second that met the objective."""
    good_share: float
    """Of the answers."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: tuple[float, float, float]
    """P50, P90, P99, from when the request was to be sent."""
    itl_s: tuple[float, float, float]
    """The same of all times between two events with text."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def lines(self) -> list[str]:
        def ms(values: tuple[float, float, float]) -> str:
            return "P50 {:8,.0f}   P90 {:8,.0f}   P99 {:8,.0f} ms".format(*(1000 * value for value in values))

        return [
            f"requests   {self.sent} sent in {self.duration_s:g} s ({self.offered_per_s:.2f}/s): {self.done} done, "
            f"{self.refused} refused, {self.failed} failed, {self.lost} lost",
            f"throughput {self.done_per_s:.2f} answers/s, {self.output_tokens_per_s:,.1f} tokens/s out, "
            f"{self.prompt_tokens_per_s:,.1f} in",
            f"goodput    {self.goodput_per_s:.2f} answers/s within the objective, {self.good_share:.0%} of the answers",
            f"TTFT       {ms(self.ttft_s)}",
            f"ITL        {ms(self.itl_s)}",
        ]


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    if not values:
        return (0.0, 0.0, 0.0)
    ordered = sorted(values)
    p50, p90, p99 = (ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.9, 0.99))
    return (round(p50, 4), round(p90, 4), round(p99, 4))


def summarise(
    outcomes: Sequence[Outcome], *, duration_s: float, objective: Objective, from_s: float = 0.0
) -> Report:
    """`from_s`: what ended before it filled the pipe, and counts for no rate."""
    ends = Counter(outcome.end for outcome in outcomes)
    done = [outcome for outcome in outcomes if outcome.end is End.DONE]
    timely = [outcome for outcome in done if from_s <= outcome.finished_s <= duration_s]
    good = [outcome for outcome in timely if objective.is_met(outcome)]
    counted_s = duration_s - from_s
    return Report(
        duration_s=duration_s,
        sent=len(outcomes),
        offered_per_s=round(len(outcomes) / duration_s, 3),
        done=ends[End.DONE],
        refused=ends[End.REFUSED],
        failed=ends[End.FAILED],
        lost=ends[End.LOST],
        refused_without_retry_after=sum(
            1 for outcome in outcomes if outcome.end is End.REFUSED and not outcome.retry_after
        ),
        done_per_s=round(len(timely) / counted_s, 3),
        goodput_per_s=round(len(good) / counted_s, 3),
        good_share=round(sum(map(objective.is_met, done)) / len(done), 3) if done else 0.0,
        prompt_tokens_per_s=round(sum(outcome.prompt_tokens for outcome in timely) / counted_s, 1),
        output_tokens_per_s=round(sum(outcome.output_tokens for outcome in timely) / counted_s, 1),
        ttft_s=percentiles([outcome.ttft_s for outcome in done if outcome.token_at_s]),
        itl_s=percentiles([gap for outcome in done for gap in outcome.gaps_s]),
    )
