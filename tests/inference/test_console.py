"""The tenant's pages: access, figures from the ledger, limits, and a bounded number of queries."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from uuid import uuid4

import pytest
from django.test import Client, override_settings
from django.urls import reverse
from django.utils import timezone

from inference import selectors
from inference.charts import chart_of_ranks, days_back
from inference.models import UsageRecord
from inference.ranking import Measure, ranking
from inference.reports import Dimension
from inference.request_log import Wanted
from inference.services.partitions import ensure_partitions
from tenants.models import Role, Tenant
from tenants.principal import LimitMetric
from tenants.services import add_member, create_project, suspend_tenant
from tests.factories import TEST, Cast, make_key, make_tenant, make_user, set_limit, signed_in

PAGES = ["overview", "limits", "usage", "usage_csv", "requests", "chat", "conversations", "keys"]
_ids = count(1)


def record(tenant: Tenant, **values: object) -> UsageRecord:
    finished = values.pop("finished_at", timezone.now())
    assert isinstance(finished, datetime)
    defaults: dict[str, object] = {
        "request_id": f"console-{next(_ids)}",
        "model": "m",
        "tier": "standard",
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "created_at": finished - timedelta(seconds=2),
        "first_token_at": finished - timedelta(seconds=1),
        "finished_at": finished,
    }
    row = UsageRecord(tenant=tenant, **{**defaults, **values})
    row.day = row.created_at.astimezone(tenant.zone).date()
    ensure_partitions([row.created_at.date()])
    row.save()
    return row


@pytest.mark.parametrize("page", PAGES)
def test_who_sees_a_tenants_page(cast: Cast, page: str):
    url = reverse(page, args=[cast.tenant.public_id])
    viewer = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=viewer, role=Role.VIEWER)
    for user in (cast.owner, cast.member, viewer):
        answer = signed_in(user).get(url)
        assert answer.status_code == 200
        assert answer.headers["Cache-Control"] == "no-store"
    for user in (cast.outsider, cast.operator, make_user()):
        answer = signed_in(user).get(url)
        assert answer.status_code == 404
        assert cast.tenant.name.encode() not in answer.content
    answer = Client().get(url)
    assert answer.status_code == 302
    assert answer.headers["Location"] == f"/login/?next={url}"
    assert signed_in(cast.owner).get(reverse(page, args=[uuid4()])).status_code == 404


@pytest.mark.parametrize(
    "page", ["overview", "limits", "usage", "usage_csv", "requests", "chat", "conversations"]
)
def test_pages_that_only_read_refuse_a_post(cast: Cast, page: str):
    assert signed_in(cast.owner).post(reverse(page, args=[cast.tenant.public_id])).status_code == 405


def test_home_leads_to_the_tenant_looked_at_last(cast: Cast):
    second = make_tenant(owner=cast.owner)
    client = signed_in(cast.owner)
    assert client.get("/").status_code == 302
    client.get(reverse("overview", args=[second.public_id]))
    assert client.get("/").headers["Location"] == reverse("overview", args=[second.public_id])


def test_the_printed_chat_address_leads_to_the_chat(cast: Cast):
    answer = signed_in(cast.owner).get("/chat/")
    assert answer.headers["Location"] == reverse("chat", args=[cast.tenant.public_id])
    assert Client().get("/chat/").headers["Location"] == "/login/?next=/chat/"
    assert signed_in(make_user()).get("/chat/").headers["Location"] == "/"


def test_home_of_somebody_without_a_tenant_says_what_to_do(db: None):
    person = make_user()
    answer = signed_in(person).get("/")
    assert person.email.encode() in answer.content
    assert b"belong to no tenant" in answer.content


def test_the_switcher_lists_only_ones_own_tenants(cast: Cast):
    second = make_tenant("Second of mine", owner=cast.owner)
    page = signed_in(cast.owner).get(reverse("overview", args=[cast.tenant.public_id])).content.decode()
    assert reverse("overview", args=[second.public_id]) in page
    assert str(cast.other_tenant.public_id) not in page


def test_overview_counts_only_this_tenants_rows(cast: Cast):
    record(cast.tenant, prompt_tokens=1000, completion_tokens=234)
    record(cast.other_tenant, prompt_tokens=777_777)
    page = signed_in(cast.owner).get(reverse("overview", args=[cast.tenant.public_id])).content.decode()
    assert "1,234" in page
    assert "777,777" not in page


def test_today_and_this_month_begin_at_midnight_utc(cast: Cast):
    now = datetime(2026, 3, 15, 12, tzinfo=UTC)
    midnight = datetime(2026, 3, 15, tzinfo=UTC)
    first = datetime(2026, 3, 1, tzinfo=UTC)
    moment = timedelta(microseconds=1)
    for accepted in (first - moment, first, midnight - moment, midnight, now):
        record(cast.tenant, created_at=accepted, finished_at=accepted + timedelta(seconds=2))
    today, month = selectors.today_and_this_month(cast.tenant, now)
    assert (today.requests, today.prompt_tokens, today.completion_tokens) == (2, 20, 10)
    assert (month.requests, month.total_tokens) == (4, 60)


def test_usage_by_day_and_model_adds_up(cast: Cast):
    now = datetime(2026, 3, 15, 12, tzinfo=UTC)
    record(cast.tenant, finished_at=now, model="a")
    record(cast.tenant, finished_at=now, model="b", completion_tokens=100)
    record(cast.tenant, finished_at=now, model="b", finish_reason="error", completion_tokens=0)
    record(cast.tenant, finished_at=now - timedelta(days=6), model="a")
    record(cast.tenant, finished_at=now - timedelta(days=7), model="a")
    record(cast.other_tenant, finished_at=now, model="a")
    rows = selectors.usage_by_day_and_model(cast.tenant, days=7, now=now)
    assert [(row.day.day, row.model, row.requests, row.failed) for row in rows] == [
        (15, "b", 2, 1),
        (15, "a", 1, 0),
        (9, "a", 1, 0),
    ]
    together = selectors.total(rows)
    assert (together.requests, together.prompt_tokens, together.completion_tokens) == (4, 40, 110)


@pytest.fixture
def two_projects(cast: Cast) -> tuple[str, str]:
    """The public ids of the key and of the project that used most: `big` 900 tokens, `small` 60, and the chat 15."""
    project = create_project(actor=TEST, tenant=cast.tenant, name="Support")
    big = make_key(cast.tenant, name="big", project=project).api_key
    small = make_key(cast.tenant, name="<b>small</b>").api_key
    for _ in range(3):
        record(
            cast.tenant, key_public_id=big.public_id, project_public_id=project.public_id, prompt_tokens=295,
            cost_microusd=1, model="b",
        )  # fmt: skip
    record(
        cast.tenant, key_public_id=small.public_id, prompt_tokens=55, cost_microusd=9, finish_reason="error"
    )
    record(cast.tenant)
    record(cast.other_tenant, prompt_tokens=777_777)
    return str(big.public_id), str(project.public_id)


def ranks(cast: Cast, **asked: str) -> list[tuple[str, int, int, int]]:
    answer = signed_in(cast.owner).get(reverse("usage", args=[cast.tenant.public_id]), asked)
    return [
        (rank.name, rank.requests, rank.failed, rank.total_tokens) for rank, *_ in answer.context["ranks"]
    ]


def test_usage_is_ranked_by_key_project_and_model(cast: Cast, two_projects: tuple[str, str]):
    key, project = two_projects
    small, chat = ("<b>small</b>", 1, 1, 60), ("Without a key: the chat", 1, 0, 15)
    assert ranks(cast, by="key") == [("big", 3, 0, 900), small, chat]
    assert ranks(cast, by="key", rank="cost")[0] == small
    assert ranks(cast, by="project") == [("Support", 3, 0, 900), ("Without a project", 2, 1, 75)]
    assert ranks(cast, by="model") == [("b", 3, 0, 900), ("m", 2, 1, 75)]
    assert ranks(cast, by="key", model="m") == [small, chat]
    assert ranks(cast, by="key", project=project) == [("big", 3, 0, 900)]
    assert ranks(cast, by="model", key=key) == [("b", 3, 0, 900)]
    page = signed_in(cast.owner).get(reverse("usage", args=[cast.tenant.public_id]), {"by": "key"})
    assert f"by=day&amp;rank=tokens&amp;key={key}" in page.content.decode()
    assert "<b>small" not in page.content.decode()
    for odd in ("tier", "0", "\0"):
        assert signed_in(cast.owner).get(page.request["PATH_INFO"], {"by": odd}).context["ranking"] is None


def test_beyond_the_first_ones_the_others_are_told_together(cast: Cast, two_projects: tuple[str, str]):
    every = selectors.usage_by_day_and_model(cast.tenant, days=7)
    found = ranking(
        cast.tenant, every, Dimension.KEY, Measure.TOKENS, days=7, wanted=Wanted(), limit=1, drawn=1
    )
    assert [rank.name for rank in found.first] == ["big"]
    assert found.number_of_others == 2
    assert found.others is not None
    assert (found.others.requests, found.others.failed, found.others.total_tokens) == (2, 1, 75)
    assert found.others.cost_microusd == 9
    today = selectors.today_of(cast.tenant)
    drawn = chart_of_ranks(every, found.first, days_back(today, 7))
    assert [(line["label"], sum(line["values"]), line["rest"]) for line in drawn["tokens"]] == [
        ("big", 900, False),
        ("Others", 75, True),
    ]
    assert len(drawn["days"]) == 7


def test_a_ranking_as_csv(cast: Cast, two_projects: tuple[str, str]):
    answer = signed_in(cast.owner).get(
        reverse("usage_csv", args=[cast.tenant.public_id]), {"by": "project", "days": "7"}
    )
    header, first, second = answer.content.decode("utf-8-sig").splitlines()
    assert header == "project,name,requests,failed,prompt_tokens,completion_tokens,cost_usd"
    assert first == f"{two_projects[1]},Support,3,0,885,15,0.000003"
    assert second == ",Without a project,2,1,65,10,0.000009"
    assert "7d-by-project.csv" in answer.headers["Content-Disposition"]


@pytest.mark.parametrize("days", ["7", "30", "90", "0", "-1", "many", "100000000000000000000", "²"])
def test_usage_takes_any_span_from_the_url_and_uses_only_known_ones(cast: Cast, days: str):
    record(cast.tenant)
    answer = signed_in(cast.owner).get(reverse("usage", args=[cast.tenant.public_id]), {"days": days})
    assert answer.status_code == 200
    assert answer.context["days"] in {7, 30, 90}


def test_limits_show_what_is_left(cast: Cast):
    set_limit(cast.tenant, LimitMetric.REQUESTS, 61)
    page = signed_in(cast.owner).get(reverse("overview", args=[cast.tenant.public_id])).content.decode()
    assert "Requests per minute" in page
    assert "61 of 61" in page


@override_settings(REDIS_URL="redis://127.0.0.1:1/0")
def test_without_redis_the_overview_still_shows_the_ledger(cast: Cast):
    record(cast.tenant, prompt_tokens=1000, completion_tokens=234)
    set_limit(cast.tenant, LimitMetric.REQUESTS, 61)
    answer = signed_in(cast.owner).get(reverse("overview", args=[cast.tenant.public_id]))
    assert b"1,234" in answer.content
    assert b"Requests are refused until they can" in answer.content


def test_a_suspended_tenant_is_told_why(cast: Cast):
    suspend_tenant(actor=TEST, tenant=cast.tenant, reason="The invoice of March is open")
    page = signed_in(cast.owner).get(reverse("overview", args=[cast.tenant.public_id])).content.decode()
    assert "The invoice of March is open" in page


def test_a_viewer_is_told_that_chatting_is_not_theirs(cast: Cast):
    viewer = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=viewer, role=Role.VIEWER)
    page = signed_in(viewer).get(reverse("chat", args=[cast.tenant.public_id])).content.decode()
    assert "can look, but not chat" in page


def test_only_operators_are_offered_the_admin(cast: Cast):
    add_member(actor=TEST, tenant=cast.tenant, user=cast.operator, role=Role.VIEWER)
    url = reverse("overview", args=[cast.tenant.public_id])
    assert b"Operator admin" in signed_in(cast.operator).get(url).content
    assert b"Operator admin" not in signed_in(cast.owner).get(url).content


def test_names_from_people_are_text(cast: Cast):
    hostile = make_tenant("<script>alert(1)</script>", owner=cast.owner)
    record(hostile, model="<b>model</b>", error_code="<i>", finish_reason="error")
    page = signed_in(cast.owner).get(reverse("overview", args=[hostile.public_id])).content.decode()
    assert "<script>alert" not in page
    assert "<b>model" not in page
    assert "<i>" not in page


@pytest.mark.parametrize(
    ("page", "bound"),
    [("overview", 13), ("usage", 10), ("usage?by=key", 13), ("requests", 10), ("chat", 10)],
)
def test_queries_do_not_grow_with_the_tenant(
    cast: Cast, page: str, bound: int, django_assert_max_num_queries, django_assert_num_queries
):
    def grow(keys: int, requests: int) -> None:
        made = [make_key(cast.tenant).api_key for _ in range(keys)]
        for number in range(requests):
            record(cast.tenant, key_public_id=made[number % keys].public_id)
        make_tenant(owner=cast.owner)

    grow(keys=1, requests=1)
    client = signed_in(cast.owner)
    name, _, query = page.partition("?")
    url = f"{reverse(name, args=[cast.tenant.public_id])}?{query}"
    client.get(url)
    with django_assert_max_num_queries(bound) as small:
        assert client.get(url).status_code == 200
    grow(keys=5, requests=25)
    with django_assert_num_queries(len(small)):
        assert client.get(url).status_code == 200
