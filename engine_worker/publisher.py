"""What the engine made, to Redis: each step's tokens in one call, and what Redis answers, to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from engine_worker.broker import BrokerUnavailable, WorkerBroker
from engine_worker.engine.types import Engine
from engine_worker.outbox import Outbox
from engine_worker.protocol import FinishReason
from engine_worker.tracing import Phases
from engine_worker.waiting import Backoff, wait
from engine_worker.worker_config import WorkerConfig

_log = structlog.get_logger("engine_worker.worker")

_HEAR_EVERY_S: Final = 0.01
"""So often at most Redis is asked what has become of what is held, by a publish that has no tokens to tell."""


class Publisher:
    """One of the worker's tasks. `on_waiting`: called when Redis says that a request waits."""

    def __init__(
        self,
        engine: Engine,
        broker: WorkerBroker,
        outbox: Outbox,
        phases: Phases,
        config: WorkerConfig,
        *,
        on_waiting: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._broker = broker
        self._outbox = outbox
        self._phases = phases
        self._config = config
        self._on_waiting = on_waiting
        self._is_due = asyncio.Event()
        self._heard_at = float("-inf")
        self._asking: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """There is something to tell."""
        self._is_due.set()

    async def run(self) -> None:
        """Publishes at each step, and often enough between steps to keep the leases."""
        backoff = Backoff()
        lost_since: float | None = None
        while True:
            await wait(self._is_due, self._config.lease_ms / 3000)
            try:
                await self._publish()
            except BrokerUnavailable as error:
                self._is_due.set()
                if lost_since is None:
                    lost_since = time.monotonic()
                    _log.warning("redis_lost", error=str(error), held=len(self._outbox))
                elif time.monotonic() - lost_since > self._config.redis_grace_s and self._outbox:
                    # Whoever claims them next goes on from the log; this worker's later tokens are made again.
                    _log.error("redis_grace_over", dropped=len(self._outbox))
                    self._drop_everything()
                await backoff.sleep()
            else:
                if lost_since is not None:
                    _log.info("redis_back", after_s=round(time.monotonic() - lost_since, 1))
                    lost_since = None
                    backoff.reset()

    async def publish_all(self) -> None:
        """What is left, at the end. Raises BrokerUnavailable."""
        while self._outbox.has_chunks:
            await self._publish(everything=True)

    async def _publish(self, *, everything: bool = False) -> None:
        self._is_due.clear()
        batch = self._outbox.batch(everything=everything)
        if not batch:
            return
        wait_s = self._heard_at + _HEAR_EVERY_S - time.monotonic()
        if wait_s > 0 and not everything and not any(held.chunks for held in batch):
            if self._asking is None:
                self._asking = asyncio.get_running_loop().call_later(wait_s, self._ask)
            return
        self._heard_at = time.monotonic()
        settled = self._outbox.settle(batch, await self._broker.publish(batch))
        if self._broker.waiting_class is not None:
            self._on_waiting()
        for engine_id in settled.to_abort:
            _log.info("request_cancelled", engine_id=engine_id)
            self._abort(self._outbox.in_engine(engine_id))
        for engine_id, in_engine in settled.fenced.items():
            _log.warning("request_fenced", engine_id=engine_id)
            self._abort(in_engine)
        self._phases.lost(settled.fenced)
        self._phases.finished(settled.finished)
        for chunk in settled.finished:
            assert chunk.finish is not None
            _log.info(
                "request_finished",
                request_id=chunk.request_id,
                epoch=chunk.epoch,
                reason=chunk.finish.reason,
                completion_tokens=chunk.finish.completion_tokens,
            )
        if self._outbox.has_due:
            self._is_due.set()

    def _ask(self) -> None:
        self._asking = None
        self._is_due.set()

    def _drop_everything(self) -> None:
        for engine_id in self._outbox.engine_ids:
            self._abort(self._outbox.in_engine(engine_id))
        self._phases.lost(self._outbox.engine_ids)
        self._outbox.drop_all()

    def _abort(self, in_engine: Sequence[str]) -> None:
        for engine_id in in_engine:
            self._engine.abort(engine_id, FinishReason.CANCELLED)
