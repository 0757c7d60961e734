"""`/v1/organization/usage` and `/costs` through OpenAI's own client: buckets that add up to the ledger."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from openai import OpenAI

from inference import usage_buckets
from inference.models import UsageRecord
from inference.reports import Dimension, Report, Width
from inference.services.ledger import adjust_usage, record_usage
from inference.usage_buckets import bucket_page
from tenants.models import ModelPrice, Tenant
from tenants.principal import Scope
from tenants.services import create_project
from tests.factories import TEST, make_key, make_tenant
from tests.inference.ledger_driving import an_event

pytestmark = pytest.mark.django_db(transaction=True)
ZONE = ZoneInfo("Asia/Kolkata")
START = datetime(2026, 9, 1, tzinfo=ZONE)
DAYS = 6
AT = int(START.timestamp())
DAY = 86_400
COMPLETIONS, EMBEDDINGS = "organization/usage/completions", "organization/usage/embeddings"


@pytest.fixture
def used(http, site) -> SimpleNamespace:
    """A tenant with six days of traffic: two models that make text, one of embeddings; and a stranger's."""
    ModelPrice.objects.create(
        model="a",
        valid_from=START,
        input_microusd_per_mtok=150_001,
        cached_input_microusd_per_mtok=75_000,
        output_microusd_per_mtok=600_003,
    )
    tenant, other = make_tenant(), make_tenant()
    Tenant.objects.filter(pk=tenant.pk).update(timezone=ZONE.key)
    project = create_project(actor=TEST, tenant=tenant, name="Search")
    keys = [str(make_key(tenant, project=owner).api_key.public_id) for owner in (project, None)]
    dice = random.Random(6)
    events = []
    for number in range(300):
        at = int((START + timedelta(minutes=dice.randrange(60 * 24 * DAYS))).timestamp() * 1000)
        model = dice.choice(["a", "b", "vectors"])
        events.append(
            an_event(
                str(tenant.public_id),
                f"organization-{number}",
                model=model,
                # A batch's lines are known by their tier alone.
                tier=dice.choice(["standard", "batch"]),
                endpoint="batches",
                finish_reason=dice.choice(["stop", "stop", "cancelled"]),
                key_id=dice.choice([*keys, None]),
                prompt_tokens=dice.randrange(1, 5000),
                completion_tokens=0 if model == "vectors" else dice.randrange(1, 500),
                created_at_ms=at,
                finished_at_ms=at + 3000,
            )
        )
    record_usage(events)
    record_usage([an_event(str(other.public_id), "theirs", model="secret", created_at_ms=AT * 1000 + 1)])
    adjust_usage(actor=TEST, tenant=tenant, cost_microusd=-77, reason="test")
    secret = make_key(tenant, scopes=[Scope.USAGE_READ]).secret
    client = OpenAI(
        base_url=f"{site.url}/v1", api_key="none", admin_api_key=secret, max_retries=0, timeout=60
    )
    return SimpleNamespace(
        tenant=tenant,
        project=str(project.public_id),
        keys=keys,
        usage=client.admin.organization.usage,
        bearer={"Authorization": f"Bearer {secret}"},
        rows=list(UsageRecord.objects.for_tenant(tenant)),
    )


def pages_of(ask: Any, **given: Any) -> list[Any]:
    """Every bucket, page by page."""
    buckets, page = [], ask(**given)
    while page.has_more:
        buckets += page.data
        page = ask(**given, page=page.next_page)
    return buckets + list(page.data)


def test_days_are_the_tenants_and_add_up_to_the_ledger(used):
    span = {"start_time": AT + 5 * 3600, "end_time": AT + DAYS * DAY - 1, "limit": 4}
    texts = [row for row in used.rows if row.model != "vectors"]
    vectors = [row for row in used.rows if row.model == "vectors"]
    for ask, rows in ((used.usage.completions, texts), (used.usage.embeddings, vectors)):
        buckets = pages_of(ask, **span)
        assert [(each.start_time, each.end_time) for each in buckets] == [
            (AT + day * DAY, AT + (day + 1) * DAY) for day in range(DAYS)
        ]
        for bucket in buckets:
            of_day = [
                row for row in rows if bucket.start_time <= row.created_at.timestamp() < bucket.end_time
            ]
            (result,) = bucket.results
            assert result.num_model_requests == len(of_day)
            assert result.input_tokens == sum(row.prompt_tokens for row in of_day)
            if ask == used.usage.completions:
                assert result.output_tokens == sum(row.completion_tokens for row in of_day)
            assert (result.project_id, result.model, result.api_key_id) == (None, None, None)


