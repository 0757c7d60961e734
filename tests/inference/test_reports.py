"""Reports: every grouping adds up to the ledger, every page follows the one before, nothing of another tenant."""

from __future__ import annotations

import math
import random
import re
from datetime import UTC, datetime, timedelta
from itertools import combinations

import pytest

from inference.models import LatencyMetric, UsageRecord
from inference.reports import SHARES, BadCursor, Dimension, Report, Width, usage_page
from inference.services.ledger import adjust_usage, record_usage
from inference.services.reconcile import ledger_differences
from tenants.models import ModelPrice, Tenant
from tenants.principal import Scope
from tenants.services import create_project
from tests.factories import TEST, make_key, make_tenant
from tests.inference.ledger_driving import an_event

pytestmark = pytest.mark.django_db(transaction=True)
START = datetime(2026, 9, 1, tzinfo=UTC)
MS = timedelta(milliseconds=1)
ENDED_WELL = ("stop", "length")


@pytest.fixture
def tenant() -> Tenant:
    ModelPrice.objects.create(
        model="a",
        valid_from=START,
        input_microusd_per_mtok=150_001,
        cached_input_microusd_per_mtok=75_000,
        output_microusd_per_mtok=600_003,
    )
    tenant, other = make_tenant(), make_tenant()
    project = create_project(actor=TEST, tenant=tenant, name="Search")
    keys = [str(make_key(tenant, project=owner).api_key.public_id) for owner in (project, None)]
    dice = random.Random(5)
    events = []
    for i in range(400):
        at = int((START + timedelta(minutes=dice.randrange(60 * 24 * 6))).timestamp() * 1000)
        events.append(
            an_event(
                str(tenant.public_id),
                f"report-{i}",
                model=dice.choice(["a", "b"]),
                tier=dice.choice(["standard", "batch"]),
                finish_reason=dice.choice(["stop", "length", "cancelled", "error"]),
                key_id=dice.choice([*keys, None]),
                prompt_tokens=dice.randrange(1, 5000),
                completion_tokens=dice.randrange(500),
                created_at_ms=at,
                first_token_at_ms=at + dice.randrange(20, 3000),
                finished_at_ms=at + 3000 + dice.randrange(9000),
            )
        )
    record_usage(events)
    record_usage(
        [an_event(str(other.public_id), "theirs", model="secret", created_at_ms=events[0].created_at_ms)]
    )
    return tenant


def lines_of(report: Report, limit: int):
    cursor, lines = None, []
    while True:
        page = usage_page(report, limit=limit, cursor=cursor)
        assert len(page.lines) <= limit
        lines += page.lines
        if page.next_cursor is None:
            return lines
        cursor = page.next_cursor


def a_report(tenant: Tenant, **given) -> Report:
    return Report(**{"tenant_id": tenant.pk, "since": START, "until": START + timedelta(days=365), **given})


@pytest.mark.parametrize("width", Width)
@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_every_grouping_adds_up_to_the_ledger(tenant, width, depth):
    """FAULTS 64."""
    adjust_usage(actor=TEST, tenant=tenant, cost_microusd=-77, reason="test")
    rows = list(UsageRecord.objects.for_tenant(tenant))
    cost = sum(row.cost_microusd for row in rows)
    for group_by in combinations(Dimension, depth):
        lines = lines_of(a_report(tenant, width=width, group_by=group_by), limit=7)
        assert sum(line.requests for line in lines) == len(rows)
        assert sum(line.prompt_tokens for line in lines) == sum(row.prompt_tokens for row in rows)
        assert sum(line.completion_tokens for line in lines) == sum(row.completion_tokens for row in rows)
        assert sum(line.total_microusd for line in lines) == cost - 77
        keys = [(line.starts, *line.groups.values()) for line in lines]
        assert keys == sorted(keys)
        assert len(set(keys)) == len(keys)
        assert "secret" not in str(lines)


def test_what_asks_for_no_key_reads_no_row_of_a_key(tenant, django_assert_max_num_queries):
    """A thousand keys make a thousand times as many rows: only what is grouped or narrowed by them reads those."""
    key = str(UsageRecord.objects.for_tenant(tenant).exclude(key_public_id=None)[0].key_public_id)
    of_keys = {
        "by key": a_report(tenant, group_by=(Dimension.KEY,)),
        "of a key": a_report(tenant, filters={Dimension.KEY: [key]}),
        "by project": a_report(tenant, group_by=(Dimension.MODEL, Dimension.PROJECT)),
    }
    others = {
        "all": a_report(tenant),
        "by model": a_report(tenant, width=Width.HOUR, group_by=(Dimension.MODEL, Dimension.FINISH_REASON)),
        "of a tier": a_report(tenant, filters={Dimension.TIER: ["batch"]}),
    }
    for name, report in (of_keys | others).items():
        with django_assert_max_num_queries(4) as asked:
            assert usage_page(report, limit=10).lines
        of_key = [re.search(r"inference_usage(day|hour)\W", each["sql"]) for each in asked.captured_queries]
        assert any(of_key) == (name in of_keys), name


def percentiles_of(rows: list[UsageRecord], metric: LatencyMetric) -> list[float | None]:
    """Directly, of the ledger's rows themselves."""
    if metric is LatencyMetric.TTFT:
        times = [(row.first_token_at - row.created_at) / MS for row in rows if row.first_token_at]
    else:
        times = [(row.finished_at - row.created_at) / MS for row in rows if row.finish_reason in ENDED_WELL]
    times.sort()
    return [times[math.ceil(share * len(times)) - 1] if times else None for share in SHARES]


