"""What an engine has counted since its start, and how that is distributed. Numbers only."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from typing import Final

PHASES: Final = ("schedule", "transfer", "compute", "sample", "detokenise")
"""Of a step. `detokenise` is everything from chosen tokens to outputs. `transfer` is between device and host:
on the CPU the blocks of preempted sequences alone."""

_BOUNDS: Final = tuple(round(base * 10.0**power, 4) for power in range(-3, 3) for base in (1, 2.5, 5))
"""Seconds, from 1 ms to 500 s."""
_RECENT: Final = 1000


class Distribution:
    """Counts by bucket since start, and the latest values for quantiles of now. In seconds."""

    def __init__(self) -> None:
        self.bounds = _BOUNDS
        self.counts = [0] * (len(_BOUNDS) + 1)
        """By upper bound, the last without one; not cumulative."""
        self.sum = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, *values: float) -> None:
        for value in values:
            # A value on a bound belongs under it, as Prometheus has it.
            self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += sum(values)
        self._recent.extend(values)

    def recent(self, *quantiles: float) -> tuple[float, ...]:
        """Of the last thousand values; 0 where there is none."""
        values = sorted(self._recent.copy())
        if not values:
            return (0.0,) * len(quantiles)
        return tuple(values[min(len(values) - 1, int(len(values) * quantile))] for quantile in quantiles)


class Measurements:
    """Written by the engine's thread, read by others: a reader may see a step half booked, never a torn number."""

    def __init__(self, max_num_seqs: int = 0) -> None:
        self.max_num_seqs = max_num_seqs
        """Sequences of a full batch."""
        self.time_to_first_token = Distribution()
        self.inter_token = Distribution()
        self.queue = Distribution()
        self.prefill = Distribution()
        """From the first scheduled chunk to the first token."""
        self.decode = Distribution()
        """From the first token to the last."""
        self.step = Distribution()
        self.phase_s = dict.fromkeys(PHASES, 0.0)
        self.finished: Counter[str] = Counter()
        """Requests by finish reason."""
        self.errors: Counter[str] = Counter()
        """Failed requests by code."""
        self.scheduled_tokens = 0
        self.wasted_tokens = 0
        """Those of them that nothing came of: wrong guesses, and sequences that had ended meanwhile."""
        self.padding_tokens = 0
        """Computed besides the scheduled ones, to fill up a graph or a batch of texts. By the device's thread."""
        self.output_tokens = 0
        self.sequence_steps = 0
        """Sequences of each step, summed: over steps times `max_num_seqs` it is how full batches were."""
