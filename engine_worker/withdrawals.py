"""Models that were unloaded while Redis was away: taken from it as soon as it is back, so that gateways say so."""

from __future__ import annotations

import asyncio

import structlog

from engine_worker.broker import BrokerUnavailable, WorkerBroker
from engine_worker.waiting import Backoff

_log = structlog.get_logger("engine_worker.withdrawals")


class Withdrawals:
    """Of one process. What is still owed at its end lapses with the model's card."""

    def __init__(self) -> None:
        self._owed: dict[str, asyncio.Task[None]] = {}

    def owe(self, broker: WorkerBroker) -> None:
        """The broker is this object's from now on."""
        self._owed[broker.model] = asyncio.create_task(_withdraw(broker), name=f"withdraw-{broker.model}")

    async def forgive(self, model: str) -> None:
        """It is to be served here again."""
        if (task := self._owed.pop(model, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def aclose(self) -> None:
        for model in list(self._owed):
            await self.forgive(model)


async def _withdraw(broker: WorkerBroker) -> None:
    backoff = Backoff()
    try:
        while True:
            try:
                is_gone = await broker.withdraw()
            except BrokerUnavailable:
                await backoff.sleep()
            else:
                _log.info("model_withdrawn" if is_gone else "worker_withdrawn", model=broker.model)
                return
    finally:
        await broker.aclose()
