"""Several models in one worker process, each with an engine and a worker of its own, loaded and unloaded on command.

They share the event loop and the device's memory, of which each gets an equal part; their steps take turns
as the system's threads do. To the queue each is a worker of its model: gateways see no difference.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import structlog

from engine_worker.broker import BrokerUnavailable, ControlBroker, WorkerBroker
from engine_worker.broker.commands import ModelAnswer, ModelCommand, ProcessStatus, Refusal
from engine_worker.broker.keys import model_prefix
from engine_worker.engine.errors import EngineFailure
from engine_worker.engine.types import Engine
from engine_worker.host_memory import NotEnoughMemory
from engine_worker.model_files import ModelFileError
from engine_worker.model_store import ModelNotFound, ModelStoreError
from engine_worker.protocol import ModelCard, ProtocolError
from engine_worker.starting import announced
from engine_worker.waiting import Backoff, wait
from engine_worker.withdrawals import Withdrawals
from engine_worker.worker import Worker
from engine_worker.worker_config import WorkerConfig
from engine_worker.worker_status import now_ms

_log = structlog.get_logger("engine_worker.served_models")

Describe: TypeAlias = Callable[[], tuple[ModelCard, bytes]]
Make: TypeAlias = Callable[[str, str], tuple[Engine, Describe]]
"""From a model's name and where it is to an engine that is not started. May take long; in a thread of its own."""


