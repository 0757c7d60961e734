"""What goes into the engine and what comes out: the interface that every engine implementation shares."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from engine_worker.engine.measurements import Measurements
from engine_worker.protocol import Finish, PositionLogprobs, SamplingParams


class OutputKind(Enum):
    """What each `RequestOutput` of a stream carries."""

    DELTA = "delta"
    """Only what this step added."""
    CUMULATIVE = "cumulative"
    """Everything so far."""
    FINAL = "final"
    """One output, at the end."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: tuple[int, float] = (0, 0.0)
    """(tier rank, fairness counter): the smallest goes first, the largest is preempted first."""
    deadline_ms: int | None = None
    """Unix time in milliseconds; checked at each step."""
    cancel_after: int | None = None
    """Cancelled once it has so many output tokens; None: never."""
    cache_salt: str = ""
    adapter: str = ""
    """A LoRA adapter of the model; "": none."""
    continues_text: bool = False
    """Whether the output's text goes on from the prompt's, as a completion's does; a chat's begins anew."""
    text_lengths: Sequence[int] = ()
    """For an embedding model: how many of the prompt's tokens are each text's; empty: one text."""
    resumed_token_ids: Sequence[int] = field(default=())
    """Output tokens that an earlier attempt already delivered: they count as output, are never emitted again."""


class RequestOutput(msgspec.Struct, frozen=True):
    """What one step (or, by OutputKind, all steps so far) produced for one request."""

    request_id: str
    seq: int
    """Index, from 0, of the first token of `token_ids` in the request's output."""
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[PositionLogprobs] | None = None
    finish: Finish | None = None
    prompt_logprobs: Sequence[PositionLogprobs] | None = None
    """Of the prompt's second token and all that follow: once, where asked for."""
    embedding: bytes | None = None
    """Of an embedding model: the vectors, one after the other, as little-endian float32, with the finish."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Everything that one engine step produced, for the whole batch, and the engine's state after it."""

    outputs: Sequence[RequestOutput]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    steps: int
    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    step_s: float
    """Duration of the last step."""
    scheduled_tokens: int
    """Tokens computed in the last step."""
    preemptions: int
    """Since start, as all below."""
    swapped_blocks: int = 0
    """Copied to host memory for sequences that were preempted."""
    kv_blocks_cached: int = 0
    """Now: held by nobody, kept for their content."""
    prompt_tokens: int = 0
    """Of requests that have begun to run."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Guessed by speculation, and how many of them were right."""
    cached_prompt_tokens: int = 0
    """Those of them that the prefix cache held."""
    rung: int = 0
    """Now: how far the engine has gone to keep its latency targets; `protocol.Rung`."""


class Engine(Protocol):
    """The engine as the worker sees it: requests in, one batch of outputs per step out.

    All methods belong to one event loop; the model runs in a thread of the engine's own.
    """

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Aborts what runs and frees everything. Idempotent."""

    def add(self, request: EngineRequest) -> None:
        """Queues a request for the next step. Raises InvalidRequest (bad parameters, too long) or DuplicateRequest."""

    def abort(self, request_id: str, reason: str = "cancelled") -> None:
        """Ends a request within one step, frees its blocks, emits its final output; unknown ids are ignored."""

    def steps(self) -> AsyncIterator[StepOutputs]:
        """Every step's outputs, in order, until `stop`. One consumer."""

    def stats(self) -> EngineStats: ...

    @property
    def meter(self) -> Measurements:
        """What it has measured since `start`."""

    def room(self) -> int:
        """How many more requests could start now, by slots and free blocks: the worker claims no more than that."""
