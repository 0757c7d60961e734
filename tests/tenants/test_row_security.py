"""The second lock: PostgreSQL itself refuses other tenants' rows to the role of a gateway."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import psycopg
import pytest
from django.apps import apps
from django.db import connection, transaction
from psycopg import sql

from inference.models import UsageRecord
from inference.services.ledger import record_usage
from inference.services.partitions import make_partitions_ahead
from tenants.models import ApiKey, Tenant
from tenants.principal import Scope
from tenants.row_security import EVERYBODY, VARIABLE, bound_to, install, make_policies, policies, uninstall
from tests.e2e.site import MODEL, ROOT, Site, running_site
from tests.factories import browser_of, make_key, make_operator, make_tenant, make_user
from tests.inference.ledger_driving import an_event
from tests.pooler import PGBOUNCER, pooler
from weir import embedded
from weir.doctor import servers

ROLES = ("weir_gateway", "weir_background", "weir_owner")


@pytest.fixture(scope="module")
def roles(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """The shipped roles in the tests' database, whose owner is whoever runs the tests."""
    psql = embedded.postgres_program("psql")
    assert psql
    database = connection.settings_dict
    given = {
        "PGHOST": "HOST",
        "PGPORT": "PORT",
        "PGUSER": "USER",
        "PGPASSWORD": "PASSWORD",
        "PGDATABASE": "NAME",
    }
    env = os.environ | {name: str(database[key]) for name, key in given.items() if database.get(key)}
    variables = [f"-v{kind}_password=secret" for kind in ("owner", "background", "gateway")]
    subprocess.run(
        [psql, "-q", *variables, "-f", ROOT / "deploy" / "postgres" / "roles.sql"],
        env=env,
        check=True,
        timeout=60,
    )
    yield
    drop = "; ".join(f"DROP OWNED BY {role}; DROP ROLE {role}" for role in ROLES)
    subprocess.run([psql, "-q", "-c", drop], env=env, check=True, timeout=60)


def as_gateway() -> psycopg.Connection[Any]:
    database = connection.settings_dict
    return psycopg.connect(
        host=database["HOST"], port=database["PORT"] or None, dbname=database["NAME"],
        user="weir_gateway", password="secret", autocommit=True,
    )  # fmt: skip


def test_every_table_of_a_tenant_has_a_policy(db: None):
    of_tenants = {
        model._meta.db_table
        for model in apps.get_models()
        if model._meta.app_label in ("tenants", "inference")
        and ("tenant" in {field.name for field in model._meta.concrete_fields} or model is Tenant)
    }
    assert len(of_tenants) > 12
    assert of_tenants <= set(policies())
    with connection.cursor() as cursor:
        cursor.execute("SELECT relname FROM pg_class WHERE relrowsecurity")
        closed = {name for (name,) in cursor.fetchall()}
        assert set(policies()) <= closed
        make_policies(connection)  # again: changes nothing
        make_partitions_ahead()
        cursor.execute(
            "SELECT relname FROM pg_inherits JOIN pg_class ON oid = inhrelid"
            " WHERE inhparent = 'inference_usagerecord'::regclass AND NOT relrowsecurity"
        )
        assert cursor.fetchall() == [], "a partition is no way around"


