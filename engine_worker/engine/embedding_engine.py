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
from engine_worker.engine.measurements import Measurements
from engine_worker.engine.types import EngineRequest, EngineStats, RequestOutput, StepOutputs
from engine_worker.protocol import EngineError, Finish, FinishReason
from engine_worker.runner.encoder import Encoder

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Waiting:
    request: EngineRequest
    number: int
    texts: list[Rows[int]]
    todo: list[int]
    """Texts without a vector, by index, longest first: neighbours in a batch are then about as long."""
    vectors: dict[int, bytes] = field(default_factory=dict)
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
        texts = _split(ids, request.text_lengths or [len(ids)])
        longest = max(map(len, texts))
        if longest > encoder.max_tokens:
            raise InvalidRequest(f"the input has {longest} tokens, this model takes {encoder.max_tokens}")
        if not all(0 <= token_id < encoder.vocab_size for token_id in ids):
            raise InvalidRequest(f"this model's token ids go from 0 to {encoder.vocab_size - 1}")
        self._added += 1
        todo = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        self._waiting[request.request_id] = _Waiting(request, self._added, texts, todo)
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
                items = list({id(item): item for item, _ in batch}.values())
                self._running = len(items)
                await asyncio.to_thread(self._compute, batch)
                self._running = 0
                self._step_s = time.perf_counter() - began
                self._meter.step.add(self._step_s)
                self._steps += 1
                for item in items:
                    if item.error is not None or not item.todo:
                        del self._waiting[item.request.request_id]
                        outputs.append(_output(item, FinishReason.ERROR if item.error else FinishReason.STOP))
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
        try:
            vectors = self.encoder.encode(texts)
        except torch.AcceleratorError as error:
            raise EngineDead(f"the device failed: {error}") from error
        except Exception:
            log.exception("embedding.batch_failed", texts=len(batch))
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
