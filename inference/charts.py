"""What the chart of the usage page draws: stacked series of days, as tokens and as cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any

from inference.ranking import Rank
from inference.selectors import DayOfModel

_EPOCH = date(1970, 1, 1)
Series = tuple[str, list[int], bool]
"""Its label, its values by day, and whether it is drawn in grey, being what is left."""


def days_back(today: date, days: int) -> list[date]:
    """The last ones, oldest first, today included."""
    return [today - timedelta(days=days - 1 - index) for index in range(days)]


def chart_of_days(rows: list[DayOfModel], days: list[date]) -> dict[str, Any]:
    """A point for each day, also for those without use."""
    tokens_in, tokens_out, cost = (defaultdict[date, int](int) for _ in range(3))
    for row in rows:
        tokens_in[row.day] += row.prompt_tokens
        tokens_out[row.day] += row.completion_tokens
        cost[row.day] += row.cost_microusd
    return _chart(
        days,
        [
            ("Tokens in", [tokens_in[day] for day in days], False),
            ("Tokens out", [tokens_out[day] for day in days], True),
        ],
        [("Cost", [cost[day] for day in days], False)],
    )


def chart_of_ranks(rows: list[DayOfModel], ranks: list[Rank], days: list[date]) -> dict[str, Any]:
    """Each rank's days, and what all others used above them."""
    tokens, cost = (defaultdict[date, int](int) for _ in range(2))
    for row in rows:
        tokens[row.day] += row.total_tokens
        cost[row.day] += row.cost_microusd
    return _chart(days, _stacked(ranks, tokens, days, 0), _stacked(ranks, cost, days, 1))


def _stacked(ranks: list[Rank], whole: dict[date, int], days: list[date], part: int) -> list[Series]:
    series: list[Series] = [
        (rank.name, [rank.days.get(day, (0, 0))[part] for day in days], False) for rank in ranks
    ]
    left = [
        whole.get(day, 0) - sum(values[index] for _, values, _ in series) for index, day in enumerate(days)
    ]
    return [*series, ("Others", left, True)] if any(left) else series


def _chart(days: list[date], tokens: Sequence[Series], cost: Sequence[Series]) -> dict[str, Any]:
    def told(series: Sequence[Series]) -> list[dict[str, Any]]:
        return [{"label": label, "values": values, "rest": is_rest} for label, values, is_rest in series]

    return {
        "days": [(day - _EPOCH).days * 86_400 for day in days],
        "tokens": told(tokens),
        "cost": told(cost),
    }
