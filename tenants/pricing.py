"""What tokens cost: dated prices per model and direction, and the arithmetic, in integers only.

A price is in micro-USD per million tokens: 0.15 USD per million input tokens is 150,000. A request
costs what the price of its model said at the moment the request was accepted; the sum over the three
directions is rounded once, half up, to a whole micro-USD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

PER_TOKENS: Final = 1_000_000
"""Prices are given per so many tokens."""


@dataclass(frozen=True, slots=True)
class Price:
    """One model's price from `valid_from` until the next one of that model."""

    public_id: str
    valid_from: datetime
    input_microusd_per_mtok: int
    cached_input_microusd_per_mtok: int
    output_microusd_per_mtok: int

    def cost_microusd(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """`cached_tokens` are those of the prompt that the prefix cache already held."""
        parts = (
            (prompt_tokens - cached_tokens) * self.input_microusd_per_mtok
            + cached_tokens * self.cached_input_microusd_per_mtok
            + completion_tokens * self.output_microusd_per_mtok
        )
        return (parts + PER_TOKENS // 2) // PER_TOKENS

    def prompt_at_most_microusd(self, prompt_tokens: int) -> int:
        """What the prompt costs if none or all of it is cached, whichever is dearer; rounded up."""
        dearer = max(self.input_microusd_per_mtok, self.cached_input_microusd_per_mtok)
        return -(-prompt_tokens * dearer // PER_TOKENS)


def price_at(prices: Sequence[Price], moment: datetime) -> Price | None:
    """The one that holds at `moment`; None before the first: then tokens cost nothing."""
    past = [price for price in prices if price.valid_from <= moment]
    return max(past, key=lambda price: price.valid_from, default=None)
