"""Keys in the operator's admin: a secret is shown once, and every change is on record."""

from __future__ import annotations

import re

import pytest
from asgiref.sync import async_to_sync

from tenants.auth import RevokedKey, authenticate_bearer
from tenants.models import ApiKey, AuditEntry
from tests.factories import make_tenant
from tests.tenants.admin.forms import committed, last_audit, url

pytestmark = pytest.mark.django_db


@committed
def test_a_key_is_issued_and_its_secret_shown_once(browser, operator):
    tenant = make_tenant()
    form = {"tenant": tenant.pk, "name": "from the admin", "scopes": ["inference"], "expires_at_0": ""}
    page = browser.post(url(ApiKey, "add"), form | {"expires_at_1": ""})
    assert page.status_code == 200
    assert "no-store" in page["Cache-Control"]
    (secret,) = set(re.findall(r"wr_live_\w{12}_\w{49}", page.content.decode()))
    principal = async_to_sync(authenticate_bearer)(secret)
    assert principal.tenant_id == tenant.pk
    # Not in a cookie, not in a message, not on any page afterwards.
    assert secret not in str(page.cookies) + str(dict(browser.session))
    api_key = ApiKey.objects.get(tenant=tenant)
    assert api_key.created_by == operator
    for path in (url(ApiKey, "changelist"), url(ApiKey, "change", api_key.pk), url(AuditEntry, "changelist")):
        assert secret.split("_")[-1] not in browser.get(path).content.decode()
    entry = last_audit("key.issued")
    assert (entry.actor_user, entry.tenant, entry.target_public_id) == (operator, tenant, api_key.public_id)
    assert entry.ip_address == "127.0.0.1"


@pytest.mark.parametrize(
    ("field", "value"), [("scopes", []), ("scopes", ["root"]), ("name", ""), ("expires_at_0", "2020-01-01")]
)
def test_a_wrong_key_form_says_so(browser, field, value):
    tenant = make_tenant()
    form = {
        "tenant": tenant.pk,
        "name": "x",
        "scopes": ["inference"],
        "expires_at_0": "",
        "expires_at_1": "",
    }
    if field == "expires_at_0":
        form["expires_at_1"] = "00:00:00"
    page = browser.post(url(ApiKey, "add"), form | {field: value})
    assert page.status_code == 200
    assert page.context["adminform"].form.errors
    assert not ApiKey.unscoped.filter(tenant=tenant).exists()


@committed
def test_keys_are_revoked_by_an_action_and_never_deleted(browser, operator, world):
    _, issued = world
    act = {"action": "revoke", "_selected_action": [issued.api_key.pk]}
    asked = browser.post(url(ApiKey, "changelist"), act)
    assert (asked.status_code, issued.api_key.name in asked.content.decode()) == (200, True)
    async_to_sync(authenticate_bearer)(issued.secret)
    act["confirmed"] = "1"
    assert browser.post(url(ApiKey, "changelist"), act).status_code == 302
    with pytest.raises(RevokedKey):
        async_to_sync(authenticate_bearer)(issued.secret)
    assert last_audit("key.revoked").actor_user == operator
    browser.post(url(ApiKey, "changelist"), act)
    assert AuditEntry.unscoped.filter(action="key.revoked").count() == 1
    assert browser.post(url(ApiKey, "delete", issued.api_key.pk), {"post": "yes"}).status_code == 403


def test_renaming_a_key_is_on_record_and_leaves_its_scopes(browser, world):
    _, issued = world
    form = {"name": "renamed", "expires_at_0": "", "expires_at_1": "", "scopes": ["admin"]}
    assert browser.post(url(ApiKey, "change", issued.api_key.pk), form).status_code == 302
    api_key = ApiKey.objects.get(tenant=issued.api_key.tenant, pk=issued.api_key.pk)
    assert (api_key.name, api_key.scopes) == ("renamed", ["inference"])
    entry = last_audit("key.changed")
    assert (entry.before, entry.after) == ({"name": "test key"}, {"name": "renamed"})
