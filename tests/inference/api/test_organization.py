"""`/v1/organization` and a key's limits, for keys with the scope `admin`; never another tenant's."""

from __future__ import annotations

import pytest
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.urls import reverse

from inference.api.error_shapes import invalid_request
from tenants.models import AuditEntry
from tenants.principal import LimitMetric, Scope
from tests.factories import Cast, make_key, make_tenant, set_limit, signed_in

pytestmark = pytest.mark.django_db(transaction=True)


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_what_an_administrator_sees_and_changes(http, model):
    tenant, other = make_tenant(), make_tenant()
    set_limit(tenant, LimitMetric.TOKENS, 1000)
    admin = bearer(make_key(tenant, scopes=(Scope.ADMIN,)).secret)
    stranger = bearer(make_key(other, scopes=(Scope.ADMIN,)).secret)
    assert http.get("organization", headers=admin).json()["name"] == tenant.name
    assert http.get("organization/members", headers=admin).json()["data"] == []

    made = http.post("organization/projects", headers=admin, json={"name": "Search"})
    assert made.status_code == 201, made.text
    path = f"organization/projects/{made.json()['id']}"
    taken = http.post("organization/projects", headers=admin, json={"name": "Search"})
    told = taken.json()["error"]
    assert (taken.status_code, told["param"], told["message"]) == (
        400, "name", "A project of this name already exists.",
    )  # fmt: skip
    other = http.post("organization/projects", headers=admin, json={"name": "Ads"}).json()
    other_path = f"organization/projects/{other['id']}"
    assert http.post(other_path, headers=admin, json={"name": "Search"}).json()["error"] == told
    assert http.delete(other_path, headers=admin).status_code == 200
    assert http.post(path, headers=admin, json={"name": "Find"}).json()["name"] == "Find"
    for method in ("GET", "DELETE"):
        assert http.request(method, path, headers=stranger).status_code == 404
    assert [each["name"] for each in http.get("organization/projects", headers=admin).json()["data"]] == [
        "Find"
    ]
    assert http.delete(path, headers=admin).json()["deleted"] is True
    assert http.get(path, headers=admin).status_code == 404

    worker = make_key(tenant)
    limits = f"keys/{worker.api_key.public_id}/limits"
    wanted = {"requests_per_minute": 1, "cost_per_month": 5_000_000}
    assert http.post(limits, headers=admin, json=wanted).json() == wanted
    assert http.post(limits, headers=stranger, json=wanted).status_code == 404
    assert http.post(limits, headers=admin, json={"cost_per_month": None}).json() == {
        "requests_per_minute": 1
    }
    told = http.get("organization/limits", headers=admin).json()["data"]
    assert [(each["scope"], each["amount"]) for each in told] == [("tenant", 1000), ("key", 1)]
    assert told[1]["key"] == str(worker.api_key.public_id)
    asked = {"model": model, "prompt": "x", "max_tokens": 1}
    statuses = [
        http.post("completions", headers=bearer(worker.secret), json=asked).status_code for _ in range(2)
    ]
    assert statuses == [200, 429]
    actions = set(AuditEntry.objects.filter(tenant=tenant).values_list("action", flat=True))
    assert {"project.created", "project.renamed", "project.deleted"} <= actions


def test_what_is_wrong_with_all_together_names_no_field():
    """Django's word for that is `__all__`."""
    together = ValidationError({NON_FIELD_ERRORS: ["Not both."]})
    assert (invalid_request(together).param, invalid_request(together).message) == (None, "Not both.")
    both = ValidationError({NON_FIELD_ERRORS: ["Not both."], "name": ["Too long."]})
    assert invalid_request(both).param == "name"
    assert invalid_request(ValidationError("Not now.")).param is None


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "\x1b[2J"])
def test_a_name_that_no_column_or_line_can_hold_is_refused(http, cast: Cast, name):
    """From the API and from the console's pages: refused, never a failure of the server."""
    admin = bearer(make_key(cast.tenant, scopes=(Scope.ADMIN,)).secret)
    for path, body in (
        ("keys", {"name": name}),
        ("keys", {"name": "x", "allowed_models": [name]}),
        ("organization/projects", {"name": name}),
    ):
        answer = http.post(path, headers=admin, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, list(body)[-1]), answer.text
    owner, before = signed_in(cast.owner), cast.tenant.name
    for page in ("settings", "projects", "service_accounts", "keys"):
        url = reverse(page, args=[cast.tenant.public_id])
        said = owner.post(url, {"name": name, "timezone": "UTC", "lifetime": 0}, follow=True)
        assert said.status_code == 200
    cast.tenant.refresh_from_db()
    assert cast.tenant.name == before
    assert not cast.tenant.projects.exists()
