"""Migrations of the ledger where it has rows already: what was counted before is counted after, to the micro-unit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.databases import a_database, manage, url_of

TENANTS = """
INSERT INTO tenants_tenant (public_id, name, slug, tier_id, timezone, suspended_reason, created_at, updated_at)
SELECT gen_random_uuid(), 'T' || n, 't' || n, (SELECT min(id) FROM tenants_tier), 'UTC', '', now(), now()
FROM generate_series(1, 2) AS n
"""
MONTHS = """
SELECT inference_ensure_usage_partition(month) FROM unnest('{2026-08-01,2026-09-01,2026-10-01}'::date[]) AS month
"""
ROWS = """
INSERT INTO inference_usagerecord (public_id, request_id, tenant_id, project_public_id, key_public_id, model, tier,
    endpoint, finish_reason, error_code, prompt_tokens, cached_tokens, completion_tokens, cost_microusd, day,
    reservation_id, worker_id, attempts, created_at, first_token_at, finished_at, recorded_at)
SELECT gen_random_uuid(), 'r' || n, (SELECT id FROM tenants_tenant WHERE slug = 't' || 1 + n % 2),
    ('{NULL,0197e5a0-0000-7000-8000-000000000001}'::uuid[])[1 + n % 2],
    ('{NULL,0197e5a0-0000-7000-8000-000000000002,0197e5a0-0000-7000-8000-000000000003}'::uuid[])[1 + n % 3],
    (ARRAY['small', 'large'])[1 + n % 2],
    (ARRAY['standard', 'batch'])[1 + n % 5 / 3], 'chat.completions',
    (ARRAY['stop', 'stop', 'length', 'cancelled', 'error'])[1 + n % 5], '', n, n / 2, 2 * n, 7 * n,
    (at AT TIME ZONE 'UTC')::date, '', '', 1, at,
    CASE WHEN n % 7 > 0 THEN at + interval '1 ms' * n END, at + interval '3 ms' * n, now()
FROM (SELECT n, '2026-08-01 00:00+00'::timestamptz + interval '5 hours' * n AS at
      FROM generate_series(1, 430) AS n) AS moments
"""
CREDIT = """
INSERT INTO inference_usageadjustment (public_id, tenant_id, request_id, model, tier, cost_microusd, reason,
    actor_label, day, created_at)
SELECT gen_random_uuid(), id, '', '', '', -11, 'slow', 'tests', '2026-09-10', '2026-09-10 12:00+00'
FROM tenants_tenant
"""
FORGOTTEN = """
DROP TABLE inference_usagerecord_2026_08;
DELETE FROM inference_recordedrequest WHERE created_at < '2026-09-01 00:00+00';
"""
SUMS = """
SELECT sum(requests), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens), sum(cost_microusd),
       sum(adjustment_microusd), sum((SELECT sum(n) FROM unnest(ttft) AS n)),
       sum((SELECT sum(n) FROM unnest(total) AS n))
FROM {}
"""
OF_KEYS = """
SELECT tenant_id, day, project_public_id, key_public_id, model, requests, prompt_tokens, cached_tokens,
       completion_tokens, cost_microusd, adjustment_microusd, failed
FROM inference_usagedayofkey ORDER BY 1, 2, 3, 4, 5
"""
DAYS_BY_KEY = """
SELECT tenant_id, day, project_public_id, key_public_id, model, sum(requests), sum(prompt_tokens), sum(cached_tokens),
       sum(completion_tokens), sum(cost_microusd), sum(adjustment_microusd)
