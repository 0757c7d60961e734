"""The console's key pages: who may see and do what, and that a secret is shown once."""

from __future__ import annotations

import re
from uuid import uuid4

import pytest
from django.test import Client
from django.urls import reverse

from tenants.models import ApiKey, AuditEntry, Role
from tenants.principal import Scope
from tenants.principal_selectors import find_stored_key
from tenants.rights import RIGHTS, SCOPES_BY_ROLE, Right
from tenants.services import KeyLimit, add_member, create_project, key_limits
from tests.factories import TEST, Cast, make_key, make_tier, make_user, signed_in

SECRET = re.compile(r"wr_live_\w+_\w+")


def member_with(cast: Cast, role: Role) -> Client:
    user = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=user, role=role)
    return signed_in(user)


def keys_url(cast: Cast) -> str:
    return reverse("keys", args=[cast.tenant.public_id])


def test_a_new_key_is_shown_once_and_works_never_again_in_html(cast: Cast):
    client = signed_in(cast.owner)
    answer = client.post(keys_url(cast), {"name": "bot", "lifetime": "0"})
    secret = SECRET.search(answer.content.decode())
    assert secret
    assert answer.headers["Cache-Control"] == "no-store"
    for path in (keys_url(cast), reverse("overview", args=[cast.tenant.public_id])):
        assert secret.group() not in client.get(path).content.decode()
    assert ApiKey.objects.get(tenant=cast.tenant).name == "bot"
    assert AuditEntry.objects.get(tenant=cast.tenant, action="key.issued").actor_user == cast.owner


def test_htmx_gets_the_region_alone(cast: Cast):
    answer = signed_in(cast.owner).post(
        keys_url(cast), {"name": "bot", "lifetime": "0"}, headers={"HX-Request": "true"}
    )
    assert answer.content.strip().startswith(b'<div id="keys"')
    assert SECRET.search(answer.content.decode())


def test_a_key_can_end(cast: Cast):
    signed_in(cast.owner).post(keys_url(cast), {"name": "bot", "lifetime": "30"})
    key = ApiKey.objects.get(tenant=cast.tenant)
    assert key.expires_at is not None
    assert (key.expires_at - key.created_at).days in {29, 30}


@pytest.mark.parametrize("form", [{"name": " ", "lifetime": "0"}, {"name": "x", "lifetime": "7"}, {}])
def test_an_impossible_key_is_explained_and_not_made(cast: Cast, form: dict[str, str]):
    answer = signed_in(cast.owner).post(keys_url(cast), form)
    assert answer.status_code == 200
    assert b'role="alert"' in answer.content
    assert not ApiKey.objects.filter(tenant=cast.tenant).exists()


def test_hostile_names_are_text(cast: Cast):
    hostile = "<img src=x onerror=alert(1)>"
    answer = signed_in(cast.owner).post(keys_url(cast), {"name": hostile, "lifetime": "0"})
    assert hostile not in answer.content.decode()
    assert "&lt;img src=x" in answer.content.decode()


def test_revoking_asks_first_then_holds(cast: Cast):
    key = make_key(cast.tenant).api_key
    client = signed_in(cast.owner)
    url = reverse("revoke_key", args=[cast.tenant.public_id, key.public_id])
    assert b"Revoke" in client.get(url).content
    key.refresh_from_db()
    assert key.revoked_at is None
    answer = client.post(url, follow=True)
    key.refresh_from_db()
    assert key.revoked_at is not None
    assert b"is revoked" in answer.content


@pytest.mark.parametrize("role", [Role.VIEWER, Role.BILLING, Role.DEVELOPER])
def test_roles_without_key_rights_look_but_do_not_touch(cast: Cast, role: Role):
    key = make_key(cast.tenant).api_key
    client = member_with(cast, role)
    page = client.get(keys_url(cast))
    assert page.status_code == 200
    assert key.prefix in page.content.decode()
    assert b"Create key" not in page.content
    assert client.post(keys_url(cast), {"name": "x", "lifetime": "0"}).status_code == 403
    revoke = reverse("revoke_key", args=[cast.tenant.public_id, key.public_id])
    assert client.get(revoke).status_code == 403
    assert client.post(revoke).status_code == 403
    key.refresh_from_db()
    assert key.revoked_at is None
    assert ApiKey.objects.filter(tenant=cast.tenant).count() == 1


