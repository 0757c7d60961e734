"""The engine of embedding models: the same requests in, one vector each out, in batches by token budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import structlog
import torch

from engine_worker.config import EngineConfig
from engine_worker.engine.measurements import Measurements
from engine_worker.engine.types import (
    DuplicateRequest,
    EngineDead,
    EngineRequest,
    EngineStats,
    InvalidRequest,
    RequestOutput,
    StepOutputs,
)
from engine_worker.protocol import EngineError, Finish, FinishReason
from engine_worker.runner.encoder import Encoder

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Waiting:
    request: EngineRequest
    number: int
    ended: str | None = None
    """Why it ends without a vector."""


class EmbeddingEngine:
    """See `types.Engine`. There is no state between steps: every request takes exactly one."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._clock = clock
        self._encoder: Encoder | None = None
        self._waiting: dict[str, _Waiting] = {}
        self._wake = asyncio.Event()
        self._stopped = False
        self._steps = self._added = self._tokens = self._batch_tokens = self._running = 0
        self._step_s = 0.0
        self._meter = Measurements(config.max_num_seqs)

    async def start(self) -> None:
        """Raises UnsupportedModel."""
        torch.set_num_threads(self._config.thread_count())
        self._encoder = await asyncio.to_thread(Encoder.load, self._config.model_dir)

    async def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    @property
    def encoder(self) -> Encoder:
        if self._encoder is None or self._stopped:
            raise EngineDead("the engine does not run")
        return self._encoder

    def add(self, request: EngineRequest) -> None:
        encoder, ids = self.encoder, request.prompt_token_ids
        if request.request_id in self._waiting:
            raise DuplicateRequest(f"request id {request.request_id!r} is in use")
        if not ids:
            raise InvalidRequest("the input is empty: at least one token is needed")
        if len(ids) > encoder.max_tokens:
            raise InvalidRequest(f"the input has {len(ids)} tokens, this model takes {encoder.max_tokens}")
        if not all(0 <= token_id < encoder.vocab_size for token_id in ids):
            raise InvalidRequest(f"this model's token ids go from 0 to {encoder.vocab_size - 1}")
        self._added += 1
        self._waiting[request.request_id] = _Waiting(request, self._added)
        self._wake.set()

    def abort(self, request_id: str, reason: str = FinishReason.CANCELLED) -> None:
        if (waiting := self._waiting.get(request_id)) is not None:
            waiting.ended = waiting.ended or reason
            self._wake.set()

    async def steps(self) -> AsyncIterator[StepOutputs]:
        while not self._stopped:
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()
                continue
            outputs = self._ended()
            batch = self._next_batch()
            if batch:
                began = time.perf_counter()
                self._running = len(batch)
                outputs += await asyncio.to_thread(self._compute, batch)
                self._running = 0
                self._step_s = time.perf_counter() - began
                self._meter.step.add(self._step_s)
                self._steps += 1
                for item in batch:
                    del self._waiting[item.request.request_id]
            for output in outputs:
                assert output.finish is not None
                self._meter.finished[output.finish.reason] += 1
            yield StepOutputs(outputs, self.stats())

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
    def meter(self) -> Measurements:
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
            del self._waiting[item.request.request_id]
        return [_output(item, item.ended or FinishReason.CANCELLED) for item in gone]

    def _next_batch(self) -> list[_Waiting]:
        """The best in order, and what fits beside it: padded tokens count, for they are computed."""
        order = sorted(self._waiting.values(), key=lambda item: (item.request.priority, item.number))
        batch: list[_Waiting] = []
        width = 0
        for item in order:
            wider = max(width, len(item.request.prompt_token_ids))
            if batch and wider * (len(batch) + 1) > self._config.max_num_batched_tokens:
                break
            batch.append(item)
            width = wider
        return batch

    def _compute(self, batch: Rows[_Waiting]) -> list[RequestOutput]:
        """In a thread. A text that breaks the batch fails alone."""
        texts = [item.request.prompt_token_ids for item in batch]
        self._batch_tokens = sum(map(len, texts))
        self._tokens += self._batch_tokens
        try:
            vectors = self.encoder.encode(texts)
        except torch.AcceleratorError as error:
            raise EngineDead(f"the device failed: {error}") from error
        except Exception:
            log.exception("embedding.batch_failed", texts=len(batch))
            if len(batch) == 1:
                failure = EngineError("engine_error", "the model failed on this text")
                return [_output(batch[0], FinishReason.ERROR, error=failure)]
            return [output for item in batch for output in self._compute([item])]
        return [
            _output(item, FinishReason.STOP, vector.numpy().astype("<f4").tobytes())
            for item, vector in zip(batch, vectors, strict=True)
        ]


def _output(
    item: _Waiting, reason: str, embedding: bytes | None = None, error: EngineError | None = None
) -> RequestOutput:
    finish = Finish(
        reason=reason,
        prompt_tokens=len(item.request.prompt_token_ids),
        completion_tokens=0,
        error=error,
    )
    return RequestOutput(item.request.request_id, 0, [], "", finish=finish, embedding=embedding)
