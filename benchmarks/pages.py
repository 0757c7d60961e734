"""How long the server takes for each page of the console where much is stored, and how much a page weighs.

    python -m benchmarks.pages [--rows 1000000] [--keys 1000] [--members 500]

Starts the embedded PostgreSQL and Valkey unless DATABASE_URL and REDIS_URL name empty ones. One tenant with a thousand
keys, five hundred members and a million requests of 90 days, three models, two tiers; some keys make most requests
(the fourth power of a uniform number). The ledger is filled by one INSERT per 50,000 rows, through the same triggers as
the product's: benchmarks/ledger.py measures the product's own way. Every page of tests/pages.py that a member or the
operator sees is asked for once unmeasured, then five times; the time is the median, from the request as the handler
gets it to the rendered answer, middleware included. The weight is what a browser that comes for the first time is sent:
the page with the scripts, styles, fonts and pictures that it names, compressed where the gateway compresses them; and
what that is unpacked. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

DAYS = 90
CHUNK = 50_000
SEED = """SELECT setseed(0.42)"""
_NAMED = {
    ".js": re.compile(r'(?:from|import)\s*"(\.{1,2}/[^"]+)"'),
    ".css": re.compile(r"""url\(["']?([^"')#:]+)["']?\)"""),
}
"""Files that a file names, by its kind."""
FILL = """
INSERT INTO inference_usagerecord (public_id, request_id, tenant_id, project_public_id, key_public_id, model, tier,
    endpoint, finish_reason, error_code, prompt_tokens, cached_tokens, completion_tokens, cost_microusd, day,
    reservation_id, worker_id, attempts, created_at, claimed_at, first_token_at, finished_at, recorded_at)
SELECT gen_random_uuid(), 'bench-' || n, %(tenant)s,
    (%(projects)s::uuid[])[key], (%(keys)s::uuid[])[key],
    (ARRAY['small', 'medium', 'large'])[1 + floor(3 * random())::int],
    (ARRAY['standard', 'batch'])[1 + floor(2 * random())::int], 'chat.completions',
    (ARRAY['stop', 'stop', 'stop', 'length', 'cancelled', 'error'])[1 + floor(6 * random())::int], '',
    10 + floor(4000 * random())::int, 0, 1 + floor(800 * random())::int, floor(3000 * random())::bigint,
    (at AT TIME ZONE 'UTC')::date, '', 'bench', 1,
    at, at + interval '20 ms', at + interval '300 ms' * (0.2 + random()), at + interval '8 s' * (0.4 + random()), now()
FROM (SELECT n, 1 + floor(%(many)s * power(random(), 4))::int AS key,
             %(start)s::timestamptz + interval '1 day' * (%(days)s * n::float8 / %(rows)s) AS at
      FROM generate_series(%(first)s::int, %(last)s::int) AS n) AS moments
