"""Pages while PostgreSQL takes nobody in, or Redis is away: a page that says so, and the platform's again by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from django.conf import settings as django_settings
from django.db import connection
from django.test import Client
from psycopg.sql import SQL, Identifier

from tenants.models import User
from tenants.principal import Scope
from tests.databases import paused_postgres
from tests.e2e.site import Site, running_site
from tests.factories import PASSWORD, make_cast, make_key, make_user
from tests.inference.test_chat_socket import hear, say, session_cookie, socket, start
from tests.pooler import PGBOUNCER, pooler
from weir.patient_connection import PatientConnection

GATEWAY = "weir-outage"


@pytest.fixture(scope="module")
def site(
    django_db_setup: None, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    scratch = tmp_path_factory.mktemp("outage-site")
    with running_site(connection.settings_dict, scratch, more_env={"PGAPPNAME": GATEWAY}) as site:
        yield site


@contextmanager
def no_database() -> Iterator[None]:
    """It lets nobody in any more, and ends the gateway's sessions; those of this process stay."""
    parameters = connection.get_connection_params()
    name = Identifier(parameters["dbname"])
    with psycopg.connect(**{**parameters, "dbname": "postgres"}, autocommit=True) as admin:
        admin.execute(SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
        try:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
                [GATEWAY],
            )
            yield
        finally:
            admin.execute(SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(180)
def test_every_kind_of_page_says_that_it_is_back_in_a_moment(site: Site):
    cast = make_cast()
    tenant = f"/t/{cast.tenant.public_id}/"
    nobody: dict[str, str] = {}
    owner, operator = ({"Cookie": session_cookie(user)} for user in (cast.owner, cast.operator))
    pages = [
        *((nobody, path) for path in ("/", "/login/", "/docs/", "/sso/")),
        *((owner, path) for path in ("/", "/chat/", tenant, f"{tenant}keys/?q=a", f"{tenant}chat/", "/sessions/")),
        *((operator, path) for path in ("/admin/", "/admin/live/", "/admin/tenants/tenant/")),
    ]  # fmt: skip

    def ask(page: tuple[dict[str, str], str]) -> httpx.Response:
        return httpx.get(site.url + page[1], headers=page[0], timeout=60)

    with (
        ThreadPoolExecutor(len(pages)) as threads,
        socket(site, cast.member) as chat,
        no_database(),
    ):
        answers = list(threads.map(ask, pages))
        program = httpx.get(f"{site.url}/operator/live", headers=operator, timeout=60)
        say(chat, **start("g1"))
        told = hear(chat)
        logo = httpx.get(f"{site.url}/static/weir/logo.svg", timeout=60)
    for (_, path), answer in zip(pages, answers, strict=True):
        assert answer.status_code == 503, path
        assert int(answer.headers["Retry-After"]) >= 1, path
        assert answer.headers["Cache-Control"] == "no-store", path
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"], path
        assert "The database can&#x27;t be reached at the moment." in answer.text, path
        assert f'href="{path}"' in answer.text, path
    assert (program.status_code, program.json()["error"]["code"]) == (503, "database_unavailable")
    assert told["type"] == "error"
    assert told["error"]["code"] in ("database_unavailable", "auth_unavailable")
    assert told["retry_after_ms"]
    assert logo.status_code == 200
    deadline = time.monotonic() + 60
    while (back := ask((owner, tenant))).status_code == 503 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert back.status_code == 200


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(180)
def test_pages_of_a_database_that_stands_still_say_so_soon(site: Site):
    """FAULTS 61: its connections are open, its kernel answers, it never does."""
    cast = make_cast()
    owner, operator = ({"Cookie": session_cookie(user)} for user in (cast.owner, cast.operator))
    pages = [(owner, f"/t/{cast.tenant.public_id}/"), (operator, "/admin/live/"), (owner, "/sessions/")]

    def ask(page: tuple[dict[str, str], str]) -> httpx.Response:
        return httpx.get(site.url + page[1], headers=page[0], timeout=30)

    def asked_until_back(page: tuple[dict[str, str], str]) -> int:
        deadline = time.monotonic() + 60
        while (back := ask(page)).status_code == 503 and time.monotonic() < deadline:
            time.sleep(0.2)
        return back.status_code

    with ThreadPoolExecutor(len(pages)) as threads:
        assert list(threads.map(asked_until_back, pages)) == [200] * len(pages)
        with paused_postgres():
            for is_known_to_hang in (False, True):
                answers = list(threads.map(ask, pages))
                for (_, path), answer in zip(pages, answers, strict=True):
                    assert answer.status_code == 503, (path, is_known_to_hang)
                    assert "The database can&#x27;t be reached at the moment." in answer.text, path
                    assert answer.elapsed.total_seconds() < 15, path
        assert list(threads.map(asked_until_back, pages)) == [200] * len(pages)


@pytest.mark.skipif(PGBOUNCER is None, reason="needs pgbouncer")
@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(300)
def test_so_do_they_of_one_that_stands_still_behind_a_pooler(tmp_path: Path):
    """It takes connections for a server that answers nobody."""
    cast = make_cast()
    owner, operator = ({"Cookie": session_cookie(user)} for user in (cast.owner, cast.operator))
    secret = make_key(cast.tenant, scopes=list(Scope)).secret
    pages = [
        (owner, f"/t/{cast.tenant.public_id}/"),
        (operator, "/admin/live/"),
        ({"Authorization": f"Bearer {secret}"}, "/v1/usage"),
    ]
    with (
        pooler(connection.settings_dict, tmp_path, mode="transaction") as pooled,
        running_site(pooled, tmp_path) as site,
        ThreadPoolExecutor(len(pages)) as threads,
    ):

        def ask(page: tuple[dict[str, str], str]) -> httpx.Response:
            return httpx.get(site.url + page[1], headers=page[0], timeout=60)

        assert [answer.status_code for answer in threads.map(ask, pages)] == [200] * len(pages)
        with paused_postgres():
            answers = list(threads.map(ask, pages))
    for (_, path), answer in zip(pages, answers, strict=True):
        assert answer.status_code == 503, path
        assert answer.elapsed.total_seconds() < 40, path


@pytest.mark.skipif(PGBOUNCER is None, reason="needs pgbouncer")
@pytest.mark.django_db(transaction=True)
def test_a_slow_statement_is_waited_for_while_a_pooler_has_none_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("weir.patient_connection._SILENT_S", 0.1)
    monkeypatch.setattr("weir.patient_connection._ANSWER_S", 1)
    with pooler(connection.settings_dict, tmp_path, mode="transaction") as pooled:
        given = connection.get_connection_params()
        where = {
            "host": pooled["HOST"],
            "port": pooled["PORT"],
            "dbname": pooled["NAME"],
            "user": given["user"],
        }

        def slow(_: int) -> tuple[Any, ...] | None:
            with PatientConnection.connect(**where, autocommit=True, prepare_threshold=None) as patient:
                return patient.execute("SELECT pg_sleep(4), 7").fetchone()

        with ThreadPoolExecutor(3) as threads:
            assert [row[1] for row in threads.map(slow, range(3)) if row] == [7, 7, 7]


@pytest.mark.django_db(transaction=True)
def test_a_slow_statement_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    """Also by a server that takes no more connections: it says so, so that it is awake."""
    monkeypatch.setattr("weir.patient_connection._SILENT_S", 0.1)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(1), 7")
        assert cursor.fetchone()[1] == 7
    with no_database(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(1), 8")
        assert cursor.fetchone()[1] == 8


@pytest.mark.django_db(transaction=True)
def test_signing_in_while_nobody_counts_failures(settings: Any):
    """Failed attempts are counted in Redis, and nobody is let in uncounted."""
    user: User = make_user()
    away = {**django_settings.CACHES["default"], "LOCATION": ["redis://127.0.0.1:9"]}
    settings.CACHES = {"default": away}
    answer = Client(raise_request_exception=False).post(
        "/login/", {"login": user.email, "password": PASSWORD}
    )
    assert answer.status_code == 503
    page = answer.content.decode()
    assert "A part of the server can&#x27;t be reached at the moment." in page
    assert 'href="/"' in page, "what was sent is not sent again by a link"
