"""The engine's loop, one step at a time, in one thread: expire, schedule, launch, append, hand out.

Synchronous, a step is computed before its results are booked. Overlapped, the next step is scheduled and
launched first, so the device never waits for Python: what ended without the loop's knowing is in one step
more, whose result is dropped. Both make the same tokens; the synchronous loop is the reference.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import takewhile

import structlog
import torch

from engine_worker.engine.block_pool import BlockPool
from engine_worker.engine.device import Device, Flight
from engine_worker.engine.errors import EngineDead
from engine_worker.engine.executor import Result
from engine_worker.engine.meter import Meter
from engine_worker.engine.pace import Pace
from engine_worker.engine.scheduled import Scheduled
from engine_worker.engine.scheduler import Scheduler
from engine_worker.engine.sequence import Sequence, Status
from engine_worker.engine.types import EngineStats, RequestOutput
from engine_worker.protocol import EngineError, FinishReason

log = structlog.get_logger(__name__)

_MAX_FAILED_STEPS = 3
_NOTHING_ALLOWED = (
    "No token may come next: the form that the output must have (a grammar, a schema, an expression, choices) leaves "
    "none, together with what else is forbidden (bad_words, or the end before min_tokens). Change one of them."
)


@dataclass(frozen=True, slots=True)
class Step:
    """`outputs`: what is new, by the sequence's uid."""

    outputs: Rows[tuple[int, RequestOutput]]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: list[Scheduled]
    flight: Flight
    launched_at: float


