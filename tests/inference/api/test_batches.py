"""Files and batches with the unmodified `openai` SDK; the runner is the one that Celery calls."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import openai
import pytest
import redis
from django.conf import settings
from django.utils import timezone
from msgspec import structs

from engine_worker.broker import keys
from inference.batch_runner import run_batches
from inference.models import Batch, BatchResult, UsageRecord
from inference.services.usage import drain_usage_stream
from tenants.models import Tenant
from tenants.services import revoke_api_key
from tests.e2e.site import ROOT
from tests.engine_worker.models import a_card
from tests.factories import TEST, make_key, make_tenant, make_tier
from tests.inference.api.test_life import as_its_worker, until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def tenant(transactional_db) -> Tenant:
    return make_tenant()


@pytest.fixture
def key(tenant) -> Any:
    return make_key(tenant)


@pytest.fixture
def client(sdk, key):
    return sdk(key.secret)


def line(number: int, model: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"line {number}"}]
    return {
        "custom_id": f"c{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": messages, "max_tokens": 4, "seed": number} | body,
    }


def begin(client, lines: list[Any], endpoint: str = "/v1/chat/completions", **more: Any):
    content = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def lines_of(client, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def test_files_come_and_go(client, sdk):
    first = client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
    second = client.files.create(file=("b.jsonl", b"{}\n{}\n"), purpose="batch")
    assert (second.bytes, second.filename, second.object, second.purpose) == (6, "b.jsonl", "file", "batch")
    assert [file.id for file in client.files.list()] == [second.id, first.id]
    assert [file.id for file in client.files.list(limit=1)] == [second.id, first.id]
    assert client.files.retrieve(first.id) == first
    assert client.files.content(first.id).read() == b"{}\n"
    outsider = sdk(make_key().secret)
    for ask in (outsider.files.retrieve, outsider.files.content, outsider.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(first.id)
    assert list(outsider.files.list()) == []
    assert client.files.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(first.id)


def test_uploads_that_are_none(client, site, key):
    for given in ({"purpose": "assistants"}, {"purpose": "batch", "extra_body": {}, "file": ("x", b"")}):
        with pytest.raises(openai.BadRequestError):
            client.files.create(**{"file": ("x", b"{}")} | given)
    answer = httpx.post(
        f"{site.url}/v1/files", headers={"Authorization": f"Bearer {key.secret}"}, json={}, timeout=60
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_a_batch_runs(client, model, tenant, key):
    make_tier("batch")
    batch = begin(
        client, [line(1, model), line(2, model), line(3, model, temperature=9)], metadata={"a": "b"}
    )
    assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
    run_batches(budget_s=30)
    done = client.batches.retrieve(batch.id)
    assert done.status == "completed"
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    assert done.in_progress_at
    assert done.completed_at
    out = lines_of(client, done.output_file_id)
    assert [each["custom_id"] for each in out] == ["c1", "c2"]
    for number, each in enumerate(out, 1):
        body = each["response"]["body"]
        assert each["response"]["status_code"] == 200
        assert body["usage"]["completion_tokens"] == 4
        direct = client.chat.completions.create(**line(number, model)["body"])
        assert direct.choices[0].message.content == body["choices"][0]["message"]["content"]
    (error,) = lines_of(client, done.error_file_id)
    assert error["response"]["status_code"] == 400
    # Each its own, also where the line never got as far as the queue: what a support mail quotes.
    ids = [each["response"]["request_id"] for each in (*out, error)]
    assert ids == [f"{batch.id.replace('_', '-')}-{number}-0" for number in range(3)]
    assert error["response"]["body"]["error"]["param"].startswith("body.temperature")
    drain_usage_stream()
    rows = UsageRecord.objects.filter(tenant=tenant, endpoint="batches")
    assert {(row.tier, str(row.key_public_id)) for row in rows} == {("batch", str(key.api_key.public_id))}
    assert rows.count() == 2
    assert [each.id for each in client.batches.list()] == [batch.id]


def test_lines_for_a_model_that_is_unloaded_fail_as_other_requests_do(client, tenant):
    """And wait for a worker of one that is only away for the night."""
    make_tier("batch")
    cards = [structs.replace(a_card(), chat_template="{{ messages[0]['content'] }}") for _ in range(2)]
    for card in cards:
        asyncio.run(as_its_worker(card, loads=True))
    until(lambda: {card.model for card in cards} <= {each.id for each in client.models.list()}, "the models")
    gone, away = (begin(client, [line(1, card.model)]) for card in cards)

    def are_queued() -> bool:
        with redis.Redis.from_url(settings.REDIS_URL) as server:
            prefixes = [keys.model_prefix(card.model) for card in cards]
            return all(server.exists(prefix + "deadlines") for prefix in prefixes)

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run_batches, budget_s=1)
        until(are_queued, "the lines")
        asyncio.run(as_its_worker(cards[0], loads=False))
        running.result(60)
    done = client.batches.retrieve(gone.id)
    assert (done.status, done.request_counts.failed) == ("completed", 1)
    (told,) = [json.loads(text) for text in client.files.content(done.error_file_id).text.splitlines()]
    assert (told["response"]["status_code"], told["response"]["body"]["error"]["code"]) == (
        404,
        "model_not_found",
    )
    assert client.batches.retrieve(away.id).status == "in_progress"


def test_completions_and_responses_are_batched_too(client, model, tenant):
    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": ["a", "b"], "max_tokens": 4, "seed": 1},
        "responses": {"input": "hello", "max_output_tokens": 4, "seed": 1},
    }
    refused = {"completions": {"prompt": "a", "suffix": "b"}, "responses": {"input": "a", "background": True}}
    batches = {}
    for route, body in bodies.items():
        lines = [
            {"custom_id": name, "method": "POST", "url": f"/v1/{route}", "body": {"model": model} | each}
            for name, each in (("good", body), ("bad", refused[route]))
        ]
        batches[route] = begin(client, lines, endpoint=f"/v1/{route}")
    run_batches(budget_s=60)
    for route, batch in batches.items():
        done = client.batches.retrieve(batch.id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 1)
        (good,) = lines_of(client, done.output_file_id)
        (bad,) = lines_of(client, done.error_file_id)
        assert bad["response"]["body"]["error"]["code"] == "unsupported_parameter"
        body = good["response"]["body"]
        if route == "completions":
            direct = client.completions.create(model=model, **bodies[route])
            assert [each["text"] for each in body["choices"]] == [each.text for each in direct.choices]
        else:
            direct = client.responses.create(
                model=model, input="hello", max_output_tokens=4, extra_body={"seed": 1}
            )
            assert body["output"][0]["content"][0]["text"] == direct.output_text
    drain_usage_stream()
    assert UsageRecord.objects.filter(tenant=tenant, endpoint="batches").count() == 3


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["{"], "invalid_json_line"),
        ([{"custom_id": "a"}], "invalid_json_line"),
        (["", " "], "empty_file"),
    ],
)
def test_a_bad_file_fails_the_batch(client, lines, code):
    batch = begin(client, lines)
    run_batches(budget_s=5)
    failed = client.batches.retrieve(batch.id)
    assert (failed.status, failed.errors.data[0].code) == ("failed", code)
    assert failed.failed_at


def test_mixed_models_and_ids_fail_it(client, model):
    batch = begin(client, [line(1, model), line(1, "other")])
    run_batches(budget_s=5)
    codes = {each.code for each in client.batches.retrieve(batch.id).errors.data}
    assert codes == {"duplicate_custom_id", "mismatched_model"}


def test_cancelled(client, model):
    batch = begin(client, [line(1, model), line(2, model)])
    assert client.batches.cancel(batch.id).status == "cancelling"
    run_batches(budget_s=5)
    cancelled = client.batches.retrieve(batch.id)
    assert cancelled.status == "cancelled"
    assert cancelled.cancelled_at
    ended = begin(client, ["{"])
    run_batches(budget_s=5)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(ended.id)


def test_expired(client, model, tenant):
    batch = begin(client, [line(1, model)])
    Batch.objects.filter(tenant=tenant).update(expires_at=timezone.now() - timedelta(seconds=1))
    run_batches(budget_s=5)
    expired = client.batches.retrieve(batch.id)
    assert expired.status == "expired"
    (error,) = lines_of(client, expired.error_file_id)
    assert error["error"]["code"] == "batch_expired"


def test_a_revoked_key_ends_it(client, model, key):
    batch = begin(client, [line(1, model)])
    revoke_api_key(actor=TEST, api_key=key.api_key)
    run_batches(budget_s=5)
    assert Batch.unscoped.get(batch_id=batch.id).failed == 1


def test_fault_79_killed_in_mid_batch_each_line_is_run_once(client, site, model, tenant):
    batch = begin(client, [line(number, model, max_tokens=30) for number in range(24)])
    script = "import django; django.setup(); from inference.batch_runner import run_batches; run_batches()"
    runner = subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, env=site.env)
    deadline = time.monotonic() + 60
    while not BatchResult.objects.filter(tenant=tenant).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait(10)
    before = BatchResult.objects.filter(tenant=tenant).count()
    assert before < 24
    for _ in range(20):
        run_batches(budget_s=30)  # the lock of the dead one is free when its connection is
        if (done := client.batches.retrieve(batch.id)).status == "completed":
            break
        time.sleep(0.2)
    assert done.status == "completed"
    assert (done.request_counts.completed, done.request_counts.failed) == (24, 0)
    assert {each["custom_id"] for each in lines_of(client, done.output_file_id)} == {
        f"c{number}" for number in range(24)
    }
    drain_usage_stream()
    rows = UsageRecord.objects.filter(tenant=tenant, endpoint="batches")
    assert (rows.count(), sum(row.completion_tokens for row in rows)) == (24, 24 * 30)
