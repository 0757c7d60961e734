"""Every route under /v1 against everyone who may not: found by itself, so that a new route can't be forgotten."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta

import pytest
from django.urls import URLPattern
from django.utils import timezone

from inference.api.urls import urlpatterns
from tenants.models import ApiKey
from tenants.principal import Scope
from tenants.services import revoke_api_key, suspend_tenant
from tests.factories import TEST, make_key, make_tenant, make_user

pytestmark = pytest.mark.django_db(transaction=True)

PUBLIC = {"openapi"}  # what the docs say to everybody
"""Routes that ask for no key, by name: each needs a reason."""
SCOPES = {
    **dict.fromkeys(
        [
            *(
                "chat-completions",
                "completions",
                "messages",
                "count-tokens",
                "embeddings",
                "responses",
                "response",
            ),
            *(
                "cancel-response",
                "response-input-items",
                "response-input-tokens",
                "files",
                "file",
                "file-content",
                "batches",
                "batch",
            ),
            *(
                "cancel-batch",
                "quota",
                "tokenize",
                "detokenize",
                "request",
                "request-stream",
                "cancel-request",
                "models",
                "model",
            ),
        ],
        Scope.INFERENCE,
    ),
    **dict.fromkeys(
        [
            *(
                "explain-request",
                "usage-lines",
                "usage-costs",
                "usage-statement",
                "usage-exports",
                "usage-export",
            ),
            *("usage-export-content", "alerts"),
            *("organization-completions", "organization-embeddings", "organization-costs"),
        ],
        Scope.USAGE_READ,
    ),
    **dict.fromkeys(["api-keys", "rotate-api-key", "revoke-api-key"], Scope.KEYS_WRITE),
    **dict.fromkeys(
        [
            *("try-quota", "audit", "audit-export", "webhooks", "webhook", "rotate-webhook-secret"),
            *("test-webhook", "webhook-deliveries", "limits-of-api-key", "organization"),
            *("organization-projects", "organization-project", "organization-members", "organization-limits"),
        ],
        Scope.ADMIN,
    ),
}
"""The scope that each route takes, beside `admin`, which is all of them."""
ROUTES = [route for route in urlpatterns if isinstance(route, URLPattern) and route.name]


def path_of(route: URLPattern, **ids: str) -> str:
    path = str(route.pattern)
    for name, converter in route.pattern.converters.items():
        kind = {
            "StringConverter": "str",
            "PathConverter": "path",
            "UUIDConverter": "uuid",
            "IntConverter": "int",
        }
        text = f"<{kind[type(converter).__name__]}:{name}>"
        path = path.replace(
            text, ids.get(name, "1" if "Int" in type(converter).__name__ else str(uuid.uuid4()))
        )
    assert "<" not in path, path
    return path


def methods_of(http, path: str) -> list[str]:
    """What the route takes; asked of it, since who asks with the wrong method learns the right ones before the key."""
    answer = http.request("PATCH", path, headers={"Authorization": ""})
    if answer.status_code == 405:
        methods = [method.strip() for method in answer.headers["Allow"].split(",")]
        return [method for method in methods if method != "HEAD"]  # as GET, without the body
    return ["GET", "POST"]


def meets(http, route: URLPattern, secret: str | None, **ids: str) -> set[tuple[int, str | None]]:
    """Status and error code of each method of the route."""
    headers = {"Authorization": "" if secret is None else f"Bearer {secret}"}
    path = path_of(route, **ids)
    found = set()
    for method in methods_of(http, path):
        # The body is read after the key and its scope: an empty object is enough.
        answer = http.request(method, path, headers=headers, json={} if method != "GET" else None)
        code = answer.json()["error"]["code"] if answer.status_code >= 400 else None
        found.add((answer.status_code, code))
    return found


@pytest.fixture(params=ROUTES, ids=lambda route: route.name)
def route(request) -> URLPattern:
    if request.param.name in PUBLIC:
        pytest.skip("needs no key")
    return request.param


def test_every_route_has_its_row():
    assert {route.name for route in ROUTES} - PUBLIC == set(SCOPES)


def test_without_a_good_key_there_is_no_way_in(http, route):
    tenant = make_tenant()
    revoked, expired = make_key(tenant), make_key(tenant)
    revoke_api_key(actor=TEST, api_key=revoked.api_key)
    long_ago = timezone.now() - timedelta(days=2)
    ApiKey.objects.filter(tenant=tenant, pk=expired.api_key.pk).update(
        created_at=long_ago, expires_at=long_ago + timedelta(days=1)
    )
    suspended = make_tenant()
    barred = make_key(suspended, scopes=[Scope.ADMIN])
    suspend_tenant(actor=TEST, tenant=suspended)
    elsewhere = make_key(tenant, scopes=[Scope.ADMIN], allowed_networks=["192.0.2.0/24"])
    wrong = make_key(tenant).secret[:-1] + "!"
    assert meets(http, route, None) == {(401, "missing_api_key")}
    assert meets(http, route, wrong) == {(401, "invalid_api_key")}
    assert meets(http, route, revoked.secret) == {(401, "api_key_revoked")}
    assert meets(http, route, expired.secret) == {(401, "api_key_expired")}
    assert meets(http, route, barred.secret) == {(403, "tenant_suspended")}
    assert meets(http, route, elsewhere.secret) == {(403, "network_not_allowed")}


def test_a_scope_that_is_not_the_routes_opens_nothing(http, route):
    tenant = make_tenant()
    refused = (403, "insufficient_permissions")
    opened = {
        scope for scope in Scope if meets(http, route, make_key(tenant, scopes=[scope]).secret) != {refused}
    }
    assert opened == {SCOPES[route.name], Scope.ADMIN}


def test_another_tenants_objects_do_not_exist(http, route):
    if not route.pattern.converters:
        pytest.skip("names no object")
    mine, theirs = make_tenant("Twin A"), make_tenant("Twin B")
    asking = make_key(mine, name="same", scopes=[Scope.ADMIN]).secret
    victim = make_key(theirs, name="same")
    ids = dict.fromkeys(route.pattern.converters, str(victim.api_key.public_id))
    for given in (
        ids,
        dict.fromkeys(ids, str(theirs.public_id)),
        dict.fromkeys(ids, "0"),
        dict.fromkeys(ids, "%00"),
    ):
        met = meets(http, route, asking, **given)
        assert {status for status, _ in met} <= {400, 404}, met
    victim.api_key.refresh_from_db()
    assert victim.api_key.revoked_at is None
    assert victim.api_key.rotation_digest is None


def test_two_tenants_with_the_same_names_never_meet(http, sdk, model):
    """Everything that a tenant can own, asked for by its true id, and listed, by the tenant beside it."""
    mine, theirs = make_tenant("Twin"), make_tenant("Twins", owner=make_user("of-the-victim@example.org"))
    asking = make_key(mine, name="same", scopes=[Scope.ADMIN]).secret
    victim = make_key(theirs, name="same", scopes=[Scope.ADMIN])
    their = sdk(victim.secret)
    with_key = {"Authorization": f"Bearer {victim.secret}"}
    line = {"custom_id": "theirs", "method": "POST", "url": "/v1/chat/completions", "body": {"model": model}}
    line["body"] |= {"messages": [{"role": "user", "content": "of-the-victim"}], "max_tokens": 1}
    file = their.files.create(file=("of-the-victim.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = their.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"of": "victim"},
    )
    answer = their.responses.create(model=model, input="of-the-victim", max_output_tokens=16)
    chat = their.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "of-the-victim"}], max_tokens=1
    )
    export = http.post("usage/exports", headers=with_key, json={"format": "csv"}).json()
    project = http.post("organization/projects", headers=with_key, json={"name": "of-the-victim"}).json()
    limits = {"cost_per_month": 987_654_321}
    limits_of_key = f"keys/{victim.api_key.public_id}/limits"
    assert http.post(limits_of_key, headers=with_key, json=limits).json() == limits
    ids = {
        "file_id": file.id,
        "batch_id": batch.id,
        "response_id": answer.id,
        "request_id": chat.id,
        "export_id": export["id"],
        "key_id": str(victim.api_key.public_id),
        "project_id": project["id"],
    }
    secrets = [*ids.values(), "of-the-victim", "987654321", str(theirs.public_id), victim.api_key.lookup_id]
    reached = set()
    for route in ROUTES:
        path = path_of(route, **ids)
        for method in methods_of(http, path):
            as_owner = http.get(path, headers=with_key) if method == "GET" else None
            answered = http.request(
                method,
                path,
                headers={"Authorization": f"Bearer {asking}"},
                json={} if method != "GET" else None,
            )
            named = set(route.pattern.converters) & set(ids)
            if named:
                assert answered.status_code in (400, 404, 409), (route.name, method, answered.text)
                if as_owner is not None and as_owner.status_code == 200:
                    reached |= named
            if route.name not in PUBLIC:
                for secret in secrets:
                    assert not (secret in answered.text and secret not in path), (route.name, method, secret)
    assert reached == set(ids)  # they were true: their owner does reach them
    for kept in (lambda: their.files.retrieve(file.id), lambda: their.responses.retrieve(answer.id)):
        assert kept().id in ids.values()
    for path, said in ((f"organization/projects/{project['id']}", project), (limits_of_key, limits)):
        assert http.get(path, headers=with_key).json() == said
    victim.api_key.refresh_from_db()
    assert victim.api_key.revoked_at is None
