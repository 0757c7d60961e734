"""Proves that the ledger, its roll-ups, its list of requests and the budgets' counters agree; says where not."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from django.db import connection
from django.utils import timezone
from redis.backoff import NoBackoff
from redis.retry import Retry

from engine_worker.broker.connection import connect_sync, disconnect_sync
from inference.services.partitions import partition_months
from inference.services.recall import budget_spent
from tenants.models import Tenant
from tenants.principal_selectors import budgets_of
from tenants.quotas.buckets import bucket_of

_SHOWN: Final = 100
"""So many differences of a kind are told one by one: more of them have one cause."""


@dataclass(frozen=True, slots=True)
class Difference:
    where: str
    whose: str
    amounts: dict[str, int]
    """What is found there beyond what the ledger says; below 0 it is missing there."""
    key: str = ""
    """Of a counter: where it is in Redis."""

    def __str__(self) -> str:
        amounts = ", ".join(f"{name} {amount:+}" for name, amount in self.amounts.items() if amount)
        return f"{self.where}: {self.whose}: {amounts}"


@dataclass(frozen=True, slots=True)
class Beside:
    """What a roll-up keeps beside the sums that all of them have."""

    columns: str
    counted: str
    """Of rows of the ledger."""
    nothing: str
    """Of adjustments."""
    failed: str
    """How many requests of one of its rows failed."""


_FAILED: Final = "finish_reason IN ('error', 'deadline')"
LATENCIES: Final = Beside(
    "ttft, total",
    """inference_histogram(inference_latency_bucket(first_token_at - created_at)),
       inference_histogram(inference_latency_bucket(finished_at - created_at))
           FILTER (WHERE finish_reason IN ('stop', 'length'))""",
    "'{}', '{}'",
    failed=f"CASE WHEN {_FAILED} THEN requests ELSE 0 END",
)
FAILURES: Final = Beside("failed", f"count(*) FILTER (WHERE {_FAILED})", "0", failed="failed")


@dataclass(frozen=True, slots=True)
class RollUp:
    """A table of sums, and how its rows follow from the ledger's: by tenant, time and `by`."""

    name: str
    table: str
    time: str
    value: str
    """`time`, of a row of the ledger."""
    by: str
    beside: Beside = LATENCIES

    def in_sql(self, text: str, **more: str) -> str:
        """`adjusted_by`: `by` of an adjustment, which no request's end belongs to."""
        own = {name: getattr(self, name) for name in ("table", "time", "value", "by")}
        beside = {name: getattr(self.beside, name) for name in ("columns", "counted", "nothing", "failed")}
        without_end = self.by.removesuffix(_END)
        adjusted_by = without_end if without_end == self.by else f"{without_end}, ''"
        return text.format(
            **own, **beside, adjusted_by=adjusted_by, without_end=without_end, is_failed=_FAILED, **more
        )


_END: Final = ", finish_reason"
_BY_KEY_ALONE: Final = "project_public_id, key_public_id, model"
_BY_KEY: Final = f"{_BY_KEY_ALONE}, tier{_END}"
_TOTAL: Final = f"model, tier{_END}"
_OF_HOUR: Final = ("starts_at", "date_trunc('hour', created_at, 'UTC')")
_OF_DAY: Final = ("day", "day")
HOURS: Final = (
    RollUp("hours", "inference_usagehour", *_OF_HOUR, _BY_KEY),
    RollUp("hours in total", "inference_usagehourtotal", *_OF_HOUR, _TOTAL),
)
DAYS: Final = (
    RollUp("days", "inference_usageday", *_OF_DAY, _BY_KEY),
    RollUp("days in total", "inference_usagedaytotal", *_OF_DAY, _TOTAL),
    RollUp("days of keys", "inference_usagedayofkey", *_OF_DAY, _BY_KEY_ALONE, FAILURES),
)

_SUMS: Final = (
    "requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "cost", "adjustments",
)  # fmt: skip