@pytest.mark.parametrize("width", Width)
@pytest.mark.parametrize(
    "group_by",
    [(), (Dimension.MODEL, Dimension.KEY), (Dimension.FINISH_REASON,), (Dimension.TIER, Dimension.PROJECT)],
    ids=str,
)
def test_percentiles_are_those_of_the_rows(tenant, width, group_by):
    """Of any grouping, hours and finish reasons too, within a histogram's bound; adjustments change none."""
    adjust_usage(actor=TEST, tenant=tenant, cost_microusd=-77, reason="test")
    columns = {Dimension.PROJECT: "project_public_id", Dimension.KEY: "key_public_id"}
    rows: dict[tuple[object, ...], list[UsageRecord]] = {}
    for row in UsageRecord.objects.for_tenant(tenant):
        starts = row.day if width is Width.DAY else row.created_at.replace(minute=0, second=0, microsecond=0)
        groups = [str(getattr(row, columns.get(each, each)) or "") for each in group_by]
        rows.setdefault((starts, *groups), []).append(row)
    lines = lines_of(a_report(tenant, width=width, group_by=group_by), limit=1000)
    assert len(lines) == len(rows) + 1  # the adjustment's own
    for line in lines:
        of_line = rows.get((line.starts, *line.groups.values()), [])
        for metric in LatencyMetric:
            expected = [each and pytest.approx(each, rel=0.05) for each in percentiles_of(of_line, metric)]
            assert list(line.latency_ms[metric]) == expected


def test_late_rows_count_and_repeated_ones_do_not(tenant):
    """A stream that is drained again, and one whose rows come days afterwards, in whatever batches."""
    report = a_report(tenant, width=Width.HOUR, group_by=(Dimension.MODEL,))
    rows = list(UsageRecord.objects.for_tenant(tenant).order_by("created_at", "id"))
    told = lines_of(report, limit=1000)
    again = [
        an_event(
            str(tenant.public_id),
            row.request_id,
            created_at_ms=int(row.created_at.timestamp() * 1000),
            finished_at_ms=int(row.finished_at.timestamp() * 1000) + 60_000,
        )
        for row in rows
    ]
    record_usage(again)
    record_usage(again[::-1])
    assert lines_of(report, limit=1000) == told
    first = rows[0]
    at = int(first.created_at.timestamp() * 1000)
    late = {"model": first.model, "created_at_ms": at, "first_token_at_ms": at + 600_000}
    for number in range(3):
        record_usage([an_event(str(tenant.public_id), f"late-{number}", **late, finished_at_ms=at + 700_000)])
    (line,) = [
        line
        for line in lines_of(report, limit=1000)
        if line.starts == first.created_at.replace(minute=0, second=0, microsecond=0)
        and line.groups[Dimension.MODEL] == first.model
    ]
    assert line.latency_ms[LatencyMetric.TTFT][-1] == pytest.approx(600_000, rel=0.05)
    assert line.latency_ms[LatencyMetric.TOTAL][-1] == pytest.approx(700_000, rel=0.05)
    assert ledger_differences() == []


def test_a_cursor_of_another_report_or_of_nobody_is_refused(tenant):
    report = a_report(tenant, group_by=(Dimension.MODEL,))
    cursor = usage_page(report, limit=1).next_cursor
    for bad in ("", "x", "AAAA", "e30", cursor[:-3], "W10", "bnVsbA"):
        with pytest.raises(BadCursor):
            usage_page(report, limit=1, cursor=bad)
    with pytest.raises(BadCursor):
        usage_page(a_report(tenant), limit=1, cursor=cursor)


def test_a_page_takes_two_queries(tenant, django_assert_num_queries):
    """FAULTS 73."""
    report = a_report(tenant, group_by=(Dimension.MODEL, Dimension.KEY))
    with django_assert_num_queries(2):
        usage_page(report, limit=5)


def test_over_http(http, tenant):
    bearer = {"Authorization": f"Bearer {make_key(tenant, scopes=[Scope.USAGE_READ]).secret}"}
    asked = {"start": "2026-09-01", "end": "2027-01-01", "group_by": "model,project", "limit": "5"}
    first = http.get("usage", params=asked, headers=bearer).json()
    assert (first["object"], len(first["data"]), first["has_more"]) == ("page", 5, True)
    line = first["data"][0]
    assert line.keys() >= {
        "start",
        "model",
        "project",
        "requests",
        "input_tokens",
        "ttft_ms",
        "total_microusd",
    }
    assert line["start"] == "2026-09-01"
    second = http.get("usage", params={**asked, "page": first["next_page"]}, headers=bearer).json()
    assert second["data"][0] not in first["data"]
    costs = http.get(
        "usage/costs", params={"start": "2026-09-01", "end": "2027-01-01"}, headers=bearer
    ).json()
    rows = UsageRecord.objects.for_tenant(tenant)
    assert sum(each["total_microusd"] for each in costs["data"]) == sum(row.cost_microusd for row in rows)
    only = http.get("usage", params={**asked, "model": "b", "bucket_width": "1h"}, headers=bearer).json()
    assert {each["model"] for each in only["data"]} == {"b"}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"group_by": "user"}, "group_by"),
        ({"bucket_width": "1m"}, "bucket_width"),
        ({"limit": "0"}, "limit"),
        ({"limit": "²"}, "limit"),
        ({"start": "yesterday"}, "start"),
        ({"start": "9" * 30}, "start"),
        ({"start": "2026-02-01", "end": "2026-01-01"}, "start"),
        ({"page": "x"}, "page"),
        ({"key": "mine"}, "key"),
        ({"model": "\x00"}, "model"),
        ({"modle": "x"}, "modle"),
    ],
)
def test_what_will_not_do_is_named(http, given, param):
    bearer = {"Authorization": f"Bearer {make_key(scopes=[Scope.USAGE_READ]).secret}"}
    answer = http.get("usage", params=given, headers=bearer)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
