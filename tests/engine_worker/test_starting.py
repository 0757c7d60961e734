"""What a worker says of itself before it serves."""

from __future__ import annotations

import pytest

from engine_worker.protocol import StartStage
from engine_worker.starting import announced, compiling_kernels
from tests.engine_worker.broker.driving import until


async def test_a_worker_says_what_it_is_at_until_it_serves_or_fails(gateway, worker, model):
    async def stage() -> str | None:
        status = (await gateway.starting()).get(model)
        assert status is None or (status.worker_id, status.for_s >= 0) == ("w1", True)
        return status and status.stage

    async def compiles() -> bool:
        return await stage() == StartStage.COMPILING

    async def loads() -> bool:
        return await stage() == StartStage.LOADING

    async with announced(worker, every_s=0.01):
        assert await loads()
        with compiling_kernels():
            await until(compiles)
        await until(loads)
    assert await loads(), "until its registration is heard of"
    with pytest.raises(ValueError, match="no such model"):
        async with announced(worker, every_s=0.01):
            raise ValueError("no such model")
    assert await stage() is None
