"""What the operator decides for the whole installation, and that gateways keep to it: models, maintenance, notices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import httpx
import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from inference.models import Announcement, Maintenance, ModelSetting
from tenants.models import AuditEntry
from tests.e2e.site import MODEL, Site
from tests.factories import Cast, make_cast, make_key

pytestmark = pytest.mark.django_db(transaction=True)
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture
def cast(transactional_db: None) -> Cast:
    return make_cast()


@pytest.fixture
def ask(site: Site, cast: Cast) -> Iterator[Callable[..., httpx.Response]]:
    """As the tenant, or as the other one."""
    secrets = {tenant: make_key(tenant).secret for tenant in (cast.tenant, cast.other_tenant)}
    with httpx.Client(base_url=f"{site.url}/v1/", timeout=60) as client:

        def call(model: str, *, other: bool = False, **fields: object) -> httpx.Response:
            secret = secrets[cast.other_tenant if other else cast.tenant]
            client.headers["Authorization"] = f"Bearer {secret}"
            if not model:
                return client.get("models")
            return client.post("chat/completions", json={**CHAT, "model": model, **fields})

        yield call


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def names(answer: httpx.Response) -> set[str]:
    return {model["id"] for model in answer.json()["data"]}


def operator_client(cast: Cast) -> Client:
    client = Client()
    client.force_login(cast.operator)
    return client


def test_maintenance_refuses_new_work_everywhere_and_says_so(cast: Cast, ask):
    operator = operator_client(cast)
    url = reverse("admin:inference_maintenance_change", args=[1])
    assert operator.get(reverse("admin:inference_maintenance_changelist")).headers["Location"] == url
    form = {"is_on": "on", "message": "New <b>disks</b>.", "retry_after_s": "90"}
    assert operator.post(url, form).status_code == 302
    assert AuditEntry.unscoped.get(action="maintenance.changed").actor_user == cast.operator
    until(lambda: ask(MODEL).status_code == 503)
    refused = ask(MODEL)
    assert refused.headers["Retry-After"] == "90"
    assert refused.json()["error"]["code"] == "maintenance"
    assert refused.json()["error"]["message"] == "New <b>disks</b>."
    assert ask("").status_code == 200
    member = Client()
    member.force_login(cast.member)
    page = member.get(reverse("overview", args=[cast.tenant.public_id])).content.decode()
    assert "New &lt;b&gt;disks&lt;/b&gt;." in page
    operator.post(url, {**form, "is_on": ""})
    until(lambda: ask(MODEL).status_code == 200)


def test_a_model_is_for_whom_it_was_given_to_also_by_another_name(cast: Cast, ask):
    hidden = ModelSetting.objects.create(name=MODEL, is_public=False)
    hidden.tenants.add(cast.other_tenant)
    until(lambda: ask(MODEL).status_code == 404)
    assert MODEL not in names(ask(""))
    assert MODEL in names(ask("", other=True))
    assert ask(MODEL, other=True).status_code == 200
    ModelSetting.objects.create(name="the-best", target=MODEL)
    until(lambda: "the-best" in names(ask("")))
    answer = ask("the-best")
    assert answer.status_code == 200
    assert answer.json()["model"] == MODEL
    assert MODEL not in names(ask(""))


def test_defaults_hold_where_a_request_names_nothing_and_the_context_always(cast: Cast, ask):
    ModelSetting.objects.create(name="brief", target=MODEL, max_tokens=3, context_length=64)

    def used(**fields: object) -> int:
        body = {"max_tokens": None, "ignore_eos": True, **fields}
        return ask("brief", **body).json()["usage"]["completion_tokens"]

    until(lambda: ask("brief").status_code == 200)
    assert used() == 3
    assert used(max_tokens=5) == 5
    too_long = ask("brief", max_tokens=64)
    assert too_long.status_code == 400
    assert "64 tokens" in too_long.json()["error"]["message"]


def test_an_alias_stands_for_a_model_not_for_an_alias(cast: Cast):
    ModelSetting.objects.create(name="first", target=MODEL)
    operator = operator_client(cast)
    add = reverse("admin:inference_modelsetting_add")
    assert (
        "That is an alias itself"
        in operator.post(add, {"name": "second", "target": "first"}).content.decode()
    )
    assert "no alias of itself" in operator.post(add, {"name": "x", "target": "x"}).content.decode()
    assert operator.post(add, {"name": "third", "target": MODEL, "is_public": "on"}).status_code == 302
    assert AuditEntry.unscoped.filter(action="model.created").count() == 1
    assert "third" in operator.get(reverse("admin:inference_modelsetting_changelist")).content.decode()


def test_an_announcement_is_shown_in_its_time_alone(cast: Cast):
    now = timezone.now()
    Announcement.objects.create(text="<i>Hello</i> all")
    Announcement.objects.create(text="too soon", begins_at=now + timedelta(hours=1))
    Announcement.objects.create(text="too late", ends_at=now - timedelta(hours=1))
    page = Client().get("/login/").content.decode()
    assert "&lt;i&gt;Hello&lt;/i&gt; all" in page
    assert "too soon" not in page
    assert "too late" not in page
    assert not Maintenance.objects.filter(is_on=True).exists()
