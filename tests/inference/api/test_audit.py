"""The audit log as owners search and export it, through the API and the console."""

from __future__ import annotations

import csv
import io
import json

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tenants.audit_log import COLUMNS, AuditWanted, audit_actions, audit_page
from tenants.models import AuditEntry
from tenants.principal import LimitMetric, Scope
from tenants.services import Actor, revoke_api_key, set_quota_limit
from tests.factories import make_key, make_tenant, make_user, set_limit

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def told():
    """A tenant with some history, and another with the same names."""
    tenant, other = make_tenant("Twin"), make_tenant("Twin too")
    owner = Actor.person(make_user("owner@example.org"), ip_address="192.0.2.9")
    for each in (tenant, other):
        key = make_key(each, name="=cmd()").api_key
        revoke_api_key(actor=owner, api_key=key)
        for amount in (5, 7):
            set_quota_limit(actor=owner, owner=each, metric=LimitMetric.REQUESTS, amount=amount)
    return tenant, other


def test_search_pages_and_csv(http, told):
    tenant, other = told
    http.headers["Authorization"] = f"Bearer {make_key(tenant, scopes=[Scope.ADMIN]).secret}"
    every = http.get("audit").json()
    assert not every["has_more"]
    assert {entry["action"] for entry in every["data"]} == {
        "tenant.created", "key.issued", "key.revoked", "limit.set",
    }  # fmt: skip
    assert str(other.public_id) not in json.dumps(every)
    (newest, _) = http.get("audit", params={"action": "limit.set"}).json()["data"]
    assert (newest["before"]["amount"], newest["after"]["amount"]) == (5, 7)
    assert (newest["actor"], newest["address"]) == ("owner@example.org", "192.0.2.9")
    for params, count in (
        ({"action": "key."}, 3),
        ({"q": "OWNER@"}, 3),
        ({"q": "192.0.2."}, 3),
        ({"actor": "owner@example.org", "action": "key.revoked"}, 1),
        ({"target": newest["target_id"]}, 2),
        ({"start": "2000-01-01", "end": "2001-01-01"}, 0),
    ):
        assert len(http.get("audit", params=params).json()["data"]) == count, params
    seen, page = [], {"limit": "2"}
    while True:
        part = http.get("audit", params=page).json()
        seen += [entry["id"] for entry in part["data"]]
        if not part["has_more"]:
            break
        page = {"limit": "2", "page": part["next_page"]}
    assert seen == [entry["id"] for entry in every["data"]]

    answer = http.get("audit/export", params={"action": "key."})
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.content.decode("utf-8-sig"))))
    assert tuple(rows[0]) == COLUMNS
    assert [row["action"] for row in rows] == ["key.issued", "key.revoked", "key.issued"]
    assert sum(row["target"].startswith("'=cmd()") for row in rows) == 2
    for params in ({"start": "never"}, {"target": "x"}, {"limit": "0"}, {"page": "AAAA"}):
        assert http.get("audit", params=params).status_code == 400, params


def test_a_page_is_one_query_however_long_the_log(told):
    tenant, _ = told
    for amount in range(1, 60):
        set_limit(tenant, LimitMetric.TOKENS, amount)
    with CaptureQueriesContext(
        connection,
    ) as queries:
        entries, after = audit_page(tenant.pk, AuditWanted(text="limit"), limit=20)
    assert (len(queries), len(entries), bool(after)) == (1, 20, True)
    assert audit_actions(tenant.pk) == ["key.issued", "key.revoked", "limit.set", "tenant.created"]
    assert AuditEntry.objects.for_tenant(tenant).count() > 60
