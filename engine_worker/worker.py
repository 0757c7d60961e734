"""The worker: claim what can start now, run it, publish every step, until told to stop.

Six tasks share one event loop and one outbox:

    claim      broker.claim(engine.room()) -> engine.add: `claimer.py`
    take       what is handed over         -> engine.add: there too
    hear       of better work, while there is no room -> claim: there too
    collect    engine.steps()              -> outbox
    publish    outbox -> broker.publish    -> verdicts -> engine.abort: `publisher.py`
    heartbeat  status, registration, the sweep, and a watch over the engine's progress

Collect and publish are apart so that a slow Redis never holds up the engine: steps that pile up go
out together in the next call.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from engine_worker.broker import BrokerUnavailable, Claim, WorkerBroker
from engine_worker.canary import Canary
from engine_worker.choices import expand
from engine_worker.claimer import Claimer
from engine_worker.engine.errors import EngineDead, EngineFailure
from engine_worker.engine.types import Engine, EngineRequest
from engine_worker.outbox import Outbox
from engine_worker.protocol import FinishReason, ModelCard
from engine_worker.publisher import Publisher
from engine_worker.tracing import Phases
from engine_worker.waiting import Backoff, wait
from engine_worker.worker_config import WorkerConfig
from engine_worker.worker_status import now_ms, status_of

_log = structlog.get_logger("engine_worker.worker")


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
        self._stopping = asyncio.Event()
        self._claimer = Claimer(engine, broker, self._outbox, start=self._start, stopping=self._stopping)
        self._publisher = Publisher(
            engine, broker, self._outbox, self._phases, config, on_waiting=self._claimer.wake
        )
        self._handing_back = asyncio.Event()
        self._news = asyncio.Event()
        """Gateways should hear at once what the next heartbeat says."""
        self._goes_for_good = False
        self.owes_withdrawal = False
        """It went for good, and Redis was not there to be told."""
        self.registered = asyncio.Event()
        """Set when gateways know the model."""

    def stop(self, *, for_good: bool = False) -> None:
        """Claim nothing more, finish what runs within the grace period.

        `for_good`: nobody will start it again, and if it is the model's last worker the model goes with it.
        """
        self._goes_for_good |= for_good
        self._stopping.set()
        self._news.set()

    def hand_back(self) -> None:
        """As `stop`, and what runs goes back to the queue at once."""
        self._handing_back.set()
        self._stopping.set()

    async def run(self) -> int:
        """The process's exit code: 0 after `stop`, 1 when the engine died and a supervisor should restart."""
        await self._register_until_stopped()
        self.registered.set()
        _log.info("worker_started", worker_id=self._config.worker_id, model=self._card.model)
        claim = asyncio.create_task(self._claimer.run(), name="worker-claim")
        tasks = [
            claim,
            asyncio.create_task(self._claimer.take(), name="worker-take"),
            asyncio.create_task(self._claimer.hear(), name="worker-hear"),
            asyncio.create_task(self._collect(), name="worker-collect"),
            asyncio.create_task(self._publisher.run(), name="worker-publish"),
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

    # -- the six tasks -------------------------------------------------------------------------

    def _start(self, claim: Claim) -> None:
        request = claim.request
        if self._outbox.holds(claim):
            # Redis lost its last writes, and this claim with them: the next publish is ahead of the log and fenced.
            _log.warning("request_claimed_twice", request_id=request.request_id, epoch=claim.epoch)
            self._publisher.wake()
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
            self._publisher.wake()
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
            continues_text=request.continues_text,
            text_lengths=request.text_lengths,
            resumed_token_ids=claim.logged_token_ids,
        )
        choices = expand(whole, claim.log)
        if not choices:
            self._outbox.end(engine_id, FinishReason.STOP)
            self._publisher.wake()
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
            self._publisher.wake()

    async def _collect(self) -> None:
        async for step in self._engine.steps():
            self._outbox.take(step.outputs)
            self._phases.stepped(step.outputs)
            for engine_id, choice in self._outbox.take_followers():
                self._add(engine_id, choice)
            self._canary.hear(step.outputs)
            self._publisher.wake()
            self._claimer.wake()
        raise EngineDead("the engine stopped stepping")

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
                    goes_for_good=self._goes_for_good,
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
            await wait(self._news, self._config.heartbeat_s)
            self._news.clear()

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
        await self._claimer.take_no_more()
        await claim  # the last claim's requests are wanted, and its failure is everybody's
        await self._claimer.take_no_more()  # which it may have offered meanwhile
        _log.info("worker_draining", held=len(self._outbox), grace_s=self._config.drain_grace_s)
        deadline = time.monotonic() + self._config.drain_grace_s
        while self._outbox and not self._handing_back.is_set() and time.monotonic() < deadline:
            await wait(self._handing_back, 0.02)

    async def _hand_back(self, *, failed: bool) -> None:
        """What is made is published, the rest goes to the front of the queue, the worker is gone from the lists."""
        try:
            await self._publisher.publish_all()
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
            if self._goes_for_good and not failed:
                is_gone = await self._broker.withdraw()
                _log.info("model_withdrawn" if is_gone else "worker_withdrawn", model=self._card.model)
            else:
                await self._broker.farewell()
        except BrokerUnavailable as error:
            # Their leases lapse, and others go on from the log.
            self.owes_withdrawal = self._goes_for_good and not failed
            _log.warning("hand_back_failed", error=str(error), held=len(self._outbox))
