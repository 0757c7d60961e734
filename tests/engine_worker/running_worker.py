"""A worker against a real server, with an engine whose every token is known beforehand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from engine_worker.broker import GatewayBroker, WorkerBroker
from engine_worker.protocol import Chunk
from engine_worker.worker import Worker
from engine_worker.worker_config import WorkerConfig
from tests.engine_worker.broker.driving import card
from tests.engine_worker.scripted_engine import ScriptedEngine


class Running:
    """A worker in a task, and its engine."""

    def __init__(self, url: str, model: str, engine: ScriptedEngine, **config: float | int | str) -> None:
        settings = {"worker_id": "w1", "heartbeat_s": 0.05, "drain_grace_s": 20.0} | config
        self.config = WorkerConfig(model=model, redis_url=url, **settings)  # type: ignore[arg-type]  # a test's mix
        self.engine = engine
        self.broker = WorkerBroker(
            url,
            model=model,
            worker_id=self.config.worker_id,
            lease_ms=self.config.lease_ms,
            timeout_s=self.config.broker_timeout_s,
        )
        self.worker = Worker(engine, self.broker, card(model), b"{}", self.config)
        self.task = asyncio.create_task(self.worker.run())

    async def close(self) -> None:
        if not self.task.done():
            self.worker.hand_back()
            self.engine.resume()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.task, 10)
        await self.engine.stop()
        await self.broker.aclose()

    async def kill(self) -> None:
        """As kill -9: nothing is said to anybody."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


Start = Callable[..., Running]


def token_ids(chunks: list[Chunk]) -> list[int]:
    """The tokens in a log, which must be without hole and without repeat."""
    tokens: list[int] = []
    for chunk in chunks:
        assert chunk.seq == len(tokens)
        tokens += chunk.token_ids
    return tokens


def text(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def finished(gateway: GatewayBroker, model: str, *request_ids: str) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        states = [await gateway.request_state(model, request_id) for request_id in request_ids]
        return all(state.state == "finished" for state in states)

    return check


def tokens_logged(
    gateway: GatewayBroker, model: str, request_id: str, count: int
) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return (await gateway.request_state(model, request_id)).tokens >= count

    return check


def is_idle(running: Running) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return not running.engine.active

    return check
