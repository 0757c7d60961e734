"""What is asked: when, and how long. All of it follows from a seed.

Arrivals are Poisson. Lengths are log-normal with the means of ShareGPT as the PagedAttention paper has them (Kwon et
al., SOSP '23, figure 11: 161 tokens in, 338 out). The spread is ours: sigma 0.9 and 0.55, a long tail of prompts and a
shorter one of answers. `scale` shortens both for slow machines and keeps their shape.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_PROMPT_SIGMA: Final = 0.9
_OUTPUT_SIGMA: Final = 0.55
# Each is one token, with the space before it, in the vocabularies of today's models, or close to it.
_TEXT: Final = (
    "the river town water boat morning old stone bridge market people story winter light road field house letter "
    "garden summer night teacher child book map storm engine paper window door table music song ship harbor bread "
    "coffee friend city school mountain forest rain snow wind fire clock tower bell"
)
_WORDS: Final = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to come."""

    at_s: float
    """After the start."""
    prompt: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Mix:
    seed: int = 0
    prompt_mean: float = 161.0
    output_mean: float = 338.0
    scale: float = 1.0
    most_tokens: int = 1024
    """Of a prompt, and of an answer."""

    def poisson(self, rate: float, duration_s: float) -> Iterator[Ask]:
        """Requests at `rate` a second, until `duration_s`."""
        dice = random.Random(f"{self.seed}/{rate}")  # noqa: S311 - a workload, no secret
        at_s = dice.expovariate(rate)
        while at_s < duration_s:
            yield self._ask(dice, at_s)
            at_s += dice.expovariate(rate)

    def endless(self) -> Iterator[Ask]:
        """Requests without times, for clients that each wait for their answer."""
        dice = random.Random(f"{self.seed}/endless")  # noqa: S311
        while True:
            yield self._ask(dice, 0.0)

    def _ask(self, dice: random.Random, at_s: float) -> Ask:
        words = self._length(dice, self.prompt_mean, _PROMPT_SIGMA)
        # The first word differs, so that a prefix cache finds no more than it would among strangers.
        prompt = f"{dice.getrandbits(32):08x} {' '.join(dice.choices(_WORDS, k=words))}"
        return Ask(at_s, prompt, self._length(dice, self.output_mean, _OUTPUT_SIGMA))

    def _length(self, dice: random.Random, mean: float, sigma: float) -> int:
        drawn = dice.lognormvariate(math.log(mean * self.scale) - sigma * sigma / 2, sigma)
        return max(1, min(self.most_tokens, round(drawn)))
