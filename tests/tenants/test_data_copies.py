"""A copy of a tenant's data: all of it, nothing secret, nothing of others, for owners alone."""

from __future__ import annotations

import io
import json
import zipfile
from datetime import timedelta

import pytest
from django.utils import timezone

from inference.models import Conversation
from inference.services.ledger import record_usage
from tenants.models import AuditEntry, DataCopy, DataCopyState, Role
from tenants.services import add_member
from tenants.services.data_copies import ask_for_copy, write_copies
from tests.factories import TEST, Cast, make_key, make_user, signed_in
from tests.inference.ledger_driving import an_event

pytestmark = pytest.mark.django_db(transaction=True)


def test_all_of_it_and_nothing_else(cast: Cast):
    key, theirs = make_key(cast.tenant, name="mine"), make_key(cast.other_tenant, name="theirs")
    record_usage([an_event(str(tenant.public_id)) for tenant in (cast.tenant, cast.other_tenant)])
    url = f"/t/{cast.tenant.public_id}/data/"
    owner = signed_in(cast.owner)
    owner.post(url)
    owner.post(url)  # one at a time
    assert b"being written" in owner.get(url).content
    assert write_copies() == 1
    copy = DataCopy.objects.for_tenant(cast.tenant).get()
    answer = owner.get(f"{url}{copy.public_id}/")
    assert answer.headers["Content-Type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        text = {name: archive.read(name).decode() for name in archive.namelist()}
    tables = {name: [json.loads(line) for line in lines.splitlines()] for name, lines in text.items()}
    assert [row["name"] for row in tables["ApiKey.jsonl"]] == ["mine"]
    assert len(tables["Membership.jsonl"]) == 2
    assert len(tables["UsageRecord.jsonl"]) == 1
    # What is kept when the ledger's old months are dropped.
    assert [row["requests"] for row in tables["UsageDay.jsonl"]] == [1]
    assert [sum(row["total"].values()) for row in tables["UsageHour.jsonl"]] == [1]
    assert "Exchange.jsonl" not in tables
    assert {row["tenant_id"] for rows in tables.values() for row in rows} == {cast.tenant.pk}
    assert "Conversation.jsonl" not in tables
    assert "ModelSetting.jsonl" not in tables  # the operator's, and it names other tenants
    assert Conversation._meta.label == "inference.Conversation"  # by which it is left out
    everything = "".join(text.values())
    for secret in ("digest", "secret", key.secret, theirs.api_key.lookup_id):
        assert secret not in everything
    actions = set(AuditEntry.objects.filter(tenant=cast.tenant).values_list("action", flat=True))
    assert {"tenant.copy_asked_for", "tenant.copy_fetched"} <= actions


def test_for_owners_alone_and_for_a_week(cast: Cast):
    copy = ask_for_copy(actor=TEST, tenant=cast.tenant)
    write_copies()
    url = f"/t/{cast.tenant.public_id}/data/"
    admin = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=admin, role=Role.ADMIN)
    for user, status in ((admin, 403), (cast.member, 403), (cast.outsider, 404)):
        for path in (url, f"{url}{copy.public_id}/"):
            assert signed_in(user).get(path).status_code == status
    elsewhere = f"/t/{cast.other_tenant.public_id}/data/{copy.public_id}/"
    assert signed_in(cast.outsider).get(elsewhere).status_code == 404
    write_copies(now=timezone.now() + timedelta(days=8))
    assert signed_in(cast.owner).get(f"{url}{copy.public_id}/").status_code == 404


def test_one_that_a_dead_task_left_is_written_by_the_next(cast: Cast):
    ask_for_copy(actor=TEST, tenant=cast.tenant)
    DataCopy.objects.for_tenant(cast.tenant).update(
        state=DataCopyState.RUNNING, started_at=timezone.now() - timedelta(minutes=5)
    )
    assert write_copies() == 0
    assert write_copies(now=timezone.now() + timedelta(minutes=6)) == 1
