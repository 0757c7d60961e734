"""Reports are read where WEIR_REPLICA_URL says, and where all is when that does not answer; the rest never is."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.conf import settings
from django.db import connection
from django.utils import timezone

from inference.replica import REPLICA, ReplicaRouter, on_replica
from inference.services.ledger import record_usage
from tenants.principal import Scope
from tests.e2e.site import Site, running_site
from tests.factories import make_key, make_tenant
from tests.inference.ledger_driving import an_event


@pytest.fixture
def lagging() -> Iterator[str]:
    """Options of a connection that sees sums of its own, as a replica that is behind has others."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE lagging_reader LOGIN SUPERUSER PASSWORD 'secret'")
        cursor.execute("CREATE SCHEMA lagging")
        cursor.execute(
            "CREATE TABLE lagging.inference_usagedaytotal (LIKE public.inference_usagedaytotal INCLUDING ALL)"
        )
    yield "-csearch_path=lagging,public"
    with connection.cursor() as cursor:
        cursor.execute("DROP SCHEMA lagging CASCADE")
        cursor.execute("DROP ROLE lagging_reader")


def asked(site: Site, key: str) -> list[dict[str, Any]]:
    day = timezone.now()
    span = {"start": f"{day - timedelta(days=2):%Y-%m-%d}", "end": f"{day + timedelta(days=2):%Y-%m-%d}"}
    answer = httpx.get(
        f"{site.url}/v1/usage", params=span, headers={"Authorization": f"Bearer {key}"}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    lines: list[dict[str, Any]] = answer.json()["data"]
    return lines


@pytest.mark.django_db(transaction=True)
def test_reports_come_from_the_replica_and_from_the_primary_without_it(lagging: str, tmp_path: Path):
    tenant = make_tenant()
    key = make_key(tenant, scopes=tuple(Scope)).secret
    now = int(timezone.now().timestamp() * 1000)
    record_usage([an_event(str(tenant.public_id), created_at_ms=now, finished_at_ms=now + 1)])
    server = settings.DATABASE_URL.rpartition("/")[0].rpartition("@")[2]
    database = connection.settings_dict["NAME"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "WEIR_REPLICA_URL", f"postgres://lagging_reader:secret@{server}/{database}?options={lagging}"
        )
        with running_site(connection.settings_dict, tmp_path) as site:
            assert asked(site, key) == [], "it knows the key of the primary, and the sums of the replica"
            with connection.cursor() as cursor:
                cursor.execute(
                    "INSERT INTO lagging.inference_usagedaytotal SELECT * FROM public.inference_usagedaytotal"
                )
            (line,) = asked(site, key)
            assert line["requests"] == 1
            with connection.cursor() as cursor:
                cursor.execute("DELETE FROM lagging.inference_usagedaytotal")
                cursor.execute("ALTER ROLE lagging_reader NOLOGIN")
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'lagging_reader'"
                )
            for _ in range(2):  # a connection that broke, and one that can't be made
                (line,) = asked(site, key)
                assert line["requests"] == 1, "the replica is away: the primary answers"


def test_only_what_asks_for_it_reads_the_replica(monkeypatch: pytest.MonkeyPatch):
    router = ReplicaRouter()
    monkeypatch.setitem(settings.DATABASES, REPLICA, {})

    def where() -> str | None:
        return router.db_for_read(type(None))  # type: ignore[arg-type]

    assert where() is None
    assert on_replica(where) == REPLICA
    assert where() is None
    assert router.allow_migrate(REPLICA, "inference") is False
    assert router.allow_migrate("default", "inference") is None
