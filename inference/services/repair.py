"""Puts right what `reconcile` finds wrong: everything that counts usage is made anew from the ledger, the one truth."""

from __future__ import annotations

import time
from typing import Final

import structlog
from django.db import connection, transaction
from redis.backoff import NoBackoff
from redis.retry import Retry

from engine_worker.broker.connection import connect_sync, disconnect_sync
from inference.services.partitions import lock_ledger
from inference.services.reconcile import DAYS, HOURS, Difference, counter_differences, provable_since
from inference.services.usage import drain_usage_stream

log = structlog.get_logger(__name__)

_SETTLED_S: Final = 2.0
"""What is on its way between ledger and counters is there after so long, or lost."""
_SUMS: Final = "requests, prompt_tokens, cached_tokens, completion_tokens, cost_microusd, adjustment_microusd"
_FORGET: Final = "DELETE FROM {table} WHERE {time} >= %s"
_COUNT: Final = """
INSERT INTO {table} (tenant_id, {time}, {by}, {sums}, {columns})
SELECT tenant_id, {value}, {by}, count(*), sum(prompt_tokens), sum(cached_tokens),
       sum(completion_tokens), sum(cost_microusd), 0, {counted}
FROM inference_usagerecord WHERE {value} >= %s GROUP BY tenant_id, {value}, {by}
"""
_ADJUST: Final = """
INSERT INTO {table} AS kept (tenant_id, {time}, {by}, {sums}, {columns})
SELECT tenant_id, {value}, {adjusted_by}, 0, 0, 0, 0, 0, sum(cost_microusd), {nothing}
FROM inference_usageadjustment WHERE {value} >= %s GROUP BY tenant_id, {value}, {without_end}
ON CONFLICT (tenant_id, {time}, {by}) DO UPDATE SET adjustment_microusd = excluded.adjustment_microusd
"""
_REQUESTS: Final = (
    "DELETE FROM inference_recordedrequest AS listed WHERE NOT EXISTS"
    " (SELECT FROM inference_usagerecord AS kept WHERE kept.request_id = listed.request_id)",
    "INSERT INTO inference_recordedrequest (request_id, created_at)"
    " SELECT request_id, created_at FROM inference_usagerecord ON CONFLICT DO NOTHING",
)


@transaction.atomic
def rebuild_roll_ups() -> None:
    """Sums, histograms and the list of requests, of all months that the ledger has. Writers wait; readers see what was
    there until it is done."""
    lock_ledger()
    first_hour, first_day = provable_since()
    with connection.cursor() as cursor:
        for since, roll_ups in ((first_hour, HOURS), (first_day, DAYS)):
            for one in roll_ups:
                for statement in (_FORGET, _COUNT, _ADJUST):
                    cursor.execute(one.in_sql(statement, sums=_SUMS), [since])
        for statement in _REQUESTS:
            cursor.execute(statement)
    log.info("roll_ups_rebuilt", since=first_hour.isoformat())


def correct_counters(redis_url: str) -> list[Difference]:
    """Budgets' counters as the ledger has them, also while requests run: by what they differ by, where they still do
    after what was on its way has arrived. Returns what was corrected."""
    first = {one.key: one for one in counter_differences(redis_url)}
    if not first:
        return []
    drain_usage_stream(redis_url=redis_url)
    time.sleep(_SETTLED_S)
    lasting = [one for one in counter_differences(redis_url) if first.get(one.key) == one]
    client = connect_sync(redis_url, connect_timeout_s=5.0, timeout_s=10.0, retry=Retry(NoBackoff(), 0))
    try:
        for one in lasting:
            (amount,) = one.amounts.values()
            client.hincrby(one.key, "spent", -amount)
            log.warning("budget_counter_corrected", whose=one.whose, amount=-amount)
    finally:
        disconnect_sync(client)
    return lasting
