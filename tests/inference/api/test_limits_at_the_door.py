"""Limits as clients meet them at every route: who is counted, who is not, and who waits for its turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import httpx
import pytest
import redis
from django.conf import settings

from inference.models import UsageRecord
from inference.services.reconcile import counter_differences
from inference.services.usage import drain_usage_stream
from tenants.principal import Calendar, LimitMetric, Scope
from tenants.quotas.buckets import tenant_prefix
from tenants.services import change_api_key
from tests.factories import TEST, make_key, make_tenant, set_limit

pytestmark = pytest.mark.django_db(transaction=True)
CHAT = [{"role": "user", "content": "hi"}]


def client_for(site, secret: str) -> httpx.Client:
    return httpx.Client(base_url=f"{site.url}/v1/", headers={"Authorization": f"Bearer {secret}"}, timeout=60)


def test_limit_n_admits_n_on_whatever_route(site, model):
    """FAULTS 54, 56 and 57: N and not N - 1; no route that generates goes past it; the others cost nothing."""
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 2, period_s=86_400)
    generating = {
        "chat/completions": {"messages": CHAT, "max_tokens": 1},
        "completions": {"prompt": "hi", "max_tokens": 1},
        "messages": {"messages": CHAT, "max_tokens": 1},
        "responses": {"input": "hi", "max_output_tokens": 16},
    }
    with client_for(site, make_key(tenant, scopes=[Scope.ADMIN]).secret) as client:

        def left() -> int:
            (limit,) = client.get("quota").json()["data"]
            return int(limit["remaining"])

        for free in (
            "models",
            f"models/{model}",
            "quota",
            "keys",
            "usage",
            "files",
            "batches",
            "alerts",
            "audit",
        ):
            assert client.get(free).status_code == 200, free
        assert client.post("tokenize", json={"model": model, "prompt": "hi"}).status_code == 200
        assert (
            client.post("messages/count_tokens", json={"model": model, "messages": CHAT}).status_code == 200
        )
        assert left() == 2
        for _ in range(2):
            answer = client.post("completions", json={"model": model, **generating["completions"]})
            assert answer.status_code == 200
        for route, body in generating.items():
            for stream in (False, True):
                answer = client.post(route, json={"model": model, "stream": stream, **body})
                assert answer.status_code == 429, (route, stream, answer.text)
                assert int(answer.headers["retry-after"]) >= 1
        assert left() == 0


def test_a_slot_is_held_until_the_streams_end(site, model):
    """FAULTS 60: one at once means that a second one waits for the first one's last event, not its first."""
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.CONCURRENCY, 1)
    body = {"model": model, "prompt": "hi", "max_tokens": 60, "stream": True}
    with client_for(site, make_key(tenant).secret) as client:
        with client.stream("POST", "completions", json=body) as first:
            assert first.status_code == 200
            lines = first.iter_lines()
            while not next(lines).startswith("data: {"):
                pass
            assert client.post("completions", json=body | {"stream": False}).status_code == 429
            for _ in lines:
                pass
        ends_at = time.monotonic() + 20
        while client.post("completions", json=body | {"stream": False, "max_tokens": 1}).status_code == 429:
            assert time.monotonic() < ends_at, "the slot did not come back"
            time.sleep(0.05)


def test_what_runs_holds_its_slot_and_its_budget_again_after_redis_forgot_them(site, model):
    """A cluster that lost the node with a tenant's limits, and not the one with its requests."""
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.CONCURRENCY, 1)
    set_limit(tenant, LimitMetric.TOKENS, 1_000_000, calendar=Calendar.MONTH)
    body = {"model": model, "prompt": "hi", "max_tokens": 3000, "stream": True}
    ends_at = time.monotonic() + 60
    with client_for(site, make_key(tenant).secret) as client:

        def left() -> dict[str, int]:
            return {each["metric"]: each["remaining"] for each in client.get("quota").json()["data"]}

        def until(what: Callable[[], bool]) -> None:
            while not what():
                assert time.monotonic() < ends_at
                time.sleep(0.05)

        with client.stream("POST", "completions", json=body) as first:
            lines = first.iter_lines()
            while not next(lines).startswith("data: {"):
                pass
            held = left()
            assert held["concurrency"] == 0
            assert held["tokens"] < 1_000_000 - 3000, "prompt and largest answer are held"
            with redis.Redis.from_url(settings.REDIS_URL) as server:
                slots = f"{tenant_prefix(str(tenant.public_id))}quota:tenant:{tenant.public_id}:concurrency:0"
                known = server.keys(f"{tenant_prefix(str(tenant.public_id))}*")
                assert slots.encode() in known
                forget = server.pipeline()
                _, nobody_runs = forget.delete(*known).zcard(slots).execute()
                assert nobody_runs == 0, "the control: so it would stay"
            until(lambda: left() == held)
            assert client.post("completions", json=body | {"stream": False}).status_code == 429
        until(lambda: left()["concurrency"] == 1)

        def is_in_the_ledger() -> bool:
            drain_usage_stream()
            return UsageRecord.objects.filter(tenant=tenant).exists()

        until(is_in_the_ledger)
        row = UsageRecord.objects.get(tenant=tenant)
        assert left()["tokens"] == 1_000_000 - row.prompt_tokens - row.completion_tokens
    differences = counter_differences(settings.REDIS_URL)
    assert [one for one in differences if one.whose.startswith(tenant.slug)] == []


def test_a_key_that_waits_takes_its_turn_in_order(site, model):
    """Queue or refuse: four at once on a rate of one every half second are answered one after the other, in the order
    in which they came; the other key of the tenant is refused as ever; what can't fit by the deadline is too."""
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 2, period_s=1, burst=1)
    patient, hasty = make_key(tenant, waits_for_rate=True), make_key(tenant)
    answered: list[tuple[int, httpx.Response]] = []
    body = {"model": model, "prompt": "hi", "max_tokens": 1}

    def ask(number: int) -> None:
        with client_for(site, patient.secret) as client:
            answer = client.post("completions", json=body)
            answered.append((number, answer))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for _, answer in answered] == [200] * 4, [a.text for _, a in answered]
    assert time.monotonic() - began > 1.4  # three of them waited half a second each
    places = [int(answer.headers["x-weir-place"]) for _, answer in answered]
    assert places == sorted(places)
    waits = [int(answer.headers["x-weir-waited-ms"]) for _, answer in answered]
    assert waits[-1] > 1000

    with client_for(site, hasty.secret) as client:
        codes = {client.post("completions", json=body).status_code for _ in range(4)}
        assert 429 in codes
    set_limit(tenant, LimitMetric.REQUESTS, 1, period_s=86_400)
    time.sleep(1.5)  # a change reaches every gateway within a second
    with client_for(site, patient.secret) as client:
        assert client.post("completions", json=body).status_code in (200, 429)
        began = time.monotonic()
        refused = client.post("completions", json=body, headers={"x-weir-deadline-s": "5"})
        assert refused.status_code == 429
        assert time.monotonic() - began < 30
    changed = change_api_key(
        actor=TEST, api_key=patient.api_key, name="patient", project=None, allowed_models=(), allowed_networks=(),
        max_tier=None, waits_for_rate=False,
    )  # fmt: skip
    assert changed
