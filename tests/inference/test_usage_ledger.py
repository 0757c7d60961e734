"""The stream to the ledger: every event one row, none twice, none lost, and nothing blocks the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.db import DatabaseError, OperationalError, connection, connections, transaction
from structlog.testing import capture_logs

from engine_worker.broker import GatewayBroker, WorkerBroker
from engine_worker.protocol import GenerateRequest, SamplingParams
from inference.models import ParkedUsageEvent, UsageRecord
from inference.services import usage
from inference.services.ledger import UnfitEvent, file_parked_event, record_usage
from inference.services.usage import drain_usage_stream
from inference.tasks import drain_usage as drain_task
from tenants.models import AuditEntry
from tenants.principal import LimitMetric
from tenants.quotas.errors import QuotaUnavailable
from tenants.quotas.store import QuotaStore
from tenants.scope import UnscopedQuery
from tenants.services import Actor
from tests.engine_worker.broker.driving import card
from tests.factories import a_limit, a_principal, make_operator, make_tenant
from tests.inference.ledger_driving import STEPS, an_event, drain, ledger_redis_url, publish, waiting

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)
"""For what other threads and processes must see."""


@pytest.fixture(autouse=True)
def fresh_stream():
    with redis.Redis.from_url(ledger_redis_url()) as client:
        client.flushdb()
        yield
        client.flushdb()


@pytest.fixture
def tenant():
    return make_tenant()


def request_ids() -> list[str]:
    return sorted(UsageRecord.unscoped.values_list("request_id", flat=True))


def test_every_field_reaches_the_ledger(tenant):
    key_id, user_id = "0197e5a0-0000-7000-8000-000000000001", "0197e5a0-0000-7000-8000-000000000002"
    event = an_event(
        str(tenant.public_id),
        "r1",
        finish_reason="error",
        prompt_tokens=12,
        cached_tokens=4,
        completion_tokens=34,
        key_id=key_id,
        user_id=user_id,
        endpoint="chat.completions",
        reservation_id="res-1",
        claimed_at_ms=1_800_000_000_100,
        first_token_at_ms=1_800_000_000_250,
        worker_id="w1",
        attempts=2,
        error_code="worker_lost",
    )
    publish([event])
    assert (drain().recorded, waiting()) == (1, 0)
    row = UsageRecord.objects.get(tenant=tenant, request_id="r1")
    assert (str(row.key_public_id), str(row.user_public_id)) == (key_id, user_id)
    assert (row.model, row.tier, row.endpoint) == ("tiny", "standard", "chat.completions")
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.total_tokens) == (12, 4, 34, 46)
    assert (row.finish_reason, row.error_code, row.worker_id, row.attempts) == (
        "error",
        "worker_lost",
        "w1",
        2,
    )
    assert row.reservation_id == "res-1"
    assert row.created_at == datetime.fromtimestamp(1_800_000_000, tz=UTC)
    assert row.claimed_at is not None
    assert row.first_token_at is not None
    assert (row.claimed_at - row.created_at).microseconds == 100_000
    assert (row.first_token_at - row.created_at).microseconds == 250_000
    assert (row.finished_at - row.created_at).total_seconds() == 1.5


def test_the_log_says_of_a_dead_request_that_it_died_and_why(tenant):
    failed = {"finish_reason": "error", "attempts": 3, "worker_id": "w1"}
    publish(
        [
            an_event(
                str(tenant.public_id), "dead", error_code="engine_failed", error_message="no memory", **failed
            ),
            an_event(
                str(tenant.public_id), "bad", error_code="invalid_request", error_message="'pink'", **failed
            ),
            an_event(str(tenant.public_id), "good"),
        ]
    )
    with capture_logs() as lines:
        drain()
    assert lines == [
        {
            "log_level": "error", "event": "request_failed", "request_id": "dead", "tenant": str(tenant.public_id),
            "model": "tiny", "code": "engine_failed", "reason": "no memory", "attempts": 3, "last_worker": "w1",
            "completion_tokens": 5,
        }
    ]  # fmt: skip


def test_who_waits_for_a_worker_ends_at_its_deadline_though_its_gateway_is_gone(tenant):
    async def wait_in_vain() -> None:
        gateway = GatewayBroker(ledger_redis_url())
        worker = WorkerBroker(ledger_redis_url(), model="tiny", worker_id="w1")
        request = GenerateRequest(
            request_id="late",
            model="tiny",
            tenant_id=str(tenant.public_id),
            tier="standard",
            tier_rank=1,
            prompt_token_ids=[1],
            sampling=SamplingParams(max_tokens=1),
            created_at_ms=1_800_000_000_000,
            deadline_ms=1_800_000_000_001,
            reply_channel="gone",
        )
        try:
            await worker.register(card("tiny"), b"{}")
            await gateway.enqueue(request, max_queued=9, max_queued_per_tenant=9)
        finally:
            await worker.aclose()
            await gateway.aclose()

    async_to_sync(wait_in_vain)()
    while not drain_usage_stream(redis_url=ledger_redis_url()).recorded:
        pass  # within two milliseconds it is over
    row = UsageRecord.objects.get(tenant=tenant, request_id="late")
    assert (row.finish_reason, row.total_tokens) == ("deadline", 0)


def test_an_event_that_comes_again_is_one_row(tenant):
    event = an_event(str(tenant.public_id), "r1")
    publish([event, event])
    drain()
    publish([event])
    drain()
    assert request_ids() == ["r1"]


def test_more_than_a_batch(tenant):
    publish([an_event(str(tenant.public_id)) for _ in range(23)])
    assert drain(count=5).recorded == 23
    assert (UsageRecord.objects.for_tenant(tenant).count(), waiting()) == (23, 0)


def test_the_ledger_settles_what_the_gateway_could_not(tenant):
    principal = a_principal(
        a_limit(LimitMetric.TOKENS, 1000, period_s=86_400),
        a_limit(LimitMetric.CONCURRENCY, 2),
        tenant_public_id=str(tenant.public_id),
    )

    async def reserve_and_vanish():
        store = QuotaStore(ledger_redis_url())
        await store.reserve(
            reservation_id="res-1",
            principal=principal,
            prompt_tokens=10,
            max_output_tokens=500,
            lease_ms=60_000,
        )
        await store.aclose()

    async def remaining():
        store = QuotaStore(ledger_redis_url())
        buckets = await store.peek(principal)
        await store.aclose()
        return [bucket.remaining for bucket in buckets]

    async_to_sync(reserve_and_vanish)()
    assert async_to_sync(remaining)() == [490, 1]
    publish([an_event(str(tenant.public_id), "r1", reservation_id="res-1")] * 2)
    drain()
    assert async_to_sync(remaining)() == [985, 2]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"tenant_id": "0197e5a0-0000-7000-8000-00000000dead"}, "no tenant"),
        ({"tenant_id": "t1"}, "no tenant"),
        ({"tenant_id": ""}, "no tenant"),
        ({"key_id": "k1"}, "key_id"),
        ({"prompt_tokens": -1}, "negative"),
        ({"cached_tokens": 11}, "cached"),
        ({"completion_tokens": 2**40}, "out of range"),
        ({"finished_at_ms": 10**18}, "not a time"),
        ({"model": "m" * 300}, "too long"),
        ({"request_id": "r" * 300}, "too long"),
        ({"request_id": ""}, "usage_has_a_request"),
        ({"worker_id": "w\x001"}, "u0000"),
    ],
)
def test_an_event_that_fits_nowhere_is_parked_and_blocks_nobody(tenant, given, reason):
    bad = an_event(**({"tenant_id": str(tenant.public_id), "request_id": "bad"} | given))
    publish([an_event(str(tenant.public_id), "r1"), bad, an_event(str(tenant.public_id), "r2"), bad])
    drained = drain()
    assert (drained.recorded, drained.parked, waiting()) == (2, 2, 0)
    assert request_ids() == ["r1", "r2"]
    parked = ParkedUsageEvent.objects.get()
    assert reason in parked.reason
    assert parked.event["model"] == bad.model


def test_a_parked_event_is_filed_once_its_cause_is_repaired(tenant):
    actor = Actor.person(make_operator())
    publish([an_event("0197e5a0-0000-7000-8000-00000000beef", "r1", prompt_tokens=77)])
    drain()
    parked = ParkedUsageEvent.objects.get()
    with pytest.raises(UnfitEvent):
        file_parked_event(actor=actor, parked=parked)
    type(tenant).objects.filter(pk=tenant.pk).update(public_id="0197e5a0-0000-7000-8000-00000000beef")
    for _ in range(2):
        assert file_parked_event(actor=actor, parked=parked).prompt_tokens == 77
    parked.refresh_from_db()
    assert parked.filed_at is not None
    assert request_ids() == ["r1"]
    assert AuditEntry.objects.filter(tenant=tenant, action="usage.filed").exists()


@committed
@pytest.mark.parametrize("step", STEPS)
def test_killed_after_any_step_each_event_is_one_row(tenant, step):
    """FAULTS 63, with a real process and SIGKILL."""
    events = [an_event(str(tenant.public_id), f"r{i}") for i in range(3)]
    publish(events)
    settings_dict = connection.settings_dict
    code = (
        "import sys; sys.path.insert(0, 'platform'); import django; django.setup();"
        "from django.conf import settings; from django.db import connection;"
        f"connection.settings_dict['NAME'] = settings.DATABASES['default']['NAME'] = {settings_dict['NAME']!r};"
        f"from tests.inference.ledger_driving import drain_and_die; drain_and_die({step!r})"
    )
    mortal = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "weir.settings"},
        timeout=60,
        check=False,
        capture_output=True,
    )
    expected = 0 if step == "never" else -signal.SIGKILL
    assert mortal.returncode == expected, mortal.stderr.decode()[-2000:]
    before = request_ids()
    assert before == ([] if step == "read" else ["r0", "r1", "r2"])
    drain()
    assert (request_ids(), waiting()) == (["r0", "r1", "r2"], 0)


@committed
def test_drains_in_parallel_share_the_work(tenant):
    publish([an_event(str(tenant.public_id), f"r{i:03}") for i in range(120)])
    barrier = threading.Barrier(4)

    def one_drain() -> None:
        try:
            barrier.wait(timeout=10)
            drain(count=7)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(one_drain) for _ in range(4)]:
            done.result(timeout=60)
    assert (len(request_ids()), waiting()) == (120, 0)


@committed
def test_two_writers_of_the_same_rows_in_opposite_order_do_not_deadlock(tenant):
    events = [an_event(str(tenant.public_id), f"r{i:04}") for i in range(400)]
    barrier = threading.Barrier(2)

    def write(mine) -> None:
        try:
            barrier.wait(timeout=10)
            record_usage(mine)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(write, events), pool.submit(write, events[::-1])]:
            done.result(timeout=60)
    assert len(request_ids()) == 400


def test_the_database_refuses_to_change_or_delete_a_row(tenant):
    record_usage([an_event(str(tenant.public_id), "r1")])
    rows = UsageRecord.objects.for_tenant(tenant)
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        rows.update(prompt_tokens=0)
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        rows.get().delete()
    assert rows.get().prompt_tokens == 10


def test_usage_is_read_only_through_its_tenant(tenant):
    with pytest.raises(UnscopedQuery):
        UsageRecord.objects.count()


def test_the_task_is_the_service(tenant, settings):
    settings.REDIS_URL = ledger_redis_url()
    event = an_event(str(tenant.public_id), "r1")
    with redis.Redis.from_url(ledger_redis_url()) as client:
        from engine_worker.broker import keys
        from engine_worker.protocol import encode

        client.sadd(keys.MODELS, "tiny")
        client.xadd(keys.model_prefix("tiny") + "usage", {"e": encode(event)})
    drain_task()
    drain_task()
    assert request_ids() == ["r1"]
    assert drain_task.time_limit


def drained_patiently() -> usage.Drained:
    """As the timetable's: what others took is left to them for a minute."""
    return drain_usage_stream(redis_url=ledger_redis_url(), consumer="c")


