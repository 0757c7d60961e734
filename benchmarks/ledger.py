"""How fast usage becomes ledger rows, and how long report pages take over a million of them.

    python benchmarks/ledger.py [--rows 1000000]

Starts the embedded PostgreSQL unless DATABASE_URL names an empty database. Seeded: 90 days, one tenant with nine tenths
of the rows, ten with the rest, 10 keys, 3 models, 2 tiers. `drain` is record_usage in batches of 500: prices, day, row,
request id, sums by hour and day, latency histograms, one commit a batch. `page` is the slowest of several report pages,
each the median of five calls: the first and one far back, by day and by hour, grouped and not, with percentiles of
latencies, and the console's own. Each page's time is printed on a line of its own.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BATCH = 500
DAYS = 90


def timed(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(times), 1)


def bench(rows: int) -> dict[str, object]:
    import django

    django.setup()
    from django.core.management import call_command
    from django.db import connection

    from engine_worker.protocol import UsageEvent
    from inference import selectors
    from inference.reports import Dimension, Report, Width, usage_page
    from inference.request_log import Ending, Wanted, log_page
    from inference.services.explain import explain
    from inference.services.ledger import record_usage
    from inference.services.reconcile import ledger_differences
    from inference.statements import statement_of
    from tenants.models import ModelPrice, Tier
    from tenants.services import Actor, create_tenant, issue_api_key

    call_command("migrate", verbosity=0)
    actor, tier = Actor.system("bench"), Tier.objects.get(name="standard")
    tenants = [create_tenant(actor=actor, name=f"Bench {n}", tier=tier) for n in range(11)]
    keys = {
        tenant.pk: [
            str(issue_api_key(actor=actor, tenant=tenant, name=f"k{n}").api_key.public_id) for n in range(10)
        ]
        for tenant in tenants
    }
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(days=DAYS)
    for model in ("small", "medium", "large"):
        ModelPrice.objects.create(
            model=model,
            valid_from=start,
            input_microusd_per_mtok=150_000,
            cached_input_microusd_per_mtok=75_000,
            output_microusd_per_mtok=600_000,
        )
    dice = random.Random(1)

    def event(number: int) -> UsageEvent:
        tenant = tenants[0] if dice.random() < 0.9 else dice.choice(tenants[1:])
        at = int((start + timedelta(days=DAYS) * (number / rows)).timestamp() * 1000)
        return UsageEvent(
            request_id=f"bench-{number}",
            tenant_id=str(tenant.public_id),
            model=dice.choice(("small", "medium", "large")),
            tier=dice.choice(("standard", "batch")),
            finish_reason=dice.choice(("stop", "stop", "stop", "length", "cancelled")),
            prompt_tokens=dice.randrange(10, 4000),
            completion_tokens=dice.randrange(1, 800),
            created_at_ms=at,
            first_token_at_ms=at + dice.randrange(50, 2000),
            finished_at_ms=at + dice.randrange(2000, 20_000),
            key_id=dice.choice(keys[tenant.pk]),
        )

    spent = 0.0
    for first in range(0, rows, BATCH):
        batch = [event(number) for number in range(first, min(rows, first + BATCH))]
        began = time.perf_counter()
        record_usage(batch)
        spent += time.perf_counter() - began
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")
    tenant = tenants[0]
    until = start + timedelta(days=DAYS + 1)
    everything = tuple(Dimension)

    def page_of(width: Width, *group_by: Dimension, cursor: str | None = None) -> Callable[[], object]:
        report = Report(tenant.pk, start, until, width, group_by)
        return lambda: usage_page(report, limit=100, cursor=cursor)

    def far(width: Width, *group_by: Dimension) -> str | None:
        report, cursor = Report(tenant.pk, start, until, width, group_by), None
        for _ in range(20):
            cursor = usage_page(report, limit=1000, cursor=cursor).next_cursor or cursor
        return cursor

    newest = selectors.recent_requests(tenant, limit=1)[0]
    narrowed = {
        "all": Wanted(),
        "of a model": Wanted(model="small"),
        "of a key": Wanted(key=newest.key_public_id),
        "cancelled, of a key and model": Wanted(
            ending=Ending.STOPPED, model="large", key=newest.key_public_id
        ),
        "of a model that was never used": Wanted(model="none"),
    }

    def log_of(wanted: Wanted, before: str = "") -> Callable[[], object]:
        return lambda: log_page(tenant, wanted, before=before)

    def far_log() -> str:
        cursor = ""
        for _ in range(20):
            cursor = log_page(tenant, Wanted(), before=cursor)[1] or cursor
        return cursor

    pages = {
        "days": timed(page_of(Width.DAY)),
        "days by tier": timed(page_of(Width.DAY, Dimension.TIER)),
        "days by finish reason": timed(page_of(Width.DAY, Dimension.FINISH_REASON)),
        "days by model and key": timed(page_of(Width.DAY, Dimension.MODEL, Dimension.KEY)),
        "days by everything": timed(page_of(Width.DAY, *everything)),
        "days by everything, far": timed(page_of(Width.DAY, *everything, cursor=far(Width.DAY, *everything))),
        "hours": timed(page_of(Width.HOUR)),
        "hours by everything": timed(page_of(Width.HOUR, *everything)),
        "hours by everything, far": timed(
            page_of(Width.HOUR, *everything, cursor=far(Width.HOUR, *everything))
        ),
        "console overview": timed(lambda: selectors.today_and_this_month(tenant)),
        "console usage": timed(lambda: selectors.usage_by_day_and_model(tenant, days=90)),
        "console requests": timed(lambda: selectors.recent_requests(tenant, limit=15)),
        "console month's health": timed(lambda: selectors.month_health(tenant)),
        "console statement": timed(lambda: statement_of(tenant, (start + timedelta(days=40)).date())),
        **{f"request log, {name}": timed(log_of(wanted)) for name, wanted in narrowed.items()},
        "request log, far": timed(log_of(Wanted(), before=far_log())),
        "explained": timed(lambda: explain(tenant.pk, str(tenant.public_id), newest.request_id)),
    }
    began = time.perf_counter()
    differences = len(ledger_differences())
    return {
        "rows": rows,
        "drain_rows_per_s": round(rows / spent),
        "page_ms": max(pages.values()),
        "pages_ms": pages,
        "reconcile_s": round(time.perf_counter() - began, 1),
        "differences": differences,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    arguments = parser.parse_args()
    process = server = None
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "weir.settings")
    if "DATABASE_URL" not in os.environ:
        from weir import embedded

        scratch = Path(tempfile.mkdtemp(prefix="weir-bench-"))
        scratch.chmod(0o755)
        os.environ["WEIR_VAR_DIR"] = str(scratch)
        server = embedded.prepare_postgres(scratch, durable=True)
        process, os.environ["DATABASE_URL"] = embedded.start(server), server.url
    try:
        results = bench(arguments.rows)
    finally:
        if process and server:
            process.send_signal(server.command.stop_signal)  # its own: terminate() waits for idle connections
            process.wait(30)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    )
    pages = results["pages_ms"]
    assert isinstance(pages, dict)
    for name, value in {**results, "pages_ms": f"{len(pages)} pages:"}.items():
        print(f"{name:18} {value}")
    for name, value in pages.items():
        print(f"  {value:8.1f} ms  {name}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
