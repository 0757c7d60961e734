"""What logits are divided by before a token is drawn: on the CPU and in a GPU's graph."""

from __future__ import annotations

from typing import Final

_LEAST: Final = 1e-5
"""Logits over a smaller one may be beyond float32. It draws what greedy takes, but for ties."""


def divisor(temperature: float) -> float:
    """0: none is drawn, the largest is taken."""
    return max(temperature, _LEAST) if temperature > 0 else 0.0