# Both sides in one list, the ledger's negated: what does not add up to nothing differs. One statement
# sees one moment, so writers need not stop.
_COMPARE: Final = """
SELECT concat_ws(' ', tenant.slug, at, {by}), {totals}
FROM (
    SELECT tenant_id, {value} AS at, {by}, -count(*) AS requests, -count(*) FILTER (WHERE {is_failed}) AS failed,
           -sum(prompt_tokens) AS prompt_tokens, -sum(cached_tokens) AS cached_tokens,
           -sum(completion_tokens) AS completion_tokens, -sum(cost_microusd) AS cost, 0 AS adjustments
    FROM inference_usagerecord WHERE {value} >= %(since)s GROUP BY tenant_id, at, {by}
    UNION ALL
    SELECT tenant_id, {value} AS at, {adjusted_by}, 0, 0, 0, 0, 0, 0, -sum(cost_microusd)
    FROM inference_usageadjustment WHERE {value} >= %(since)s GROUP BY tenant_id, at, {without_end}
    UNION ALL
    SELECT tenant_id, {time}, {by}, requests, {failed}, prompt_tokens, cached_tokens, completion_tokens,
           cost_microusd, adjustment_microusd
    FROM {table} WHERE {time} >= %(since)s
) AS sides JOIN tenants_tenant AS tenant ON tenant.id = tenant_id
GROUP BY tenant.slug, at, {by}
HAVING {differs}
ORDER BY 1 LIMIT %(limit)s
"""
_REQUESTS: Final = """
SELECT request_id, sum(side) FROM (
    SELECT request_id, -1 AS side FROM inference_usagerecord
    UNION ALL SELECT request_id, 1 FROM inference_recordedrequest
) AS sides GROUP BY request_id HAVING sum(side) <> 0 ORDER BY 1 LIMIT %(limit)s
"""
# As above, for each bucket of each histogram.
_BUCKETS: Final = """
WITH seen AS (
    SELECT tenant_id, {value} AS at, {by}, inference_latency_bucket(first_token_at - created_at) AS ttft,
           inference_latency_bucket(finished_at - created_at) AS total
    FROM inference_usagerecord WHERE {value} >= %(since)s
), kept AS (SELECT *, {time} AS at FROM {table} WHERE {time} >= %(since)s)
SELECT concat_ws(' ', tenant.slug, at, {by}, metric, 'bucket ' || bucket), sum(requests)
FROM (
    SELECT tenant_id, at, {by}, 'ttft' AS metric, ttft AS bucket, -count(*) AS requests
    FROM seen WHERE ttft IS NOT NULL GROUP BY tenant_id, at, {by}, ttft
    UNION ALL
    SELECT tenant_id, at, {by}, 'total', total, -count(*)
    FROM seen WHERE finish_reason IN ('stop', 'length') GROUP BY tenant_id, at, {by}, total
    UNION ALL
    SELECT tenant_id, at, {by}, 'ttft', bucket, coalesce(ttft[bucket], 0)
    FROM kept, generate_subscripts(ttft, 1) AS bucket
    UNION ALL
    SELECT tenant_id, at, {by}, 'total', bucket, coalesce(total[bucket], 0)
    FROM kept, generate_subscripts(total, 1) AS bucket
) AS sides JOIN tenants_tenant AS tenant ON tenant.id = tenant_id
GROUP BY tenant.slug, at, {by}, metric, bucket HAVING sum(requests) <> 0 ORDER BY 1 LIMIT %(limit)s
"""


def provable_since() -> tuple[datetime, date]:
    """The first hour and the first day of which the ledger has every row."""
    kept_since = min(partition_months(), default=date(2020, 1, 1))
    first_hour = datetime.combine(kept_since, datetime.min.time(), UTC)
    # Roll-ups outlive the months that were dropped; a tenant's day at the border has but a part of its rows.
    return first_hour, kept_since + timedelta(days=1 if _has_hours_before(first_hour) else -1)


def ledger_differences() -> list[Difference]:
    """Nothing, when all is well. Reads the whole ledger: minutes for many millions of rows."""
    first_hour, first_day = provable_since()
    totals = ", ".join(f"sum({name})" for name in _SUMS)
    differs = " OR ".join(f"sum({name}) <> 0" for name in _SUMS)
    found: list[Difference] = []
    for since, roll_ups in ((first_hour, HOURS), (first_day, DAYS)):
        for one in roll_ups:
            sums = one.in_sql(_COMPARE, totals=totals, differs=differs)
            found += _differences(one.name, sums, _SUMS, since)
            if one.beside is LATENCIES:
                found += _differences(f"latencies of {one.name}", one.in_sql(_BUCKETS), ("requests",), since)
    return found + _differences("recorded requests", _REQUESTS, ("requests",), None)


def _has_hours_before(moment: datetime) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT EXISTS (SELECT FROM inference_usagehour WHERE starts_at < %s)", [moment])
        return bool(cursor.fetchone()[0])


def _differences(where: str, query: str, names: tuple[str, ...], since: Any) -> list[Difference]:
    with connection.cursor() as cursor:
        cursor.execute(query, {"since": since, "limit": _SHOWN})
        return [
            Difference(where, str(whose), {name: int(n) for name, n in zip(names, amounts, strict=True)})
            for whose, *amounts in cursor.fetchall()
        ]


def counter_differences(redis_url: str) -> list[Difference]:
    """Where a budget's counter in Redis is not what the ledger says of its current period.

    Equal at rest; usage that has ended and is not in the ledger yet is told as a difference.
    """
    now = timezone.now()
    differences = []
    client = connect_sync(redis_url, connect_timeout_s=5.0, timeout_s=10.0, retry=Retry(NoBackoff(), 0))
    try:
        for tenant in Tenant.objects.select_related("tier").order_by("id"):
            for principal, limit in budgets_of(tenant):
                key = bucket_of(principal, limit, now).key
                spent = client.hget(key, "spent")
                if spent is None:
                    continue  # not used in this period: it starts from the ledger
                amount = int(spent) - budget_spent(principal, limit, now)
                if amount:
                    whose = f"{tenant.slug} {limit.scope} {limit.owner_id} {limit.calendar}"
                    amounts = {str(limit.metric): amount}
                    differences.append(Difference("budget counters", whose, amounts, key))
    finally:
        disconnect_sync(client)
    return differences