def test_hours_groups_and_filters(used):
    span = {"start_time": AT, "end_time": AT + DAYS * DAY, "bucket_width": "1h", "limit": 100}
    grouped = pages_of(used.usage.completions, **span, group_by=["model", "api_key_id", "service_tier"])
    assert len(grouped) == DAYS * 24 + 1, "India's midnight is in the middle of UTC's hours"
    results = [result for bucket in grouped for result in bucket.results]
    assert {result.model for result in results} == {"a", "b"}
    assert {result.service_tier for result in results} == {"standard", "batch"}
    assert {result.api_key_id for result in results} == {*used.keys, None}
    only = pages_of(
        used.usage.completions,
        **span,
        models=["a", "vectors"],
        api_key_ids=[used.keys[0]],
        project_ids=[used.project],
    )
    wanted = [row for row in used.rows if row.model == "a" and str(row.key_public_id) == used.keys[0]]
    assert sum(result.num_model_requests for bucket in only for result in bucket.results) == len(wanted) > 0
    assert any(not bucket.results for bucket in only), "empty buckets are told too"


def test_costs_have_the_adjustments_in_them(used, http):
    now = int(datetime.now(UTC).timestamp())
    assert now > AT + DAYS * DAY
    given = {"start_time": AT, "limit": 180}
    total = sum(
        result.amount.value for bucket in pages_of(used.usage.costs, **given) for result in bucket.results
    )
    assert round(total * 1_000_000) == sum(row.cost_microusd for row in used.rows) - 77
    items = pages_of(used.usage.costs, **given, group_by=["line_item", "project_id"])
    found = {(result.line_item, result.project_id) for bucket in items for result in bucket.results}
    assert {("a", used.project), ("a", None), (None, None)} <= found
    one = pages_of(used.usage.costs, **given, extra_query={"line_items": ["a"]})
    assert round(sum(each.amount.value for bucket in one for each in bucket.results) * 1_000_000) == sum(
        row.cost_microusd for row in used.rows if row.model == "a"
    )


@pytest.mark.parametrize("width", Width)
def test_a_page_with_too_many_lines_has_fewer_buckets_and_never_half_of_one(used, monkeypatch, width):
    monkeypatch.setattr(usage_buckets, "_LINES_AT_ONCE", 3)
    zone = UTC if width is Width.HOUR else ZONE
    report = Report(
        used.tenant.pk,
        START.astimezone(UTC).replace(minute=0) if width is Width.HOUR else START,
        (START + timedelta(days=DAYS)).astimezone(zone),
        width,
        (Dimension.MODEL, Dimension.KEY, Dimension.TIER),
    )
    starts, requests, at = [], 0, report.since
    while True:
        page = bucket_page(Report(report.tenant_id, at, report.until, width, report.group_by), limit=31)
        assert page.buckets
        starts += [bucket.starts_at for bucket in page.buckets]
        requests += sum(line.requests for bucket in page.buckets for line in bucket.lines)
        if page.next_at is None:
            break
        at = page.next_at
    assert starts == sorted(set(starts))
    assert len(starts) == (DAYS * 24 + 1 if width is Width.HOUR else DAYS)
    assert requests == len(used.rows)


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        (COMPLETIONS, {}, "start_time"),
        (COMPLETIONS, {"start_time": "x"}, "start_time"),
        (COMPLETIONS, {"start_time": 5, "bucket_width": "1m"}, "bucket_width"),
        (COMPLETIONS, {"start_time": 5, "end_time": 5}, "end_time"),
        (COMPLETIONS, {"start_time": 5, "limit": 32}, "limit"),
        (EMBEDDINGS, {"start_time": 5, "limit": 169, "bucket_width": "1h"}, "limit"),
        (COMPLETIONS, {"start_time": 5, "group_by[]": "user_id"}, "group_by"),
        (COMPLETIONS, {"start_time": 5, "group_by": "batch"}, "group_by"),
        (COMPLETIONS, {"start_time": 5, "user_ids": "u"}, "user_ids"),
        (COMPLETIONS, {"start_time": 5, "project_ids": "mine"}, "project_ids"),
        (EMBEDDINGS, {"start_time": 5, "page": "page_7"}, "page"),
        (EMBEDDINGS, {"start_time": 5, "page": "x"}, "page"),
        ("organization/costs", {"start_time": 5, "bucket_width": "1h"}, "bucket_width"),
        ("organization/costs", {"start_time": 5, "limit": 181}, "limit"),
    ],
)
def test_what_will_not_do_is_named(http, path, given, param):
    bearer = {"Authorization": f"Bearer {make_key(scopes=[Scope.USAGE_READ]).secret}"}
    answer = http.get(path, params=given, headers=bearer)
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]["param"]
    assert said is not None
    assert said.startswith(param)
