"""Books each step and each request. Pure: the clock is passed in.

A step's gaps are added in one call, so a token costs a few attribute writes and no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager

from engine_worker.engine.measurements import Measurements
from engine_worker.engine.scheduled import Scheduled
from engine_worker.engine.sequence import Sequence
from engine_worker.protocol import Finish


class Meter(Measurements):
    """`clock`: monotonic, in seconds. `max_num_seqs`: what a full batch would be."""

    def __init__(self, max_num_seqs: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(max_num_seqs)
        self._clock = clock

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self.phase_s[name] += self._clock() - began

    def arrived(self, sequence: Sequence) -> None:
        sequence.arrived_at = self._clock()

    def book(self, plan: Rows[Scheduled], duration_s: float) -> list[tuple[Sequence, float]]:
        """A step that is done, its outputs not yet taken. Returns who waited how long for what it got next."""
        now = self._clock()
        waits: list[tuple[Sequence, float]] = []
        gaps: list[float] = []
        for item in plan:
            sequence = item.sequence
            if sequence.started_at is None:
                sequence.started_at = now - duration_s
                self.queue.add(max(0.0, sequence.started_at - sequence.arrived_at))
            made = sequence.num_output - sequence.num_emitted
            if not made:
                continue  # in the middle of its prompt, or ended without a token
            if sequence.token_at is not None:
                waits.append((sequence, now - sequence.token_at))
            gaps += self.tokens_came(sequence, made, now)
        if gaps:
            self.inter_token.add(*gaps)
        self.step.add(duration_s)
        self.scheduled_tokens += sum(item.num_tokens for item in plan)
        self.sequence_steps += len(plan)
        return waits

    def tokens_came(self, sequence: Sequence, count: int, now: float) -> list[float]:
        """Output tokens that came at once. Returns the gaps between tokens to book for them.

        Guesses that are right come with the token before them: the wait is shared by all that it brought, so that gaps
        are as many as tokens and add up to the time that they took.
        """
        before, sequence.token_at = sequence.token_at, now
        self.output_tokens += count
        if before is not None:
            return [(now - before) / count] * count
        assert sequence.started_at is not None
        sequence.first_token_at = now
        self.time_to_first_token.add(now - sequence.arrived_at)
        self.prefill.add(now - sequence.started_at)
        return [0.0] * (count - 1)

    def ended(self, sequence: Sequence) -> None:
        assert sequence.finish is not None
        self.count_end(sequence.finish)
        if sequence.first_token_at is not None and sequence.token_at is not None:
            self.decode.add(sequence.token_at - sequence.first_token_at)

    def count_end(self, finish: Finish) -> None:
        self.finished[finish.reason] += 1
        if finish.error is not None:
            self.errors[finish.error.code] += 1
