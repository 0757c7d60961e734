"""The engine's loop, one step at a time, in one thread: expire, schedule, compute, append, hand out."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Protocol

import structlog
import torch
from torch import Tensor

from engine_worker.engine.block_pool import BlockPool
from engine_worker.engine.meter import Meter
from engine_worker.engine.pace import Pace
from engine_worker.engine.row import Ahead, Row
from engine_worker.engine.sampler import Sampled, Sampler
from engine_worker.engine.scheduler import Scheduled, Scheduler
from engine_worker.engine.sequence import Sequence, Status
from engine_worker.engine.types import EngineDead, EngineStats, RequestOutput
from engine_worker.protocol import EngineError, FinishReason, PositionLogprobs

log = structlog.get_logger(__name__)

_MAX_FAILED_STEPS = 3


class Runner(Protocol):
    """Computes steps: `runner.ModelRunner`."""

    def execute(self, step: Rows[Scheduled]) -> Tensor:
        """Logits, float32[sum of num_logits, vocab], in order. Running a step again must give the same."""

    def scrub(self, blocks: Rows[int]) -> None:
        """Overwrites KV blocks that may hold NaN."""


@dataclass(frozen=True, slots=True)
class Step:
    """`outputs`: what is new, by the sequence's uid."""

    outputs: Rows[tuple[int, RequestOutput]]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class _Result:
    """What a step made of one sequence's chunk."""

    sampled: Rows[Sampled]
    """The token that follows, and those after each token of the draft; none while the prompt goes on."""
    scored: Rows[PositionLogprobs]


