"""Commands of an operator to one worker process: load a model, unload one. By single commands, outside any model."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, Final, cast

from engine_worker.broker.commands import ModelAnswer, ModelCommand, ProcessStatus
from engine_worker.broker.connection import bounded, connect, disconnect
from engine_worker.broker.keys import WORKER_TTL_MS
from engine_worker.protocol import decode, encode

_KEPT_S: Final = 300
"""A command to a process that is not there is forgotten after so long; each of its heartbeats keeps what waits."""
_ANSWER_KEPT_S: Final = 24 * 3600
_POLL_S: Final = 1.0
_PROCESSES: Final = "weir:processes"


class ControlBroker:
    """Both sides. Raises BrokerUnavailable."""

    def __init__(self, url: str, *, timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s
        self._redis = connect(url, timeout_s=timeout_s, max_connections=4)

    async def aclose(self) -> None:
        await disconnect(self._redis)

    # -- the operator's side

    async def send(self, worker_id: str, command: ModelCommand) -> None:
        """It is obeyed after those that were sent before it."""
        async with bounded(self._timeout_s), self._redis.pipeline(transaction=True) as pipe:
            pipe.rpush(_commands(worker_id), encode(command))
            pipe.expire(_commands(worker_id), _KEPT_S)
            await pipe.execute()

    async def answer_to(self, command_id: str) -> ModelAnswer | None:
        """None: there is none, or it is forgotten after a day."""
        async with bounded(self._timeout_s):
            data: Any = await cast(Any, self._redis.lindex(_answer(command_id), -1))
        return None if data is None else decode(data, ModelAnswer)

    async def waiting(self, worker_id: str) -> list[str]:
        """The ids of commands that the process has not taken yet."""
        async with bounded(self._timeout_s):
            found: Any = await cast(Any, self._redis.lrange(_commands(worker_id), 0, -1))
        return [decode(data, ModelCommand).command_id for data in found]

    async def processes(self) -> list[ProcessStatus]:
        """Those that obey commands and whose last heartbeat is younger than 15 s, by id."""
        async with bounded(self._timeout_s):
            members: Any = await cast(Any, self._redis.smembers(_PROCESSES))
            ids = sorted(member.decode() for member in members)
            async with self._redis.pipeline(transaction=False) as pipe:
                for worker_id in ids:
                    pipe.get(_process(worker_id))
                found = await pipe.execute() if ids else []
            gone = [worker_id for worker_id, data in zip(ids, found, strict=True) if data is None]
            if gone:
                await cast(Any, self._redis.srem(_PROCESSES, *gone))  # one that lives adds itself again
        return [decode(data, ProcessStatus) for data in found if data is not None]

    async def ask(
        self, worker_id: str, action: str, model: str, source: str = "", *, timeout_s: float
    ) -> ModelAnswer | None:
        """The worker's answer; None: it gave none in time, and may do so yet."""
        command = ModelCommand(command_id=uuid.uuid4().hex, action=action, model=model, source=source)
        await self.send(worker_id, command)
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while loop.time() < until:
            if (data := await self._pop(_answer(command.command_id))) is not None:
                return decode(data, ModelAnswer)
        return None

    # -- the worker's side

    async def heartbeat(self, status: ProcessStatus) -> None:
        async with bounded(self._timeout_s), self._redis.pipeline(transaction=False) as pipe:
            pipe.sadd(_PROCESSES, status.worker_id)
            pipe.set(_process(status.worker_id), encode(status), px=WORKER_TTL_MS)
            pipe.expire(_commands(status.worker_id), _KEPT_S)
            await pipe.execute()

    async def farewell(self, worker_id: str) -> None:
        async with bounded(self._timeout_s):
            await self._redis.delete(_process(worker_id))

    async def next_command(self, worker_id: str) -> ModelCommand | None:
        """None when there was none for a second."""
        data = await self._pop(_commands(worker_id))
        return None if data is None else decode(data, ModelCommand)

    async def answer(self, answer: ModelAnswer) -> None:
        key = _answer(answer.command_id)
        async with bounded(self._timeout_s), self._redis.pipeline(transaction=True) as pipe:
            pipe.rpush(key, encode(answer))
            pipe.expire(key, _ANSWER_KEPT_S)
            await pipe.execute()

    async def _pop(self, key: str) -> bytes | None:
        async with bounded(_POLL_S + self._timeout_s):
            found = await cast(Any, self._redis.blpop([key], timeout=_POLL_S))
        return None if found is None else cast(bytes, found[1])


def _commands(worker_id: str) -> str:
    return f"weir:control:{worker_id}"


def _answer(command_id: str) -> str:
    return f"weir:answer:{command_id}"


def _process(worker_id: str) -> str:
    return f"weir:process:{worker_id}"
