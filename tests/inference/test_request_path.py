"""What a request with a warm key costs, counted instead of timed: no query, no thread, two calls to Redis."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from django.conf import settings
from django.db.backends.utils import CursorWrapper
from redis.asyncio import Redis

from engine_worker.broker import WorkerBroker, scripts
from engine_worker.broker.shared import SharedConnection
from engine_worker.protocol import ModelCard
from engine_worker.worker import Worker
from engine_worker.worker_config import WorkerConfig
from inference import models_served
from inference.runtime import close_runtime, get_runtime
from tenants import key_cache
from tenants.principal import LimitMetric
from tenants.quotas import scripts as quota_scripts
from tenants.quotas.store import QuotaStore
from tests.e2e.site import CHAT_TEMPLATE
from tests.engine_worker.models import byte_tokenizer
from tests.engine_worker.scripted_engine import ScriptedEngine
from tests.factories import make_key, make_tenant, set_limit
from weir.asgi import application

TOKENS = 20


@pytest.fixture
async def model() -> AsyncIterator[str]:
    """Served by a real worker around an engine that takes no time, in this very process."""
    name = f"test-{uuid.uuid4().hex}"
    card = ModelCard(
        model=name,
        revision="r",
        architecture="Scripted",
        context_length=2000,
        vocab_size=258,
        eos_token_ids=[256],
        tokenizer_sha256=name,
        chat_template=CHAT_TEMPLATE,
    )
    config = WorkerConfig(model=name, redis_url=settings.REDIS_URL, broker_timeout_s=20)
    broker = WorkerBroker(settings.REDIS_URL, model=name, worker_id=config.worker_id, timeout_s=20)
    worker = Worker(ScriptedEngine(), broker, card, byte_tokenizer().to_str().encode(), config)
    running = asyncio.create_task(worker.run())
    yield name
    worker.stop()
    await asyncio.wait_for(running, 60)
    await broker.aclose()
    await close_runtime()


async def ask(key: str, model: str, *, stream: bool) -> list[dict[str, Any]]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": TOKENS,
        "stream": stream,
    }
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"authorization", f"Bearer {key}".encode()),
            (b"content-type", b"application/json"),
        ],
    }
    client = ApplicationCommunicator(application, scope)
    await client.send_input({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
    sent = [await client.receive_output(timeout=60)]
    while sent[-1]["type"] != "http.response.body" or sent[-1].get("more_body"):
        sent.append(await client.receive_output(timeout=60))
    await client.wait(timeout=60)
    return sent


async def settled() -> None:
    tasks = get_runtime()._tasks
    while tasks:
        await asyncio.wait(tasks, timeout=30)


@pytest.fixture
def key(transactional_db: None) -> str:
    tenant = make_tenant()
    for metric in (LimitMetric.REQUESTS, LimitMetric.TOKENS, LimitMetric.CONCURRENCY):
        set_limit(tenant, metric, 1_000_000)
    return make_key(tenant).secret


async def test_a_warm_request_costs_no_query_no_thread_and_two_calls(key, model, monkeypatch):
    runtime = get_runtime()
    for stream in (False, True):
        await ask(key, model, stream=stream)  # warms the key, the model and the limits
    await settled()
    # What runs beside requests, by the clock, is not theirs.
    monkeypatch.setattr(key_cache, "EPOCH_FRESH_S", 600.0)
    monkeypatch.setattr(models_served, "_REFRESH_S", 600.0)
    if runtime.models._refresh is not None:
        await runtime.models._refresh

    verbs = {quota_scripts.load(verb).sha1: verb for verb in ("reserve", "settle", "release")}
    verbs |= {scripts.load(verb).sha1: verb for verb in ("enqueue", "cancel", "attach", "state")}
    both = quota_scripts.load_reserve_then(scripts.load("enqueue").text)
    verbs[both.sha1] = "reserve, then enqueue"
    ours = (runtime.broker._scripts, runtime.quotas._scripts)
    called: Counter[str] = Counter()
    queries: list[str] = []
    threads: list[str] = []
    call, execute, start = SharedConnection._call, CursorWrapper.execute, threading.Thread.start
    others = Redis.execute_command

    async def counted_call(self: SharedConnection, *command: Any) -> Any:
        if self in ours and command[1] in verbs:
            called[verbs[command[1]]] += 1
        return await call(self, *command)

    async def counted_other(self: Redis, *command: Any, **options: Any) -> Any:
        if self in (runtime.broker._redis, runtime.quotas._redis):
            called[str(command[0])] += 1
        return await others(self, *command, **options)

    def counted_execute(self: CursorWrapper, sql: str, params: Any = None) -> Any:
        queries.append(sql)
        return execute(self, sql, params)

    def counted_start(self: threading.Thread) -> None:
        threads.append(self.name)
        start(self)

    monkeypatch.setattr(SharedConnection, "_call", counted_call)
    monkeypatch.setattr(Redis, "execute_command", counted_other)
    monkeypatch.setattr(CursorWrapper, "execute", counted_execute)
    monkeypatch.setattr(threading.Thread, "start", counted_start)
    for stream in (False, True):
        called.clear()
        sent = await ask(key, model, stream=stream)
        assert sent[0]["status"] == 200, sent
        await settled()
        assert called == {"reserve, then enqueue": 1, "settle": 1}
        assert queries == []
        assert threads == []
        headers = dict(sent[0]["headers"])
        if not stream:
            assert int(headers[b"Content-Length"]) == len(sent[1]["body"])
            assert len(sent) == 2
            continue
        body = b"".join(message.get("body", b"") for message in sent)
        assert body.count(b"data: ") == TOKENS + 3  # the role, the reason, the end


@pytest.fixture
def narrow_key(transactional_db: None) -> str:
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 1)
    return make_key(tenant).secret


async def test_what_is_refused_is_not_released(narrow_key, model, monkeypatch):
    """Nothing was taken: of a crowd that is refused each asks once, not twice."""
    assert (await ask(narrow_key, model, stream=False))[0]["status"] == 200
    await settled()
    released: list[str] = []
    release = QuotaStore.release

    async def noted_release(self: QuotaStore, **given: Any) -> None:
        released.append(given["reservation_id"])
        await release(self, **given)

    monkeypatch.setattr(QuotaStore, "release", noted_release)
    assert (await ask(narrow_key, model, stream=False))[0]["status"] == 429
    await settled()
    assert released == []


async def test_a_redis_that_is_away_has_a_code_of_its_own(key, model, settings):
    await ask(key, model, stream=False)  # the key is known from now on
    await close_runtime()
    settings.REDIS_URL = f"redis://127.0.0.1:{_closed_port()}/0"
    try:
        head, body = await ask(key, model, stream=False)
    finally:
        await close_runtime()
    assert head["status"] == 503
    assert int(dict(head["headers"])[b"Retry-After"]) >= 1
    assert json.loads(body["body"])["error"]["code"] == "queue_unavailable"


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
