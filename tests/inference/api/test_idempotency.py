"""`Idempotency-Key`: the same key and body are the same request, whole or streamed, and charged once."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import httpx
import pytest
import redis
import uuid_utils
from asgiref.sync import async_to_sync
from django.conf import settings
from django.db import connections
from django.utils import timezone

from engine_worker.broker import GatewayBroker
from engine_worker.protocol import GenerateRequest, SamplingParams
from inference.api.once import _answer
from inference.errors import Overloaded
from inference.models import IdempotentRequest
from inference.services.idempotency import Claim, delete_expired_requests
from inference.services.ledger import record_usage
from tenants.quotas.store import QuotaStore
from tests.e2e.site import Site, wait_until
from tests.factories import make_key, make_tenant
from tests.inference.api.test_life import rows_of
from tests.inference.ledger_driving import an_event

pytestmark = pytest.mark.django_db(transaction=True)
CHAT = "chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def tenant():
    return make_tenant()


@pytest.fixture
def ask(site, model, tenant):
    secret = make_key(tenant).secret
    with httpx.Client(base_url=f"{site.url}/v1/", timeout=120) as client:
        # Known from here on: a database that is busy for a second keeps none of them waiting.
        mine = {"Authorization": f"Bearer {secret}"}
        wait_until(lambda: client.get("models", headers=mine).status_code == 200, "the key", site.log)

        def post(key: str | None, path: str = CHAT, secret: str = secret, **body: Any) -> httpx.Response:
            given = {"model": model, "messages": HELLO, "max_tokens": 5} if path == CHAT else {"model": model}
            headers = {"Authorization": f"Bearer {secret}"} | ({"Idempotency-Key": key} if key else {})
            return client.post(path, json=given | body, headers=headers)

        yield post


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {}),
        (CHAT, {"stream": True}),
        ("completions", {"prompt": ["a", "b"]}),
        ("messages", {"messages": HELLO, "max_tokens": 5, "stream": True}),
        ("responses", {"input": "hi", "max_output_tokens": 5}),
    ],
)
def test_asked_twice_it_runs_once(ask, tenant, path, body):
    first, again, other = (ask(key, path, **body) for key in ("k1", "k1", "k2"))
    assert first.status_code == again.status_code == 200, first.text
    assert shown(first) == shown(again)
    assert again.headers["x-weir-replayed"] == "true"
    assert again.headers["content-type"] == first.headers["content-type"]
    assert shown(other) != shown(first)
    expected = 4 if path == "completions" else 2  # a row per prompt
    assert len(rows_of(tenant, expected)) == expected


def shown(answer: httpx.Response) -> str:
    """The answer without comments, which only keep a connection alive."""
    return "\n".join(line for line in answer.text.splitlines() if line and not line.startswith(":"))


def test_while_it_runs_and_by_many_at_once(ask, tenant):
    barrier = threading.Barrier(6)

    def one(_: int) -> httpx.Response:
        barrier.wait(60)
        return ask("same", max_tokens=40)

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(one, range(6)))
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    assert len({json.dumps(answer.json(), sort_keys=True) for answer in answers}) == 1
    (row,) = rows_of(tenant, 1)
    assert row.completion_tokens == 40


def test_a_client_that_breaks_off_comes_back_to_the_same_answer(ask, site, model, tenant):
    given: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 60, "stream": True}
    headers = {"Authorization": f"Bearer {make_key(tenant).secret}", "Idempotency-Key": "broken"}
    url = f"{site.url}/v1/{CHAT}"
    with httpx.stream("POST", url, json=given, headers=headers, timeout=120) as stream:
        began = [line for line, _ in zip(stream.iter_lines(), range(9), strict=False)]
    again = httpx.post(url, json=given, headers=headers, timeout=120)
    data = [line for line in again.text.splitlines() if line.startswith("data: ")]
    seen = [line for line in began if line.startswith("data: ")]
    assert seen
    assert seen == data[: len(seen)]
    assert data[-1] == "data: [DONE]"
    (row,) = rows_of(tenant, 1)
    assert (row.finish_reason, row.completion_tokens) == ("length", 60)


def test_another_body_or_key_is_another_request(ask, site, tenant):
    first = ask("k")
    reused = ask("k", max_tokens=4)
    assert (reused.status_code, reused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert ask("k", "completions", prompt="x").status_code == 422
    other_key = ask("k", secret=make_key(tenant).secret)
    assert other_key.json()["id"] != first.json()["id"]
    for bad in ("a b", "x" * 256):
        assert ask(bad).status_code == 400


def test_what_was_refused_may_try_again_and_a_day_later_all_is_forgotten(ask):
    assert ask("k", model="nope").status_code == 404
    assert not IdempotentRequest.unscoped.exists()
    first = ask("k").json()["id"]
    IdempotentRequest.unscoped.update(expires_at=timezone.now() - timedelta(seconds=1))
    assert ask("k").json()["id"] != first
    IdempotentRequest.unscoped.update(expires_at=timezone.now() - timedelta(seconds=1))
    delete_expired_requests()
    assert not IdempotentRequest.unscoped.exists()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("known_by", ["redis", "the ledger", "its reservation"])
def test_a_refusal_that_cost_nothing_is_not_the_answer(ask, model, tenant, known_by, is_streamed):
    """The gateway that was refused has died before it could forget the claim."""
    ask("k", stream=is_streamed)
    refused = uuid_utils.uuid7().hex
    IdempotentRequest.unscoped.update(content_type="", body=b"", request_hex=refused)
    if known_by == "redis":
        async_to_sync(in_vain)(model, str(tenant.public_id), f"chatcmpl-{refused}", "enqueue", "refuse")
    elif known_by == "the ledger":
        event = an_event(
            str(tenant.public_id),
            f"chatcmpl-{refused}",
            finish_reason="error",
            error_code="model_unavailable",
            prompt_tokens=0,
            completion_tokens=0,
        )
        record_usage([event])
    else:
        async_to_sync(released)(str(tenant.public_id), f"chatcmpl-{refused}")
    again = ask("k", stream=is_streamed)
    assert again.status_code == 200, again.text
    assert refused not in again.text
    assert ask("k", stream=is_streamed).headers["x-weir-replayed"] == "true"


def test_a_refusal_while_a_repeat_waits_is_told_and_forgotten(ask, site, model, tenant):
    """And the next one is tried anew: the claim does not stand for what runs no more."""
    ask("k")
    waiting = uuid_utils.uuid7().hex
    IdempotentRequest.unscoped.update(content_type="", body=b"", request_hex=waiting)
    request_id = f"chatcmpl-{waiting}"
    broker = async_to_sync(in_vain)
    broker(model, str(tenant.public_id), request_id, "enqueue")
    with ThreadPoolExecutor() as pool:
        repeat = pool.submit(ask, "k")
        with redis.Redis.from_url(settings.REDIS_URL) as server:
            channels = f"weir:{{m:{model}}}:req:{request_id}"
            wait_until(lambda: b"\n" in (server.hget(channels, "channels") or b""), "the repeat", site.log)
        broker(model, str(tenant.public_id), request_id, "refuse")
        told = repeat.result(60)
    assert (told.status_code, told.json()["error"]["code"]) == (503, "model_unavailable")
    assert ask("k").status_code == 200


async def released(tenant_id: str, reservation_id: str) -> None:
    store = QuotaStore(settings.REDIS_URL)
    await store.release(tenant_public_id=tenant_id, reservation_id=reservation_id)
    await store.aclose()


async def in_vain(model: str, tenant_id: str, request_id: str, *steps: str) -> None:
    """A request for an adapter that no worker has."""
    broker = GatewayBroker(settings.REDIS_URL)
    now = round(time.time() * 1000)
    request = GenerateRequest(
        request_id=request_id,
        model=model,
        tenant_id=tenant_id,
        tier="standard",
        tier_rank=1,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=1),
        created_at_ms=now,
        deadline_ms=now + 600_000,
        reply_channel="of-a-dead-gateway",
        adapter="nobody-has-it",
    )
    try:
        if "enqueue" in steps:
            await broker.enqueue(request, max_queued=100, max_queued_per_tenant=100)
        if "refuse" in steps:
            await broker.refuse(model, request_id, code="model_unavailable", message="No worker.")
    finally:
        await broker.aclose()


def test_at_another_gateway_while_it_runs_and_after_the_first_has_died(site, model, tenant):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    other = Site(port=port, env=site.env, log=site.log)
    other.start_gateway()
    given: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 200, "stream": True}
    headers = {"Authorization": f"Bearer {make_key(tenant).secret}", "Idempotency-Key": "two"}
    try:
        with httpx.stream("POST", f"{site.url}/v1/{CHAT}", json=given, headers=headers, timeout=120) as first:
            began = [
                line for line, _ in zip(first.iter_lines(), range(9), strict=False) if line.startswith("data")
            ]
            with httpx.stream(
                "POST", f"{other.url}/v1/{CHAT}", json=given, headers=headers, timeout=120
            ) as second:
                lines = second.iter_lines()
                told = [next(lines) for _ in range(9)]
                site.kill_gateway()
                told += list(lines)
        data = [line for line in told if line.startswith("data")]
        assert data[: len(began)] == began
        assert data[-1] == "data: [DONE]"
        again = httpx.post(f"{other.url}/v1/{CHAT}", json=given, headers=headers, timeout=120)
        assert again.headers["x-weir-replayed"] == "true"
        assert [line for line in again.text.splitlines() if line.startswith("data")] == data
    finally:
        other.kill_gateway()
        site.start_gateway()
    (row,) = rows_of(tenant, 1)
    assert (row.finish_reason, row.completion_tokens) == ("length", 200)


@pytest.mark.parametrize("keys", [24, 1], ids=["of-their-own", "shared"])
def test_more_at_once_than_the_pool_has_connections(ask, keys):
    """Whoever waits for an answer holds no connection of the database, or ten who wait would wait for each other."""
    with ThreadPoolExecutor(24) as threads:
        answers = list(threads.map(lambda number: ask(f"k{number % keys}"), range(24)))
    assert [answer.status_code for answer in answers] == [200] * 24, {answer.text for answer in answers}
    assert len({shown(answer) for answer in answers}) == keys


def test_a_failure_is_told_also_where_its_key_can_not_be_forgotten(monkeypatch):
    async def refused(_: Claim) -> Any:
        raise Overloaded("Come back later.")

    async def ask() -> None:
        answered = asyncio.get_running_loop().create_future()
        claim = Claim(1, 1, "0" * 32, is_repeat=False)
        await _answer(claim, lambda: refused(claim), refused, answered)
        await asyncio.wait_for(answered, 5)

    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))  # and nobody listens: a thread that begins now finds no database
        away = {"HOST": "127.0.0.1", "PORT": held.getsockname()[1], "OPTIONS": {"connect_timeout": 5}}
        monkeypatch.setitem(connections.settings, "default", {**connections.settings["default"], **away})
        with pytest.raises(Overloaded):
            asyncio.run(ask())
