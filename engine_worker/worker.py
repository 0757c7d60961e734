"""The worker: claim what can start now, run it, publish every step, until told to stop.

Five tasks share one event loop and one outbox:

    claim      broker.claim(engine.room()) -> engine.add
    hear       of better work, while there is no room -> claim
    collect    engine.steps()              -> outbox
    publish    outbox -> broker.publish    -> verdicts -> engine.abort
    heartbeat  status, registration, the sweep, and a watch over the engine's progress

Collect and publish are apart so that a slow Redis never holds up the engine: steps that pile up go
out together in the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Final

import structlog

from engine_worker.backoff import Backoff
from engine_worker.broker import BrokerUnavailable, Claim, WorkerBroker
from engine_worker.canary import Canary
from engine_worker.choices import expand
from engine_worker.engine.errors import EngineDead, EngineFailure
from engine_worker.engine.types import Engine, EngineRequest
from engine_worker.outbox import Outbox
from engine_worker.protocol import FinishReason, ModelCard
from engine_worker.tracing import Phases
from engine_worker.worker_config import WorkerConfig
from engine_worker.worker_status import now_ms, status_of

_log = structlog.get_logger("engine_worker.worker")

_WAIT_FOR_WORK_S: Final = 1.0
_WAIT_FOR_BETTER_S: Final = 5.0
_HEAR_EVERY_S: Final = 0.01
"""So often at most Redis is asked what has become of what is held, by a publish that has no tokens to tell."""


class Worker:
    """Runs until `stop` is called or the engine dies. One use.

    The engine must be started already, so that a model that can't be loaded is never announced.
    """

    def __init__(
        self,
        engine: Engine,
        broker: WorkerBroker,
        card: ModelCard,
        tokenizer_json: bytes,
        config: WorkerConfig,
    ) -> None:
        self._engine = engine
        self._broker = broker
        self._card = card
        self._tokenizer_json = tokenizer_json
        self._config = config
        self._outbox = Outbox()
        self._phases = Phases(config.worker_id)
        self._canary = Canary(engine, after_s=config.canary_s, patience_s=config.stall_s)
        self._started_at_ms = now_ms()
        self._stepped = asyncio.Event()  # for claim: there may be room
        self._to_publish = asyncio.Event()
        self._heard_at = float("-inf")
        self._asking: asyncio.TimerHandle | None = None
        self._is_full = asyncio.Event()  # for hear: without room what is better is news
        self._stopping = asyncio.Event()
        self._handing_back = asyncio.Event()
        self.registered = asyncio.Event()
        """Set when gateways know the model."""

    def stop(self) -> None:
        """First call: claim nothing more, finish what runs within the grace period. Second: hand back at once."""
        if self._stopping.is_set():
            self._handing_back.set()
        self._stopping.set()

    async def run(self) -> int:
        """The process's exit code: 0 after `stop`, 1 when the engine died and a supervisor should restart."""
        await self._register_until_stopped()
        self.registered.set()
        _log.info("worker_started", worker_id=self._config.worker_id, model=self._card.model)
        claim = asyncio.create_task(self._claim(), name="worker-claim")
        tasks = [
            claim,
            asyncio.create_task(self._hear(), name="worker-hear"),
            asyncio.create_task(self._collect(), name="worker-collect"),
            asyncio.create_task(self._publish(), name="worker-publish"),
            asyncio.create_task(self._heartbeat(), name="worker-heartbeat"),
        ]
        drained = asyncio.create_task(self._drain(claim), name="worker-drain")
        try:
            await asyncio.wait([*tasks[1:], drained], return_when=asyncio.FIRST_COMPLETED)
            failures = [task.exception() for task in tasks if task.done() and task.exception()]
        finally:
            for task in (*tasks, drained):
                task.cancel()
            await asyncio.gather(*tasks, drained, return_exceptions=True)
        for failure in failures:
            _log.error(
                "engine_dead" if isinstance(failure, EngineDead) else "worker_failed", exc_info=failure
            )
        await self._hand_back(failed=bool(failures))
        _log.info("worker_stopped", worker_id=self._config.worker_id, failed=bool(failures))
        return 1 if failures else 0

    # -- the five tasks ------------------------------------------------------------------------

    async def _claim(self) -> None:
        """Ends by itself when stopping: a claim that is cancelled half way would strand what it took."""
        backoff = Backoff()
        while not self._stopping.is_set():
            self._stepped.clear()
            room = self._engine.room()
            try:
                if room <= 0:
                    self._is_full.set()
                    if not await self._claim_better():
                        await _wait(self._stepped, _WAIT_FOR_WORK_S)
                    continue
                claims = await self._broker.claim(room)
                for claim in claims:
                    self._start(claim)
                if len(claims) < room and not self._stopping.is_set():
                    await self._broker.wait_for_work(_WAIT_FOR_WORK_S)
                backoff.reset()
            except BrokerUnavailable:
                await backoff.sleep()

    async def _claim_better(self) -> bool:
        """Without room: takes what is of a better class than something held, which the engine then preempts.

        Asks only when the last publish said that such a request waits: a full worker costs no extra calls.
        """
        extra, worst = self._outbox.to_put_aside(self._engine.stats().running)
        waiting, self._broker.waiting_class = self._broker.waiting_class, None
        if not extra or waiting is None or waiting >= worst:
            return False
        claims = await self._broker.claim(0, extra=extra, put_aside=worst)
        for claim in claims:
            self._start(claim)
        return bool(claims)

    async def _hear(self) -> None:
        """A better class than all that waited does not have to wait for the next publish to be heard of."""
        backoff = Backoff()
        while True:
            await self._is_full.wait()
            self._is_full.clear()
            if self._stopping.is_set():
                await asyncio.sleep(_WAIT_FOR_BETTER_S)
                continue
            try:
                better = await self._broker.wait_for_better(_WAIT_FOR_BETTER_S)
                backoff.reset()
            except BrokerUnavailable:
                await backoff.sleep()
                continue
            if better is not None:
                waiting = self._broker.waiting_class
                self._broker.waiting_class = better if waiting is None else min(better, waiting)
                self._stepped.set()

    def _start(self, claim: Claim) -> None:
        request = claim.request
        if self._outbox.holds(claim):
            # Redis lost its last writes, and this claim with them: the next publish is ahead of the log and fenced.
            _log.warning("request_claimed_twice", request_id=request.request_id, epoch=claim.epoch)
            self._to_publish.set()
            return
        engine_id = self._outbox.hold(claim)
        self._phases.claimed(engine_id, claim)
        _log.info(
            "request_claimed",
            request_id=request.request_id,
            http_request_id=request.trace.get("x-request-id"),
            tenant_id=request.tenant_id,
            epoch=claim.epoch,
            attempt=claim.attempt,
            prompt_tokens=len(request.prompt_token_ids),
            resumed_tokens=len(claim.logged_token_ids),
        )
        logged = len(claim.logged_token_ids)
        if logged and logged >= request.sampling.max_tokens * request.sampling.n:
            # Its last worker logged the last token and died before it could say so.
            self._outbox.end(engine_id, FinishReason.LENGTH)
            self._to_publish.set()
            return
        whole = EngineRequest(
            request_id=engine_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            priority=(claim.tier_class, claim.counter),
            # By this machine's clock, which need not agree with the server's.
            deadline_ms=now_ms() + claim.remaining_ms,
            # A gateway that makes no salt yet must not put its tenants into one cache.
            cache_salt=request.cache_salt or request.tenant_id,
            adapter=request.adapter,
            text_lengths=request.text_lengths,
            resumed_token_ids=claim.logged_token_ids,
        )
        choices = expand(whole, claim.log)
        if not choices:
            self._outbox.end(engine_id, FinishReason.STOP)
            self._to_publish.set()
            return
        # The others begin when the first has left the prompt in the prefix cache.
        self._outbox.follow(engine_id, choices[1:])
        self._add(engine_id, choices[0])

    def _add(self, engine_id: str, choice: EngineRequest) -> None:
        try:
            self._engine.add(choice)
        except EngineDead:
            raise
        except EngineFailure as refusal:
            _log.warning("request_refused", engine_id=engine_id, reason=type(refusal).__name__)
            self._outbox.fail(engine_id, "invalid_request", str(refusal))
            self._to_publish.set()

    async def _collect(self) -> None:
        async for step in self._engine.steps():
            self._outbox.take(step.outputs)
            self._phases.stepped(step.outputs)
            for engine_id, choice in self._outbox.take_followers():
                self._add(engine_id, choice)
            self._canary.hear(step.outputs)
            self._to_publish.set()
            self._stepped.set()
        raise EngineDead("the engine stopped stepping")

    async def _publish(self) -> None:
        """Publishes at each step, and often enough between steps to keep the leases."""
        backoff = Backoff()
        lost_since: float | None = None
        while True:
            await _wait(self._to_publish, self._config.lease_ms / 3000)
            try:
                await self._publish_once()
            except BrokerUnavailable as error:
                self._to_publish.set()
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

    async def _publish_once(self, *, everything: bool = False) -> None:
        self._to_publish.clear()
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
            self._stepped.set()  # the claim may want to know
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
            self._to_publish.set()

    def _ask(self) -> None:
        self._asking = None
        self._to_publish.set()

    async def _heartbeat(self) -> None:
        progress, progressed_at = -1, time.monotonic()
        is_lost = False
        while True:
            stats = self._engine.stats()
            if stats.steps != progress or not (stats.running or stats.waiting):
                progress, progressed_at = stats.steps, time.monotonic()
            elif time.monotonic() - progressed_at > self._config.stall_s:
                raise EngineDead(f"no step for {self._config.stall_s:g} s with work at hand")
            if not self._stopping.is_set():
                self._canary.watch(stats)
            try:
                status = status_of(
                    self._engine,
                    self._config,
                    self._card.model,
                    started_at_ms=self._started_at_ms,
                    draining=self._stopping.is_set(),
                )
                if not await self._broker.heartbeat(status, tokenizer_sha256=self._card.tokenizer_sha256):
                    _log.warning("registration_lost")
                    await self._broker.register(self._card, self._tokenizer_json)
                expired, requeued, ended = await self._broker.expire()
                if expired or requeued or ended:
                    _log.info("swept", expired=expired, requeued=requeued, ended=ended)
                is_lost = False
            except BrokerUnavailable as error:
                if not is_lost:
                    _log.warning("heartbeat_failed", error=str(error))
                is_lost = True
            await asyncio.sleep(self._config.heartbeat_s)

    # -- start and end -------------------------------------------------------------------------

    async def _register_until_stopped(self) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                await self._broker.register(self._card, self._tokenizer_json)
                return
            except BrokerUnavailable as error:
                _log.warning("register_failed", error=str(error))
                await backoff.sleep()

    async def _drain(self, claim: asyncio.Task[None]) -> None:
        """Done when the worker was told to stop and nothing is left to wait for."""
        stopping = asyncio.create_task(self._stopping.wait(), name="worker-stopping")
        try:
            await asyncio.wait([stopping, claim], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        await claim  # the last claim's requests are wanted, and its failure is everybody's
        _log.info("worker_draining", held=len(self._outbox), grace_s=self._config.drain_grace_s)
        deadline = time.monotonic() + self._config.drain_grace_s
        while self._outbox and not self._handing_back.is_set() and time.monotonic() < deadline:
            await _wait(self._handing_back, 0.02)

    async def _hand_back(self, *, failed: bool) -> None:
        """What is made is published, the rest goes to the front of the queue, the worker is gone from the lists."""
        try:
            while self._outbox.has_chunks:
                await self._publish_once(everything=True)
            if self._outbox:
                self._phases.lost(self._outbox.engine_ids)
                held = self._outbox.drop_all()
                await self._broker.release(
                    held,
                    failed=failed,
                    code="engine_failed",
                    message="The engine failed while generating this answer.",
                )
                _log.info("requests_released", count=len(held))
            await self._broker.farewell()
        except BrokerUnavailable as error:
            # Their leases lapse, and others go on from the log.
            _log.warning("hand_back_failed", error=str(error), held=len(self._outbox))

    # -- small things --------------------------------------------------------------------------

    def _drop_everything(self) -> None:
        for engine_id in self._outbox.engine_ids:
            self._abort(self._outbox.in_engine(engine_id))
        self._phases.lost(self._outbox.engine_ids)
        self._outbox.drop_all()

    def _abort(self, in_engine: Sequence[str]) -> None:
        for engine_id in in_engine:
            self._engine.abort(engine_id, FinishReason.CANCELLED)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    # Not asyncio.wait_for: before Python 3.12 it can swallow a cancellation (python/cpython#86296).
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