"""


def fill(rows: int, keys: int, members: int) -> tuple[Any, Any, dict[str, Any]]:
    """The owner, the operator, and the ids that routes ask for."""
    from datetime import UTC, datetime, timedelta

    from django.db import connection

    from inference.services.partitions import ensure_partitions
    from inference.services.webhooks import create_webhook
    from tenants.key_format import digest_key, new_key_secret
    from tenants.models import ApiKey, Membership, Role, Tier, User
    from tenants.principal import LimitMetric
    from tenants.services import Actor, create_project, create_tenant, set_quota_limit

    actor = Actor.system("bench")
    owner = User.objects.create_user("owner@example.org", "of the bench")
    operator = User.objects.create_superuser("op@example.org", "of the bench")
    tier = Tier.objects.get(name="standard")
    tenant = create_tenant(actor=actor, name="Bench", tier=tier, owner=owner)
    create_tenant(actor=actor, name="Another", tier=tier, owner=owner)
    for number in range(60):
        create_tenant(actor=actor, name=f"Tenant {number}", tier=tier)
    projects = [create_project(actor=actor, tenant=tenant, name=f"Project {number}") for number in range(40)]
    for metric, amount in (
        (LimitMetric.REQUESTS, 600),
        (LimitMetric.TOKENS, 400_000),
        (LimitMetric.CONCURRENCY, 64),
    ):
        set_quota_limit(actor=actor, owner=tenant, metric=metric, amount=amount)
    made = []
    for number in range(keys):
        secret = new_key_secret()
        made.append(
            ApiKey(
                tenant=tenant,
                name=f"program {number}, in production",
                lookup_id=secret.lookup_id,
                digest=digest_key(secret, pepper="bench"),
                scopes=["inference"],
                project=projects[number % len(projects)],
            )
        )
    ApiKey.objects.bulk_create(made)
    for api_key in made[:150]:
        set_quota_limit(actor=actor, owner=api_key, metric=LimitMetric.REQUESTS, amount=60)
    people = User.objects.bulk_create(
        User(email=f"person{number}@example.org") for number in range(members - 1)
    )
    Membership.objects.bulk_create(
        Membership(tenant=tenant, user=person, role=Role.DEVELOPER) for person in people
    )
    hook = create_webhook(actor=actor, tenant=tenant, url="https://hooks.example.org/weir")
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(days=DAYS)
    ensure_partitions((start + timedelta(days=day)).date() for day in range(DAYS + 2))
    with connection.cursor() as cursor:
        cursor.execute(SEED)
        for first in range(0, rows, CHUNK):
            cursor.execute(
                FILL,
                {
                    "tenant": tenant.pk, "keys": [str(key.public_id) for key in made], "many": keys, "start": start,
                    "projects": [str(key.project.public_id) for key in made if key.project],
                    "days": DAYS, "rows": rows, "first": first, "last": min(rows, first + CHUNK) - 1,
                },
            )  # fmt: skip
        cursor.execute("VACUUM ANALYZE")
    ids = {
        "tenant_id": tenant.public_id,
        "key_id": made[0].public_id,
        "project_id": projects[0].public_id,
        "webhook_id": hook.public_id,
        "member_id": Membership.objects.for_tenant(tenant).order_by("-id")[0].public_id,
        "request_id": f"bench-{rows // 2}",
    }
    return owner, operator, ids


def bench(rows: int, keys: int, members: int) -> dict[str, object]:
    import django

    django.setup()
    from django.core.management import call_command
    from django.test import Client

    from tests.pages import NOBODY, OPERATOR, PAGES, RECENT, admin_lists, path_of

    call_command("migrate", verbosity=0)
    began = time.perf_counter()
    owner, operator, ids = fill(rows, keys, members)
    filled_s = time.perf_counter() - began
    of_owner, of_operator = (
        Client(headers={"host": "localhost", "accept-encoding": "gzip"}) for _ in range(2)
    )
    of_owner.force_login(owner)
    of_operator.force_login(operator)
    asked = {
        name: (of_operator if who == OPERATOR else of_owner, path_of(name, ids))
        for name, who in PAGES.items()
        if who not in (NOBODY, RECENT)
    }
    later = of_owner.get(path_of("requests", ids), headers={"accept-encoding": "identity"}).content.decode()
    if found := re.search(r'href="\?([^"]*before=[^"]*)"', later):
        asked["requests, next"] = (of_owner, f"{path_of('requests', ids)}?{found[1].replace('&amp;', '&')}")
    asked["usage, 90 days"] = (of_owner, f"{path_of('usage', ids)}?days=90")
    for way in ("model", "project", "key"):
        asked[f"usage, by {way}"] = (of_owner, f"{path_of('usage', ids)}?by={way}")
    asked["usage, by key, 90 days"] = (of_owner, f"{path_of('usage', ids)}?days=90&by=key")
    asked["usage, by key, 90 days, of a model"] = (
        of_owner,
        f"{path_of('usage', ids)}?days=90&by=key&model=small",
    )
    asked["usage, of a key"] = (of_owner, f"{path_of('usage', ids)}?days=90&key={ids['key_id']}")
    asked["usage, of a project"] = (of_owner, f"{path_of('usage', ids)}?days=90&project={ids['project_id']}")
    asked["requests, of a rare key"] = (
        of_owner,
        f"{path_of('requests', ids)}?key={ids['key_id']}&end=failed",
    )
    asked["usage as CSV"] = (of_owner, f"{path_of('usage_csv', ids)}?days=90")
    asked |= {
        path: (of_operator, path) for path in admin_lists() if "maintenance" not in path
    }  # leads to its form
    table: dict[str, tuple[float, float, float]] = {}
    refused: list[str] = []
    for name, (client, path) in asked.items():
        answer = client.get(path)
        if answer.status_code != 200:
            refused.append(f"{name}: {answer.status_code}")
            continue
        weights = _weight(answer) if "html" in answer.headers["Content-Type"] else (0, 0)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            client.get(path)
            times.append((time.perf_counter() - began) * 1000)
        sent, unpacked = (round(weight / 1000, 1) for weight in weights)
        table[name] = (round(statistics.median(times), 1), sent, unpacked)
    print(f"{'':44} {'server':>11} {'sent':>11} {'unpacked':>11}")
    for name, (ms, sent, unpacked) in sorted(table.items(), key=lambda row: -row[1][0]):
        print(f"{name:44} {ms:8.1f} ms {sent:8.1f} kB {unpacked:8.1f} kB")
    if refused:
        raise SystemExit(f"not answered: {', '.join(refused)}")
    slowest = max(table, key=lambda name: table[name][0])
    heaviest = max(table, key=lambda name: table[name][1])
    return {
        "rows": rows,
        "keys": keys,
        "members": members,
        "filled_s": round(filled_s),
        "slowest_ms": table[slowest][0],
        "slowest_page": slowest,
        "heaviest_kb": table[heaviest][1],
        "heaviest_page": heaviest,
    }


def _weight(answer: Any) -> tuple[int, int]:
    """Bytes of the page, of our own files that it names, and of those that they name: as sent, and unpacked."""
    from django.contrib.staticfiles import finders
    from whitenoise.compress import Compressor

    compressor = Compressor(use_brotli=False, quiet=True)
    html = answer.content
    sent = len(html)
    if answer.headers.get("Content-Encoding") == "gzip":
        html = gzip.decompress(html)
    seen: dict[str, tuple[int, int]] = {}

    def add(path: str) -> None:
        file = finders.find(path)
        if not file or path in seen:
            return
        content = Path(file).read_bytes()
        packed = len(gzip.compress(content)) if compressor.should_compress(path) else len(content)
        seen[path] = (min(packed, len(content)), len(content))
        named = _NAMED.get(Path(path).suffix)
        for name in named.findall(content.decode(errors="replace")) if named else []:
            add(os.path.normpath(os.path.join(os.path.dirname(path), name)))

    for path in re.findall(r'(?:src|href)="/static/([^"#]+)', html.decode()):
        add(path)
    return sent + sum(row[0] for row in seen.values()), len(html) + sum(row[1] for row in seen.values())


@contextmanager
def servers() -> Iterator[None]:
    """The embedded ones, for what the environment does not name."""
    from weir import embedded

    scratch = Path(tempfile.mkdtemp(prefix="weir-bench-"))
    scratch.chmod(0o755)
    os.environ["WEIR_VAR_DIR"] = str(scratch)
    with ExitStack() as stack:
        for variable, prepare in (
            ("DATABASE_URL", embedded.prepare_postgres),
            ("REDIS_URL", embedded.prepare_valkey),
        ):
            if variable not in os.environ:
                server = prepare(scratch, durable=False)
                process = embedded.start(server)
                stack.callback(process.wait, 30)
                stack.callback(process.send_signal, server.command.stop_signal)
                os.environ[variable] = server.url
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--members", type=int, default=500)
    arguments = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "weir.settings")
    with servers():
        results = bench(arguments.rows, arguments.keys, arguments.members)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