class Refused(ValueError):
    """A command that can't be done; the message says why, `code` says so to programs (see Refusal)."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


_ENGINE_STOP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Served:
    source: str
    engine: Engine
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
        self._started_at_ms = now_ms()
        self._command_id = ""
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._withdrawals = Withdrawals()
        self._stopping = False
        self._goes_for_good = False
        self._failed = 0

    @property
    def names(self) -> list[str]:
        return sorted(self._served)

    def engines(self) -> dict[str, Engine]:
        """By model. May be asked by any thread."""
        return {name: served.engine for name, served in self._served.copy().items()}

    async def load(self, name: str, source: str, *, as_others: bool = False) -> None:
        """Returns when gateways know the model; at once where it is served already, from there. Raises Refused.

        `as_others`: what other workers that live serve under that name has to be the same model. A process that begins
        may bring a newer one, before the others do.
        """
        if (served := self._served.get(name)) is not None and served.source == source:
            return
        if served is not None or name in self._loading:
            raise Refused(
                f"{name} is served already, from elsewhere: give another name, or unload it first",
                Refusal.SERVED,
            )
        if len(self._served) + len(self._loading) >= self._most:
            raise Refused(f"this worker serves {self._most} models at most: unload one first", Refusal.FULL)
        try:
            model_prefix(name)
        except ValueError as error:
            raise Refused(str(error), Refusal.MALFORMED) from error
        self._loading.add(name)
        config = replace(self._config, model=name)
        broker = WorkerBroker(
            config.redis_url,
            model=name,
            worker_id=config.worker_id,
            lease_ms=config.lease_ms,
            timeout_s=config.broker_timeout_s,
        )
        try:
            async with announced(broker, every_s=config.heartbeat_s):
                engine, (card, tokenizer) = await self._start(name, source)
        except BaseException as error:
            await broker.aclose()
            if isinstance(error, Exception):
                raise _refused(error) from error
            raise
        finally:
            self._loading.discard(name)
        try:
            if as_others:
                await self._refuse_another_model(broker, card)
        except BaseException:
            await engine.stop()
            await broker.aclose()
            raise
        await self._withdrawals.forgive(name)
        worker = Worker(engine, broker, card, tokenizer, config)
        running = asyncio.create_task(self._run(name, worker, engine, broker), name=f"serve-{name}")
        self._served[name] = _Served(source, engine, worker, running)
        if self._stopping:
            worker.stop(for_good=self._goes_for_good)
        registered = asyncio.create_task(worker.registered.wait(), name=f"register-{name}")
        await asyncio.wait([registered, running], return_when=asyncio.FIRST_COMPLETED)
        registered.cancel()

    async def _refuse_another_model(self, broker: WorkerBroker, card: ModelCard) -> None:
        """The last one to describe a model does so for all that serve it: requests would be checked, and streams go on,
        by another model's description."""
        try:
            served = await broker.card_of_others()
        except (BrokerUnavailable, ProtocolError) as error:
            raise Refused(str(error), Refusal.UNSERVABLE) from error
        if served is not None and served.revision != card.revision:
            raise Refused(
                f"another worker serves another model as {card.model}: give another name, or unload it there first",
                Refusal.SERVED,
            )

    async def _start(self, name: str, source: str) -> tuple[Engine, tuple[ModelCard, bytes]]:
        engine, describe = await asyncio.to_thread(self._make, name, source)
        await engine.start()
        try:
            return engine, describe()
        except BaseException:
            await engine.stop()
            raise

    async def unload(self, name: str) -> None:
        """Claims nothing more, finishes what runs within the grace period, frees the memory. Raises Refused."""
        served = self._served.get(name)
        if served is None:
            raise Refused(f"{name} is not served here", Refusal.NOT_SERVED)
        served.worker.stop(for_good=True)
        await asyncio.wait([served.running])
        gc.collect()  # an engine's parts know each other: its memory is free now, not some time later

    def stop(self, *, for_good: bool = False) -> None:
        """As `Worker.stop`, for all of them."""
        self._stopping = True
        self._goes_for_good |= for_good
        self._ended.set()
        for served in self._served.values():
            served.worker.stop(for_good=for_good)

    def hand_back(self) -> None:
        self.stop()
        for served in self._served.values():
            served.worker.hand_back()

    async def run(self) -> int:
        """Obeys commands until `stop` is called or an engine dies; the process's exit code."""
        control = ControlBroker(self._config.redis_url, timeout_s=self._config.broker_timeout_s)
        tasks = [
            asyncio.create_task(self._obey(control), name="models-control"),
            asyncio.create_task(self._tell(control), name="models-heartbeat"),
        ]
        try:
            await self._ended.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(BrokerUnavailable):  # then its status lapses
                await control.farewell(self._config.worker_id)
            await control.aclose()
        self.stop()
        codes = await asyncio.gather(*(served.running for served in self._served.values()))
        await self._withdrawals.aclose()
        return max([self._failed, *codes])

    async def _run(self, name: str, worker: Worker, engine: Engine, broker: WorkerBroker) -> int:
        code = 1
        try:
            code = await worker.run()
        finally:
            del self._served[name]
            if worker.owes_withdrawal:
                self._withdrawals.owe(broker)
            else:
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
                    self._set_command(command.command_id)
                    answer = await self._answer(command)
                    await self._deliver(control, answer)
                    self._set_command("")
                backoff.reset()
            except ProtocolError as error:
                _log.warning("command_not_understood", error=str(error))
            except BrokerUnavailable:
                await backoff.sleep()

    def _set_command(self, command_id: str) -> None:
        self._command_id = command_id
        self._news.set()

    async def _deliver(self, control: ControlBroker, answer: ModelAnswer) -> None:
        """However long Redis is away: the command has been obeyed, and who sent it waits to hear so."""
        backoff = Backoff()
        while True:
            try:
                return await control.answer(answer)
            except BrokerUnavailable:
                await backoff.sleep()

    async def _tell(self, control: ControlBroker) -> None:
        """Each second, and at each change of what it is at."""
        while True:
            self._news.clear()
            status = ProcessStatus(
                worker_id=self._config.worker_id,
                started_at_ms=self._started_at_ms,
                updated_at_ms=now_ms(),
                max_models=self._most,
                models=self.names,
                command_id=self._command_id,
                host=socket.gethostname(),
                device=self._config.device,
            )
            with suppress(BrokerUnavailable):  # the models' own heartbeats say so in the log
                await control.heartbeat(status)
            await wait(self._news, self._config.heartbeat_s)

    async def _answer(self, command: ModelCommand) -> ModelAnswer:
        _log.info("model_command", action=command.action, model=command.model)
        actions: dict[str, Callable[[], Awaitable[None]]] = {
            "load": lambda: self.load(command.model, command.source, as_others=True),
            "unload": lambda: self.unload(command.model),
        }
        error = code = ""
        try:
            if command.action not in actions:
                raise Refused(f"unknown action {command.action!r}", Refusal.MALFORMED)
            await actions[command.action]()
        except Refused as refused:
            error, code = str(refused), refused.code
        _log.info("model_command_done", action=command.action, model=command.model, error=error)
        return ModelAnswer(command_id=command.command_id, models=self.names, error=error, code=code)


def _refused(error: Exception) -> Refused:
    """Why a model could not be loaded. Whatever it was, the other models of the process go on."""
    text = str(error) or type(error).__name__
    if isinstance(error, NotEnoughMemory):
        return Refused(text, Refusal.MEMORY)
    if (
        isinstance(error, MemoryError) or "not enough memory" in text or "out of memory" in text
    ):  # torch's words
        return Refused(f"not enough memory: {text}", Refusal.MEMORY)
    if isinstance(error, ModelNotFound):
        return Refused(text, Refusal.NOT_FOUND)
    if not isinstance(error, EngineFailure | ModelStoreError | ModelFileError | ValueError | OSError):
        _log.error("model_not_loaded", exc_info=error)
    return Refused(text, Refusal.UNSERVABLE)