class EngineCore:
    """Sequences in, tokens out. `clock` gives Unix time in seconds."""

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        scheduler: Scheduler,
        pool: BlockPool,
        clock: Callable[[], float] = time.time,
        pace: Pace | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._scheduler = scheduler
        self._pool = pool
        self._clock = clock
        self._pace = pace
        self.meter = meter or Meter()
        self._live: dict[int, Sequence] = {}
        self._failed_steps = 0
        self._steps = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self._last = (0.0, 0)  # seconds, tokens

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, sequence: Sequence) -> None:
        self._live[sequence.uid] = sequence
        self.meter.arrived(sequence)
        if sequence.finish is None:  # an earlier attempt may have reached the end already
            self._scheduler.add(sequence)

    def abort(self, uid: int, reason: str = FinishReason.CANCELLED) -> None:
        """Frees the sequence's blocks now; its final output comes with the next step. Unknown ids are ignored."""
        sequence = self._live.get(uid)
        if sequence is not None:
            sequence.end(reason)
            self._scheduler.remove(sequence)

    def abort_all(self) -> None:
        for uid in list(self._live):
            self.abort(uid)

    def step(self) -> Step:
        """Raises EngineDead when nothing can be computed any more."""
        began = time.perf_counter()
        self._expire()
        if self._pace is not None:
            self._pace.before(self._scheduler)
        with self.meter.phase("schedule"):
            plan = self._scheduler.schedule()
        computed = self._compute(plan)
        with self.meter.phase("detokenise"):
            for item, result in computed:
                self._advance(item, result)
        waits = self.meter.book(plan, time.perf_counter() - began) if plan else []
        if self._pace is not None:
            self._pace.after(plan, waits)
        with self.meter.phase("detokenise"):
            outputs = [
                (sequence.uid, sequence.take_output())
                for sequence in self._live.values()
                if sequence.has_news
            ]
        self._forget_ended()
        if plan:
            self._steps += 1
            self._last = (time.perf_counter() - began, sum(item.num_tokens for item in plan))
        if not self._live:
            self._pool.check(())
        return Step(outputs, self.stats())

    def stats(self) -> EngineStats:
        return EngineStats(
            steps=self._steps,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_blocks_total=self._pool.total,
            kv_blocks_used=self._pool.used,
            step_s=self._last[0],
            scheduled_tokens=self._last[1],
            preemptions=self._scheduler.preemptions,
            kv_blocks_cached=self._pool.cached,
            prompt_tokens=self._scheduler.prompt_tokens,
            cached_prompt_tokens=self._scheduler.cached_prompt_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            rung=0 if self._pace is None else self._pace.rung,
        )

    def check(self) -> None:
        """Raises AssertionError unless the live sequences account for every KV block."""
        self._pool.check([sequence.table for sequence in self._live.values()])

    def _expire(self) -> None:
        now_ms = self._clock() * 1000
        for sequence in self._live.values():
            deadline_ms = sequence.request.deadline_ms
            if deadline_ms is not None and deadline_ms <= now_ms:
                self.abort(sequence.uid, FinishReason.DEADLINE)

    def _forget_ended(self) -> None:
        for sequence in [sequence for sequence in self._live.values() if sequence.finish is not None]:
            self._scheduler.remove(sequence)
            self.meter.ended(sequence)
            del self._live[sequence.uid]

    def _advance(self, item: Scheduled, result: _Result) -> None:
        """Books a computed chunk and the token that was chosen after it."""
        sequence = item.sequence
        if sequence.status is not Status.RUNNING:
            return  # aborted since it was scheduled
        sequence.num_computed += item.num_tokens - len(item.draft)
        if sequence.scored is not None:
            sequence.scored += result.scored
        accepted = self._verify(item, result)
        for ahead, sampled in enumerate(result.sampled[: accepted + 1]):
            if sampled.token_id is None:
                self._fail(sequence, "the model's output is not a number, or every token is forbidden")
                return
            # The token before is one that was guessed right: it is computed already.
            sequence.num_computed += min(ahead, 1)
            # Not before a token was chosen: what gave no number must not be found by others.
            self._scheduler.keep(sequence)
            if sequence.max_tokens == 0:
                sequence.end(FinishReason.LENGTH)
                return
            sequence.append(sampled.token_id)
            if sampled.logprobs is not None:
                sequence.logprobs.append(sampled.logprobs)
            if sequence.finish is not None:
                return

    def _verify(self, item: Scheduled, result: _Result) -> int:
        """How many tokens of the draft are what was then chosen."""
        pairs = zip(item.draft, result.sampled, strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token_id, pairs))
        if item.draft and (drafter := item.sequence.drafter) is not None:
            drafter.verified(len(item.draft), accepted, len(item.sequence.token_ids) + accepted + 1)
            self.drafted_tokens += len(item.draft)
            self.accepted_tokens += accepted
        return accepted

    def _compute(self, plan: list[Scheduled]) -> list[tuple[Scheduled, _Result]]:
        """Each scheduled chunk with what came of it. A request that breaks the step fails alone."""
        if not plan:
            return []
        try:
            done = self._execute(plan)
        except torch.AcceleratorError as error:
            # The device's context is gone, and every later call with it: no request is to blame.
            raise EngineDead(f"the device failed: {error}") from error
        except Exception:
            log.exception("engine.step_failed", sequences=len(plan))
            done = self._compute_one_by_one(plan)
        self._failed_steps = 0 if done else self._failed_steps + 1
        if self._failed_steps >= _MAX_FAILED_STEPS:
            raise EngineDead(f"{_MAX_FAILED_STEPS} steps in a row failed for every request in them")
        return done

    def _compute_one_by_one(self, plan: list[Scheduled]) -> list[tuple[Scheduled, _Result]]:
        done = []
        for item in plan:
            try:
                done += self._execute([item])
            except Exception as error:
                log.exception("engine.request_failed", request_id=item.sequence.request.request_id)
                self._fail(item.sequence, f"the model failed on this request: {type(error).__name__}")
        return done

    def _execute(self, plan: list[Scheduled]) -> list[tuple[Scheduled, _Result]]:
        """Changes no sequence, so that a step that breaks half way can be made again."""
        with self.meter.phase("compute"):
            logits = self._runner.execute(plan)
        sampling: list[Row] = []
        wanted: list[int] = []
        scored: dict[int, list[PositionLogprobs]] = {}
        row = 0
        for item in plan:
            if item.sequence.is_scoring:
                scored[item.sequence.uid] = self._score(item.sequence, logits[row : row + item.num_logits])
            row += item.num_logits
            if item.samples:
                sampling.append(item.sequence)
                sampling += [Ahead(item.sequence, item.draft[: n + 1]) for n in range(len(item.draft))]
                wanted += range(row - 1 - len(item.draft), row)
        if len(wanted) < row:
            logits = logits[wanted]
        with self.meter.phase("sample"):
            tokens = iter(self._sampler.sample(logits, sampling) if sampling else ())
        return [
            (
                item,
                _Result(
                    list(islice(tokens, 1 + len(item.draft))) if item.samples else [],
                    scored.get(item.sequence.uid, ()),
                ),
            )
            for item in plan
        ]

    def _score(self, sequence: Sequence, logits: Tensor) -> list[PositionLogprobs]:
        """Of the prompt tokens that follow those whose logits these are, float32[tokens, vocab]."""
        assert sequence.scored is not None
        first = len(sequence.scored) + 1
        token_ids = sequence.token_ids[first : min(first + len(logits), sequence.num_prompt)]
        if not token_ids:
            return []
        count = sequence.sampling.prompt_logprobs or 0
        return self._sampler.score(logits[: len(token_ids)], token_ids, count)

    def _fail(self, sequence: Sequence, message: str) -> None:
        sequence.end(FinishReason.ERROR, error=EngineError("engine_error", message))
        # Whatever made it fail may have left NaN in its blocks, for their next holder to find. Shared
        # ones are only no longer given to others: who still holds them has its own check.
        self._runner.scrub(self._pool.forget(sequence.table))
        self._scheduler.remove(sequence)
