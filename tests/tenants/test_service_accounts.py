"""Members without a person: keys that outlive who made them, and end together."""

from __future__ import annotations

import re

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection, transaction
from django.urls import reverse
from django.utils import timezone

from tenants.members import list_service_accounts
from tenants.models import ApiKey, ApiKeyUse, AuditEntry, Membership, Role, Tenant
from tenants.services import Actor
from tenants.services.members import remove_member
from tenants.services.service_accounts import (
    create_service_account,
    issue_service_key,
    retire_service_account,
)
from tests.factories import TEST, Cast, signed_in

pytestmark = pytest.mark.django_db


def test_it_outlives_who_made_it(cast: Cast):
    maker = Actor.person(cast.member)
    account = create_service_account(actor=maker, tenant=cast.tenant, name=" nightly ")
    issued = issue_service_key(actor=maker, account=account, name="nightly")
    membership = Membership.objects.get(tenant=cast.tenant, user=cast.member)
    remove_member(actor=TEST, by=Role.OWNER, membership=membership)
    issued.api_key.refresh_from_db()
    assert issued.api_key.revoked_at is None
    ApiKeyUse.objects.create(api_key=issued.api_key, last_used_at=timezone.now())
    (listed,) = list_service_accounts(cast.tenant)
    assert (listed.name, listed.live_keys) == ("nightly", 1)
    assert listed.last_used_at is not None


def test_retiring_it_revokes_all_its_keys_and_no_other(cast: Cast):
    account = create_service_account(actor=TEST, tenant=cast.tenant, name="bot")
    mine = [issue_service_key(actor=TEST, account=account, name="bot").api_key for _ in range(2)]
    other = issue_service_key(
        actor=TEST, account=create_service_account(actor=TEST, tenant=cast.tenant, name="b"), name="b"
    ).api_key
    assert retire_service_account(actor=TEST, account=account)
    assert not retire_service_account(actor=TEST, account=account)
    live = ApiKey.objects.for_tenant(cast.tenant).filter(revoked_at=None)
    assert list(live) == [other]
    assert all(key not in live for key in mine)
    with pytest.raises(ValidationError):
        issue_service_key(actor=TEST, account=account, name="late")
    create_service_account(actor=TEST, tenant=cast.tenant, name="bot")  # the name is free again
    actions = list(AuditEntry.objects.filter(tenant=cast.tenant).values_list("action", flat=True))
    assert actions.count("key.revoked") == 2
    assert actions.count("service_account.retired") == 1


def _move(key: ApiKey, tenant: Tenant) -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        ApiKey.objects.for_tenant(key.tenant_id).filter(pk=key.pk).update(tenant=tenant)
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")


def test_names_and_tenants(cast: Cast):
    account = create_service_account(actor=TEST, tenant=cast.tenant, name="bot")
    with pytest.raises(ValidationError, match="of this name already exists"):
        create_service_account(actor=TEST, tenant=cast.tenant, name="bot")
    for name in (" ", ""):
        with pytest.raises(ValidationError):
            create_service_account(actor=TEST, tenant=cast.tenant, name=name)
    create_service_account(actor=TEST, tenant=cast.other_tenant, name="bot")
    theirs = issue_service_key(actor=TEST, account=account, name="bot").api_key
    with pytest.raises(IntegrityError):
        _move(theirs, cast.other_tenant)


def test_the_page(cast: Cast):
    owner, developer = signed_in(cast.owner), signed_in(cast.member)
    url = reverse("service_accounts", args=[cast.tenant.public_id])
    assert developer.post(url, {"name": "mine"}).status_code == 403
    owner.post(url, {"name": "<b>bot"})
    refused = owner.post(url, {"name": "<b>bot"}).content.decode()
    assert 'value="&lt;b&gt;bot"' in refused, "what was typed is still there"
    page = owner.get(url).content.decode()
    assert "&lt;b&gt;bot" in page
    assert "New service account" not in developer.get(url).content.decode()
    (account,) = list_service_accounts(cast.tenant)
    key_url = reverse("service_key", args=[cast.tenant.public_id, account.public_id])
    assert developer.post(key_url).status_code == 403
    assert signed_in(cast.outsider).post(key_url).status_code == 404
    shown = owner.post(key_url)
    assert re.search(r"wr_live_\w+_\w+", shown.content.decode())
    assert shown.headers["Cache-Control"] == "no-store"
    assert not re.search(r"wr_live_\w+_\w+", owner.get(url).content.decode())
    retire = reverse("retire_service_account", args=[cast.tenant.public_id, account.public_id])
    assert "All its keys are revoked" in owner.get(retire).content.decode()
    assert developer.get(retire).status_code == 403
    assert ApiKey.objects.for_tenant(cast.tenant).filter(revoked_at=None).exists()
    owner.post(retire)
    assert not ApiKey.objects.for_tenant(cast.tenant).filter(revoked_at=None).exists()
    assert "No service accounts yet" in owner.get(url).content.decode()
