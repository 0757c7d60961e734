"""Between the engine's loop and the latency controller: who waits for a token, by when, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows

from engine_worker.engine.scheduler import Scheduled, Scheduler
from engine_worker.engine.sequence import Sequence
from engine_worker.engine.slo import LatencyController
from engine_worker.protocol import Rung


class Pace:
    """`targets_s`: seconds between two tokens, by tier rank. `clock`: monotonic, in seconds."""

    def __init__(
        self,
        controller: LatencyController,
        targets_s: Mapping[int, float],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._controller = controller
        self._targets_s = targets_s
        self._clock = clock
        self._began = 0.0

    @property
    def rung(self) -> Rung:
        return self._controller.rung

    def before(self, scheduler: Scheduler) -> None:
        """Sets what the coming step may compute."""
        self._began = self._clock()
        streams = [sequence for sequence in scheduler.running if sequence.num_uncomputed == 1]
        targets = [target for sequence in streams if (target := self._target(sequence)) is not None]
        scheduler.allow(
            self._controller.allowance(self._began, streams=len(streams), target_s=min(targets, default=None))
        )

    def after(self, plan: Rows[Scheduled]) -> None:
        """Books the step: its duration, and the wait of each stream that got a token."""
        now = self._clock()
        decodes = prompt_tokens = 0
        lateness: list[float] = []
        for item in plan:
            sequence = item.sequence
            if item.num_tokens == 1:
                decodes += 1
            else:
                prompt_tokens += item.num_tokens
            if not sequence.has_news:
                continue  # in the middle of its prompt
            target = self._target(sequence)
            if target is not None and sequence.token_at is not None:
                lateness.append((now - sequence.token_at) / target)
            sequence.token_at = now
        if plan:
            self._controller.note_step(now - self._began, decodes=decodes, prompt_tokens=prompt_tokens)
            self._controller.note_gaps(lateness)

    def _target(self, sequence: Sequence) -> float | None:
        return self._targets_s.get(sequence.rank)
