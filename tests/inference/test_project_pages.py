"""The console's pages about projects and limits: what they show, who may change what."""

from __future__ import annotations

import pytest
from django.template.loader import render_to_string
from django.urls import reverse

from inference.services.decision import LimitTold, Told
from tenants.models import AuditEntry, Project, Role
from tenants.principal import LimitMetric
from tenants.quotas.gauges import Gauge
from tenants.quotas.types import BucketState
from tenants.services import add_member, create_project
from tests.factories import TEST, a_limit, make_key, make_user, set_limit, signed_in

pytestmark = pytest.mark.django_db


def test_projects_are_made_renamed_and_deleted_when_empty(cast):
    owner = signed_in(cast.owner)
    url = reverse("projects", args=[cast.tenant.public_id])
    assert "No projects yet" in owner.get(url).content.decode()
    made = owner.post(url, {"name": "<i>Support</i>"}, follow=True).content.decode()
    assert "&lt;i&gt;Support" in made
    assert "<i>Support" not in made
    row = Project.objects.get(tenant=cast.tenant)
    refused = owner.post(url, {"name": row.name}).content.decode()
    assert "already exists" in refused
    assert 'value="&lt;i&gt;Support&lt;/i&gt;"' in refused, "what was typed is still there"
    one = reverse("project", args=[cast.tenant.public_id, row.public_id])
    owner.post(one, {"name": "Research"})
    row.refresh_from_db()
    assert row.name == "Research"
    key = make_key(cast.tenant, project=row).api_key
    refused = owner.post(one, {"verb": "delete", "name": "Research"}, follow=True).content.decode()
    assert "has 1 key" in refused
    key.delete()
    assert "is deleted" in owner.post(one, {"verb": "delete"}, follow=True).content.decode()
    assert not Project.objects.filter(tenant=cast.tenant).exists()
    actions = AuditEntry.objects.filter(tenant=cast.tenant, action__startswith="project.")
    assert {"project.created", "project.renamed", "project.deleted"} == set(
        actions.values_list("action", flat=True)
    )


def test_who_may_only_look_makes_none(cast):
    person = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=person, role=Role.VIEWER)
    row = create_project(actor=TEST, tenant=cast.tenant, name="Support")
    viewer = signed_in(person)
    page = viewer.get(reverse("projects", args=[cast.tenant.public_id])).content.decode()
    assert "Support" in page
    assert "Create project" not in page
    assert viewer.post(reverse("projects", args=[cast.tenant.public_id]), {"name": "x"}).status_code == 403
    one = reverse("project", args=[cast.tenant.public_id, row.public_id])
    assert viewer.post(one, {"verb": "delete"}).status_code == 403


def test_the_limits_page_tells_the_tiers_the_tenants_and_the_keys(cast):
    set_limit(cast.tenant, LimitMetric.REQUESTS, 600)
    set_limit(cast.tenant.tier, LimitMetric.CONCURRENCY, 32)
    key = make_key(cast.tenant, name="nightly").api_key
    set_limit(key, LimitMetric.TOKENS, 5000)
    page = signed_in(cast.member).get(reverse("limits", args=[cast.tenant.public_id])).content.decode()
    assert "600 of 600" in page
    assert "of the tier" in page
    assert "nightly" in page
    assert "5,000 tokens per minute" in page
    assert "binds now" not in page


def test_what_comes_back_as_requests_end_has_no_time_to_be_full_again_in():
    """A request that runs may go on until its deadline: that is no promise to a reader."""
    states = tuple(
        BucketState(a_limit(metric, 5, period_s=period_s), remaining=3, reset_after_ms=301_000)
        for metric, period_s in ((LimitMetric.CONCURRENCY, 0), (LimitMetric.REQUESTS, 600))
    )
    gauges = [
        Gauge(state.limit, state.remaining, None, full_again_ms=state.reset_after_ms) for state in states
    ]
    shown = [render_to_string("inference/gauges.html", {"limits": [gauge]}) for gauge in gauges]
    assert ["Full again" in text for text in shown] == [False, True]
    told = [
        LimitTold("tenant", "t", state.limit.metric, 5, state.limit.period_s, 5, "", True, 1, 3, 301_000)
        for state in states
    ]
    decision = Told(at_ms=0, prompt_tokens=1, max_output_tokens=1, limits=told)
    page = render_to_string(
        "inference/decision.html", {"decision": decision, "explained": {"verdict": "admitted"}}
    )
    assert page.count("as requests end") == 1
