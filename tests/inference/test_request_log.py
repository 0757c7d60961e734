"""The request log, one request's timeline, the usage page's filters and CSV, and where budgets end at this rate."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.urls import reverse
from django.utils import timezone

from inference import selectors
from inference.request_log import PAGE, Ending, Wanted, log_page
from tenants.models import Tenant
from tenants.principal import Calendar, LimitMetric
from tenants.quotas.gauges import forecast
from tenants.quotas.types import BucketState
from tenants.services import create_project
from tests.factories import TEST, Cast, a_budget, a_limit, make_key, make_tenant
from tests.inference.test_console import record, signed_in


def test_pages_of_the_log_hold_each_request_once(cast: Cast):
    moment = timezone.now()
    for number in range(2 * PAGE + 7):
        # Several share a moment: the page must not end between them.
        record(cast.tenant, created_at=moment - timedelta(seconds=number // 4), request_id=f"r{number}")
    record(cast.other_tenant, request_id="another's")
    seen: list[str] = []
    before, pages = "", 0
    while pages == 0 or before:
        page, before = log_page(cast.tenant, Wanted(), before=before)
        seen += [row.request_id for row in page]
        pages += 1
    assert pages == 3
    assert len(seen) == len(set(seen)) == 2 * PAGE + 7
    assert "another's" not in seen


def test_narrowed_pages_hold_each_request_once_however_rare(cast: Cast):
    """FAULTS 72: only the days that have some are read, and none of them twice."""
    noon = timezone.now().replace(hour=12)
    Tenant.objects.filter(pk=cast.tenant.pk).update(timezone="Pacific/Kiritimati")  # 14 hours ahead
    zone = ZoneInfo("Pacific/Kiritimati")
    wanted = 0
    for back in range(0, 400, 8):
        for number in range(1 + 5 * (back % 3)):
            at = noon - timedelta(days=back, minutes=37 * number)
            rare = number % 3 != 1
            wanted += rare
            record(
                cast.tenant, created_at=at, day=at.astimezone(zone).date(), model="rare" if rare else "other",
                request_id=f"{back}-{number}",
            )  # fmt: skip
    seen: list[str] = []
    before, pages = "", 0
    while pages == 0 or before:
        page, before = log_page(cast.tenant, Wanted(model="rare"), before=before)
        assert [row.created_at for row in page] == sorted((row.created_at for row in page), reverse=True)
        seen += [row.request_id for row in page]
        pages += 1
        assert pages < 20
    assert len(seen) == len(set(seen)) == wanted > 2 * PAGE
    assert log_page(cast.tenant, Wanted(model="never used")) == ([], "")
    assert len(log_page(cast.tenant, Wanted(model="rare", ending=Ending.FAILED))[0]) == 0


@pytest.mark.parametrize("before", ["x", "_1", "2026-01-01_1", "2026-01-01T00:00:00+00:00_x", "\0", "9" * 40])
def test_a_bad_cursor_begins_at_the_newest(cast: Cast, before: str):
    record(cast.tenant, request_id="here")
    answer = signed_in(cast.owner).get(reverse("requests", args=[cast.tenant.public_id]), {"before": before})
    assert b"/requests/here/" in answer.content


def test_the_log_is_narrowed_by_its_address(cast: Cast):
    key = make_key(cast.tenant, name="robot").api_key
    record(cast.tenant, request_id="good", model="a", key_public_id=key.public_id)
    record(cast.tenant, request_id="bad", model="b", finish_reason="error", error_code="engine_failed")
    record(cast.tenant, request_id="left", model="b", finish_reason="cancelled")
    client, url = signed_in(cast.owner), reverse("requests", args=[cast.tenant.public_id])

    def found(**query: object) -> set[str]:
        page = client.get(url, query).content.decode()
        return {name for name in ("good", "bad", "left") if f"/requests/{name}/" in page}

    assert found() == {"good", "bad", "left"}
    assert found(end="failed") == {"bad"}
    assert found(end="stopped") == {"left"}
    assert found(end="complete") == {"good"}
    assert found(model="b") == {"bad", "left"}
    assert found(key=str(key.public_id)) == {"good"}
    assert found(end="<script>", key="no key") == {"good", "bad", "left"}
    assert "None of that kind" in client.get(url, {"model": "c"}).content.decode()


def test_one_requests_timeline_is_its_tenants_alone(cast: Cast):
    finished = timezone.now()
    record(
        cast.tenant, request_id="req-1~2", finished_at=finished, created_at=finished - timedelta(seconds=9),
        claimed_at=finished - timedelta(seconds=7), first_token_at=finished - timedelta(seconds=6), attempts=2,
    )  # fmt: skip
    record(cast.tenant, request_id="never-ran", first_token_at=None, finish_reason="deadline")
    url = reverse("request", args=[cast.tenant.public_id, "req-1~2"])
    page = signed_in(cast.owner).get(url).content.decode()
    for words in ("after 2.0 s", "after 1.0 s", "after 6.0 s", "2 attempts"):
        assert words in page
    waited = signed_in(cast.owner).get(reverse("request", args=[cast.tenant.public_id, "never-ran"]))
    assert waited.content.decode().count("never") >= 2
    assert signed_in(cast.outsider).get(url).status_code == 404
    elsewhere = reverse("request", args=[cast.other_tenant.public_id, "req-1~2"])
    assert signed_in(cast.outsider).get(elsewhere).status_code == 404
    assert signed_in(cast.owner).get(url.replace("req-1", "req-2")).status_code == 404


def test_usage_by_model_key_and_project_as_page_and_csv(cast: Cast):
    key = make_key(cast.tenant).api_key
    project = create_project(actor=TEST, tenant=cast.tenant, name="Search")
    record(
        cast.tenant, model="=cmd()", key_public_id=key.public_id, project_public_id=project.public_id,
        prompt_tokens=3, cost_microusd=1_500_000,
    )  # fmt: skip
    record(cast.tenant, model="b", prompt_tokens=4)
    client = signed_in(cast.owner)
    url = reverse("usage_csv", args=[cast.tenant.public_id])

    def rows(**query: object) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(client.get(url, query).content.decode("utf-8-sig"))))

    assert {(row["model"], row["prompt_tokens"]) for row in rows()} == {("'=cmd()", "3"), ("b", "4")}
    (only,) = rows(key=str(key.public_id), days=7)
    assert (only["cost_usd"], only["day"]) == ("1.500000", str(selectors.today_of(cast.tenant)))
    assert [row["model"] for row in rows(model="b")] == ["b"]
    assert rows(project=str(project.public_id)) == rows(key=str(key.public_id)) == [only]
    assert rows(project=str(project.public_id), model="b") == []
    page = client.get(reverse("usage", args=[cast.tenant.public_id]), {"project": project.public_id})
    assert f'value="{project.public_id}" selected' in page.content.decode()
    page = client.get(reverse("usage", args=[cast.tenant.public_id]), {"model": "b"}).content.decode()
    assert 'id="usage-data"' in page
    assert "model=b" in page


def test_how_the_month_goes(cast: Cast):
    now = timezone.now()
    for number in range(4):
        record(
            cast.tenant, finish_reason="error" if number == 0 else "stop", created_at=now - timedelta(seconds=1),
            first_token_at=now - timedelta(seconds=1) + timedelta(milliseconds=100), finished_at=now,
        )  # fmt: skip
    health = selectors.month_health(cast.tenant)
    assert health.failed_percent == 25
    assert health.ttft_p50_ms == pytest.approx(100, rel=0.06)
    assert selectors.month_health(cast.other_tenant).failed_percent is None


def test_where_a_budget_ends_at_this_rate(db: None):
    tenant = make_tenant()
    month = a_budget(LimitMetric.COST, 1000, calendar=Calendar.MONTH)
    states = (BucketState(month, 600, 0), BucketState(a_limit(LimitMetric.REQUESTS, 9), 4, 0))
    noon = datetime(2026, 11, 16, tzinfo=UTC)  # half of November
    budget, rate = forecast(states, tenant, noon) or []
    assert (budget.at_this_rate, budget.will_not_do, rate.at_this_rate) == (800, False, None)
    budget, _ = forecast((BucketState(month, 400, 0), states[1]), tenant, noon) or []
    assert (budget.at_this_rate, budget.will_not_do) == (1200, True)
    budget, _ = forecast(states, tenant, datetime(2026, 11, 1, 1, tzinfo=UTC)) or []
    assert budget.at_this_rate is None
    assert forecast(None, tenant) is None


def test_of_very_many_keys_some_are_offered_and_the_chosen_one_is(cast: Cast):
    keys = [make_key(cast.tenant, name=f"key {number:03}").api_key for number in range(310)]
    for key in keys:
        record(cast.tenant, key_public_id=key.public_id)
    client = signed_in(cast.owner)
    last = str(keys[-1].public_id)
    limit = {"metric": "requests", "amount": 1, "per": "60", "days": 1}
    for asked, offered in (({}, 300), ({"key": last}, 301)):
        for name, page in (("usage", asked), ("try_limit", asked | limit)):
            html = client.get(reverse(name, args=[cast.tenant.public_id]), page).content.decode()
            assert html.count(">key ") == offered, name
            assert (f'<option value="{last}" selected>' in html) == bool(asked), name
