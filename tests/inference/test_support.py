"""Support: an operator sees a tenant's console for a while, changes nothing, and the tenant knows of it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from tenants.models import AuditEntry, Project
from tenants.principal import LimitMetric
from tenants.support import LASTS, visit_of
from tests.factories import make_key, make_tenant, make_user, set_limit, signed_in

pytestmark = pytest.mark.django_db


def test_an_operator_looks_in_changes_nothing_and_leaves(cast):
    operator = signed_in(cast.operator)
    overview = reverse("overview", args=[cast.tenant.public_id])
    ask = reverse("admin_support", args=[cast.tenant.public_id])
    assert operator.get(overview).status_code == 404
    assert "Say why" in operator.post(ask, {"reason": " "}).content.decode()
    assert operator.get(overview).status_code == 404
    assert operator.post(ask, {"reason": "ticket 7"}).headers["Location"] == overview
    page = operator.get(overview).content.decode()
    assert f"You look at {cast.tenant.name} as operator" in page
    key = make_key(cast.tenant).api_key
    keys = operator.get(reverse("keys", args=[cast.tenant.public_id])).content.decode()
    assert key.prefix in keys
    assert "Create key" not in keys
    projects = reverse("projects", args=[cast.tenant.public_id])
    assert operator.post(projects, {"name": "mine"}).status_code == 403
    assert not Project.objects.filter(tenant=cast.tenant).exists()
    other = reverse("overview", args=[cast.other_tenant.public_id])
    assert operator.get(other).status_code == 404
    operator.post(reverse("admin_end_support", args=[cast.tenant.public_id]))
    assert operator.get(overview).status_code == 404
    log = AuditEntry.objects.filter(tenant=cast.tenant, action__startswith="support.").order_by("id")
    assert [entry.action for entry in log] == ["support.began", "support.ended"]
    assert log[0].after["reason"] == "ticket 7"
    assert {entry.actor_user for entry in log} == {cast.operator}


def test_a_visit_ends_by_itself_and_with_the_operators_rights(cast):
    operator = signed_in(cast.operator)
    operator.post(reverse("admin_support", args=[cast.tenant.public_id]), {"reason": "a look"})
    session = operator.session
    assert visit_of(cast.operator, session) is not None
    assert visit_of(cast.operator, session, timezone.now() + LASTS + timedelta(seconds=1)) is None
    overview = reverse("overview", args=[cast.tenant.public_id])
    assert operator.get(overview).status_code == 200
    cast.operator.is_superuser = False
    cast.operator.save()
    assert operator.get(overview).status_code == 404


def test_nobody_else_may_look_in(cast):
    for person in (cast.owner, make_user(is_staff=True)):
        url = reverse("admin_support", args=[cast.other_tenant.public_id])
        assert signed_in(person).post(url, {"reason": "curious"}).status_code in (302, 403)
        overview = reverse("overview", args=[cast.other_tenant.public_id])
        assert signed_in(person).get(overview).status_code == 404
    assert not AuditEntry.objects.filter(tenant=cast.other_tenant, action="support.began").exists()


def test_all_tenants_with_use_and_limits_on_one_page(cast, django_assert_max_num_queries):
    set_limit(cast.tenant, LimitMetric.REQUESTS, 600)
    make_tenant("<b>Ministry</b>")
    operator = signed_in(cast.operator)
    url = reverse("admin_usage")
    page = operator.get(url).content.decode()
    assert "600 requests per minute" in page
    assert "&lt;b&gt;Ministry" in page
    assert "<b>Ministry" not in page
    found = operator.get(url, {"q": "ministry"}).content.decode()
    assert cast.tenant.name not in found.split("</form>")[-1]
    assert "No tenant of that name" in operator.get(url, {"q": "\0nobody"}).content.decode()
    assert signed_in(cast.owner).get(url).status_code == 302
    for _ in range(30):
        make_tenant()
    with django_assert_max_num_queries(70):
        assert "Page 1 of 2" in operator.get(url).content.decode()
