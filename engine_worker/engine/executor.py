"""What computing a step takes: the model, then the sampler. Changes no sequence, so a step can be made again."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from torch import Tensor

from engine_worker.engine.errors import EngineDead
from engine_worker.engine.meter import Meter
from engine_worker.engine.row import Ahead, Row
from engine_worker.engine.sampler import Sampled, Sampler
from engine_worker.engine.scheduled import Scheduled
from engine_worker.engine.sequence import Sequence
from engine_worker.engine.swap import Move
from engine_worker.protocol import PositionLogprobs


class StepAbandoned(Exception):
    """The step before failed, and this one needs its tokens."""


class Runner(Protocol):
    """Computes steps: `runner.ModelRunner`."""

    def execute(self, step: Rows[Scheduled]) -> Tensor:
        """Logits, float32[sum of num_logits, vocab], in order. Running a step again must give the same."""

    def move(self, moves: Rows[Move]) -> None:
        """Copies KV blocks to host memory and back, in order."""

    def scrub(self, blocks: Rows[int]) -> None:
        """Overwrites KV blocks that may hold NaN."""

    def close(self) -> None:
        """Nothing will be computed any more."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a step made of one sequence's chunk."""

    sampled: Rows[Sampled]
    """The token that follows, and those after each token of the draft; none while the prompt goes on."""
    scored: Rows[PositionLogprobs] = ()


class Executor:
    """Belongs to one thread, which need not be the scheduler's."""

    def __init__(self, runner: Runner, sampler: Sampler, meter: Meter) -> None:
        self.runner = runner
        self._sampler = sampler
        self._meter = meter

    def run(self, plan: Rows[Scheduled], moves: Rows[Move] = ()) -> list[Result]:
        """One per item. Fills in what each item chooses. Raises StepAbandoned, or what the model failed with."""
        if moves:
            self._move(moves)
        if not plan:
            return []
        if any(item.awaits is not None and item.awaits.token_id is None for item in plan):
            raise StepAbandoned
        with self._meter.phase("compute"):
            logits = self.runner.execute(plan)
        rows: list[Row] = []
        wanted: list[int] = []
        scored: dict[int, list[PositionLogprobs]] = {}
        end = 0
        for item in plan:
            first, end = end, end + item.num_logits
            if item.sequence.is_scoring:
                scored[item.sequence.uid] = self._score(item.sequence, logits[first:end])
            if item.samples:
                rows += rows_of(item)
                wanted += range(end - 1 - len(item.draft), end)
        if len(wanted) < end:
            logits = logits[wanted]
        with self._meter.phase("sample"):
            tokens = iter(self._sampler.sample(logits, rows) if rows else ())
        results = []
        for item in plan:
            sampled: list[Sampled] = []
            if item.chooses is not None:
                sampled = list(islice(tokens, 1 + len(item.draft)))
                # Where there is none the sequence fails, and what the next step makes of it is dropped.
                item.chooses.token_id = sampled[0].token_id or 0
            results.append(Result(sampled, scored.get(item.sequence.uid, ())))
        return results

    def _move(self, moves: Rows[Move]) -> None:
        try:
            with self._meter.phase("transfer"):
                self.runner.move(moves)
        except Exception as error:
            # No request is to blame, and no second attempt at the step would make it good.
            raise EngineDead(f"copying KV blocks failed: {error}") from error

    def _score(self, sequence: Sequence, logits: Tensor) -> list[PositionLogprobs]:
        """Of the prompt tokens that follow those whose logits these are, float32[tokens, vocab]."""
        assert sequence.scored is not None
        first = len(sequence.scored) + 1
        token_ids = sequence.token_ids[first : min(first + len(logits), sequence.num_prompt)]
        if not token_ids:
            return []
        count = sequence.sampling.prompt_logprobs or 0
        return self._sampler.score(logits[: len(token_ids)], token_ids, count)


def rows_of(item: Scheduled) -> list[Row]:
    """Whoever the item's tokens are chosen for: the sequence, and it again after each token of the draft."""
    sequence, awaited = item.sequence, item.awaited
    now = Ahead(sequence, item.known, awaited) if awaited else sequence
    ahead = (item.draft[: n + 1] for n in range(len(item.draft)))
    return [now, *(Ahead(sequence, item.known, [*awaited, *tokens]) for tokens in ahead)]
