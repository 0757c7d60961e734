"""Fault 30: an engine that is dead or hung must not go on looking healthy."""

from __future__ import annotations

import asyncio
import time

import pytest

from engine_worker.canary import Canary
from engine_worker.config import EngineConfig
from engine_worker.engine.async_engine import AsyncEngine
from engine_worker.engine.errors import EngineDead
from tests.engine_worker.models import make_tiny_model


@pytest.fixture
async def engine(tmp_path):
    engine = AsyncEngine(
        EngineConfig(model_dir=make_tiny_model(tmp_path), block_size=4, num_kv_blocks=33, threads=1)
    )
    await engine.start()
    yield engine
    await engine.stop()


async def watched(engine: AsyncEngine, canary: Canary, for_s: float) -> int:
    """Watches as the worker does; how many answers came."""
    steps = 0

    async def listen():
        nonlocal steps
        async for step in engine.steps():
            canary.hear(step.outputs)
            steps += len(step.outputs)

    listening = asyncio.create_task(listen())
    until = time.monotonic() + for_s
    try:
        while time.monotonic() < until:
            canary.watch(engine.stats())
            if listening.done():
                listening.result()
            await asyncio.sleep(0.01)
    finally:
        listening.cancel()
    return steps


async def test_fault_30_an_idle_engine_proves_again_and_again_that_it_computes(engine):
    assert await watched(engine, Canary(engine, after_s=0.02, patience_s=10), 1.0) >= 3


async def test_fault_30_a_blocked_loop_is_found_though_nothing_is_asked_of_it(engine):
    release = asyncio.Event()
    blocked = asyncio.get_running_loop()

    def block(core):
        asyncio.run_coroutine_threadsafe(release.wait(), blocked).result(20)

    engine._commands.put(block)
    try:
        with pytest.raises(EngineDead, match="no token within"):
            await watched(engine, Canary(engine, after_s=0.02, patience_s=0.3), 10)
    finally:
        release.set()


async def test_fault_30_an_engine_that_only_fails_is_dead(engine):
    def poison(core):
        def fails(step):
            raise RuntimeError("broken for good")

        core.device.executor.runner.execute = fails

    engine._commands.put(poison)
    with pytest.raises(EngineDead):
        await watched(engine, Canary(engine, after_s=0.02, patience_s=10), 10)
