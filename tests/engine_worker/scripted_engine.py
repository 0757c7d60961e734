"""An engine without a model: same interface, text that follows from the request alone.

Token `i` of a request's output is a letter chosen by a hash of (prompt, seed, i), as the real
engine's is by logits and counter-based noise, so that a resumed request must continue exactly as
the undisturbed one would have. `expected_output` says what that is.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from engine_worker.engine.errors import DuplicateRequest, EngineDead, InvalidRequest
from engine_worker.engine.measurements import Measurements
from engine_worker.engine.types import EngineRequest, EngineStats, RequestOutput, StepOutputs
from engine_worker.protocol import Finish, FinishReason

FIRST_LETTER_ID = 97
"""Token ids are the code points of a to z."""


def scripted_token(prompt_token_ids: Sequence[int], seed: int, position: int) -> int:
    digest = hashlib.blake2b(repr((tuple(prompt_token_ids), seed, position)).encode(), digest_size=2).digest()
    return FIRST_LETTER_ID + int.from_bytes(digest) % 26


def expected_output(prompt_token_ids: Sequence[int], seed: int, max_tokens: int) -> list[int]:
    return [scripted_token(prompt_token_ids, seed, position) for position in range(max_tokens)]


@dataclass(slots=True)
class _Sequence:
    request: EngineRequest
    produced: int
    aborted: str | None = None


@dataclass
class ScriptedEngine:
    """Each step takes `step_s` and gives every running request up to `tokens_per_step` tokens.

    The first `max_num_seqs` by priority run; the others are put aside.
    """

    max_num_seqs: int = 8
    tokens_per_step: int = 1
    step_s: float = 0.0
    context_length: int = 2048
    die_at_step: int | None = None
    """Raise EngineDead from `steps()` instead of making this step."""
    stop_after: int | None = None
    """Finish with reason `stop` after so many output tokens, if max_tokens does not end it first."""
    clock_ahead_s: float = 0.0
    """Of the machine's: deadlines come when a test says so."""

    _sequences: dict[str, _Sequence] = field(default_factory=dict)
    _steps: int = 0
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _may_step: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: bool = False

    def __post_init__(self) -> None:
        self._may_step.set()

    def pause(self) -> None:
        """No step is made until `resume`: tests choose the moment."""
        self._may_step.clear()

    def resume(self) -> None:
        self._may_step.set()

    @property
    def active(self) -> list[str]:
        return list(self._sequences)

    async def start(self) -> None:
        self._stopped = False

    async def stop(self) -> None:
        self._stopped = True
        self._sequences.clear()
        self._work.set()
        self._may_step.set()

    def add(self, request: EngineRequest) -> None:
        if request.request_id in self._sequences:
            raise DuplicateRequest(request.request_id)
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt is empty")
        if len(request.prompt_token_ids) >= self.context_length:
            raise InvalidRequest(f"the prompt is longer than the context of {self.context_length} tokens")
        self._sequences[request.request_id] = _Sequence(request, len(request.resumed_token_ids))
        self._work.set()

    def abort(self, request_id: str, reason: str = "cancelled") -> None:
        if sequence := self._sequences.get(request_id):
            sequence.aborted = sequence.aborted or reason

    async def steps(self) -> AsyncIterator[StepOutputs]:
        while True:
            if not self._sequences:
                self._work.clear()
                await self._work.wait()
            await self._may_step.wait()
            await asyncio.sleep(self.step_s)
            if self._stopped:
                return
            if self._steps + 1 == self.die_at_step:
                raise EngineDead("the script says so")
            self._steps += 1
            in_order = sorted(self._sequences.values(), key=lambda sequence: sequence.request.priority)
            outputs = [self._advance(sequence) for sequence in in_order[: self.max_num_seqs]]
            for output in outputs:
                if output.finish:
                    del self._sequences[output.request_id]
            yield StepOutputs(outputs=outputs, stats=self.stats())

    @property
    def meter(self) -> Measurements:
        return Measurements(self.max_num_seqs)

    def stats(self) -> EngineStats:
        running = min(len(self._sequences), self.max_num_seqs)
        return EngineStats(
            steps=self._steps,
            running=running,
            waiting=len(self._sequences) - running,
            kv_blocks_total=self.max_num_seqs,
            kv_blocks_used=running,
            step_s=self.step_s,
            scheduled_tokens=running * self.tokens_per_step,
            preemptions=0,
        )

    def room(self) -> int:
        return max(0, self.max_num_seqs - len(self._sequences))

    def _advance(self, sequence: _Sequence) -> RequestOutput:
        request = sequence.request
        seq = sequence.produced
        now_ms = (time.time() + self.clock_ahead_s) * 1000
        late = request.deadline_ms is not None and now_ms >= request.deadline_ms
        reason = sequence.aborted or (FinishReason.DEADLINE if late else None)
        token_ids: list[int] = []
        while reason is None and len(token_ids) < self.tokens_per_step:
            token_ids.append(
                scripted_token(request.prompt_token_ids, request.sampling.seed, sequence.produced)
            )
            sequence.produced += 1
            if sequence.produced == self.stop_after:
                reason = FinishReason.STOP
            elif sequence.produced >= request.sampling.max_tokens:
                reason = FinishReason.LENGTH
        finish = None
        if reason is not None:
            finish = Finish(
                reason=reason,
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=sequence.produced,
            )
        return RequestOutput(
            request_id=request.request_id,
            seq=seq,
            token_ids=token_ids,
            text="".join(map(chr, token_ids)),
            finish=finish,
        )
