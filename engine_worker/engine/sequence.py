"""One request's state inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine_worker.engine.block_pool import BlockTable
from engine_worker.engine.grammar import GrammarError, GrammarTooComplexError, Matcher
from engine_worker.engine.output_text import OutputText
from engine_worker.engine.prefix import PrefixKeys
from engine_worker.engine.speculation import Drafter
from engine_worker.engine.types import EngineRequest, RequestOutput
from engine_worker.protocol import EngineError, Finish, FinishReason, PositionLogprobs, SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Choice:
    """A token that a step chooses. The step after it reads it here, before the sequence has it."""

    token_id: int | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, its tokens and how far they are computed.

    There is no phase: `num_computed` catches up with `len(token_ids)`, by chunks while it is far
    behind (prefill, or recomputation after a preemption), by one token per step after that (decode).
    """

    uid: int
    """Never used twice, unlike the request's own id."""
    request: EngineRequest
    token_ids: list[int]
    """Prompt, then output."""
    num_prompt: int
    max_tokens: int
    """The request's, cut to what the context leaves."""
    stop_ids: frozenset[int]
    """Ids that end this request: the model's end tokens, unless ignored, and the request's own."""
    text: OutputText
    bad_words: tuple[tuple[int, ...], ...] = ()
    matcher: Matcher | None = None
    """Follows the output through the request's grammar."""
    prefix: PrefixKeys | None = None
    """Names of its blocks in the prefix cache; None: neither looked up nor kept there."""
    scored: list[PositionLogprobs] | None = None
    """Of the prompt's second token and on, as far as computed; None: not asked for, or delivered already."""
    drafter: Drafter | None = None
    """Made when tokens are first guessed for it."""
    table: BlockTable = field(default_factory=BlockTable)
    status: Status = Status.WAITING
    num_computed: int = 0
    """Tokens that are computed, or being computed in the step in flight."""
    pending: tuple[Choice, ...] = ()
    """Tokens that steps in flight choose: not in `token_ids` yet. Never more than one while a step is scheduled."""
    host_blocks: list[int] = field(default_factory=list)
    """Where its computed tokens are while it is swapped out; else empty."""
    num_cached: int | None = None
    """Tokens found in the prefix cache when it first began to run."""
    num_emitted: int = 0
    """Output tokens that the caller has, those of earlier attempts included."""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    """Of the tokens not yet emitted."""
    arrived_at: float = 0.0
    """By the meter's clock, as the three below."""
    started_at: float | None = None
    first_token_at: float | None = None
    token_at: float | None = None
    """When its last output token was made."""
    preempted: bool = False
    finish: Finish | None = None
    """Set once, when the request has ended, for whatever reason."""

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_tokens(self) -> int:
        """With those in flight."""
        return len(self.token_ids) + len(self.pending)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def will_end(self) -> bool:
        """Whether the token in flight is the last, whatever it is."""
        return bool(self.pending) and self.num_output + len(self.pending) >= self.last_token

    @property
    def last_token(self) -> int:
        """So many output tokens end it, whatever they are."""
        cancel_after = self.request.cancel_after
        return self.max_tokens if cancel_after is None else min(self.max_tokens, cancel_after)

    @property
    def is_scoring(self) -> bool:
        """Whether prompt tokens are still to be scored. What is cached has no logits, so all is computed."""
        return self.scored is not None and len(self.scored) < self.num_prompt - 1

    @property
    def rank(self) -> int:
        """Priority class; 0 goes first."""
        return self.request.priority[0]

    @property
    def order(self) -> tuple[int, bool, float, int]:
        """Smallest goes first, largest is preempted first. A preempted sequence goes to the head of its
        class, and no further: it keeps its place without passing a better class."""
        rank, counter = self.request.priority
        return (rank, not self.preempted, counter, self.uid)

    def append(self, token_id: int) -> None:
        """Adds an output token and notes whether it ends the request."""
        self.token_ids.append(token_id)
        if self.matcher is not None and not self._follows(self.matcher, token_id):
            return
        may_stop = self.num_output > self.sampling.min_tokens
        if may_stop and token_id in self.stop_ids:
            own = token_id in self.sampling.stop_token_ids
            self.end(FinishReason.STOP, stop_reason=token_id if own else None)
            return
        stop = self.text.push(token_id, may_stop=may_stop)
        if stop is not None:
            self.end(FinishReason.STOP, stop_reason=stop)
        elif self.matcher is not None and self.matcher.is_complete:
            self.end(FinishReason.STOP)
        elif self.num_output >= self.max_tokens:
            self.end(FinishReason.LENGTH)
        elif self.num_output >= self.last_token:
            self.end(FinishReason.CANCELLED)

    def _follows(self, matcher: Matcher, token_id: int) -> bool:
        try:
            matcher.accept(token_id)
        except GrammarError as error:
            code = "invalid_request" if isinstance(error, GrammarTooComplexError) else "grammar_failed"
            self.end(
                FinishReason.ERROR,
                error=EngineError(code, f"The output could not follow its grammar: {error}"),
            )
            return False
        return True

    def end(
        self, reason: str, *, stop_reason: str | int | None = None, error: EngineError | None = None
    ) -> None:
        """Only the first end counts."""
        if self.finish is not None:
            return
        self.text.close()
        self.finish = Finish(
            reason=reason,
            # One that ends before it began to run has cost nothing.
            prompt_tokens=self.num_prompt if self.num_cached is not None or self.num_output else 0,
            completion_tokens=self.num_output,
            cached_tokens=min(self.num_cached or 0, self.num_prompt),
            drafted_tokens=self.drafter.drafted if self.drafter else 0,
            accepted_tokens=self.drafter.accepted if self.drafter else 0,
            stop_reason=stop_reason,
            error=error,
        )

    @property
    def has_news(self) -> bool:
        return self.finish is not None or self.num_output > self.num_emitted

    def take_output(self) -> RequestOutput:
        """What is new since the last call."""
        first = self.num_emitted
        token_ids = self.token_ids[self.num_prompt + first :]
        self.num_emitted += len(token_ids)
        logprobs, self.logprobs = self.logprobs, []
        scored = None
        if self.scored is not None and not self.is_scoring:
            scored, self.scored = self.scored, None
        return RequestOutput(
            request_id=self.request.request_id,
            seq=first,
            token_ids=token_ids,
            text=self.text.take(),
            logprobs=logprobs if self.sampling.logprobs is not None else None,
            finish=self.finish,
            prompt_logprobs=scored,
        )