def test_another_tenants_key_is_absent_also_under_ones_own_tenant(cast: Cast):
    theirs = make_key(cast.other_tenant).api_key
    client = signed_in(cast.owner)
    for key_id in (theirs.public_id, uuid4()):
        assert client.post(reverse("revoke_key", args=[cast.tenant.public_id, key_id])).status_code == 404
    theirs.refresh_from_db()
    assert theirs.revoked_at is None


def test_posting_needs_a_csrf_token(cast: Cast):
    client = Client(enforce_csrf_checks=True)
    client.force_login(cast.owner)
    answer = client.post(keys_url(cast), {"name": "bot", "lifetime": "0"})
    assert answer.status_code == 403
    assert b"out of date" in answer.content
    assert not ApiKey.objects.filter(tenant=cast.tenant).exists()


def test_the_list_costs_the_same_for_many_keys(cast: Cast, django_assert_max_num_queries):
    for _ in range(12):
        make_key(cast.tenant)
    client = signed_in(cast.owner)
    client.get(keys_url(cast))
    with django_assert_max_num_queries(10):
        assert client.get(keys_url(cast)).status_code == 200


def test_a_rotation_shows_a_new_secret_once_and_only_its_id_does_it_again(cast: Cast):
    issued = make_key(cast.tenant, name="bot")
    url = reverse("rotate_key", args=[cast.tenant.public_id, issued.api_key.public_id])
    owner = signed_in(cast.owner)
    asked = owner.get(url)
    rotation_id = re.search(r'name="rotation_id" value="([^"]+)"', asked.content.decode())
    assert rotation_id
    form = {"rotation_id": rotation_id[1], "overlap_h": "1"}
    first = SECRET.search(owner.post(url, form).content.decode())
    again = SECRET.search(owner.post(url, form).content.decode())
    assert first
    assert again
    assert first[0] == again[0] != issued.secret
    assert first[0] not in owner.get(keys_url(cast)).content.decode()
    assert "old secret until" in owner.get(keys_url(cast)).content.decode()
    other = owner.post(url, {"rotation_id": "x" * 40, "overlap_h": "1"}, follow=True).content.decode()
    assert "was not rotated" in other
    assert not SECRET.search(other)
    assert AuditEntry.objects.filter(tenant=cast.tenant, action="key.rotated").count() == 1


def test_who_may_rotate(cast: Cast):
    key = make_key(cast.tenant).api_key
    url = reverse("rotate_key", args=[cast.tenant.public_id, key.public_id])
    for client, status in (
        (member_with(cast, Role.ADMIN), 200),
        (member_with(cast, Role.VIEWER), 403),
        (signed_in(cast.outsider), 404),
    ):
        assert client.get(url).status_code == status
    elsewhere = reverse("rotate_key", args=[cast.other_tenant.public_id, key.public_id])
    assert signed_in(cast.outsider).post(elsewhere, {"rotation_id": "x" * 40}).status_code == 404
    assert ApiKey.objects.get(tenant=cast.tenant, pk=key.pk).rotation_digest is None


BOUND = {
    "name": "bot",
    "lifetime": "0",
    "scopes": ["inference", "usage:read"],
    "max_tier": "batch",
    "allowed_networks": "192.0.2.7, 2001:db8::/32",
    "requests_per_minute": "30",
    "cost_per_month": "12.5",
}


