"""Several models in one worker process, each with an engine and a worker of its own, loaded and unloaded on command.

They share the event loop and the device's memory, of which each gets an equal part; their steps take turns
as the system's threads do. To the queue each is a worker of its model: gateways see no difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import structlog

from engine_worker.backoff import Backoff
from engine_worker.broker import BrokerUnavailable, ControlBroker, WorkerBroker
from engine_worker.engine.errors import EngineFailure
from engine_worker.engine.types import Engine
from engine_worker.model_card import ModelCardError
from engine_worker.model_store import ModelStoreError
from engine_worker.protocol import ModelAnswer, ModelCard, ModelCommand, ProtocolError
from engine_worker.worker import Worker
from engine_worker.worker_config import WorkerConfig

_log = structlog.get_logger("engine_worker.served_models")

Describe: TypeAlias = Callable[[], tuple[ModelCard, bytes]]
Make: TypeAlias = Callable[[str, str], tuple[Engine, Describe]]
"""From a model's name and where it is to an engine that is not started. May take long; in a thread of its own."""


class Refused(ValueError):
    """A command that can't be done; the message says why."""


_ENGINE_STOP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Served:
    worker: Worker
    running: asyncio.Task[int]


class ServedModels:
    """`most`: so many models at once."""

    def __init__(self, make: Make, config: WorkerConfig, *, most: int) -> None:
        self._make = make
        self._config = config
        self._most = most
        self._served: dict[str, _Served] = {}
        self._loading: set[str] = set()
        self._ended = asyncio.Event()
        self._stopping = False
        self._failed = 0

    @property
    def names(self) -> list[str]:
        return sorted(self._served)

    async def load(self, name: str, source: str) -> None:
        """Returns when gateways know the model. Raises Refused."""
        if name in self._served or name in self._loading:
            raise Refused(f"{name} is served already")
        if len(self._served) + len(self._loading) >= self._most:
            raise Refused(f"this worker serves {self._most} models at most: unload one first")
        self._loading.add(name)
        try:
            engine, describe = await asyncio.to_thread(self._make, name, source)
            await engine.start()
        except (EngineFailure, ModelStoreError, ModelCardError, ValueError, OSError) as error:
            raise Refused(str(error)) from error
        finally:
            self._loading.discard(name)
        config = replace(self._config, model=name)
        broker = WorkerBroker(
            config.redis_url,
            model=name,
            worker_id=config.worker_id,
            lease_ms=config.lease_ms,
            timeout_s=config.broker_timeout_s,
        )
        worker = Worker(engine, broker, *describe(), config)
        running = asyncio.create_task(self._run(name, worker, engine, broker), name=f"serve-{name}")
        self._served[name] = _Served(worker, running)
        if self._stopping:
            worker.stop()
        await worker.registered.wait()

    async def unload(self, name: str) -> None:
        """Claims nothing more, finishes what runs within the grace period, frees the memory. Raises Refused."""
        served = self._served.get(name)
        if served is None:
            raise Refused(f"{name} is not served here")
        served.worker.stop()
        await asyncio.wait([served.running])

    def stop(self) -> None:
        """As `Worker.stop`, for all of them."""
        self._stopping = True
        self._ended.set()
        for served in self._served.values():
            served.worker.stop()

    async def run(self) -> int:
        """Obeys commands until `stop` is called or an engine dies; the process's exit code."""
        control = ControlBroker(self._config.redis_url, timeout_s=self._config.broker_timeout_s)
        obeying = asyncio.create_task(self._obey(control), name="models-control")
        try:
            await self._ended.wait()
        finally:
            obeying.cancel()
            await asyncio.gather(obeying, return_exceptions=True)
            await control.aclose()
        self.stop()
        codes = await asyncio.gather(*(served.running for served in self._served.values()))
        return max([self._failed, *codes])

    async def _run(self, name: str, worker: Worker, engine: Engine, broker: WorkerBroker) -> int:
        code = 1
        try:
            code = await worker.run()
        finally:
            del self._served[name]
            await broker.aclose()
            try:
                async with asyncio.timeout(_ENGINE_STOP_S):
                    await engine.stop()
            except TimeoutError:
                code = code or 1  # a step hangs: its memory can't be had back without the process
            if code:
                # One engine died. Its process is started again as a whole, so the others hand back as well.
                self._failed = code
                self._ended.set()
        return code

    async def _obey(self, control: ControlBroker) -> None:
        backoff = Backoff()
        while True:
            try:
                command = await control.next_command(self._config.worker_id)
                if command is not None:
                    await control.answer(await self._answer(command))
                backoff.reset()
            except ProtocolError as error:
                _log.warning("command_not_understood", error=str(error))
            except BrokerUnavailable:
                await backoff.sleep()

    async def _answer(self, command: ModelCommand) -> ModelAnswer:
        _log.info("model_command", action=command.action, model=command.model)
        actions: dict[str, Callable[[], Awaitable[None]]] = {
            "load": lambda: self.load(command.model, command.source),
            "unload": lambda: self.unload(command.model),
        }
        error = ""
        try:
            if command.action not in actions:
                raise Refused(f"unknown action {command.action!r}")
            await actions[command.action]()
        except Refused as refused:
            error = str(refused)
        return ModelAnswer(command_id=command.command_id, models=self.names, error=error)
