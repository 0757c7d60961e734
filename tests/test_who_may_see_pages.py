"""Every page of a tenant in the console against everyone who may not, found by itself."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.test import Client
from django.urls import URLPattern, reverse

import inference.urls
import tenants.urls
from tenants.models import ApiKey, Role
from tenants.services import add_member, suspend_tenant
from tests.factories import TEST, make_key, make_user, signed_in

PAGES = [
    route
    for route in [*inference.urls.urlpatterns, *tenants.urls.urlpatterns]
    if isinstance(route, URLPattern) and "tenant_id" in route.pattern.converters
]

READINGS = {"exports"}
"""Pages whose POST changes nothing of the tenant's: it asks for a file of what the role may read anyway."""


@pytest.fixture(params=PAGES, ids=lambda route: route.name)
def page(request) -> URLPattern:
    return request.param


def url_of(page: URLPattern, tenant, **ids) -> str:
    converters = page.pattern.converters
    values = {name: ids.get(name, uuid4()) for name in converters if name != "tenant_id"}
    return reverse(page.name, kwargs={"tenant_id": tenant.public_id, **values})


def test_who_does_not_belong_finds_nothing(cast, page):
    key = make_key(cast.tenant, name="victim").api_key
    url = url_of(page, cast.tenant, key_id=key.public_id)
    for method in ("get", "post"):
        answer = getattr(Client(), method)(url)
        if answer.status_code != 405:
            assert (answer.status_code, answer.headers["Location"].split("?")[0]) == (302, "/login/")
        for stranger in (cast.outsider, cast.operator):
            answer = getattr(signed_in(stranger), method)(url)
            assert answer.status_code in (404, 405)
            assert cast.tenant.name.encode() not in answer.content
    assert ApiKey.objects.filter(tenant=cast.tenant, revoked_at=None).count() == 1


def test_ids_of_another_tenant_swapped_into_ones_own_pages(cast, page):
    if set(page.pattern.converters) == {"tenant_id"}:
        pytest.skip("names no object")
    key = make_key(cast.tenant, name="victim").api_key
    ids = dict.fromkeys(page.pattern.converters, key.public_id)
    url = url_of(
        page, cast.other_tenant, **{name: value for name, value in ids.items() if name != "tenant_id"}
    )
    for method in ("get", "post"):
        assert getattr(signed_in(cast.outsider), method)(url).status_code in (404, 405)
    key.refresh_from_db()
    assert key.revoked_at is None


@pytest.mark.parametrize("role", [Role.VIEWER, Role.BILLING])
def test_who_may_only_look_changes_nothing(cast, page, role):
    person = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=person, role=role)
    key = make_key(cast.tenant, name="victim").api_key
    before = ApiKey.objects.filter(tenant=cast.tenant).count()
    answer = signed_in(person).post(
        url_of(page, cast.tenant, key_id=key.public_id), {"name": "mine", "lifetime": "0"}
    )
    assert answer.status_code in ((302,) if page.name in READINGS else (403, 404, 405))
    key.refresh_from_db()
    assert key.revoked_at is None
    assert ApiKey.objects.filter(tenant=cast.tenant).count() == before


@pytest.mark.parametrize("role", [Role.OWNER, Role.VIEWER])
def test_people_of_a_suspended_tenant_look_as_before_and_are_told(cast, page, role):
    person = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=person, role=role)
    key = make_key(cast.tenant, name="theirs").api_key
    browser, url = signed_in(person), url_of(page, cast.tenant, key_id=key.public_id)
    before = browser.get(url)
    suspend_tenant(actor=TEST, tenant=cast.tenant, reason="The invoice of March is open")
    after = browser.get(url)
    assert after.status_code == before.status_code
    if after.status_code == 200 and "text/html" in after.headers["Content-Type"]:
        assert b"The invoice of March is open" in after.content
        assert b"The invoice of March is open" not in before.content
