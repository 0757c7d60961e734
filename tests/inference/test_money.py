"""Prices, roll-ups, adjustments, partitions: what was used costs the same wherever it is read."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from itertools import count

import pytest
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db import DatabaseError, IntegrityError, connection, connections, transaction
from django.db.models import F, Sum
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_worker.protocol import UsageEvent
from inference import selectors
from inference.models import (
    RecordedRequest,
    UsageAdjustment,
    UsageDay,
    UsageDayOfKey,
    UsageDayTotal,
    UsageHour,
    UsageHourTotal,
    UsageRecord,
    percentiles_ms,
)
from inference.services.ledger import adjust_usage, record_usage
from inference.services.partitions import (
    drop_old_months,
    drop_partitions_before,
    make_partitions_ahead,
    partition_months,
)
from inference.services.reconcile import ledger_differences
from tenants.models import AuditEntry, ModelPrice, Tenant
from tenants.pricing import Price, price_at
from tenants.services import set_model_price
from tests.factories import TEST, make_tenant
from tests.inference.ledger_driving import an_event

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)
_ids = count(1)


@pytest.fixture
def tenant() -> Tenant:
    return make_tenant()


def ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def used(tenant: Tenant, at: datetime, **given: object) -> UsageEvent:
    given = {"finished_at_ms": ms(at) + 1500, **given}
    return an_event(str(tenant.public_id), f"money-{next(_ids)}", created_at_ms=ms(at), **given)


def price(model: str, at: datetime, *amounts: int) -> None:
    names = ("input_microusd_per_mtok", "cached_input_microusd_per_mtok", "output_microusd_per_mtok")
    ModelPrice.objects.create(model=model, valid_from=at, **dict(zip(names, amounts, strict=True)))


def a_price(*amounts: int, at: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> Price:
    return Price("p", at, *amounts)


def test_cost_counts_each_direction_and_rounds_once():
    dear = a_price(150_000, 75_000, 600_000)
    assert dear.cost_microusd(prompt_tokens=1000, cached_tokens=400, completion_tokens=100) == 90 + 30 + 60
    # 0.15 + 0.15 of a micro-USD is 0.3, not 0 + 0 nor 1 + 1; half is rounded up.
    assert (
        a_price(150_000, 0, 150_000).cost_microusd(prompt_tokens=1, cached_tokens=0, completion_tokens=1) == 0
    )
    assert (
        a_price(250_000, 0, 250_000).cost_microusd(prompt_tokens=1, cached_tokens=0, completion_tokens=1) == 1
    )


def test_the_price_of_a_moment_is_the_last_that_began():
    first, second = a_price(1, 1, 1), a_price(2, 2, 2, at=datetime(2026, 2, 1, tzinfo=UTC))
    assert price_at([second, first], datetime(2025, 12, 31, tzinfo=UTC)) is None
    assert price_at([second, first], datetime(2026, 1, 31, 23, 59, tzinfo=UTC)) is first
    assert price_at([second, first], datetime(2026, 2, 1, tzinfo=UTC)) is second


def test_a_row_keeps_the_price_at_which_it_was_accepted(tenant):
    changes = datetime(2026, 6, 1, tzinfo=UTC)
    price("tiny", changes - timedelta(days=100), 1_000_000, 500_000, 2_000_000)
    price("tiny", changes, 3_000_000, 0, 3_000_000)
    before, after = (
        used(
            tenant,
            at,
            prompt_tokens=10,
            cached_tokens=4,
            completion_tokens=5,
            finished_at_ms=ms(changes) + 5000,
        )
        for at in (changes - timedelta(seconds=1), changes)
    )
    unpriced = used(tenant, changes, model="free")
    record_usage([before, after, unpriced])
    costs = {row.request_id: row.cost_microusd for row in UsageRecord.objects.for_tenant(tenant)}
    assert costs == {before.request_id: 6 + 2 + 10, after.request_id: 18 + 15, unpriced.request_id: 0}
    assert UsageRecord.objects.get(tenant=tenant, request_id=unpriced.request_id).price_public_id is None


def test_a_price_in_force_never_changes(tenant):
    set_model_price(actor=TEST, model="m", input_microusd_per_mtok=5, output_microusd_per_mtok=7)
    now = ModelPrice.objects.get(model="m")
    assert now.cached_input_microusd_per_mtok == 5
    with pytest.raises(DatabaseError, match="never changed"), transaction.atomic():
        ModelPrice.objects.update(input_microusd_per_mtok=0)
    with pytest.raises(DatabaseError, match="never changed"), transaction.atomic():
        now.delete()
    with pytest.raises(ValidationError, match="has passed"):
        set_model_price(
            actor=TEST,
            model="m",
            input_microusd_per_mtok=1,
            output_microusd_per_mtok=1,
            valid_from=timezone.now() - timedelta(days=1),
        )
    later = set_model_price(
        actor=TEST,
        model="m",
        input_microusd_per_mtok=1,
        output_microusd_per_mtok=1,
        valid_from=timezone.now() + timedelta(days=1),
    )
    later.delete()
    assert AuditEntry.unscoped.filter(action="price.set").count() == 2


@pytest.mark.parametrize(
    ("given", "prompt_tokens"),
    [
        ({"finish_reason": "error", "completion_tokens": 0}, 0),
        ({"finish_reason": "error", "completion_tokens": 1}, 10),
        ({"finish_reason": "cancelled", "completion_tokens": 0}, 10),
        ({"finish_reason": "stop", "completion_tokens": 0}, 10),
    ],
)
def test_what_failed_before_its_first_token_costs_nothing(tenant, given, prompt_tokens):
    """FAULTS 62."""
    price("tiny", datetime(2026, 1, 1, tzinfo=UTC), 1_000_000, 1_000_000, 1_000_000)
    record_usage([used(tenant, datetime(2026, 6, 1, tzinfo=UTC), cached_tokens=4, **given)])
    row = UsageRecord.objects.for_tenant(tenant).get()
    assert (row.prompt_tokens, row.cost_microusd) == (prompt_tokens, prompt_tokens + row.completion_tokens)


def test_a_day_is_the_tenants_own_daylight_saving_included():
    berlin = make_tenant()
    Tenant.objects.filter(pk=berlin.pk).update(timezone="Europe/Berlin")
    # Midnight is 22:00 UTC in summer, 23:00 in winter; the clocks turn back on 25 October 2026.
    for at in ["2026-10-24T21:59:59", "2026-10-24T22:00:00", "2026-10-25T22:59:59", "2026-10-25T23:00:00"]:
        record_usage([used(berlin, datetime.fromisoformat(at).replace(tzinfo=UTC))])
    days = UsageDay.objects.for_tenant(berlin).order_by("day").values_list("day", "requests")
    assert list(days) == [(date(2026, 10, 24), 1), (date(2026, 10, 25), 2), (date(2026, 10, 26), 1)]
    assert UsageHour.objects.for_tenant(berlin).count() == 4


def test_an_adjustment_is_a_new_row_with_a_reason_and_an_actor(tenant):
    now = timezone.now()
    price("tiny", now - timedelta(days=1), 1_000_000, 1_000_000, 1_000_000)
    record_usage([used(tenant, now)])
    row = UsageRecord.objects.for_tenant(tenant).get()
    with pytest.raises(ValidationError):
        adjust_usage(actor=TEST, tenant=tenant, cost_microusd=-5, reason=" ", request=row)
    with pytest.raises(ValueError, match="another tenant"):
        adjust_usage(actor=TEST, tenant=make_tenant(), cost_microusd=-5, reason="no", request=row)
    made = adjust_usage(actor=TEST, tenant=tenant, cost_microusd=-5, reason="Engine was slow", request=row)
    assert (made.model, made.request_id, made.actor_label) == ("tiny", row.request_id, "tests")
    _, month = selectors.today_and_this_month(tenant)
    assert (month.requests, month.cost_microusd) == (1, 10)
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        UsageAdjustment.objects.for_tenant(tenant).update(cost_microusd=0)
    assert AuditEntry.objects.filter(tenant=tenant, action="usage.adjusted").exists()
    assert ledger_differences() == []


@st.composite
def usage(draw: st.DrawFn) -> dict[str, object]:
    prompt = draw(st.integers(0, 2**31 - 1))
    return {
        "model": draw(st.sampled_from(["tiny", "large", "free"])),
        "tier": draw(st.sampled_from(["standard", "batch"])),
        "finish_reason": draw(st.sampled_from(["stop", "length", "cancelled", "error", "deadline"])),
        "prompt_tokens": prompt,
        "cached_tokens": draw(st.integers(0, prompt)),
        "completion_tokens": draw(st.integers(0, 2**31 - 1)),
        "key_id": draw(st.sampled_from([None, "0197e5a0-0000-7000-8000-000000000001"])),
        "first_token_at_ms": draw(st.one_of(st.none(), st.just(1_790_000_000_000))),
    }


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    events=st.lists(st.tuples(usage(), st.integers(0, 60 * 24 * 70)), min_size=1, max_size=12),
    credits=st.lists(st.integers(-(10**15), 10**15).filter(bool), max_size=3),
)
def test_every_total_equals_the_ledger(events, credits):
    """FAULTS 64 and 80: roll-ups by hour and by day, the console and the ledger itself, to the micro-unit."""
    with transaction.atomic():
        tenant = make_tenant()
        start = datetime(2026, 8, 1, tzinfo=UTC)
        ModelPrice.objects.get_or_create(
            model="tiny",
            valid_from=start,
            defaults={
                "input_microusd_per_mtok": 123_457,
                "cached_input_microusd_per_mtok": 61_728,
                "output_microusd_per_mtok": 654_321,
            },
        )
        batch = [used(tenant, start + timedelta(minutes=at), **fields) for fields, at in events]
        record_usage(batch)
        record_usage(batch[::-1])
        for credit in credits:
            adjust_usage(actor=TEST, tenant=tenant, cost_microusd=credit, reason="test")
        rows = UsageRecord.objects.for_tenant(tenant)
        ledger = rows.aggregate(
            r=Sum(1),
            p=Sum("prompt_tokens"),
            c=Sum("completion_tokens"),
            k=Sum("cached_tokens"),
            m=Sum("cost_microusd"),
        )
        assert rows.count() == len(batch)
        for sums in (UsageHour, UsageDay, UsageDayOfKey, UsageHourTotal, UsageDayTotal):
            rolled = sums.objects.for_tenant(tenant).aggregate(
                r=Sum("requests"), p=Sum("prompt_tokens"), c=Sum("completion_tokens"), k=Sum("cached_tokens"),
                m=Sum("cost_microusd"),
            )  # fmt: skip
            assert rolled == ledger
            adjusted = sums.objects.for_tenant(tenant).aggregate(n=Sum("adjustment_microusd", default=0))
            assert adjusted["n"] == sum(credits)
        shown = selectors.total(selectors.usage_by_day_and_model(tenant, days=4000))
        assert (shown.requests, shown.cost_microusd) == (len(batch), ledger["m"] + sum(credits))
        assert ledger_differences() == []
        transaction.set_rollback(True)


def test_reconcile_says_where_the_books_differ(tenant):
    record_usage([used(tenant, datetime(2026, 6, 1, 12, tzinfo=UTC), first_token_at_ms=1_790_000_000_000)])
    out = io.StringIO()
    call_command("reconcile", stdout=out)
    assert "agree" in out.getvalue()
    UsageDay.objects.for_tenant(tenant).update(cost_microusd=F("cost_microusd") + 3)
    UsageHour.objects.for_tenant(tenant).delete()
    UsageHourTotal.objects.for_tenant(tenant).update(completion_tokens=0)
    UsageDayTotal.objects.for_tenant(tenant).update(finish_reason="length")
    UsageDayOfKey.objects.for_tenant(tenant).update(failed=1, cached_tokens=F("cached_tokens") + 2)
    RecordedRequest.objects.create(request_id="ghost", created_at=timezone.now())
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE inference_usageday SET ttft = '{}', total[78] = 2 WHERE tenant_id = %s", [tenant.pk]
        )
    out = io.StringIO()
    with pytest.raises(CommandError, match="15 differences"):
        call_command("reconcile", stdout=out)
    latency = f"latencies of days: {tenant.slug} 2026-06-01 tiny standard stop total"
    assert f"{latency} bucket 78: requests +2" in out.getvalue()
    assert f"days: {tenant.slug} 2026-06-01 tiny standard stop: cost +3" in out.getvalue()
    assert "requests -1, prompt_tokens -10, completion_tokens -5" in out.getvalue()
    assert "hours in total" in out.getvalue()
    assert f"days in total: {tenant.slug} 2026-06-01 tiny standard length: requests +1" in out.getvalue()
    assert f"days of keys: {tenant.slug} 2026-06-01 tiny: failed +1, cached_tokens +2" in out.getvalue()
    assert "recorded requests: ghost: requests +1" in out.getvalue()
    adjust_usage(actor=TEST, tenant=tenant, cost_microusd=-5, reason="Slow")
    out = io.StringIO()
    call_command("reconcile", "--repair", stdout=out)
    assert "agree" in out.getvalue()
    day = UsageDay.objects.for_tenant(tenant).get(finish_reason="stop")
    assert (day.requests, day.prompt_tokens, sum(day.ttft.values())) == (1, 10, 1)
    of_keys = UsageDayOfKey.objects.for_tenant(tenant)
    assert sorted(of_keys.values_list("requests", "failed", "cost_microusd", "adjustment_microusd")) == [
        (0, 0, 0, -5), (1, 0, day.cost_microusd, 0),
    ]  # fmt: skip
    assert (
        UsageHour.objects.for_tenant(tenant).count() == UsageHourTotal.objects.for_tenant(tenant).count() == 2
    )
    assert not RecordedRequest.objects.filter(request_id="ghost").exists()


def test_a_request_is_one_row_even_in_different_months(tenant):
    first = used(tenant, datetime(2026, 6, 1, tzinfo=UTC))
    again = an_event(
        str(tenant.public_id), first.request_id, created_at_ms=ms(datetime(2026, 7, 1, tzinfo=UTC))
    )
    record_usage([first])
    (settled,), parked = record_usage([again])
    assert (settled.request_id, parked) == (first.request_id, [])
    row = UsageRecord.objects.for_tenant(tenant).get()
    # The control: past the service the database itself refuses.
    row.pk, row.created_at = None, datetime(2026, 7, 1, tzinfo=UTC)
    with pytest.raises(IntegrityError), transaction.atomic():
        row.save(force_insert=True)


def test_months_are_made_ahead_when_needed_and_dropped_whole(tenant):
    """FAULTS 72."""
    now = datetime(2031, 11, 15, tzinfo=UTC)
    assert make_partitions_ahead(now) == 4
    assert make_partitions_ahead(now) == 0
    assert partition_months()[-1] == date(2032, 2, 1)
    record_usage([used(tenant, datetime(2024, 2, 29, 23, 59, tzinfo=UTC)), used(tenant, now)])
    assert partition_months()[0] == date(2024, 2, 1)
    assert drop_partitions_before(date(2024, 3, 20)) == [date(2024, 2, 1)]
    assert (UsageRecord.objects.for_tenant(tenant).count(), RecordedRequest.objects.count()) == (1, 1)
    assert UsageDay.objects.for_tenant(tenant).aggregate(n=Sum("requests"))["n"] == 2
    assert ledger_differences() == []


def test_months_go_when_they_are_kept_no_longer(tenant, settings):
    now = datetime(2028, 3, 1, tzinfo=UTC)
    record_usage([used(tenant, datetime(2028, month, 1, tzinfo=UTC)) for month in (1, 2, 3)])
    settings.LEDGER_KEPT_MONTHS = 0
    assert drop_old_months(now) == []
    settings.LEDGER_KEPT_MONTHS = 1
    assert date(2028, 1, 1) in drop_old_months(now)
    assert drop_old_months(now) == []
    assert UsageRecord.objects.for_tenant(tenant).count() == 2
    assert UsageDay.objects.for_tenant(tenant).aggregate(n=Sum("requests"))["n"] == 3


def test_a_query_over_a_month_reads_one_partition(tenant):
    make_partitions_ahead(datetime(2026, 6, 1, tzinfo=UTC))
    rows = UsageRecord.objects.filter(
        tenant=tenant,
        created_at__gte=datetime(2026, 7, 1, tzinfo=UTC),
        created_at__lt=datetime(2026, 8, 1, tzinfo=UTC),
    )
    plan = rows.explain()
    assert "inference_usagerecord_2026_07" in plan
    assert "2026_06" not in plan


@committed
def test_writers_that_share_roll_ups_in_any_order_neither_deadlock_nor_lose(tenant):
    at = datetime(2026, 6, 1, tzinfo=UTC)
    batches = [
        [used(tenant, at + timedelta(hours=h), model=f"m{h % 3}") for h in range(48)] for _ in range(4)
    ]
    barrier = threading.Barrier(4)

    def write(events: list[UsageEvent]) -> None:
        try:
            barrier.wait(timeout=10)
            for event in events if events[0].request_id < batches[1][0].request_id else events[::-1]:
                record_usage([event])
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(write, batch) for batch in batches]:
            done.result(timeout=100)
    assert UsageDay.objects.for_tenant(tenant).aggregate(n=Sum("requests"))["n"] == 4 * 48
    assert ledger_differences() == []


def test_percentiles_of_a_histogram_are_right_to_a_twentieth(tenant):
    at = datetime(2026, 6, 1, tzinfo=UTC)
    delays = [1, 7, 20, 33, 150, 151, 480, 999, 2500, 60_000]
    record_usage([used(tenant, at, first_token_at_ms=ms(at) + d, finished_at_ms=ms(at) + d) for d in delays])
    shares = [nth / len(delays) for nth in range(1, len(delays) + 1)]
    for sums in (UsageHour, UsageDay, UsageHourTotal, UsageDayTotal):
        row = sums.objects.for_tenant(tenant).get()
        for histogram in (row.ttft, row.total):
            assert sum(histogram.values()) == len(delays)
            assert percentiles_ms(histogram, shares) == pytest.approx(delays, rel=0.05)
    assert percentiles_ms({}, (0.5,)) == (None,)
