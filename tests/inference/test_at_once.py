"""Two connections that change what belongs together, at once: one is first, the other is told so, and nobody has a 500.

Each order is made sure of: the first holds its transaction open until the second waits for it in PostgreSQL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection, connections, transaction
from django.test import Client
from django.urls import reverse

from inference.errors import NotFound
from inference.models import ModelSetting
from inference.services.files import delete_file, read_file, store_file
from inference.services.webhooks import create_webhook, delete_webhook
from tenants.models import ApiKey, AuditEntry, Project, Tenant
from tenants.principal import Scope
from tenants.services import change_api_key, create_project, delete_project, issue_api_key
from tests.e2e.site import Site
from tests.factories import (
    TEST,
    Cast,
    a_principal,
    make_key,
    make_operator,
    make_tenant,
    make_tier,
    signed_in,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]
WAITING = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()"
)


def at_once(first: Callable[[], Any], second: Callable[[], Any]) -> Any:
    """What `second` gives, or the error that it ends with, while `first` is done and not committed."""
    told: list[Any] = []

    def run() -> None:
        try:
            told.append(second())
        except Exception as error:
            told.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    with transaction.atomic():
        first()
        thread.start()
        deadline = time.monotonic() + 60
        with connection.cursor() as cursor:
            while not told:
                cursor.execute(WAITING)
                if cursor.fetchone()[0]:
                    break
                assert time.monotonic() < deadline, "the second neither waited nor ended"
                time.sleep(0.02)
    thread.join(60)
    return told[0]


@pytest.fixture
def tenant() -> Tenant:
    return make_tenant()


@pytest.fixture
def project(tenant: Tenant) -> Project:
    return create_project(actor=TEST, tenant=tenant, name="Search")


def test_a_key_made_in_a_project_that_is_being_deleted(tenant: Tenant, project: Project):
    told = at_once(
        lambda: delete_project(actor=TEST, project=project),
        lambda: issue_api_key(actor=TEST, tenant=tenant, name="late", project=project),
    )
    assert isinstance(told, ValidationError)
    assert told.message_dict == {"project": ["This project was deleted just now: choose another."]}
    assert not ApiKey.objects.for_tenant(tenant).exists()


def test_control_without_the_lock_the_database_refuses_it_at_the_end(tenant: Tenant, project: Project):
    key = make_key(tenant).api_key
    told = at_once(
        lambda: delete_project(actor=TEST, project=project),
        lambda: ApiKey.objects.for_tenant(tenant).filter(pk=key.pk).update(project=project.pk),
    )
    assert isinstance(told, IntegrityError)


def test_a_key_moved_to_a_project_that_is_being_deleted(tenant: Tenant, project: Project):
    key = make_key(tenant).api_key
    told = at_once(
        lambda: delete_project(actor=TEST, project=project),
        lambda: change_api_key(
            actor=TEST, api_key=key, name="moved", project=project, allowed_models=(), allowed_networks=(),
            max_tier=None,
        ),
    )  # fmt: skip
    assert isinstance(told, ValidationError)
    key.refresh_from_db()
    assert (key.name, key.project) == ("test key", None)


def test_a_project_deleted_while_a_key_is_made_in_it(tenant: Tenant, project: Project):
    told = at_once(
        lambda: issue_api_key(actor=TEST, tenant=tenant, name="first", project=project),
        lambda: delete_project(actor=TEST, project=project),
    )
    assert isinstance(told, ValidationError)
    assert "has 1 key" in told.messages[0]
    assert ApiKey.objects.for_tenant(tenant).get().project == project


def test_what_the_api_is_asked_for_at_that_moment_is_a_conflict(site, tenant: Tenant, project: Project):
    """A tier deleted while a key is bound to it, a project while a key is made in it."""
    tier, secret = make_tier("passing"), make_key(tenant, scopes=tuple(Scope)).secret

    def ask(**body: Any) -> httpx.Response:
        bearer = {"Authorization": f"Bearer {secret}"}
        return httpx.post(f"{site.url}/v1/keys", json={"name": "late", **body}, headers=bearer, timeout=60)

    told = at_once(tier.delete, lambda: ask(max_tier="passing"))
    assert (told.status_code, told.json()["error"]["code"]) == (409, "conflict"), told.text
    told = at_once(
        lambda: delete_project(actor=TEST, project=project), lambda: ask(project=str(project.public_id))
    )
    assert (told.status_code, told.json()["error"]["param"]) == (400, "project"), told.text
    assert ask().status_code == 201


def asked(site: Site, secret: str, method: str, path: str, **body: Any) -> httpx.Response:
    bearer = {"Authorization": f"Bearer {secret}"}
    return httpx.request(
        method, f"{site.url}/v1/{path}", json=None if method == "DELETE" else body, headers=bearer, timeout=60
    )


@pytest.mark.parametrize(
    ("method", "verb", "body"),
    [
        ("POST", "", {"kinds": ["budget"]}),
        ("POST", "/rotate", {"overlap_s": 60}),
        ("POST", "/test", {}),
        ("DELETE", "", {}),
    ],
)
def test_a_webhook_that_is_being_deleted_is_not_found(site, tenant: Tenant, method, verb, body):
    endpoint = create_webhook(actor=TEST, tenant=tenant, url="https://example.com/weir")
    secret = make_key(tenant, scopes=(Scope.ADMIN,)).secret
    told = at_once(
        lambda: delete_webhook(actor=TEST, endpoint=endpoint),
        lambda: asked(site, secret, method, f"webhooks/{endpoint.public_id}{verb}", **body),
    )
    assert (told.status_code, told.json()["error"]["code"]) == (404, "webhook_not_found"), told.text
    actions = AuditEntry.objects.filter(tenant=tenant, action__startswith="webhook.")
    assert sorted(actions.values_list("action", flat=True)) == ["webhook.created", "webhook.deleted"]


@pytest.mark.parametrize("verb", ["rotate", "disable", "try", "delete"])
def test_nor_on_its_page(cast: Cast, verb):
    endpoint = create_webhook(actor=TEST, tenant=cast.tenant, url="https://example.com/weir")
    owner = signed_in(cast.owner)
    page = reverse("webhook", args=[cast.tenant.public_id, endpoint.public_id])
    told = at_once(
        lambda: delete_webhook(actor=TEST, endpoint=endpoint), lambda: owner.post(page, {"verb": verb})
    )
    assert told.status_code == 404


@pytest.mark.parametrize(
    ("verb", "body"),
    [("rotate", {"rotation_id": "r" * 24, "overlap_s": 60}), ("limits", {"requests_per_minute": 5})],
)
def test_what_no_service_thought_of_is_not_found_either(site, tenant: Tenant, verb, body):
    """Keys go with their tenant alone."""
    secret, key = make_key(tenant, scopes=tuple(Scope)).secret, make_key(tenant).api_key
    path = f"keys/{key.public_id}/{verb}"
    told = at_once(lambda: key.delete(), lambda: asked(site, secret, "POST", path, **body))
    assert (told.status_code, told.json()["error"]["code"]) == (404, "not_found"), told.text


def test_a_file_deleted_while_it_is_read_is_whole_or_not_found(tenant: Tenant):
    """Between any two queries of its reading."""
    principal = replace(a_principal(), tenant_id=tenant.pk)
    kept = store_file(tenant_id=tenant.pk, filename="a", purpose="batch", content=b"whole")
    queries = 0

    def delete_after(execute: Callable[..., Any], *args: Any) -> Any:
        nonlocal queries
        found = execute(*args)
        queries += 1
        if queries == 1:
            delete_file(principal, kept.file_id)
        return found

    with connection.execute_wrapper(delete_after):
        assert read_file(principal, kept.file_id) == b"whole"
    assert queries > 1, "it was deleted"
    with pytest.raises(NotFound):
        read_file(principal, kept.file_id)


def test_the_same_name_taken_twice_in_the_admin_is_a_page_that_says_so():
    browser = Client()
    browser.force_login(make_operator())
    tier = make_tier()
    form = {"name": "Twice", "slug": "twice", "tier": tier.pk, "weight": 1, "timezone": "UTC"}
    rows = ("memberships", "limits")
    form |= {f"{row}-{count}_FORMS": 0 for row in rows for count in ("TOTAL", "INITIAL")}
    told = at_once(
        lambda: Tenant.objects.create(name="Twice", slug="twice", tier=tier),
        lambda: browser.post("/admin/tenants/tenant/add/", form),
    )
    assert told.status_code == 409, getattr(told, "context", None) and told.context.get("errors")
    assert "Somebody else was faster" in told.content.decode()
    told = at_once(
        lambda: ModelSetting.objects.create(name="twice"),
        lambda: browser.post("/admin/inference/modelsetting/add/", {"name": "twice", "is_public": "on"}),
    )
    assert told.status_code == 409
    assert ModelSetting.objects.filter(name="twice").count() == 1
