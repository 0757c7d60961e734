"""Every admit, refusal and charge can be opened, to the numbers that decided it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from django.test import Client
from django.urls import reverse

from inference.models import UsageRecord
from inference.services.ledger import adjust_usage
from inference.services.usage import drain_usage_stream
from tenants.models import ModelPrice, Role
from tenants.principal import Calendar, LimitMetric, Scope
from tenants.services import add_member
from tests.factories import TEST, make_key, make_tenant, make_user, set_limit

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def tenant(model):
    ModelPrice.objects.create(
        model=model,
        valid_from=datetime(2026, 1, 1, tzinfo=UTC),
        input_microusd_per_mtok=2_500_000,
        cached_input_microusd_per_mtok=1_000_000,
        output_microusd_per_mtok=3_000_000,
    )
    tenant = make_tenant()
    set_limit(tenant, LimitMetric.REQUESTS, 2, period_s=86_400)
    set_limit(tenant, LimitMetric.TOKENS, 1000, period_s=86_400)
    set_limit(tenant, LimitMetric.COST, 10_000, calendar=Calendar.MONTH)
    set_limit(tenant, LimitMetric.CONCURRENCY, 5)
    return tenant


def test_an_admission_a_refusal_and_a_charge_are_explained(site, model, tenant):
    """FAULTS 71: the limit that bound, and numbers that agree with what then happened."""
    headers = {
        "Authorization": f"Bearer {make_key(tenant, scopes=[Scope.INFERENCE, Scope.USAGE_READ]).secret}"
    }
    with httpx.Client(base_url=f"{site.url}/v1/", headers=headers, timeout=60) as client:
        ask = {"model": model, "prompt": "seven!!", "max_tokens": 5}
        first, second, third = (client.post("completions", json=ask) for _ in range(3))
        assert [answer.status_code for answer in (first, second, third)] == [200, 200, 429]
        drain_usage_stream()
        answer_id = first.json()["id"]
        row = UsageRecord.objects.get(tenant=tenant, request_id=answer_id)
        adjust_usage(actor=TEST, tenant=tenant, cost_microusd=-3, reason="Slow", request=row)

        told = client.get(f"requests/{answer_id}/explain").json()
        assert (told["verdict"], told["decision"]["prompt_tokens"]) == ("admitted", 7)
        limits = {limit["metric"]: limit for limit in told["decision"]["limits"]}
        # 7 x 2.5 is 17.5, rounded up while it is reserved; 5 x 3.
        assert {metric: limit["asked"] for metric, limit in limits.items()} == {
            "requests": 1, "tokens": 12, "concurrency": 1, "cost": 18 + 15,
        }  # fmt: skip
        for metric, before in (("requests", 2), ("tokens", 1000), ("cost", 10_000), ("concurrency", 5)):
            assert limits[metric]["remaining"] == before - limits[metric]["asked"]
            assert not limits[metric]["binding"]
        charge = told["charge"]
        exact = sum(part["tokens"] * part["microusd_per_mtok"] for part in charge["parts"])
        assert charge["cost_microusd"] == (exact + 500_000) // 1_000_000 == row.cost_microusd == 33
        assert (charge["total_microusd"], charge["adjustments"][0]["reason"]) == (30, "Slow")

        refused = client.get(f"requests/{third.headers['x-weir-request']}/explain").json()
        assert (refused["verdict"], refused["charge"]) == ("refused", None)
        (binding,) = [limit for limit in refused["decision"]["limits"] if limit["binding"]]
        assert (binding["metric"], binding["remaining"], binding["limit"]) == ("requests", 0, 2)
        waits_ms = refused["decision"]["retry_after_ms"]
        assert abs(waits_ms - int(third.headers["retry-after-ms"])) < 1000

        # Nobody else's, though the id is known.
        client.headers["Authorization"] = f"Bearer {make_key(make_tenant(), scopes=[Scope.ADMIN]).secret}"
        for known in (answer_id, third.headers["x-weir-request"], "never"):
            assert client.get(f"requests/{known}/explain").json()["error"]["code"] == "request_not_found"


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_it_is_explained_at_every_moment_of_its_life(site, model, tenant):
    """Before the ledger has it as well: while it runs, and between its end and its row."""
    headers = {
        "Authorization": f"Bearer {make_key(tenant, scopes=[Scope.INFERENCE, Scope.USAGE_READ]).secret}"
    }
    stranger = {"Authorization": f"Bearer {make_key(make_tenant(), scopes=[Scope.USAGE_READ]).secret}"}
    with httpx.Client(base_url=f"{site.url}/v1/", headers=headers, timeout=60) as client:
        # Known from here on: a database that is busy does not keep it waiting later.
        eventually(lambda: client.get("usage", headers=stranger).status_code == 200)
        ask = {"model": model, "prompt": "seven!!", "max_tokens": 40, "stream": True}
        with client.stream("POST", "completions", json=ask) as stream:
            events = (line for line in stream.iter_lines() if line.startswith("data: {"))
            answer_id = json.loads(next(events).removeprefix("data: "))["id"]

            def explained() -> dict[str, Any]:
                answer = client.get(f"requests/{answer_id}/explain")
                assert answer.status_code == 200, answer.text
                told: dict[str, Any] = answer.json()
                return told

            running = explained()
            assert (running["id"], running["verdict"], running["charge"]) == (answer_id, "admitted", None)
            for _ in events:
                pass
        ended = explained()
        assert not UsageRecord.objects.filter(tenant=tenant).exists()
        assert ended["decision"] == running["decision"]
        assert (ended["charge"]["completion_tokens"], ended["charge"]["cost_microusd"]) == (40, 138)
        refused = client.get(f"requests/{answer_id}/explain", headers=stranger)
        assert refused.json()["error"]["code"] == "request_not_found"
        drain_usage_stream()
        assert explained() == ended


def test_the_console_shows_what_decided(site, model, tenant):
    owner, outsider = make_user(), make_user()
    add_member(actor=TEST, tenant=tenant, user=owner, role=Role.OWNER)
    other = make_tenant(owner=outsider)
    headers = {"Authorization": f"Bearer {make_key(tenant, name='busy').secret}"}
    with httpx.Client(base_url=f"{site.url}/v1/", headers=headers, timeout=60) as client:
        ask = {"model": model, "prompt": "seven!!", "max_tokens": 5}
        first, _, refused = (client.post("completions", json=ask) for _ in range(3))
    drain_usage_stream()
    answer_id, refused_id = first.json()["id"], refused.headers["x-weir-request"]
    row = UsageRecord.objects.get(tenant=tenant, request_id=answer_id)
    adjust_usage(actor=TEST, tenant=tenant, cost_microusd=-3, reason="Slow", request=row)
    person, stranger = Client(), Client()
    person.force_login(owner)
    stranger.force_login(outsider)

    def page_of(request_id: str) -> str:
        url = reverse("request", args=[tenant.public_id, request_id])
        assert stranger.get(url).status_code == 404
        assert stranger.get(reverse("request", args=[other.public_id, request_id])).status_code == 404
        return person.get(url).content.decode()

    admitted = page_of(answer_id)
    seed = json.loads(row.decision)["seed"]
    for said in (
        f"<dt>Seed</dt><dd>{seed}</dd>",
        "Why it was admitted",
        "Tokens per day",
        "$0.000033",
        "Slow",
        "$0.000030",
        "$2.50",
    ):
        assert said in admitted, said
    page = page_of(refused_id)
    for said in ("Why it was refused", "busy", "Requests per day", ">refused</span>"):
        assert said in page, said
    listed = person.get(reverse("limits", args=[tenant.public_id])).content.decode()
    assert listed.count(reverse("request", args=[tenant.public_id, refused_id])) == 1
    assert answer_id not in listed
    theirs = stranger.get(reverse("limits", args=[other.public_id])).content.decode()
    assert "No request met a limit" in theirs


def test_a_limit_is_tried_before_it_is_set(site, model, tenant):
    headers = {"Authorization": f"Bearer {make_key(tenant, scopes=[Scope.ADMIN]).secret}"}
    with httpx.Client(base_url=f"{site.url}/v1/", headers=headers, timeout=60) as client:
        for _ in range(2):
            assert (
                client.post("completions", json={"model": model, "prompt": "x", "max_tokens": 2}).status_code
                == 200
            )
        drain_usage_stream()

        def tried(**limit) -> dict:
            answer = client.post("quota/try", json=limit)
            assert answer.status_code == 200, answer.text
            return answer.json()

        assert tried(metric="requests", amount=1, period_s=86_400)["refused"] == 1
        assert tried(metric="tokens", amount=6, calendar="month")["refused"] == 0
        spent = tried(metric="tokens", amount=5, calendar="month")
        assert (spent["requests"], spent["admitted"], spent["refused"], spent["used"]) == (2, 1, 1, 3)
        assert sum(day["refused"] for day in spent["days"]) == 1
        assert tried(metric="requests", amount=1, period_s=86_400, model="none")["requests"] == 0
        for wrong in (
            {"metric": "wishes", "amount": 1},
            {"metric": "cost", "amount": 1, "period_s": 60},
            {"metric": "requests", "amount": 1, "calendar": "year"},
            {"metric": "requests", "amount": 1, "key": "mine"},
        ):
            assert client.post("quota/try", json=wrong).status_code == 400, wrong
    assert not tenant.limits.filter(metric="tokens", calendar="month").exists()
