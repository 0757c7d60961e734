"""vLLM behind the same interface: it computes and samples, everything else about a request stays ours.

vLLM gives token ids (`detokenize=False`). Limits, end tokens, stop strings, text and counts are those of
`admission.py` and `sequence.py`, so a client can't tell from the form of an answer which engine made it,
and an attempt that takes over another's tokens goes on where its text stopped. What differs: docs/engine.md.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import structlog
from transformers import AutoConfig

from engine_worker.config import EngineConfig
from engine_worker.engine.admission import Admission
from engine_worker.engine.errors import DuplicateRequest, EngineDead, InvalidRequest
from engine_worker.engine.grammar import Grammars
from engine_worker.engine.meter import Meter
from engine_worker.engine.sequence import Sequence
from engine_worker.engine.types import EngineRequest, EngineStats, StepOutputs
from engine_worker.protocol import EngineError, FinishReason, PositionLogprobs, TokenLogprob
from engine_worker.runner.model_loader import read_vocabulary
from engine_worker.vllm_source import AsyncLLMSource, TokenSource

log = structlog.get_logger(__name__)


class VLLMEngine:
    """See `types.Engine`. A task per request follows it in vLLM, whose own process steps."""

    def __init__(
        self,
        config: EngineConfig,
        make_source: Callable[[EngineConfig], TokenSource] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._make_source = make_source or AsyncLLMSource
        self._clock = clock
        self._source: TokenSource | None = None
        self._admission: Admission | None = None
        self._dead: EngineDead | None = EngineDead("the engine has not been started")
        self._uids = itertools.count(1)
        self._live: dict[str, Sequence] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._news: dict[int, Sequence] = {}
        """Those with something to tell, in the order in which it came."""
        self._wake = asyncio.Event()
        self._meter = Meter(config.max_num_seqs)
        self._steps = self._prompt_tokens = self._cached_tokens = 0
        self._step_s = 0.0

    async def start(self) -> None:
        """Raises UnsupportedModel, or what vLLM fails with."""
        # In this thread: AsyncLLM belongs to the running loop, and starting it blocks until the model is loaded.
        self._source = source = self._make_source(self._config)
        config = AutoConfig.from_pretrained(self._config.model_dir)
        vocabulary = read_vocabulary(self._config.model_dir, config)
        self._admission = Admission(
            tokenizer=vocabulary.tokenizer,
            special_token_ids=vocabulary.special_token_ids,
            eos_token_ids=vocabulary.eos_token_ids,
            vocab_size=vocabulary.size,
            grammars=Grammars(vocabulary.tokenizer, vocabulary.size, vocabulary.eos_token_ids),
            max_model_len=source.max_model_len,
            model_revision=str(self._config.model_dir),
            cached_block_size=None,  # the prefix cache is vLLM's
        )
        self._dead = None

    async def stop(self) -> None:
        if self._dead is None:
            self._dead = EngineDead("the engine was stopped")
        for sequence in list(self._live.values()):
            self.abort(sequence.request.request_id)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._wake.set()
        if self._source is not None:
            source, self._source = self._source, None
            await asyncio.to_thread(source.shutdown)

    @property
    def limits(self) -> Admission:
        if self._admission is None:
            raise EngineDead("the engine has not been started")
        return self._admission

    def add(self, request: EngineRequest) -> None:
        if self._dead is not None:
            raise self._dead
        if request.request_id in self._live:
            raise DuplicateRequest(f"request id {request.request_id!r} is in use")
        if request.sampling.grammar:
            raise InvalidRequest("this worker's engine can't follow grammars")
        sequence = self.limits.admit(request, next(self._uids))
        self._live[request.request_id] = sequence
        self._meter.arrived(sequence)
        task = asyncio.create_task(self._follow(sequence), name=f"vllm-{request.request_id}")
        self._tasks[sequence.uid] = task
        task.add_done_callback(lambda _: self._tasks.pop(sequence.uid, None))

    def abort(self, request_id: str, reason: str = FinishReason.CANCELLED) -> None:
        # As in our own engine the id is free at once; vLLM knows the request by its uid.
        if (sequence := self._live.get(request_id)) is not None:
            self._end(sequence, reason)
            if (task := self._tasks.get(sequence.uid)) is not None:
                task.cancel()

    async def steps(self) -> AsyncIterator[StepOutputs]:
        while True:
            if self._news:
                news, self._news = self._news, {}
                self._steps += 1
                yield StepOutputs([sequence.take_output() for sequence in news.values()], self.stats())
            elif self._dead is not None:
                if self._source is not None and self._source.is_dead:
                    raise self._dead
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    def stats(self) -> EngineStats:
        running = sum(sequence.started_at is not None for sequence in list(self._live.values()))
        return EngineStats(
            steps=self._steps,
            running=running,
            waiting=len(self._live) - running,
            kv_blocks_total=self._source.num_blocks if self._source is not None else 0,
            kv_blocks_used=0,  # vLLM tells only its own loggers
            step_s=self._step_s,
            scheduled_tokens=running,
            preemptions=0,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_tokens,
        )

    @property
    def meter(self) -> Meter:
        return self._meter

    def room(self) -> int:
        return 0 if self._dead is not None else max(0, self._config.max_num_seqs - len(self._live))

    async def _follow(self, sequence: Sequence) -> None:
        deadline_ms = sequence.request.deadline_ms
        left_s = None if deadline_ms is None else deadline_ms / 1000 - self._clock()
        try:
            if left_s is not None and left_s <= 0:
                raise TimeoutError
            async with asyncio.timeout(left_s):
                await self._generate(sequence)
            failure = EngineError("engine_error", "the engine gave up this request")
            self._end(sequence, FinishReason.ERROR, failure)  # changes nothing where it has ended
        except TimeoutError:
            self._end(sequence, FinishReason.DEADLINE)
        except Exception as error:
            if self._source is not None and self._source.is_dead:
                self._dead = self._dead or EngineDead(f"vLLM ended: {type(error).__name__}: {error}")
                self._wake.set()
                return
            log.exception("vllm.request_failed", request_id=sequence.request.request_id)
            code = "invalid_request" if isinstance(error, ValueError) else "engine_error"
            self._end(sequence, FinishReason.ERROR, EngineError(code, f"the engine failed: {error}"))

    async def _generate(self, sequence: Sequence) -> None:
        assert self._source is not None
        if sequence.finish is None:  # an earlier attempt may have reached the end already
            async with aclosing(self._source.generate(sequence)) as outputs:
                async for output in outputs:
                    self._take(sequence, output)
                    if sequence.finish is not None:
                        break
        if sequence.finish is not None:
            self._end(sequence, sequence.finish.reason)

    def _take(self, sequence: Sequence, output: Any) -> None:
        if sequence.finish is not None:
            return
        now = time.perf_counter()
        computed = 0
        if sequence.started_at is None:
            sequence.num_cached = output.num_cached_tokens or 0
            sequence.started_at = sequence.arrived_at
            # vLLM tells its own times where it keeps statistics ("disable_log_stats": false in vllm_args).
            if (told := output.metrics) is not None and told.scheduled_ts:
                queued_s = max(0.0, told.scheduled_ts - told.queued_ts)
                sequence.started_at += queued_s
                self._meter.queue.add(queued_s)
            computed = len(sequence.token_ids) - sequence.num_cached - 1
            self._prompt_tokens += sequence.num_prompt
            self._cached_tokens += min(sequence.num_cached, sequence.num_prompt)
        if sequence.is_scoring and output.prompt_logprobs is not None:
            top = sequence.sampling.prompt_logprobs or 0
            prompt = sequence.token_ids[1 : sequence.num_prompt]
            sequence.scored = [
                _position(token_id, found, top)
                for token_id, found in zip(prompt, output.prompt_logprobs[1:], strict=True)
            ]
        (made,) = output.outputs
        # Each token is chosen after the one before it was computed.
        self._meter.scheduled_tokens += computed + len(made.token_ids)
        self._meter.sequence_steps += 1
        had = sequence.num_output
        for place, token_id in enumerate(made.token_ids):
            if sequence.max_tokens == 0:
                sequence.end(FinishReason.LENGTH)  # vLLM makes at least one token
            if sequence.finish is not None:
                break
            if sequence.sampling.logprobs is not None:
                found = made.logprobs[place]
                sequence.logprobs.append(_position(token_id, found, sequence.sampling.logprobs))
            sequence.append(token_id)
        self._book(sequence, sequence.num_output - had, now)
        if sequence.finish is None:
            self._tell(sequence)
        else:
            self._end(sequence, sequence.finish.reason)

    def _book(self, sequence: Sequence, count: int, now: float) -> None:
        if not count:
            return
        if sequence.token_at is not None:
            self._step_s = now - sequence.token_at
        self._meter.inter_token.add(*self._meter.tokens_came(sequence, count, now))

    def _end(self, sequence: Sequence, reason: str, error: EngineError | None = None) -> None:
        sequence.end(reason, error=error)
        if self._live.get(sequence.request.request_id) is sequence:
            del self._live[sequence.request.request_id]
            self._meter.ended(sequence)
            self._tell(sequence)

    def _tell(self, sequence: Sequence) -> None:
        if sequence.has_news:
            self._news[sequence.uid] = sequence
            self._wake.set()


def _position(token_id: int, found: Mapping[int, Any], top: int) -> PositionLogprobs:
    """vLLM gives the chosen token beside the likeliest: ours are the likeliest, and the chosen one apart."""
    likeliest = sorted(found.items(), key=lambda item: -item[1].logprob)[:top]
    return PositionLogprobs(
        TokenLogprob(token_id, found[token_id].logprob),
        tuple(TokenLogprob(each, value.logprob) for each, value in likeliest),
        found[token_id].rank,
    )
