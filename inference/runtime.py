"""What a gateway process keeps for its token path: one of each per event loop, made at first use."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from contextvars import Context
from typing import Any
from weakref import WeakKeyDictionary

import structlog
from django.conf import settings

from engine_worker.broker import BrokerUnavailable, GatewayBroker
from inference.loop_lag import LoopLag
from inference.models_served import ModelCatalogue
from inference.reservation_watch import ReservationWatch
from inference.services.recall import recall_from_ledger
from inference.settlements import Settlements
from inference.site_policy import SitePolicy
from inference.streams import LiveStreams
from inference.tenant_watch import TenantWatch
from inference.worker_watch import WorkerWatch
from tenants.quotas.store import QuotaStore

log = structlog.get_logger(__name__)


class Detached:
    """Generations whose connection dropped, each with a task that cancels it unless somebody resumes it."""

    def __init__(self, broker: GatewayBroker, channel: str) -> None:
        self._broker = broker
        self._channel = channel
        self._timers: dict[str, asyncio.Task[None]] = {}

    def hold(self, model: str, request_id: str, grace_s: float) -> None:
        timer = asyncio.create_task(
            self._cancel_after(model, request_id, grace_s), name="detached-generation"
        )
        self._timers[request_id] = timer
        timer.add_done_callback(lambda _: self._timers.pop(request_id, None))

    def resume(self, request_id: str) -> None:
        if timer := self._timers.pop(request_id, None):
            timer.cancel()

    async def aclose(self) -> None:
        timers = list(self._timers.values())
        for timer in timers:
            timer.cancel()
        await asyncio.gather(*timers, return_exceptions=True)

    async def _cancel_after(self, model: str, request_id: str, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        try:
            # Not if another gateway has attached to it since.
            await self._broker.cancel(model, request_id, if_last_watched_by=self._channel)
        except BrokerUnavailable as error:
            log.warning("detached_not_cancelled", request_id=request_id, reason=str(error))


class Runtime:
    def __init__(self) -> None:
        self.gateway_id = secrets.token_hex(8)
        self.broker = GatewayBroker(settings.REDIS_URL)
        self.quotas = QuotaStore(settings.REDIS_URL, recall=recall_from_ledger)
        self.streams = LiveStreams(self.broker, self.gateway_id)
        self.policy = SitePolicy()
        self.models = ModelCatalogue(self.broker, self.policy, expected=settings.EXPECTED_MODELS)
        self.detached = Detached(self.broker, self.streams.channel)
        self.tenants = TenantWatch()
        self.workers = WorkerWatch(self.models)
        self.lag = LoopLag()
        self.reservations = ReservationWatch(self.quotas)
        self.settlements = Settlements(self.quotas, self.spawn)
        self.is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    def break_off_streams(self) -> None:
        """This gateway is being stopped: whoever waits for an answer of it looks up (`Generation.is_cut_short`)."""
        self.is_stopping = True
        self.streams.interrupt()

    def spawn(
        self, work: Coroutine[Any, Any, None], *, name: str, context: Context | None = None
    ) -> asyncio.Task[None]:
        """Work that outlives its request; this object owns the task. `context`: None is the caller's."""
        task = asyncio.create_task(work, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self, *, grace_s: float = 5.0) -> None:
        """Lets settlements end, then closes everything. For the end of a process, and of a test."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + grace_s
        while self._tasks and (left_s := ends_at - loop.time()) > 0:  # what is cancelled settles
            await asyncio.wait(self._tasks, timeout=left_s)
        for task in self._tasks:
            task.cancel()
        self.lag.close()
        await self.tenants.aclose()
        await self.workers.aclose()
        await self.reservations.aclose()
        await self.detached.aclose()
        await self.streams.aclose()
        await self.models.aclose()
        await self.policy.aclose()
        await self.quotas.aclose()
        await self.broker.aclose()


_runtimes: WeakKeyDictionary[asyncio.AbstractEventLoop, Runtime] = WeakKeyDictionary()


def get_runtime() -> Runtime:
    loop = asyncio.get_running_loop()
    runtime = _runtimes.get(loop)
    if runtime is None:
        runtime = _runtimes[loop] = Runtime()
    return runtime


def break_off_streams() -> None:
    """Of this event loop, if it has answered anything."""
    if (runtime := _runtimes.get(asyncio.get_running_loop())) is not None:
        runtime.break_off_streams()


async def close_runtime() -> None:
    runtime = _runtimes.pop(asyncio.get_running_loop(), None)
    if runtime is not None:
        await runtime.aclose()
