"""The engine of embedding models: the same requests in, one vector per text out, in batches by token budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import structlog
import torch

from engine_worker.config import EngineConfig
from engine_worker.engine.errors import DuplicateRequest, EngineDead, InvalidRequest
from engine_worker.engine.meter import Meter
from engine_worker.engine.types import EngineRequest, EngineStats, RequestOutput, StepOutputs
from engine_worker.protocol import EngineError, Finish, FinishReason
from engine_worker.runner.encoder import Encoder

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Waiting:
    request: EngineRequest
    number: int
    """Never used twice, unlike the request's own id."""
    arrived_at: float
    texts: list[Rows[int]]
    todo: list[int]
    """Texts without a vector, by index, longest first: neighbours in a batch are then about as long."""
    vectors: dict[int, bytes] = field(default_factory=dict)
    started_at: float | None = None
    """By the monotonic clock, as `arrived_at`: of its first batch."""
    error: EngineError | None = None
    ended: str | None = None
    """Why it ends without a vector."""


_Text: TypeAlias = tuple[_Waiting, int]
"""A text by its request and its place there."""


class EmbeddingEngine:
    """See `types.Engine`. A request ends in the step that gives its last text a vector."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._clock = clock
        self._encoder: Encoder | None = None
        self._waiting: dict[int, _Waiting] = {}
        """By number."""
        self._live: dict[str, int] = {}
        """Request id to number, of those not aborted."""
        self._wake = asyncio.Event()
        self._stopped = False
        self._steps = self._added = self._tokens = self._batch_tokens = self._running = 0
        self._step_s = 0.0
        self._meter = Meter(config.max_num_seqs)

    async def start(self) -> None:
        """Raises UnsupportedModel."""
        torch.set_num_threads(self._config.thread_count())
        self._encoder = await asyncio.to_thread(Encoder.load, self._config.model_dir)

    async def stop(self) -> None:
        self._stopped = True
        for request_id in list(self._live):
            self.abort(request_id)
        self._wake.set()

    @property
    def encoder(self) -> Encoder:
        if self._encoder is None or self._stopped:
            raise EngineDead("the engine does not run")
        return self._encoder

    def add(self, request: EngineRequest) -> None:
        encoder, ids = self.encoder, request.prompt_token_ids
        if request.request_id in self._live:
            raise DuplicateRequest(f"request id {request.request_id!r} is in use")
        if not ids:
            raise InvalidRequest("the input is empty: at least one token is needed")
        texts = _split(ids, request.text_lengths or [len(ids)])
        longest = max(map(len, texts))
        if longest > encoder.max_tokens:
            raise InvalidRequest(f"the input has {longest} tokens, this model takes {encoder.max_tokens}")
        if not all(0 <= token_id < encoder.vocab_size for token_id in ids):
            raise InvalidRequest(f"this model's token ids go from 0 to {encoder.vocab_size - 1}")
        self._added += 1
        todo = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        self._live[request.request_id] = self._added
        self._waiting[self._added] = _Waiting(request, self._added, time.perf_counter(), texts, todo)
        self._wake.set()

    def abort(self, request_id: str, reason: str = FinishReason.CANCELLED) -> None:
        # As in the other engines the id is free at once.
        if (number := self._live.pop(request_id, None)) is not None:
            waiting = self._waiting[number]
            waiting.ended = waiting.ended or reason
            self._wake.set()

    async def steps(self) -> AsyncIterator[StepOutputs]:
        while self._waiting or not self._stopped:
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()
                continue
            outputs = self._ended()
            with self._meter.phase("schedule"):
                batch = self._next_batch()
            if batch:
                outputs += await self._step(batch)
            for output in outputs:
                assert output.finish is not None
                self._meter.count_end(output.finish)
            yield StepOutputs(outputs, self.stats())

    async def _step(self, batch: Rows[_Text]) -> list[RequestOutput]:
        """Computes the batch; who has its last vector, or none to come."""
        began = time.perf_counter()
        items = list({item.number: item for item, _ in batch}.values())
        for item in items:
            if item.started_at is None:
                item.started_at = began
                self._meter.queue.add(began - item.arrived_at)
        self._running = len(items)
        with self._meter.phase("compute"):
            await asyncio.to_thread(self._compute, batch)
        self._running = 0
        now = time.perf_counter()
        self._step_s = now - began
        self._meter.step.add(self._step_s)
        self._meter.sequence_steps += len(items)
        self._steps += 1
        done = [item for item in items if item.error is not None or not item.todo]
        for item in done:
            self._forget(item)
            if item.error is None:
                assert item.started_at is not None
                self._meter.time_to_first_token.add(now - item.arrived_at)
                self._meter.prefill.add(now - item.started_at)
        return [_output(item, FinishReason.ERROR if item.error else FinishReason.STOP) for item in done]

    def stats(self) -> EngineStats:
        return EngineStats(
            steps=self._steps,
            running=self._running,
            waiting=len(self._waiting) - self._running,
            kv_blocks_total=0,
            kv_blocks_used=0,
            step_s=self._step_s,
            scheduled_tokens=self._batch_tokens,
            preemptions=0,
            prompt_tokens=self._tokens,
        )

    @property
    def meter(self) -> Meter:
        return self._meter

    def room(self) -> int:
        return max(0, self._config.max_num_seqs - len(self._waiting)) if not self._stopped else 0

    def _ended(self) -> list[RequestOutput]:
        """What was cancelled or came too late, taken out."""
        now_ms = self._clock() * 1000
        for item in self._waiting.values():
            if item.request.deadline_ms is not None and item.request.deadline_ms <= now_ms:
                item.ended = item.ended or FinishReason.DEADLINE
        gone = [item for item in self._waiting.values() if item.ended is not None]
        for item in gone:
            self._forget(item)
        return [_output(item, item.ended or FinishReason.CANCELLED) for item in gone]

    def _forget(self, item: _Waiting) -> None:
        del self._waiting[item.number]
        if self._live.get(item.request.request_id) == item.number:
            del self._live[item.request.request_id]

    def _next_batch(self) -> list[_Text]:
        """The best in order, and what fits beside it: padded tokens count, for they are computed."""
        order = sorted(self._waiting.values(), key=lambda item: (item.request.priority, item.number))
        batch: list[_Text] = []
        width = 0
        for item in order:
            for index in item.todo:
                wider = max(width, len(item.texts[index]))
                if batch and wider * (len(batch) + 1) > self._config.max_num_batched_tokens:
                    return batch
                batch.append((item, index))
                width = wider
        return batch

    def _compute(self, batch: Rows[_Text]) -> None:
        """In a thread. A text that breaks the batch fails alone, and its request with it."""
        texts = [item.texts[index] for item, index in batch]
        self._batch_tokens = sum(map(len, texts))
        padding = max(map(len, texts)) * len(texts) - self._batch_tokens
        self._meter.scheduled_tokens += self._batch_tokens
        self._meter.padding_tokens += padding
        try:
            vectors = self.encoder.encode(texts)
        except torch.AcceleratorError as error:
            raise EngineDead(f"the device failed: {error}") from error
        except Exception:
            log.exception("embedding.batch_failed", texts=len(batch))
            self._meter.wasted_tokens += self._batch_tokens
            if len(batch) == 1:
                batch[0][0].error = EngineError("engine_error", "the model failed on this text")
                return
            for text in batch:
                self._compute([text])
            return
        self._tokens += self._batch_tokens
        for (item, index), vector in zip(batch, vectors, strict=True):
            item.vectors[index] = vector.numpy().astype("<f4").tobytes()
            item.todo.remove(index)


def _split(ids: Rows[int], lengths: Rows[int]) -> list[Rows[int]]:
    if min(lengths) < 1 or sum(lengths) != len(ids):
        raise InvalidRequest("the lengths of the texts don't add up to the input, or one is empty")
    ends = list(accumulate(lengths))
    return [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _output(item: _Waiting, reason: str) -> RequestOutput:
    finish = Finish(
        reason=reason,
        prompt_tokens=len(item.request.prompt_token_ids),
        completion_tokens=0,
        error=item.error,
    )
    embedding = None
    if reason == FinishReason.STOP:
        embedding = b"".join(item.vectors[index] for index in range(len(item.texts)))
    return RequestOutput(item.request.request_id, 0, [], "", finish=finish, embedding=embedding)