@pytest.mark.django_db(transaction=True)
def test_the_role_sees_the_rows_of_the_tenant_that_it_is_told(roles: None):
    mine, other = make_tenant(), make_tenant()
    for tenant in (mine, other):
        make_key(tenant)
        record_usage([an_event(str(tenant.public_id))])
    with as_gateway() as gateway:

        def tell(value: object) -> None:
            gateway.execute("SELECT set_config(%s, %s, false)", [VARIABLE, str(value)])

        def tenants(table: str) -> set[int]:
            query = sql.SQL("SELECT tenant_id FROM {}").format(sql.Identifier(table))
            return {row[0] for row in gateway.execute(query).fetchall()}

        assert tenants("inference_usagerecord") == set(), "before anybody is known: no ledger"
        assert tenants("tenants_apikey") >= {mine.pk, other.pk}, "but whose key it is can be found"
        tell(mine.pk)
        for table in ("inference_usagerecord", "inference_usageday", "tenants_apikey"):
            assert tenants(table) == {mine.pk}, table
        (partition,) = gateway.execute(
            "SELECT tableoid::regclass::text FROM inference_usagerecord LIMIT 1"
        ).fetchone() or ("",)
        direct = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(partition))
        assert gateway.execute(direct).fetchone() == (0,)
        moved = gateway.execute("UPDATE tenants_apikey SET name = 'mine' WHERE tenant_id = %s", [other.pk])
        assert moved.rowcount == 0
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            gateway.execute("UPDATE tenants_apikey SET tenant_id = %s", [other.pk])
        tell(EVERYBODY)
        assert tenants("inference_usagerecord") >= {mine.pk, other.pk}
        for statement in (
            "ALTER TABLE tenants_apikey DISABLE ROW LEVEL SECURITY",
            "DROP TABLE inference_usagerecord",
            "SET ROLE weir_owner",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                gateway.execute(statement)


@pytest.mark.django_db(transaction=True)
def test_a_query_that_forgot_its_tenant_finds_nothing_of_others(roles: None, settings: Any):
    """Django's own connection, as that role: also after a rollback, and for what a thread began with."""
    mine, other = make_tenant(), make_tenant()
    record_usage([an_event(str(tenant.public_id)) for tenant in (mine, other)])

    def seen() -> set[int]:
        return set(UsageRecord.unscoped.values_list("tenant_id", flat=True))

    assert seen() >= {mine.pk, other.pk}, "the control: this is what the first lock alone is for"
    settings.ROW_SECURITY = True
    assert [finding.level for finding in servers.row_security()] == ["warning"], (
        "the doctor: the owner is not bound"
    )
    connection.close()
    install()
    try:
        with connection.cursor() as cursor:
            cursor.execute("SET ROLE weir_gateway")
        assert seen() == set()
        assert [finding.level for finding in servers.row_security()] == ["ok"]
        with bound_to(str(mine.pk)):
            assert seen() == {mine.pk}
            with transaction.atomic():
                with bound_to(str(other.pk)):
                    assert seen() == {other.pk}
                transaction.set_rollback(True)
            assert seen() == {mine.pk}
            with transaction.atomic():
                ApiKey.unscoped.count()
                with bound_to(str(other.pk)):
                    assert seen() == {other.pk}
                assert seen() == {mine.pk}
        assert seen() == set()
    finally:
        uninstall()
        with connection.cursor() as cursor:
            cursor.execute("RESET ROLE")  # the pool keeps the connection
        connection.close()


@pytest.fixture(params=["straight", "pooled"])
def site(
    roles: None, transactional_db: None, tmp_path_factory: pytest.TempPathFactory, request: Any
) -> Iterator[Site]:
    """A gateway that connects as the role: to PostgreSQL, or to a pooler in session mode."""
    database = {**connection.settings_dict, "USER": "weir_gateway", "PASSWORD": "secret"}
    with ExitStack() as stack:
        if request.param == "pooled":
            if PGBOUNCER is None:
                pytest.skip("needs pgbouncer")
            home = tmp_path_factory.mktemp("pooler")
            database = stack.enter_context(pooler(database, home, mode="session"))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("WEIR_ROW_SECURITY", "true")
        yield stack.enter_context(running_site(database, tmp_path_factory.mktemp("row-security")))


def test_a_gateway_as_that_role_does_its_work(site: Site):
    owner, operator = make_user(), make_operator()
    tenant, other = make_tenant(owner=owner), make_tenant()
    for one in (tenant, other):
        record_usage([an_event(str(one.public_id), completion_tokens=one.pk)])
    key = make_key(tenant, scopes=tuple(Scope)).secret
    bearer = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=site.url, headers=bearer, timeout=60) as client:
        body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        made = client.post("/v1/responses", json={"model": MODEL, "input": "hi", "max_output_tokens": 16})
        assert made.status_code == 200, made.text
        assert client.get(f"/v1/responses/{made.json()['id']}").status_code == 200
        lines = b'{"custom_id": "1"}\n'
        file = client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", lines, "application/jsonl")}
        )
        assert file.status_code == 200, file.text
        assert client.get(f"/v1/files/{file.json()['id']}/content").content == lines
        usage = client.get("/v1/usage", params={"start": "2027-01-01", "end": "2027-02-01"})
        assert usage.status_code == 200
        assert json.dumps(usage.json()).count(f'"output_tokens": {tenant.pk}') == 1
        assert client.get("/v1/keys").status_code == 200
        assert client.post("/v1/keys", json={"name": "second", "scopes": ["inference"]}).status_code < 300

    with browser_of(site.url, owner) as browser:
        for page in ("", "usage/", "keys/"):
            address = f"/t/{tenant.public_id}/{page}"
            assert browser.get(address, follow_redirects=True).status_code == 200, address
    with browser_of(site.url, operator) as browser:
        for page in ("/admin/tenants/tenant/", "/admin/inference/usagerecord/", "/operator/live"):
            answer = browser.get(page)
            assert answer.status_code in (200, 302), page