@pytest.mark.parametrize(
    "outage",
    [OperationalError("the server does not answer"), QuotaUnavailable("Redis does not answer")],
    ids=["database", "redis"],
)
def test_what_an_outage_kept_from_the_ledger_is_recorded_with_the_next_drain(tenant, monkeypatch, outage):
    """It waited until it was a minute old."""
    publish([an_event(str(tenant.public_id), "r1")])
    with monkeypatch.context() as patch:
        patch.setattr(
            usage,
            "record_usage" if isinstance(outage, OperationalError) else "settle_rows",
            raising(outage),
        )
        for _ in range(2):
            with pytest.raises(type(outage)):
                drained_patiently()
    publish([an_event(str(tenant.public_id), "r2")])
    assert drained_patiently() == usage.Drained(recorded=2, parked=0)
    assert (request_ids(), waiting()) == (["r1", "r2"], 0)


def test_what_fails_for_no_outage_lets_new_events_pass(tenant, monkeypatch):
    publish([an_event(str(tenant.public_id), "r1")])
    with monkeypatch.context() as patch:
        patch.setattr(usage, "record_usage", raising(RuntimeError("a bug")))
        with pytest.raises(RuntimeError):
            drained_patiently()
    publish([an_event(str(tenant.public_id), "r2")])
    assert drained_patiently().recorded == 1
    assert (request_ids(), waiting()) == (["r2"], 1)


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call
