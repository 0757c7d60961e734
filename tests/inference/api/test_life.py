"""From the client's connection to the ledger: whatever the client does, one row, exact tokens, nothing left over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import redis
from django.conf import settings
from msgspec import structs

from engine_worker.broker import Claim, Held, Verdict, WorkerBroker, keys
from engine_worker.protocol import ModelCard, WorkerStatus, decode
from inference.models import UsageRecord
from inference.services.usage import drain_usage_stream
from tenants.models import Tenant
from tenants.principal import LimitMetric
from tests.engine_worker.broker.driving import last, publish, tokens
from tests.engine_worker.broker.driving import status as worker_status
from tests.engine_worker.models import a_card, byte_tokenizer
from tests.factories import make_key, make_tenant, set_limit

HELLO = [{"role": "user", "content": "hello"}]
HEARD_WITHIN_S = 3.5
"""So soon who waits for a model hears that it is unloaded: about a second where nothing else keeps the machine busy."""


@pytest.fixture
def server() -> Iterator[redis.Redis]:
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        yield client


def until(condition: Callable[[], object], what: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)


def rows_of(tenant: Tenant, count: int) -> list[UsageRecord]:
    def arrived() -> bool:
        drain_usage_stream()
        return UsageRecord.objects.filter(tenant=tenant).count() >= count

    until(arrived, f"{count} ledger rows")
    return list(UsageRecord.objects.filter(tenant=tenant))


def worker_of(server: redis.Redis, model: str) -> WorkerStatus:
    prefix = keys.model_prefix(model)
    (worker,) = server.zrange(f"{prefix}workers", 0, -1)
    return decode(server.get(f"{prefix}worker:{worker.decode()}"), WorkerStatus)


@pytest.mark.django_db(transaction=True)
def test_an_unloaded_model_is_gone_and_who_waited_for_it_has_failed(http):
    """On record with the reason that its client heard, and for nothing; not as stopped by a client that left."""
    tenant = make_tenant()
    http.headers["Authorization"] = f"Bearer {make_key(tenant).secret}"
    card = structs.replace(a_card(), chat_template="{{ messages[0]['content'] }}")
    asyncio.run(as_its_worker(card, loads=True))

    def is_listed() -> bool:
        return card.model in [each["id"] for each in http.get("models").json()["data"]]

    until(is_listed, "the model")
    asked = {"model": card.model, "prompt": "x", "max_tokens": 2}
    background = {"model": card.model, "input": "x", "max_output_tokens": 2, "background": True}
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(http.post, "completions", json=asked)
        path = f"requests/{http.post('responses', json=background).json()['id']}"
        until(lambda: http.get(path).json().get("status") == "queued", "its place in the queue")
        asyncio.run(as_its_worker(card, loads=False))
        refused = waiting.result(HEARD_WITHIN_S)
    until(lambda: http.get(path).json()["status"] == "finished", "its end")
    told = http.get(path).json()
    assert (told["finish_reason"], told["error_code"]) == ("error", "model_not_found")
    assert http.get(path).json()["queue_ms"] == told["queue_ms"], "it waits no longer"
    for answer in (refused, http.post("completions", json=asked), http.get(f"models/{card.model}")):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == (
            f"The model '{card.model}' was unloaded: it is not served any more. "
            "GET /v1/models lists those that you may use."
        )
    assert not is_listed()
    for row in rows_of(tenant, 2):
        assert (row.finish_reason, row.error_code) == ("error", "model_not_found")
        assert (row.prompt_tokens, row.completion_tokens) == (0, 0)


def test_a_stream_whose_model_is_unloaded_ends_with_the_reason(http):
    """And is charged for what was made; without a word it would go on until its deadline."""
    tenant = make_tenant()
    http.headers["Authorization"] = f"Bearer {make_key(tenant).secret}"
    card = a_card()
    asyncio.run(as_its_worker(card, loads=True))
    until(lambda: http.get(f"models/{card.model}").status_code == 200, "the model")
    body = {"model": card.model, "prompt": "x", "max_tokens": 9, "stream": True}
    with http.stream("POST", "completions", json=body, headers={"x-weir-deadline-s": "100"}) as answer:
        lines = answer.iter_lines()
        asyncio.run(begins_and_is_unloaded(card))
        unloaded_at = time.monotonic()
        data = [line for line in lines if line.startswith("data: ")]
        assert time.monotonic() - unloaded_at < HEARD_WITHIN_S
    assert '"text":"xx"' in data[0]
    assert '"code":"model_not_found"' in data[-1]
    (row,) = rows_of(tenant, 1)
    assert (row.finish_reason, row.error_code, row.completion_tokens) == ("error", "model_not_found", 2)


async def begins_and_is_unloaded(card: ModelCard) -> None:
    worker = WorkerBroker(settings.REDIS_URL, model=card.model, worker_id="w", timeout_s=10)
    try:
        claim = await next_claim(worker)
        assert await publish(worker, claim, tokens(claim, 0, 1, 2)) == Verdict.OK
        await worker.release([Held(claim.request.request_id, claim.epoch)], failed=False)
        assert await worker.withdraw()
    finally:
        await worker.aclose()


async def as_its_worker(card: ModelCard, *, loads: bool) -> None:
    """A worker that claims nothing; it loads the model, or the operator unloads it there."""
    worker = WorkerBroker(settings.REDIS_URL, model=card.model, worker_id="w", timeout_s=10)
    try:
        if loads:
            await worker.register(card, byte_tokenizer().to_str().encode())
            await worker.heartbeat(worker_status(worker), tokenizer_sha256=card.tokenizer_sha256)
        else:
            assert await worker.withdraw()
    finally:
        await worker.aclose()


@pytest.mark.django_db(transaction=True)
def test_nothing_begins_at_a_model_that_is_being_unloaded_and_what_runs_goes_on(http):
    """Who would begin, or has waited, hears it at once, not when the last answer that runs is done."""
    http.headers["Authorization"] = f"Bearer {make_key().secret}"
    card = a_card()
    asyncio.run(as_its_worker(card, loads=True))
    until(lambda: http.get(f"models/{card.model}").status_code == 200, "the model")
    body = {"model": card.model, "prompt": "x", "max_tokens": 9}
    with ThreadPoolExecutor(3) as threads:
        runs = threads.submit(http.post, "completions", json=body)
        claim = asyncio.run(claimed(card))
        waits = threads.submit(http.post, "completions", json=body)
        leaves = threads.submit(asyncio.run, drains(card, claim, 20))
        told = [waits.result(HEARD_WITHIN_S), http.post("completions", json=body)]
        assert not leaves.done()
        listed = [each["id"] for each in http.get("models").json()["data"]]
        leaves.result(60)
        assert runs.result(60).json()["choices"][0]["text"] == "xx"
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in told] == [
        (404, "model_not_found")
    ] * 2
    assert card.model not in listed


async def claimed(card: ModelCard) -> Claim:
    worker = WorkerBroker(settings.REDIS_URL, model=card.model, worker_id="w", timeout_s=10)
    try:
        return await next_claim(worker)
    finally:
        await worker.aclose()


async def next_claim(worker: WorkerBroker) -> Claim:
    claims = await worker.claim(1)
    while not claims:
        await asyncio.sleep(0.05)
        claims = await worker.claim(1)
    return claims[0]


async def drains(card: ModelCard, claim: Claim, for_s: float) -> None:
    """Its worker finishes what runs, and says so with each heartbeat."""
    worker = WorkerBroker(settings.REDIS_URL, model=card.model, worker_id="w", timeout_s=10)
    try:
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            status = worker_status(worker, draining=True, goes_for_good=True)
            await worker.heartbeat(status, tokenizer_sha256=card.tokenizer_sha256)
            assert await publish(worker, claim) == Verdict.OK
            await asyncio.sleep(0.5)
        assert await publish(worker, claim, last(claim, 0, 1, 2)) == Verdict.OK
        assert await worker.withdraw()
    finally:
        await worker.aclose()


@pytest.mark.django_db(transaction=True)
def test_one_row_per_request_with_its_tokens(sdk, model):
    tenant = make_tenant()
    issued = make_key(tenant)
    answer = sdk(issued.secret).chat.completions.create(model=model, messages=HELLO, max_tokens=6)

    (row,) = rows_of(tenant, 1)
    assert row.request_id == answer.id
    assert (row.prompt_tokens, row.completion_tokens) == (answer.usage.prompt_tokens, 6)
    assert (row.finish_reason, row.endpoint, row.model) == ("length", "chat.completions", model)
    assert row.attempts == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("after", [1, 5, 20])
def test_fault_62_a_client_that_leaves_pays_for_what_was_made(sdk, server, model, after):
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.CONCURRENCY, 1)
    client = sdk(make_key(tenant).secret)
    stream = client.chat.completions.create(model=model, messages=HELLO, max_tokens=3000, stream=True)
    texts = [chunk.choices[0].delta.content for chunk, _ in zip(stream, range(after + 1), strict=False)]
    stream.close()

    (row,) = rows_of(tenant, 1)
    assert row.finish_reason == "cancelled"
    # What it saw at least, and what a few steps made until the news arrived at most.
    assert len("".join(filter(None, texts))) <= row.completion_tokens < 400
    until(lambda: worker_of(server, model).kv_blocks_used == 0, "the blocks to be free")
    # The slot is free again, exactly once.
    until(lambda: _is_admitted(client, model), "the slot to be free")


def _is_admitted(client: openai.OpenAI, model: str) -> bool:
    try:
        client.chat.completions.create(model=model, messages=HELLO, max_tokens=1)
    except openai.RateLimitError:
        return False
    return True


@pytest.mark.django_db(transaction=True)
def test_fault_69_a_plain_request_is_cancelled_too(site, server, model):
    tenant = make_tenant()
    secret = make_key(tenant).secret
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{site.url}/v1/chat/completions",
            headers={"Authorization": f"Bearer {secret}"},
            json={"model": model, "messages": HELLO, "max_tokens": 3000},
            timeout=httpx.Timeout(30, read=1.0),
        )
    (row,) = rows_of(tenant, 1)
    assert row.finish_reason == "cancelled"
    assert row.completion_tokens < 3000
    until(lambda: worker_of(server, model).kv_blocks_used == 0, "the blocks to be free")


@pytest.mark.django_db(transaction=True)
def test_fault_50_and_54_a_limit_of_n_admits_n(site, model):
    limit, attempts = 7, 40
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, limit, period_s=86_400)
    secret = make_key(tenant).secret
    barrier = threading.Barrier(8)

    def ask(number: int) -> int:
        if number < 8:
            barrier.wait(30)
        response = httpx.post(
            f"{site.url}/v1/completions",
            headers={"Authorization": f"Bearer {secret}"},
            json={"model": model, "prompt": "x", "max_tokens": 1},
            timeout=60,
        )
        return response.status_code

    with ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(ask, range(attempts)))
    assert sorted(set(statuses)) == [200, 429]
    assert statuses.count(200) == limit
    assert len(rows_of(tenant, limit)) == limit


@pytest.mark.django_db(transaction=True)
def test_fault_53_refused_at_one_level_charges_none(sdk, model):
    tenant = make_tenant()
    issued = make_key(tenant)
    set_limit(tenant, LimitMetric.REQUESTS, 100, period_s=86_400)
    set_limit(issued.api_key, LimitMetric.CONCURRENCY, 1)
    client = sdk(issued.secret)
    with client.chat.completions.create(model=model, messages=HELLO, max_tokens=3000, stream=True) as stream:
        next(iter(stream))
        for _ in range(3):
            with pytest.raises(openai.RateLimitError):
                client.chat.completions.create(model=model, messages=HELLO, max_tokens=1)
    until(lambda: _is_admitted(client, model), "the slot to be free")
    last = client.chat.completions.with_raw_response.create(model=model, messages=HELLO, max_tokens=1)
    # The stream, the admitted probe and this one; the refused ones cost nothing.
    assert last.headers["x-ratelimit-remaining-requests"] == "97"


@pytest.mark.django_db(transaction=True)
def test_fault_57_listing_models_costs_nothing(sdk, model):
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 1, period_s=86_400)
    client = sdk(make_key(tenant).secret)
    for _ in range(3):
        assert client.models.list().data
    assert _is_admitted(client, model)
    assert not _is_admitted(client, model)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_fault_56_every_generating_route_is_limited(site, model, route):
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 1, period_s=86_400)
    body = {
        "model": model,
        "max_tokens": 1,
        **({"prompt": "x"} if route == "completions" else {"messages": HELLO}),
    }
    headers = {"Authorization": f"Bearer {make_key(tenant).secret}"}
    statuses = [
        httpx.post(f"{site.url}/v1/{route}", headers=headers, json=body, timeout=60).status_code
        for _ in range(2)
    ]
    assert statuses == [200, 429]
