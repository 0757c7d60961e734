"""Reports are read where WEIR_REPLICA_URL says, and where all is when that lags or is away; the rest never is."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from django.conf import settings
from django.db import connection
from django.utils import timezone

from inference.replica import REPLICA, ReplicaRouter, on_replica
from inference.services.ledger import record_usage
from tenants.models import Tenant
from tenants.principal import Scope
from tests.e2e.site import ROOT, Site, running_site
from tests.factories import make_key, make_tenant
from tests.inference.ledger_driving import an_event
from tests.streaming_replica import streaming_replica, until

MAX_LAG_S = 2


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(300)
def test_reports_come_from_a_streaming_replica_while_it_keeps_up(tmp_path: Path):
    """A real one, made by pg_basebackup: rows arrive; what lags, and what is dead, is not asked; what is back is."""
    tenant = make_tenant()
    key = make_key(tenant, scopes=tuple(Scope)).secret
    with streaming_replica() as replica:
        more = {
            "WEIR_REPLICA_URL": replica.url(connection.settings_dict["NAME"]),
            "WEIR_REPLICA_MAX_LAG_S": str(MAX_LAG_S),
            "WEIR_METRICS_TOKEN": "m",
        }
        with running_site(connection.settings_dict, tmp_path, more_env=more) as site:
            counted = count_requests(site.url, key)

            def asked() -> tuple[int, str]:
                """How many requests the report knows, and where it was read."""
                before = sources(site.url)
                requests = counted()
                (source,) = [name for name, count in sources(site.url).items() if count > before.get(name, 0)]
                return requests, source

            assert asked() == (0, "replica"), "it knows the key, and that there is nothing yet"
            record(tenant)
            until(lambda: asked() == (1, "replica"))

            replica.say("SELECT pg_wal_replay_pause()")
            until(lambda: replica.say("SELECT pg_get_wal_replay_pause_state()") == "paused")
            record(tenant)
            until(lambda: asked() == (2, "primary_lagging"))
            assert "replica_lags" in site.log.read_text()
            assert "more than WEIR_REPLICA_MAX_LAG_S: reports come from the primary" in doctor(site)
            replica.say("SELECT pg_wal_replay_resume()")
            until(lambda: asked() == (2, "replica"))

            replica.kill()
            for _ in range(2):  # a connection that broke, and one that can't be made
                record(tenant)
                requests, source = asked()
                assert source == "primary_away"
            assert requests == 4
            assert "replica_away" in site.log.read_text()
            assert "replica: does not answer" in doctor(site)
            replica.start_again()
            until(lambda: asked() == (4, "replica"))


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(300)
def test_a_replica_that_answers_nobody_holds_no_report_up(tmp_path: Path):
    """Its host takes connections and says nothing: sooner than a connection is given up all read the primary."""
    key = make_key(make_tenant(), scopes=tuple(Scope)).secret
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        more = {
            "WEIR_REPLICA_URL": f"postgres://weir@127.0.0.1:{silent.getsockname()[1]}/weir",
            "WEIR_METRICS_TOKEN": "m",
        }
        with running_site(connection.settings_dict, tmp_path, more_env=more) as site:
            count = count_requests(site.url, key)

            def seconds(_: int) -> float:
                began = time.monotonic()
                assert count() == 0
                return time.monotonic() - began

            for _ in range(2):
                with ThreadPoolExecutor(8) as threads:
                    assert max(threads.map(seconds, range(8))) < 4.5
            assert sources(site.url) == {"primary_away": 16}


def doctor(site: Site) -> str:
    done = subprocess.run(
        [sys.executable, "manage.py", "doctor"],
        cwd=ROOT, env=site.env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stdout


def record(tenant: Tenant) -> None:
    now = int(timezone.now().timestamp() * 1000)
    record_usage([an_event(str(tenant.public_id), created_at_ms=now, finished_at_ms=now + 1)])


def count_requests(url: str, key: str) -> Callable[[], int]:
    day = timezone.now()
    span = {"start": f"{day - timedelta(days=2):%Y-%m-%d}", "end": f"{day + timedelta(days=2):%Y-%m-%d}"}

    def count() -> int:
        bearer = {"Authorization": f"Bearer {key}"}
        answer = httpx.get(f"{url}/v1/usage", params=span, headers=bearer, timeout=60)
        assert answer.status_code == 200, answer.text
        return sum(line["requests"] for line in answer.json()["data"])

    return count


def sources(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer m"}, timeout=60).text
    found = re.findall(r'^weir_report_reads_total\{source="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {name: float(count) for name, count in found}


def test_only_what_asks_for_it_reads_the_replica(monkeypatch: pytest.MonkeyPatch):
    router = ReplicaRouter()
    monkeypatch.setitem(settings.DATABASES, REPLICA, {})
    monkeypatch.setattr("inference.replica._Lag.is_small", lambda self: True)

    def where() -> str | None:
        return router.db_for_read(type(None))  # type: ignore[arg-type]

    assert where() is None
    assert on_replica(where) == REPLICA
    assert where() is None
    monkeypatch.setattr("inference.replica._Lag.is_small", lambda self: False)
    assert on_replica(where) is None
    assert router.allow_migrate(REPLICA, "inference") is False
    assert router.allow_migrate("default", "inference") is None
