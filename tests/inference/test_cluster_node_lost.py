"""A node of a real Redis Cluster is killed, with a tenant's limits on it: what runs holds them again, and what ended is
charged.

The gateway, its worker and the ledger's drain are the product's own. The node comes back empty, as one does whose disk
or machine is new. That the model's requests are on another node makes it half a loss, which no restart repairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.conf import settings
from django.db import connection

from engine_worker.broker import keys
from inference.models import UsageRecord
from inference.services.reconcile import counter_differences
from inference.services.usage import drain_usage_stream
from tenants.models import Tenant
from tenants.principal import Calendar, LimitMetric
from tenants.quotas.buckets import tenant_prefix
from tests.e2e.site import MODEL, Site, running_site
from tests.factories import make_key, make_tenant, set_limit
from tests.redis_fleets import Cluster, cluster_of_three

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]
BUDGET = 1_000_000
ASKED = {"model": MODEL, "prompt": "hi", "stream": True}


def until(condition: Callable[[], Any], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def a_tenant_elsewhere(nodes: Cluster) -> tuple[Tenant, int]:
    """One whose limits are not where the model's requests are, and the number of its node."""
    away = nodes.holder_of(keys.model_prefix(MODEL))
    while True:
        tenant = make_tenant()
        number = nodes.holder_of(tenant_prefix(str(tenant.public_id)))
        if number != away:
            return tenant, number


def test_what_runs_is_held_again_and_what_ended_is_charged(tmp_path: Path):
    with cluster_of_three(tmp_path) as nodes:
        others = {
            "WEIR_CELERY_URL": settings.REDIS_URL,
            "WEIR_CHANNELS_URL": settings.REDIS_URL,
            # The list of models may be on that node too: until the next heartbeat a model is late, not unknown.
            "WEIR_EXPECTED_MODELS": MODEL,
        }
        with running_site(
            connection.settings_dict, tmp_path, more_env={"REDIS_URL": nodes.url, **others}
        ) as site:
            lose_it_while_and_after(nodes, site)


def lose_it_while_and_after(nodes: Cluster, site: Site) -> None:
    tenant, number = a_tenant_elsewhere(nodes)
    set_limit(tenant, LimitMetric.CONCURRENCY, 1)
    set_limit(tenant, LimitMetric.TOKENS, BUDGET, calendar=Calendar.MONTH)
    bearer = {"Authorization": f"Bearer {make_key(tenant).secret}"}
    with httpx.Client(base_url=f"{site.url}/v1/", headers=bearer, timeout=60) as client:

        def left() -> dict[str, int] | None:
            answer = client.get("quota")
            if answer.status_code == 503:
                return None  # at that moment the node is away, and it says so
            assert answer.status_code == 200, answer.text
            return {each["metric"]: each["remaining"] for each in answer.json()["data"]}

        def asked(max_tokens: int) -> httpx.Response:
            """What it is told once the node is back, also in the eyes of its clients; until then it is 503."""
            deadline = time.monotonic() + 60
            while True:
                body = ASKED | {"max_tokens": max_tokens, "stream": False}
                answer = client.post("completions", json=body)
                if answer.status_code != 503:
                    return answer
                assert time.monotonic() < deadline, answer.text
                time.sleep(0.1)

        def charged() -> int:
            drain_usage_stream(redis_url=nodes.url)
            rows = UsageRecord.objects.filter(tenant=tenant)
            return sum(row.prompt_tokens + row.completion_tokens for row in rows)

        with client.stream("POST", "completions", json=ASKED | {"max_tokens": 3000}) as running:
            lines = running.iter_lines()
            while not next(lines).startswith("data: {"):
                pass
            held = left()
            assert held is not None
            assert held["concurrency"] == 0
            assert held["tokens"] < BUDGET - 3000
            nodes.lose(number)
            until(lambda: left() == held)
            assert "reservation_taken_again" in site.log.read_text(), "it was gone"
            assert asked(1).status_code == 429
            for _ in range(5):  # and it goes on
                while not next(lines).startswith("data: {"):
                    pass
        until(lambda: (left() or {}).get("concurrency") == 1)
        until(lambda: charged() > 0)
        assert left() == {"concurrency": 1, "tokens": BUDGET - charged()}

        # One that ended, and whose row is not written yet: its reservation went with the node.
        before = charged()
        answer = asked(5)
        assert answer.status_code == 200, answer.text
        nodes.lose(number)
        until(lambda: charged() > before)
        assert charged() == before + answer.json()["usage"]["total_tokens"]
        until(lambda: left() == {"concurrency": 1, "tokens": BUDGET - charged()})
    assert counter_differences(nodes.url) == []
