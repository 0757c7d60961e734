"""PgBouncer in transaction mode, where no session is anybody's: the whole product works, and the doctor says so."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from typing import Any

import httpx
import pytest
from django.db import connection
from django.urls import reverse
from django.utils import timezone
from openai import OpenAI

from inference.models import BatchStatus
from inference.services.usage import drain_usage_stream
from tenants.models import DataCopyState, Role, Tenant
from tenants.principal import Scope
from tenants.services import add_member
from tenants.services.data_copies import ask_for_copy, list_copies
from tests.e2e.site import MODEL, ROOT, Site, running_site
from tests.factories import TEST, browser_of, make_key, make_operator, make_tenant, make_tier, make_user
from tests.pooler import PGBOUNCER, connect, pooler

pytestmark = [
    pytest.mark.skipif(PGBOUNCER is None, reason="needs pgbouncer"),
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(300),
]
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
_ALL_TASKS = """
import django
django.setup()
from celery import Task
from inference import tasks
from tenants import tasks as more
for module in (tasks, more):
    for name, task in vars(module).items():
        if isinstance(task, Task):
            task()
            print(name)
"""


def test_the_whole_product_through_sessions_that_change_with_each_transaction(tmp_path: Any):
    owner, operator = make_user(), make_operator()
    tenant = make_tenant(owner=owner)
    make_tier("batch")
    add_member(actor=TEST, tenant=tenant, user=make_user(), role=Role.VIEWER)
    key = make_key(tenant, scopes=tuple(Scope)).secret
    with pooler(connection.settings_dict, tmp_path, mode="transaction") as pooled:
        with connect(pooled) as direct:
            (held,) = direct.execute("SELECT pg_try_advisory_lock(1, 42)").fetchone() or (False,)
            assert held
            released = [direct.execute("SELECT pg_advisory_unlock(1, 42)").fetchone() for _ in range(4)]
            assert released[0] == (False,), "the control: what a session has stays with whichever was lent"
            assert (True,) in released
        with running_site(pooled, tmp_path) as site:
            requests_and_batches(site, tenant, key)
            pages(site, tenant, owner, operator)
            assert "pooler in transaction mode" in run(site, "manage.py", "doctor", check=False)
    assert list_copies(tenant)[0].state == DataCopyState.DONE


def requests_and_batches(site: Site, tenant: Tenant, key: str) -> None:
    with OpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        run_a_batch(site, client, tenant)
        with client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, stream=True) as stream:
            assert len(list(stream)) > 8
        response = client.responses.create(model=MODEL, input="hi", max_output_tokens=16)
        assert client.responses.retrieve(response.id) == response
        run_a_batch(site, client, tenant)
    drain_usage_stream()
    day = timezone.now()
    span = {"start": f"{day - timedelta(days=2):%Y-%m-%d}", "end": f"{day + timedelta(days=2):%Y-%m-%d}"}
    with httpx.Client(base_url=site.url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as plain:
        assert sum(line["requests"] for line in plain.get("/v1/usage", params=span).json()["data"]) == 4
        tried = plain.post("/v1/quota/try", json={"metric": "requests", "amount": 1, "period_s": 86_400})
        assert (tried.status_code, tried.json()["refused"]) == (200, 3), tried.text


def run_a_batch(site: Site, client: OpenAI, tenant: Tenant) -> None:
    line: dict[str, Any] = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    ask_for_copy(actor=TEST, tenant=tenant)
    ended = set(run(site, "-c", _ALL_TASKS).split())
    assert ended >= {"run_batches", "copy_data", "drain_usage", "alert", "send_webhooks", "export"}
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
        assert cursor.fetchone() == (0,), "what a session has stays with whichever was lent"
    assert client.batches.retrieve(batch.id).status == BatchStatus.COMPLETED


def pages(site: Site, tenant: Tenant, owner: Any, operator: Any) -> None:
    with browser_of(site.url, owner) as browser:
        for page in ("overview", "usage", "keys", "requests", "limits", "members"):
            address = reverse(page, args=[tenant.public_id])
            assert browser.get(address).status_code == 200, page
    with browser_of(site.url, operator) as browser:
        # Forms with choices from the database, which Django reads by cursors.
        for page in ("tenant", "apikey", "quotalimit", "membership"):
            for _ in range(3):
                assert browser.get(f"/admin/tenants/{page}/add/").status_code == 200, page


def run(site: Site, *arguments: str, check: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, env=site.env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done.stdout
