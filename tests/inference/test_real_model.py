"""The whole path with the real model: SDK, gateway, queue, the real engine in a worker process, ledger."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import redis
from django.conf import settings
from openai import AsyncOpenAI, OpenAI

from engine_worker.broker import keys
from engine_worker.protocol import WorkerStatus, decode
from inference.models import UsageRecord
from inference.services.usage import drain_usage_stream
from tests.e2e.site import ROOT, Site, wait_until
from tests.engine_worker.models import real_model_dir
from tests.factories import make_key, make_tenant

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(600)]
MODEL = "smollm2-real"
QUESTIONS = [
    "What is the capital of France?",
    "Count to five.",
    "Say hello in Spanish.",
    "Name three colours, please, and say in one sentence why a painter would choose each of them.",
    "Why is the sky blue? " * 12,
]


@pytest.fixture(scope="module")
def served(site: Site) -> Iterator[Site]:
    with site.log.open("ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "engine_worker", "--model", f"{MODEL}={real_model_dir()}"],
            cwd=ROOT, env=site.env | {"WEIR_MODEL_NAME": ""}, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        with redis.Redis.from_url(settings.REDIS_URL) as server:
            wait_until(lambda: server.exists(_card_key()) == 1, "the model to be loaded", site.log, 180)
        yield site
    finally:
        worker.terminate()
        worker.wait(60)


def _card_key() -> str:
    return keys.model_prefix(MODEL) + "card"


def status() -> WorkerStatus:
    prefix = keys.model_prefix(MODEL)
    with redis.Redis.from_url(settings.REDIS_URL) as server:
        (worker,) = server.zrange(f"{prefix}workers", 0, -1)
        return decode(server.get(f"{prefix}worker:{worker.decode()}"), WorkerStatus)


def test_a_sensible_answer(served):
    with OpenAI(base_url=f"{served.url}/v1", api_key=make_key().secret, timeout=300) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTIONS[0]}],
            max_tokens=24,
            temperature=0,
        )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"


def test_twenty_streams_while_others_join_and_leave(served):
    """Each equals its solo run, greedy; those that leave in the middle free their blocks and are billed once."""
    tenant = make_tenant()
    secret = make_key(tenant).secret
    asked = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{QUESTIONS[number % 5]} ({number})"}],
            "max_tokens": 4 + number % 7,
            "temperature": 0,
        }
        for number in range(20)
    ]

    async def run() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key=secret, max_retries=0, timeout=500
        ) as client:

            async def stream(number: int) -> str:
                # Joined one by one, while those before are in prefill and decode.
                await asyncio.sleep(0.2 * number)
                chunks = await client.chat.completions.create(stream=True, **asked[number])
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            async def leave(number: int) -> None:
                await asyncio.sleep(0.5 * number)
                chunks = await client.chat.completions.create(
                    stream=True, **{**asked[number], "max_tokens": 400}
                )
                async for chunk in chunks:
                    if chunk.choices[0].delta.content:
                        break
                await chunks.close()

            together, _ = await asyncio.gather(
                asyncio.gather(*(stream(number) for number in range(20))),
                asyncio.gather(*(leave(number) for number in range(5))),
            )
            alone = []
            for body in asked:
                answer = await client.chat.completions.create(**body)
                alone.append(answer.choices[0].message.content or "")
            return together, alone

    together, alone = asyncio.run(run())
    assert together == alone

    deadline = time.monotonic() + 60
    while status().kv_blocks_used or UsageRecord.objects.filter(tenant=tenant).count() < 45:
        assert time.monotonic() < deadline, "blocks or ledger rows are missing"
        drain_usage_stream()
        time.sleep(0.1)
    rows = UsageRecord.objects.filter(tenant=tenant)
    assert rows.count() == 45
    cancelled = rows.filter(finish_reason="cancelled")
    assert cancelled.count() == 5
    assert all(1 <= row.completion_tokens < 400 for row in cancelled)
