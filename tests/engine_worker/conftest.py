"""One model name per test: tests share a server and never each other's keys.

Without a GPU the Triton kernels run in its interpreter, which is chosen when they, or torch's own
users of triton, are imported: before any test module is.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from engine_worker.broker import GatewayBroker, WorkerBroker
from engine_worker.protocol import GenerateRequest, SamplingParams
from tests.engine_worker.running_worker import Running, Start
from tests.engine_worker.scripted_engine import ScriptedEngine

Make = Callable[..., GenerateRequest]


@pytest.fixture
def model() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def redis_url() -> str:
    return os.environ["REDIS_URL"]


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[GatewayBroker]:
    broker = GatewayBroker(redis_url, timeout_s=30)
    yield broker
    await broker.aclose()


@pytest.fixture
async def worker(redis_url: str, model: str) -> AsyncIterator[WorkerBroker]:
    broker = WorkerBroker(redis_url, model=model, worker_id="w1", timeout_s=30)
    yield broker
    await broker.aclose()


@pytest.fixture
def make(model: str) -> Make:
    """A valid request; say only what matters."""

    def build(request_id: str, **given: Any) -> GenerateRequest:
        fields: dict[str, Any] = {
            "request_id": request_id,
            "model": model,
            "tenant_id": "t1",
            "tier": "standard",
            "tier_rank": 1,
            "prompt_token_ids": [1, 2, 3],
            "sampling": SamplingParams(max_tokens=8),
            "created_at_ms": 1_000_000,
            "deadline_ms": 1_060_000,
            "reply_channel": f"weir:live:{model}",
            "reservation_id": f"res-{request_id}",
            "key_id": "key-1",
            "endpoint": "chat.completions",
        }
        return GenerateRequest(**(fields | given))

    return build


@pytest.fixture
async def start(redis_url: str, model: str) -> AsyncIterator[Start]:
    started: list[Running] = []

    def build(
        engine: ScriptedEngine | None = None, *, url: str = redis_url, **config: float | int | str
    ) -> Running:
        running = Running(url, model, engine or ScriptedEngine(), **config)
        started.append(running)
        return running

    yield build
    for running in started:
        await running.close()
