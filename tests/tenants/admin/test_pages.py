"""The operator's admin: every page opens for the operator alone, and shows no secret."""

from __future__ import annotations

import pytest
from django.contrib import admin

from inference.models import Alert, Maintenance, ParkedUsageEvent, UsageRecord
from inference.services.ledger import record_usage
from tenants.models import ApiKey, AuditEntry, Membership, QuotaLimit, Tenant
from tenants.principal import LimitMetric
from tests.factories import make_key, make_tenant, make_user, set_limit
from tests.inference.ledger_driving import an_event
from tests.tenants.admin.forms import url

pytestmark = pytest.mark.django_db
OUR_MODELS = [
    model for model in admin.site._registry if model._meta.app_label in {"tenants", "inference", "auth"}
]
READ_ONLY = [AuditEntry, UsageRecord, ParkedUsageEvent, Alert]
ONE_ROW = [Maintenance]
"""Their list leads to the row, and no other is added."""


@pytest.mark.parametrize("model", OUR_MODELS, ids=lambda model: model.__name__)
def test_every_page_opens_and_shows_no_secret(browser, world, model):
    _, issued = world
    leads_on = model in ONE_ROW
    pages = [browser.get(url(model, "changelist"), query, follow=leads_on) for query in (None, {"q": "a"})]
    row = admin.site._registry[model].get_queryset(None).first()
    if row is not None:
        pages.append(browser.get(url(model, "change", row.pk)))
    add = browser.get(url(model, "add"))
    assert add.status_code == (403 if model in READ_ONLY + ONE_ROW else 200)
    digest = bytes(issued.api_key.digest)
    for page in pages:
        assert page.status_code == 200
        body = page.content
        assert issued.secret.encode() not in body
        assert issued.secret.split("_")[-1].encode() not in body
        assert digest not in body
        assert digest.hex().encode() not in body


@pytest.mark.parametrize("model", OUR_MODELS, ids=lambda model: model.__name__)
def test_nobody_else_gets_in(client, world, model):
    cast, _ = world
    for user in (cast.owner, cast.member, cast.outsider):
        client.force_login(user)
        assert client.get(url(model, "changelist")).status_code == 302


@pytest.mark.parametrize("model", READ_ONLY, ids=lambda model: model.__name__)
def test_ledger_and_audit_can_not_be_changed_even_by_a_superuser(browser, world, model):
    row = admin.site._registry[model].get_queryset(None).first()
    assert browser.post(url(model, "add"), {}).status_code == 403
    assert browser.post(url(model, "change", row.pk), {"request_id": "x"}).status_code == 403
    assert browser.post(url(model, "delete", row.pk), {"post": "yes"}).status_code == 403
    assert "delete_selected" not in browser.get(url(model, "changelist")).content.decode()


def test_the_menu_leads_to_every_list_and_shows_nobody_what_is_not_theirs(client, browser):
    page = browser.get("/admin/live/").content.decode()
    for model in admin.site._registry:
        assert f'href="{url(model, "changelist")}"' in page, model
    assert 'href="/admin/live/"' in page
    client.force_login(make_user(is_staff=True))
    page = client.get("/admin/live/").content.decode()
    assert 'href="/admin/live/"' in page
    assert url(Tenant, "changelist") not in page


@pytest.mark.parametrize("model", [ApiKey, Tenant, UsageRecord, AuditEntry, QuotaLimit, Membership])
def test_a_longer_list_asks_no_more_queries(browser, django_assert_max_num_queries, model):
    def grow() -> None:
        for _ in range(4):
            tenant = make_tenant(owner=make_user())
            set_limit(make_key(tenant).api_key, LimitMetric.TOKENS, 5)
            record_usage([an_event(str(tenant.public_id))])

    grow()
    path = url(model, "changelist")
    browser.get(path)
    with django_assert_max_num_queries(100) as few:
        browser.get(path)
    grow()
    with django_assert_max_num_queries(len(few)):
        browser.get(path)
