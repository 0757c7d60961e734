"""A worker that does not serve yet says what it is at, for who asks for its model meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from engine_worker.broker import BrokerUnavailable, WorkerBroker
from engine_worker.protocol import StartStage, WorkerStarting


class _Kernels:
    """Of this process: whichever model comes first has them compiled for all."""

    compiling_since: float | None = None
    """By time.monotonic."""


_KERNELS: Final = _Kernels()


@contextmanager
def compiling_kernels() -> Iterator[None]:
    _KERNELS.compiling_since = time.monotonic()
    try:
        yield
    finally:
        _KERNELS.compiling_since = None


@asynccontextmanager
async def announced(broker: WorkerBroker, *, every_s: float) -> AsyncIterator[None]:
    """Around the start of an engine. Where that succeeds the last word lapses by itself, after the worker's first."""
    began = time.monotonic()
    await _say(broker, began)  # at once: a compiler may let nobody else run for a while
    going_on = asyncio.create_task(_go_on(broker, began, every_s), name=f"starting-{broker.model}")
    try:
        yield
    except BaseException:
        await _end(going_on)
        with suppress(BrokerUnavailable):  # then it lapses
            await broker.starts_no_more()
        raise
    await _end(going_on)


async def _go_on(broker: WorkerBroker, began: float, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await _say(broker, began)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _say(broker: WorkerBroker, began: float) -> None:
    compiling_since = _KERNELS.compiling_since
    status = WorkerStarting(
        worker_id=broker.worker_id,
        model=broker.model,
        stage=StartStage.LOADING if compiling_since is None else StartStage.COMPILING,
        for_s=time.monotonic() - (began if compiling_since is None else compiling_since),
    )
    with suppress(BrokerUnavailable):  # its registration will say so in the log
        await broker.starts(status)
