"""Commands of an operator to one worker process: load a model, unload one. By single commands, outside any model."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, Final, cast

from engine_worker.broker.connection import bounded, connect, disconnect
from engine_worker.protocol import ModelAnswer, ModelCommand, decode, encode

_KEPT_S: Final = 300
"""A command that nobody took, or an answer that nobody read, is forgotten after so long."""
_POLL_S: Final = 1.0


class ControlBroker:
    """Both sides. Raises BrokerUnavailable."""

    def __init__(self, url: str, *, timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s
        self._redis = connect(url, timeout_s=timeout_s, max_connections=2)

    async def aclose(self) -> None:
        await disconnect(self._redis)

    async def ask(
        self, worker_id: str, action: str, model: str, source: str = "", *, timeout_s: float
    ) -> ModelAnswer | None:
        """The worker's answer; None: it gave none in time, and may do so yet."""
        command = ModelCommand(command_id=uuid.uuid4().hex, action=action, model=model, source=source)
        async with bounded(self._timeout_s), self._redis.pipeline(transaction=True) as pipe:
            pipe.rpush(_commands(worker_id), encode(command))
            pipe.expire(_commands(worker_id), _KEPT_S)
            await pipe.execute()
        key, loop = f"weir:answer:{command.command_id}", asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while loop.time() < until:
            if (data := await self._pop(key)) is not None:
                return decode(data, ModelAnswer)
        return None

    async def next_command(self, worker_id: str) -> ModelCommand | None:
        """None when there was none for a second."""
        data = await self._pop(_commands(worker_id))
        return None if data is None else decode(data, ModelCommand)

    async def answer(self, answer: ModelAnswer) -> None:
        key = f"weir:answer:{answer.command_id}"
        async with bounded(self._timeout_s), self._redis.pipeline(transaction=True) as pipe:
            pipe.rpush(key, encode(answer))
            pipe.expire(key, _KEPT_S)
            await pipe.execute()

    async def _pop(self, key: str) -> bytes | None:
        async with bounded(_POLL_S + self._timeout_s):
            found = await cast(Any, self._redis.blpop([key], timeout=_POLL_S))
        return None if found is None else cast(bytes, found[1])


def _commands(worker_id: str) -> str:
    return f"weir:control:{worker_id}"
