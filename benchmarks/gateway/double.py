"""The engine worker's double: the real worker, broker and outbox around an engine that computes nothing.

    python -m benchmarks.gateway.double NAME MODEL_DIR STEP_S DIMENSIONS     (Redis from REDIS_URL)

Each step gives every request its next token, which holds streams open. With a step of 0 s all tokens of an answer are
there at once, one by one, as the peers' upstream writes its chunks: what takes time then is the path, not the double.
With DIMENSIONS above 0 it is an embedding model's double.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import pack

import structlog

from engine_worker.engine.measurements import Measurements
from engine_worker.engine.types import EngineRequest, EngineStats, RequestOutput, StepOutputs
from engine_worker.model_card import read_model_card
from engine_worker.process import configure_logging, run_worker
from engine_worker.protocol import Finish, FinishReason
from engine_worker.worker_config import WorkerConfig

_SLOTS = 1024
_TOKEN = 28  # any that is not special


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    produced: int = 0
    aborted: str = ""


class InstantEngine:
    def __init__(self, step_s: float, dimensions: int) -> None:
        self._step_s = step_s
        self._dimensions = dimensions
        self._running: dict[str, _Running] = {}
        self._work = asyncio.Event()
        self._steps = 0
        self.meter = Measurements(_SLOTS)

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self._running.clear()

    def add(self, request: EngineRequest) -> None:
        self._running[request.request_id] = _Running(request)
        self._work.set()

    def abort(self, request_id: str, reason: str = "cancelled") -> None:
        if running := self._running.get(request_id):
            running.aborted = reason

    async def steps(self) -> AsyncIterator[StepOutputs]:
        while True:
            if not self._running:
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self._step_s)
            self._steps += 1
            outputs = [output for running in self._running.values() for output in self._advanced(running)]
            for output in outputs:
                if output.finish:
                    del self._running[output.request_id]
            yield StepOutputs(outputs=outputs, stats=self.stats())

    def _advanced(self, running: _Running) -> Iterator[RequestOutput]:
        output = self._advance(running)
        yield output
        while not self._step_s and not output.finish:
            yield (output := self._advance(running))

    def _advance(self, running: _Running) -> RequestOutput:
        request, seq = running.request, running.produced
        if request.text_lengths:
            return self._embedded(request)
        token_ids = [] if running.aborted else [_TOKEN]
        running.produced += len(token_ids)
        reason = running.aborted
        if running.produced >= request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        finish = None
        if reason:
            finish = Finish(
                reason=reason,
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=running.produced,
            )
        return RequestOutput(
            request_id=request.request_id,
            seq=seq,
            token_ids=token_ids,
            text=" token" * len(token_ids),
            finish=finish,
        )

    def _embedded(self, request: EngineRequest) -> RequestOutput:
        prompt = len(request.prompt_token_ids)
        return RequestOutput(
            request_id=request.request_id,
            seq=0,
            token_ids=[],
            text="",
            finish=Finish(reason=FinishReason.STOP, prompt_tokens=prompt, completion_tokens=0),
            embedding=pack("<f", 0.01) * (self._dimensions * len(request.text_lengths)),
        )

    def stats(self) -> EngineStats:
        running = len(self._running)
        return EngineStats(
            steps=self._steps,
            running=running,
            waiting=0,
            kv_blocks_total=_SLOTS,
            kv_blocks_used=running,
            step_s=self._step_s,
            scheduled_tokens=running,
            preemptions=0,
        )

    def room(self) -> int:
        return max(0, _SLOTS - len(self._running))


def main() -> int:
    name, directory, step_s, dimensions = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    configure_logging()
    # Two lines a request would be written to nobody.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    return run_worker(
        InstantEngine(step_s, dimensions),
        lambda: read_model_card(name, directory, context_length=8192, dtype="float32", dimensions=dimensions),
        WorkerConfig(model=name, redis_url=os.environ["REDIS_URL"], canary_s=3600),
    )


if __name__ == "__main__":
    sys.exit(main())
