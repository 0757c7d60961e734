"""A tenant is deleted: what runs stops, what it owned goes, what accounts need stays, and no name is left."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import uuid4

import openai
import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.conf import settings
from django.db import DatabaseError, connections, transaction
from django.test import Client
from django.utils import timezone

from engine_worker.broker import GatewayBroker
from engine_worker.protocol import GenerateRequest, SamplingParams
from inference.models import UsageRecord
from inference.services.usage import drain_usage_stream
from tenants.models import AuditEntry, Membership, Role, Tenant
from tenants.services import Actor, add_member, resume_tenant, suspend_tenant
from tenants.services.deletion import purge_due_tenants, restore_tenant, schedule_deletion
from tenants.services.invitations import invite_member
from tests.factories import TEST, make_cast, make_key, make_tenant, make_user

HELLO = [{"role": "user", "content": "hello"}]


def test_scheduling_and_taking_it_back(db: None):
    tenant = make_tenant()
    assert schedule_deletion(actor=TEST, tenant=tenant)
    assert not schedule_deletion(actor=TEST, tenant=tenant)
    assert tenant.is_suspended
    assert tenant.delete_at is not None
    assert abs(tenant.delete_at - timezone.now() - timedelta(days=30)) < timedelta(minutes=5)
    assert not resume_tenant(actor=TEST, tenant=tenant)  # that is not how it is taken back
    assert purge_due_tenants() == 0
    assert restore_tenant(actor=TEST, tenant=tenant)
    assert not restore_tenant(actor=TEST, tenant=tenant)
    assert not tenant.is_suspended
    actions = AuditEntry.objects.filter(tenant=tenant).order_by("id").values_list("action", flat=True)
    assert list(actions)[-2:] == ["tenant.deletion_scheduled", "tenant.restored"]
    # A suspension by the operator outlasts both.
    suspend_tenant(actor=TEST, tenant=tenant, reason="unpaid")
    schedule_deletion(actor=TEST, tenant=tenant)
    restore_tenant(actor=TEST, tenant=tenant)
    assert tenant.suspended_reason == "unpaid"


def test_who_may_delete_and_how(db: None):
    cast = make_cast()
    url = f"/t/{cast.tenant.public_id}/deletion/"
    admin = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=admin, role=Role.ADMIN)
    for user, status in ((admin, 403), (cast.member, 403), (cast.outsider, 404)):
        client = Client()
        client.force_login(user)
        assert client.get(url).status_code == status
        assert client.post(url, {"slug": cast.tenant.slug}).status_code == status
    owner = Client()
    owner.force_login(cast.owner)
    assert b'role="alert"' in owner.post(url, {"slug": "something else"}).content
    cast.tenant.refresh_from_db()
    assert cast.tenant.delete_at is None
    owner.post(url, {"slug": cast.tenant.slug})
    cast.tenant.refresh_from_db()
    assert cast.tenant.delete_at is not None
    assert b"will be deleted on" in owner.get(f"/t/{cast.tenant.public_id}/members/").content
    owner.post(url, {"restore": "1"})
    cast.tenant.refresh_from_db()
    assert cast.tenant.delete_at is None


def _everything() -> str:
    """Every value of every row of every table, as text."""
    return "\n".join(
        str(row)
        for model in apps.get_models()
        if model._meta.managed
        for row in getattr(model, "unscoped", model.objects).values_list()
    )


@pytest.mark.django_db(transaction=True)
def test_after_the_grace_only_what_accounts_need_is_left(http: Any, sdk: Any, model: str):
    owner, guest = make_user("gone@gone.example"), make_user("elsewhere@stays.example")
    tenant, other = make_tenant("Vanishing Incorporated", owner=owner), make_tenant(owner=guest)
    add_member(actor=TEST, tenant=tenant, user=guest, role=Role.DEVELOPER)
    key = make_key(tenant, name="Vanishing key")
    invite_member(
        actor=Actor.person(owner, ip_address="192.0.2.77"),
        by=Role.OWNER,
        tenant=tenant,
        email="invited@gone.example",
        role=Role.VIEWER,
    )
    client = sdk(key.secret)
    client.files.create(file=("vanishing.jsonl", b'{"custom_id": "1"}'), purpose="batch")
    answer = client.responses.create(model=model, input="vanishing words", max_output_tokens=16)
    _drained(tenant, 1)

    schedule_deletion(actor=Actor.person(owner, ip_address="192.0.2.77"), tenant=tenant)
    Tenant.objects.filter(pk=tenant.pk).update(delete_at=timezone.now() - timedelta(seconds=1))
    assert purge_due_tenants() == 1
    assert purge_due_tenants() == 0
    assert not restore_tenant(actor=TEST, tenant=tenant)

    left = _everything()
    for word in ("gone.example", "anishing", "192.0.2.77", key.api_key.lookup_id):
        assert word not in left, word
    record = UsageRecord.objects.get(tenant=tenant)
    assert (record.prompt_tokens, record.completion_tokens) == (
        answer.usage.input_tokens,
        answer.usage.output_tokens,
    )
    actions = set(AuditEntry.objects.filter(tenant=tenant).values_list("action", flat=True))
    assert {"tenant.created", "key.issued", "tenant.deletion_scheduled", "tenant.deleted"} <= actions
    owner.refresh_from_db()
    assert not owner.is_active
    guest.refresh_from_db()
    assert (guest.is_active, guest.email) == (True, "elsewhere@stays.example")
    assert Membership.objects.for_tenant(other).filter(user=guest).exists()
    with pytest.raises(openai.AuthenticationError):
        sdk(key.secret).models.list()
    # The log is as closed as before: erasing was for that transaction, and for those columns.
    for change in ({"action": "x"}, {"actor_label": "(erased)"}):
        with pytest.raises(DatabaseError), transaction.atomic():
            AuditEntry.objects.for_tenant(tenant).update(**change)


def _drained(tenant: Tenant, rows: int) -> None:
    deadline = time.monotonic() + 60
    while UsageRecord.objects.filter(tenant=tenant).count() < rows:
        assert time.monotonic() < deadline, "waited for the ledger"
        drain_usage_stream()
        time.sleep(0.05)


@pytest.mark.django_db(transaction=True)
def test_deletion_stops_running_streams(sdk: Any, model: str):
    """Beside a control: the same request put into the queue past the gateway is not stopped by anything else."""
    tenant = make_tenant()
    client = sdk(make_key(tenant).secret)
    streams = 3
    under_way = threading.Barrier(streams + 1, timeout=60)

    def read(_: int) -> tuple[str, float]:
        seen = 0
        try:
            for chunk in client.chat.completions.create(
                model=model, messages=HELLO, max_tokens=3000, stream=True
            ):
                seen += bool(chunk.choices)
                if seen == 2:
                    under_way.wait()
        except openai.APIError as error:
            return str(error.code), time.monotonic()
        finally:
            connections.close_all()
        return "not stopped", time.monotonic()

    now_ms = int(time.time() * 1000)
    control = GenerateRequest(
        request_id=f"control-{uuid4()}",
        model=model,
        tenant_id=str(tenant.public_id),
        tier="standard",
        tier_rank=1,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=20_000),
        created_at_ms=now_ms,
        deadline_ms=now_ms + 300_000,
        reply_channel="nobody",
    )
    _enqueue(control)
    with ThreadPoolExecutor(streams) as pool:
        reading = [pool.submit(read, number) for number in range(streams)]
        under_way.wait()
        began = time.monotonic()
        schedule_deletion(actor=TEST, tenant=tenant)
        ended = [future.result(timeout=90) for future in reading]
    assert [code for code, _ in ended] == ["tenant_suspended"] * streams
    assert max(at for _, at in ended) - began < 20  # half a second on a machine that is not loaded
    with pytest.raises(openai.PermissionDeniedError):
        client.models.list()
    _drained(tenant, streams)
    rows = UsageRecord.objects.filter(tenant=tenant, endpoint="chat.completions")
    assert {row.finish_reason for row in rows} == {"cancelled"}
    assert all(row.completion_tokens < 3000 for row in rows)
    assert _state(model, control.request_id) == "running"
    _cancel(model, control.request_id)


def _with_broker(work: Any) -> Any:
    async def run() -> Any:
        broker = GatewayBroker(settings.REDIS_URL, timeout_s=10)
        try:
            return await work(broker)
        finally:
            await broker.aclose()

    return async_to_sync(run)()


def _enqueue(request: Any) -> None:
    _with_broker(lambda broker: broker.enqueue(request, max_queued=1000, max_queued_per_tenant=1000))


def _cancel(model: str, request_id: str) -> None:
    _with_broker(lambda broker: broker.cancel(model, request_id))


def _state(model: str, request_id: str) -> str:
    async def ask(broker: GatewayBroker) -> str:
        return (await broker.request_state(model, request_id)).state

    state: str = _with_broker(ask)
    return state