FROM inference_usageday GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5
"""
ONE_BY_ONE = """
SELECT {time}, tenant_id, model, tier, finish_reason, metric, bucket, sum(n) FROM (
    SELECT *, 'ttft' AS metric, ttft[bucket] AS n FROM {table}, generate_subscripts(ttft, 1) AS bucket
    UNION ALL
    SELECT *, 'total', total[bucket] FROM {table}, generate_subscripts(total, 1) AS bucket
) AS counts WHERE n > 0
GROUP BY {time}, tenant_id, model, tier, finish_reason, metric, bucket ORDER BY 1, 2, 3, 4, 5, 6, 7
"""


def gives_way_to_a_long_report(name: str, var_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/operations.md has it: a migration that waits for a reader would hold up every writer behind it. With a
    bound it ends instead, and leaves what was there."""
    state = "SELECT array_agg(name ORDER BY id) FROM django_migrations WHERE app = 'inference'"
    with psycopg.connect(url_of(name)) as report, psycopg.connect(url_of(name), autocommit=True) as writer:
        before = writer.execute(state).fetchone()
        for table in ("usagehour", "usageday", "usagerecord"):
            report.execute(f"LOCK TABLE inference_{table} IN ACCESS SHARE MODE")  # what a SELECT takes
        with monkeypatch.context() as patch:
            patch.setenv("PGOPTIONS", "-c lock_timeout=500ms")
            given_up = manage("migrate", "inference", database=name, var_dir=var_dir)
        assert given_up.returncode != 0
        assert "lock timeout" in given_up.stderr
        assert writer.execute(state).fetchone() == before


@pytest.mark.timeout(300)
@pytest.mark.django_db
def test_sums_and_latencies_survive_their_migrations_with_rows_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From before latencies stood beside the sums (0014); then came totals (0015) and days of keys (0018)."""
    with a_database() as name:
        before = manage("migrate", "inference", "0013", database=name, var_dir=tmp_path)
        assert before.returncode == 0, before.stderr
        with psycopg.connect(url_of(name)) as database:
            for statement in (TENANTS, MONTHS, ROWS, CREDIT):
                database.execute(statement)
            latencies = database.execute(
                "SELECT day, tenant_id, model, tier, metric, bucket, sum(requests) FROM inference_latencyday"
                " GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4, 5, 6"
            ).fetchall()
            database.execute(FORGOTTEN)  # a month whose rows are kept no longer
        gives_way_to_a_long_report(name, tmp_path, monkeypatch)
        after = manage("migrate", database=name, var_dir=tmp_path)
        assert after.returncode == 0, after.stderr
        with psycopg.connect(url_of(name)) as database:
            ids = range(1, 431)
            of_days = database.execute(SUMS.format("inference_usagedaytotal")).fetchone()
            assert of_days is not None
            assert of_days[:6] == (
                430, sum(ids), sum(n // 2 for n in ids), 2 * sum(ids), 7 * sum(ids), -22,
            )  # fmt: skip
            assert of_days[6:] == (
                sum(n % 7 > 0 for n in ids), sum(n % 5 < 3 for n in ids),
            )  # fmt: skip
            assert database.execute(SUMS.format("inference_usageday")).fetchone() == of_days
            of_keys = database.execute(OF_KEYS).fetchall()
            assert [row[:-1] for row in of_keys] == database.execute(DAYS_BY_KEY).fetchall()
            assert sum(row[-1] for row in of_keys) == sum(n % 5 == 4 for n in ids)
            for width, time in (("hour", "starts_at"), ("day", "day")):
                by_key, in_total = (
                    database.execute(
                        ONE_BY_ONE.format(table=f"inference_usage{width}{kind}", time=time)
                    ).fetchall()
                    for kind in ("", "total")
                )
                assert by_key == in_total
            told = Counter[tuple[Any, ...]]()
            for *known, _finish_reason, metric, bucket, requests in in_total:
                told[*known, metric, bucket] += int(requests)
            assert told == {tuple(row[:-1]): row[-1] for row in latencies}, "no bucket was moved or lost"
            # And the new triggers go on where the old ones stopped.
            database.execute(CREDIT)
        reconciled = manage("reconcile", database=name, var_dir=tmp_path)
        assert reconciled.returncode == 0, reconciled.stdout + reconciled.stderr
