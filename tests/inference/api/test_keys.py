"""`/v1/keys` over HTTP: what a key may make of keys, and never more than it is itself."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.utils import timezone

from inference.models import ModelSetting, UsageRecord
from inference.services.usage import drain_usage_stream
from tenants.models import ApiKey, AuditEntry
from tenants.principal import LimitMetric, Scope
from tenants.services import create_project
from tests.factories import TEST, make_key, make_tenant, make_tier, set_limit

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def tenant():
    return make_tenant()


@pytest.fixture
def manager(tenant):
    scopes = (Scope.INFERENCE, Scope.KEYS_WRITE)
    return {"Authorization": f"Bearer {make_key(tenant, name='manager', scopes=scopes).secret}"}


def test_the_life_of_a_key(http, manager, tenant, model):
    make_tier("batch")
    project = create_project(actor=TEST, tenant=tenant, name="Search")
    asked = {"name": "bot", "project": str(project.public_id), "allowed_models": [model], "max_tier": "batch"}
    made = http.post("keys", json=asked, headers=manager)
    assert made.status_code == 201, made.text
    key = made.json()
    bearer = {"Authorization": f"Bearer {key['secret']}"}
    assert [each["id"] for each in http.get("models", headers=bearer).json()["data"]] == [model]
    answer = http.post("completions", json={"model": model, "prompt": "hi", "max_tokens": 2}, headers=bearer)
    assert (answer.status_code, answer.headers["x-weir-tier"]) == (200, "batch")

    rotation = {"rotation_id": "0123456789abcdefghijkl", "overlap_s": 600}
    turned = [http.post(f"keys/{key['id']}/rotate", json=rotation, headers=manager) for _ in range(2)]
    assert [each.status_code for each in turned] == [200, 200]
    assert len({each.json()["secret"] for each in turned}) == 1
    again = http.post(f"keys/{key['id']}/rotate", json={"rotation_id": "x" * 30}, headers=manager)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "rotation_underway")
    for secret in (key["secret"], turned[0].json()["secret"]):
        assert http.get("models", headers={"Authorization": f"Bearer {secret}"}).status_code == 200

    listed = http.get("keys", headers=manager)
    assert [each["name"] for each in listed.json()["data"]] == ["bot", "manager"]
    assert "secret" not in listed.text
    assert http.post(f"keys/{key['id']}/revoke", headers=manager).json()["revoked_at"] is not None

    drain_usage_stream()
    assert UsageRecord.objects.for_tenant(tenant).get().project_public_id == project.public_id
    entries = AuditEntry.objects.for_tenant(tenant).filter(actor_kind="key").order_by("id")
    assert [entry.action for entry in entries] == ["key.issued", "key.rotated", "key.revoked"]
    assert entries[0].ip_address == "127.0.0.1"


def test_a_key_is_bound_to_a_model_or_to_an_alias_of_it(http, manager, model):
    """Also one that no worker serves at the moment, where the operator names it; what there is, the refusal says."""
    for name, target in (("the-best", model), ("not-here-yet", "to-come")):
        ModelSetting.objects.create(name=name, target=target)
    wrong = {"name": "x", "allowed_models": ["the-best", "the-bset"]}
    deadline = time.monotonic() + 30  # gateways look at the settings once a second
    while (
        "the-best"
        not in (refused := http.post("keys", json=wrong, headers=manager).json()["error"])[
            "message"
        ].partition("There are")[2]
    ):
        assert time.monotonic() < deadline, refused
    assert refused["message"].startswith("There is no model 'the-bset'. There are: the-best, "), (
        "the nearest first"
    )
    assert (
        http.post("keys", json={"name": "x", "allowed_models": ["not-here-yet"]}, headers=manager).status_code
        == 201
    )
    made = http.post("keys", json={"name": "x", "allowed_models": ["the-best"]}, headers=manager).json()
    bearer = {"Authorization": f"Bearer {made['secret']}"}
    assert [each["id"] for each in http.get("models", headers=bearer).json()["data"]] == ["the-best"]
    for name, status in (("the-best", 200), (model, 403)):
        asked = {"model": name, "prompt": "hi", "max_tokens": 1}
        assert http.post("completions", json=asked, headers=bearer).status_code == status
        assert http.get(f"models/{name}", headers=bearer).status_code == status


def test_a_model_that_is_not_the_keys(http, tenant, model):
    bearer = {"Authorization": f"Bearer {make_key(tenant, allowed_models=['other']).secret}"}
    assert http.get("models", headers=bearer).json()["data"] == []
    asked = {"model": model, "prompt": "hi", "max_tokens": 1}
    for answer in (
        http.post("completions", json=asked, headers=bearer),
        http.get(f"models/{model}", headers=bearer),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")


@pytest.mark.parametrize(
    ("given", "status", "param"),
    [
        ({"name": ""}, 400, "name"),
        ({"scopes": ["everything"]}, 400, "scopes"),
        ({"scopes": ["admin"]}, 403, None),
        ({"scopes": ["usage:read"]}, 403, None),
        ({"allowed_networks": ["example.org"]}, 400, "allowed_networks"),
        ({"expires_at": 1_000_000}, 400, "expires_at"),
        ({"max_tier": "gold"}, 400, "max_tier"),
        ({"project": "0197e5a0-0000-7000-8000-00000000dead"}, 400, "project"),
        ({"nmae": "x"}, 400, "nmae"),
        ({"allowed_models": ["smolm2"]}, 400, "allowed_models"),
        ({"allowed_models": []}, 400, "allowed_models"),
        ({"allowed_networks": []}, 400, "allowed_networks"),
    ],
)
def test_a_key_that_will_not_do(http, manager, tenant, given, status, param):
    answer = http.post("keys", json={"name": "x", **given}, headers=manager)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert ApiKey.objects.for_tenant(tenant).count() == 1


def test_a_bound_key_makes_no_free_one(http, tenant, model):
    bound = make_key(tenant, scopes=[Scope.KEYS_WRITE], allowed_models=["other"])
    free = make_key(tenant, scopes=[Scope.KEYS_WRITE])
    greater = make_key(tenant, scopes=[Scope.ADMIN])
    bearer = {"Authorization": f"Bearer {bound.secret}"}
    assert http.post("keys", json={"name": "x", "scopes": ["keys:write"]}, headers=bearer).status_code == 403
    rotation = {"rotation_id": "0123456789abcdefghijkl"}
    for victim, status in ((free, 403), (greater, 403), (bound, 200)):
        path = f"keys/{victim.api_key.public_id}/rotate"
        assert http.post(path, json=rotation, headers=bearer).status_code == status
    path = f"keys/{greater.api_key.public_id}/rotate"
    assert (
        http.post(path, json=rotation, headers={"Authorization": f"Bearer {free.secret}"}).status_code == 403
    )


def test_a_limited_key_makes_no_unlimited_one_and_does_not_unlimit_itself(http, tenant):
    limited = make_key(tenant, scopes=[Scope.KEYS_WRITE])
    admin = make_key(tenant, scopes=[Scope.ADMIN])
    free = make_key(tenant, scopes=[Scope.KEYS_WRITE])
    for owner in (limited, admin):
        set_limit(owner.api_key, LimitMetric.TOKENS, 1000)
        bearer = {"Authorization": f"Bearer {owner.secret}"}
        asked = {"name": "x", "scopes": ["keys:write"]}
        assert http.post("keys", json=asked, headers=bearer).status_code == 403
        rotation = {"rotation_id": "0123456789abcdefghijkl"}
        path = f"keys/{free.api_key.public_id}/rotate"
        assert http.post(path, json=rotation, headers=bearer).status_code == 403
    bearer = {"Authorization": f"Bearer {admin.secret}"}
    own, others = (f"keys/{each.api_key.public_id}/limits" for each in (admin, limited))
    refused = http.post(own, json={"tokens_per_minute": None}, headers=bearer)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_permissions")
    assert http.get(own, headers=bearer).json() == {"tokens_per_minute": 1000}
    assert http.post(others, json={"tokens_per_minute": 5}, headers=bearer).status_code == 200


def test_a_key_that_ends_leaves_none_behind_that_does_not(http, tenant):
    end = timezone.now() + timedelta(hours=1)
    ending = make_key(tenant, scopes=[Scope.KEYS_WRITE], expires_at=end)
    endless = make_key(tenant, scopes=[Scope.KEYS_WRITE])
    bearer = {"Authorization": f"Bearer {ending.secret}"}
    asked = {"name": "x", "scopes": ["keys:write"]}
    at = int(end.timestamp())
    for more, status in (({}, 403), ({"expires_at": at + 60}, 403), ({"expires_at": at - 60}, 201)):
        assert http.post("keys", json={**asked, **more}, headers=bearer).status_code == status
    rotation = {"rotation_id": "0123456789abcdefghijkl"}
    for victim, status in ((endless, 403), (ending, 200)):
        path = f"keys/{victim.api_key.public_id}/rotate"
        assert http.post(path, json=rotation, headers=bearer).status_code == status