class EngineCore:
    """Sequences in, tokens out. `clock` gives Unix time in seconds."""

    def __init__(
        self,
        device: Device,
        scheduler: Scheduler,
        pool: BlockPool,
        clock: Callable[[], float] = time.time,
        pace: Pace | None = None,
        meter: Meter | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        self.device = device
        self._scheduler = scheduler
        self._pool = pool
        self._clock = clock
        self._pace = pace
        self.meter = meter or Meter()
        self._overlap = overlap
        self._in_flight: _InFlight | None = None
        self._landed_at = 0.0
        self._live: dict[int, Sequence] = {}
        self._failed_steps = 0
        self._steps = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self._last = (0.0, 0)  # seconds, tokens

    @property
    def has_work(self) -> bool:
        return bool(self._live) or self._in_flight is not None

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
        self._expire()
        if self._pace is not None:
            self._pace.before(self._scheduler)
        if self._in_flight is not None and self._scheduler.needs_tokens:
            self._land()
        before, self._in_flight = self._in_flight, self._launch()
        if before is not None:
            self._land(before)
        elif not self._overlap:
            self._land()
        with self.meter.phase("detokenise"):
            outputs = [
                (sequence.uid, sequence.take_output())
                for sequence in self._live.values()
                if sequence.has_news
            ]
        self._forget_ended()
        if not self._live:
            self._pool.check(())
        return Step(outputs, self.stats())

    def _launch(self) -> _InFlight | None:
        began = time.perf_counter()
        with self.meter.phase("schedule"):
            plan = self._scheduler.schedule()
            moves = self._scheduler.take_moves()
        return _InFlight(plan, self.device.launch(plan, moves), began) if plan or moves else None

    def _land(self, landing: _InFlight | None = None) -> None:
        """Books what a step has computed: the given one, or else that in flight."""
        if landing is None:
            landing, self._in_flight = self._in_flight, None
        if landing is None:
            return
        computed = self._collect(landing)
        with self.meter.phase("detokenise"):
            for item, result in computed:
                self._advance(item, result)
        now = time.perf_counter()
        duration_s = now - max(landing.launched_at, self._landed_at)
        self._landed_at = now
        waits = self.meter.book(landing.plan, duration_s)
        self._scheduler.note_step(landing.plan, duration_s)
        if self._pace is not None:
            self._pace.after(landing.plan, waits, duration_s)
        self._steps += 1
        self._last = (duration_s, sum(item.num_tokens for item in landing.plan))

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
            swapped_blocks=self._scheduler.swapped_blocks,
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

    def _advance(self, item: Scheduled, result: Result) -> None:
        """Books a computed chunk and the token that was chosen after it."""
        sequence = item.sequence
        if sequence.status is Status.FINISHED:
            self.meter.wasted_tokens += item.num_tokens
            return  # aborted, or ended by the step before, since it was scheduled
        if item.chooses is not None:
            assert sequence.pending[0] is item.chooses, "tokens must be booked in order"
            sequence.pending = sequence.pending[1:]
        if sequence.scored is not None:
            sequence.scored += result.scored
        accepted = self._verify(item, result)
        for ahead, sampled in enumerate(result.sampled[: accepted + 1]):
            if sampled.is_forbidden:
                self._refuse(sequence)
                return
            if sampled.token_id is None:
                self._fail(sequence, "the model's output is not a number")
                return
            # One that was preempted meanwhile has its token, and no blocks.
            if sequence.status is Status.RUNNING:
                # The token before is one that was guessed right: it is computed already.
                sequence.num_computed += min(ahead, 1)
                # Not before a token was chosen: what gave no number must not be found by others.
                self._scheduler.keep(sequence, item.end + ahead)
            if sequence.max_tokens == 0:
                sequence.end(FinishReason.LENGTH)
                return
            sequence.append(sampled.token_id)
            if sampled.logprobs is not None:
                sequence.logprobs.append(sampled.logprobs)
            if sequence.finish is not None:
                return

    def _verify(self, item: Scheduled, result: Result) -> int:
        """How many tokens of the draft are what was then chosen."""
        pairs = zip(item.draft, result.sampled, strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token_id, pairs))
        if item.draft and (drafter := item.sequence.drafter) is not None:
            drafter.verified(len(item.draft), accepted, len(item.sequence.token_ids) + accepted + 1)
            self.drafted_tokens += len(item.draft)
            self.meter.wasted_tokens += len(item.draft) - accepted
            self.accepted_tokens += accepted
        return accepted

    def _collect(self, landing: _InFlight) -> list[tuple[Scheduled, Result]]:
        """Each scheduled chunk with what came of it. A request that breaks the step fails alone."""
        plan = landing.plan
        try:
            done = list(zip(plan, landing.flight.result(), strict=True))
        except EngineDead:
            raise
        except torch.AcceleratorError as error:
            # The device's context is gone, and every later call with it: no request is to blame.
            raise EngineDead(f"the device failed: {error}") from error
        except Exception:
            log.exception("engine.step_failed", sequences=len(plan))
            self._take_back_next()
            done = self._collect_one_by_one(plan)
        self._failed_steps = 0 if done else self._failed_steps + 1
        if self._failed_steps >= _MAX_FAILED_STEPS:
            raise EngineDead(f"{_MAX_FAILED_STEPS} steps in a row failed for every request in them")
        return done

    def _take_back_next(self) -> None:
        """The step in flight was scheduled on one that failed: it is to be scheduled again."""
        landing, self._in_flight = self._in_flight, None
        if landing is None:
            return
        with contextlib.suppress(Exception):  # what it fails with, it will fail with again
            landing.flight.result()
        for item in landing.plan:
            self._scheduler.take_back(item)

    def _collect_one_by_one(self, plan: list[Scheduled]) -> list[tuple[Scheduled, Result]]:
        done: list[tuple[Scheduled, Result]] = []
        for item in plan:
            sequence = item.sequence
            if sequence.table.blocks is not item.blocks:
                if sequence.status is Status.WAITING:
                    self._scheduler.lose(sequence)  # preempted meanwhile: its blocks may be another's by now
                continue
            try:
                done += zip([item], self.device.launch([item]).result(), strict=True)
            except Exception as error:
                log.exception("engine.request_failed", request_id=sequence.request.request_id)
                self._fail(sequence, f"the model failed on this request: {type(error).__name__}")
        return done

    def _refuse(self, sequence: Sequence) -> None:
        """What the request asks for excludes itself, which nobody could know before: its client's to mend."""
        sequence.end(FinishReason.ERROR, error=EngineError("invalid_request", _NOTHING_ALLOWED))
        self._scheduler.remove(sequence)

    def _fail(self, sequence: Sequence, message: str) -> None:
        sequence.end(FinishReason.ERROR, error=EngineError("engine_error", message))
        # Whatever made it fail may have left NaN in its blocks, for their next holder to find. Shared
        # ones are only no longer given to others: who still holds them has its own check.
        self.device.scrub(self._pool.forget(sequence.table))
        self._scheduler.remove(sequence)
