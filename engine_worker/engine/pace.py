"""Between the engine's loop and the latency controller: who waits for a token, by when, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows

from engine_worker.engine.scheduled import Scheduled
from engine_worker.engine.scheduler import Scheduler
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

    @property
    def rung(self) -> Rung:
        return self._controller.rung

    def before(self, scheduler: Scheduler) -> None:
        """Sets what the coming step may compute."""
        scheduler.may_speculate = self._controller.rung < Rung.NO_SPECULATION
        streams = [sequence for sequence in scheduler.running if sequence.num_uncomputed == 1]
        targets = [target for sequence in streams if (target := self._target(sequence)) is not None]
        targets += self._of_whoever_may_come(scheduler)
        scheduler.allow(
            self._controller.allowance(
                self._clock(), streams=len(streams), target_s=min(targets, default=None)
            )
        )

    def after(self, plan: Rows[Scheduled], waits: Rows[tuple[Sequence, float]], duration_s: float) -> None:
        """Books the step: its duration, and how long streams waited for the token that it gave them."""
        chunks = [item.num_tokens - len(item.draft) for item in plan]
        prompt_tokens = sum(chunk for chunk in chunks if chunk > 1)
        decodes = sum(chunk == 1 for chunk in chunks)
        if plan:
            self._controller.note_step(duration_s, decodes=decodes, prompt_tokens=prompt_tokens)
        lateness = ((wait, self._target(sequence)) for sequence, wait in waits)
        self._controller.note_gaps(wait / target for wait, target in lateness if target is not None)

    def _of_whoever_may_come(self, scheduler: Scheduler) -> list[float]:
        """Targets of better classes than have prompts now: one that arrives waits for the step that runs."""
        prompts = [sequence.rank for sequence in scheduler.running if sequence.num_uncomputed > 1]
        prompts += [sequence.rank for sequence in scheduler.waiting[:1]]
        best = min(prompts, default=0)
        return [target for rank, target in self._targets_s.items() if rank < best]

    def _target(self, sequence: Sequence) -> float | None:
        return self._targets_s.get(sequence.rank)