def test_a_key_is_bound_and_limited_when_it_is_made_and_again_later(cast: Cast):
    make_tier("batch")
    project = create_project(actor=TEST, tenant=cast.tenant, name="Support")
    owner = signed_in(cast.owner)
    owner.post(keys_url(cast), {**BOUND, "project": str(project.public_id)})
    key = ApiKey.objects.get(tenant=cast.tenant)
    assert (key.project, key.max_tier and key.max_tier.name) == (project, "batch")
    assert key.allowed_networks == ["192.0.2.7/32", "2001:db8::/32"]
    assert sorted(key.scopes) == ["inference", "usage:read"]
    assert key_limits(key) == {KeyLimit.REQUESTS_PER_MINUTE: 30, KeyLimit.COST_PER_MONTH: 12_500_000}

    url = reverse("key", args=[cast.tenant.public_id, key.public_id])
    page = owner.get(url).content.decode()
    assert 'value="12.5"' in page
    assert "Requests per minute" in page
    answer = owner.post(url, {"name": "robot", "tokens_per_minute": "900", "requests_per_minute": "40"})
    assert answer.status_code == 302
    key.refresh_from_db()
    assert (key.name, key.project, key.max_tier, key.allowed_networks) == ("robot", None, None, [])
    assert key_limits(key) == {KeyLimit.REQUESTS_PER_MINUTE: 40, KeyLimit.TOKENS_PER_MINUTE: 900}
    changes = AuditEntry.objects.filter(tenant=cast.tenant, action="key.changed")
    assert changes.get().before["name"] == "bot"
    owner.post(url, {"name": "robot", "tokens_per_minute": "900", "requests_per_minute": "40"})
    assert changes.count() == 1


@pytest.mark.parametrize("role", Role)
def test_who_manages_keys_may_make_one_for_everything_and_nobody_else(cast: Cast, role: Role):
    """It can do what they can, and no more: nobody makes a key that is better than they are."""
    client = member_with(cast, role)
    answer = client.post(keys_url(cast), {"name": "deploy", "lifetime": "30", "scopes": ["admin"]})
    if Right.MANAGE_KEYS not in RIGHTS[role]:
        assert answer.status_code == 403
        assert not ApiKey.objects.filter(tenant=cast.tenant).exists()
        return
    key = ApiKey.objects.get(tenant=cast.tenant)
    assert key.scopes == ["admin"]
    stored = find_stored_key(key.lookup_id)
    assert stored
    assert stored.principal.scopes == frozenset(Scope) == SCOPES_BY_ROLE[role]
    issued = AuditEntry.objects.get(tenant=cast.tenant, action="key.issued")
    assert issued.after["scopes"] == ["admin"]
    page = client.get(reverse("key", args=[cast.tenant.public_id, key.public_id])).content.decode()
    assert "read the audit log" in page


@pytest.mark.parametrize(
    "given", [{"allowed_networks": "here"}, {"requests_per_minute": "0"}, {"cost_per_month": "1e30"}]
)
def test_a_bound_that_will_not_do_is_explained_and_nothing_is_made(cast: Cast, given: dict[str, str]):
    answer = signed_in(cast.owner).post(keys_url(cast), {"name": "bot", "lifetime": "0", **given})
    assert b'role="alert"' in answer.content
    assert b'<details class="more" open>' in answer.content
    assert not ApiKey.objects.filter(tenant=cast.tenant).exists()


def test_a_revoked_key_is_shown_but_can_not_be_changed(cast: Cast):
    key = make_key(cast.tenant, name="gone").api_key
    url = reverse("key", args=[cast.tenant.public_id, key.public_id])
    owner = signed_in(cast.owner)
    owner.post(reverse("revoke_key", args=[cast.tenant.public_id, key.public_id]))
    assert b"Save" not in owner.get(url).content
    assert owner.post(url, {"name": "back"}).status_code == 403
    assert "gone" not in owner.get(keys_url(cast) + "?q=gone").content.decode().split("</form>")[-1]
    assert "gone" in owner.get(keys_url(cast) + "?state=ended").content.decode()


def test_long_lists_are_paged_and_found_by_name_or_by_the_keys_beginning(cast: Cast):
    keys = [make_key(cast.tenant, name=f"key {number:02}").api_key for number in range(53)]
    owner = signed_in(cast.owner)
    first = owner.get(keys_url(cast)).content.decode()
    assert "key 52" in first
    assert "key 02" not in first
    older = re.search(r'href="(\?before=[^"]+)"', first)
    assert older
    second = owner.get(keys_url(cast) + older[1]).content.decode()
    assert "key 02" in second
    assert "key 03" not in second
    found = owner.get(keys_url(cast), {"q": keys[7].prefix}).content.decode()
    assert "key 07" in found
    assert "key 08" not in found
    assert "No key of that name" in owner.get(keys_url(cast), {"q": "\0nobody"}).content.decode()
    assert owner.get(keys_url(cast), {"before": str(uuid4())}).status_code == 200
