"""The console's pages about limits: one to try, and a key that waits instead of being refused."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from inference.services.ledger import record_usage
from tenants.models import ApiKey, Role
from tenants.services import add_member
from tests.e2e.world import refuse_a_request
from tests.factories import TEST, make_key, make_user, signed_in
from tests.inference.ledger_driving import an_event

pytestmark = pytest.mark.django_db


def test_a_limit_is_tried_on_the_traffic_that_was(cast):
    key = str(make_key(cast.tenant, name="busy").api_key.public_id)
    at = int((timezone.now() - timedelta(hours=1)).timestamp() * 1000)
    for owner, count in ((cast.tenant, 5), (cast.other_tenant, 3)):
        record_usage(
            [
                an_event(
                    str(owner.public_id),
                    f"{owner.slug}-{number}",
                    key_id=key if owner == cast.tenant and number < 2 else None,
                    created_at_ms=at + number,
                    finished_at_ms=at + number + 50,
                )
                for number in range(count)
            ]
        )
    owner, url = signed_in(cast.owner), reverse("try_limit", args=[cast.tenant.public_id])
    assert "Refused" not in owner.get(url).content.decode()
    asked = {"metric": "requests", "amount": "2", "per": "3600", "days": "7"}
    page = owner.get(url, asked).content.decode()
    assert "<dt>Requests</dt><dd>5</dd>" in page
    assert "<dt>Refused</dt><dd>3</dd>" in page
    assert f"{cast.tenant.slug}-2" in page  # the first that it refuses
    assert cast.other_tenant.slug not in page
    page = owner.get(url, {**asked, "key": key}).content.decode()
    assert "<dt>Refused</dt><dd>0</dd></div>" in page
    page = owner.get(url, {**asked, "metric": "tokens", "amount": "31", "per": "month"}).content.decode()
    assert "<dt>Used by the others</dt><dd>30</dd>" in page
    assert not cast.tenant.limits.exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"amount": "1.5"}, "A whole number"),
        ({"amount": "0"}, "greater than or equal"),
        ({"amount": "1e30"}, "digit"),
        ({"metric": "wishes"}, "not one of the available choices"),
        ({"metric": "cost", "amount": "5"}, "Try a limit"),
        ({"days": "400"}, "less than or equal"),
        ({"key": "mine"}, "not one of the available choices"),
    ],
)
def test_what_can_not_be_a_limit_is_said(cast, given, said):
    url = reverse("try_limit", args=[cast.tenant.public_id])
    asked = {"metric": "requests", "amount": "2", "per": "3600", "days": "7", **given}
    page = signed_in(cast.owner).get(url, asked).content.decode()
    assert said in page
    assert 'role="alert"' in page
    assert "<dt>Refused</dt>" not in page


@pytest.mark.parametrize("role", [Role.DEVELOPER, Role.VIEWER, Role.BILLING])
def test_who_sets_no_limits_tries_none(cast, role):
    person = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=person, role=role)
    client = signed_in(person)
    assert client.get(reverse("try_limit", args=[cast.tenant.public_id])).status_code == 403
    assert b"Try a limit" not in client.get(reverse("limits", args=[cast.tenant.public_id])).content


def test_a_key_is_told_to_wait_instead_of_being_refused(cast):
    owner = signed_in(cast.owner)
    keys = reverse("keys", args=[cast.tenant.public_id])
    owner.post(keys, {"name": "patient", "lifetime": "0", "over_a_rate": "wait"})
    owner.post(keys, {"name": "hasty", "lifetime": "0"})
    patient, hasty = (ApiKey.objects.get(tenant=cast.tenant, name=name) for name in ("patient", "hasty"))
    assert (patient.waits_for_rate, hasty.waits_for_rate) == (True, False)
    for api_key, given in ((patient, ""), (hasty, "wait")):
        page = reverse("key", args=[cast.tenant.public_id, api_key.public_id])
        assert ('value="wait" selected' in owner.get(page).content.decode()) == api_key.waits_for_rate
        owner.post(page, {"name": api_key.name, "over_a_rate": given})
        api_key.refresh_from_db()
        assert api_key.waits_for_rate == bool(given)


def test_a_refusal_is_found_from_the_log_and_says_who_can_raise_its_limit(cast):
    key = make_key(cast.tenant).api_key
    request_id = refuse_a_request(cast.tenant, key)
    limits, log = (reverse(name, args=[cast.tenant.public_id]) for name in ("limits", "requests"))
    page = reverse("request", args=[cast.tenant.public_id, request_id])
    key_page = reverse("key", args=[cast.tenant.public_id, key.public_id])
    owner, member = signed_in(cast.owner), signed_in(cast.member)
    assert f'href="{limits}#refused-title"' in owner.get(log).content.decode()
    listed = owner.get(limits).content.decode()
    assert 'id="refused-title"' in listed
    assert f'href="{page}"' in listed
    assert f'href="{key_page}"' in owner.get(page).content.decode()
    seen_by_member = member.get(page).content.decode()
    assert "an owner or admin of this tenant" in seen_by_member
    assert f'href="{key_page}"' not in seen_by_member
    of_the_chat = reverse("request", args=[cast.tenant.public_id, refuse_a_request(cast.tenant, None)])
    seen_by_owner = owner.get(of_the_chat).content.decode()
    assert "the operator" in seen_by_owner
    assert "Retry-After" in owner.get(page).content.decode()
    assert "Retry-After" not in seen_by_owner, "a chat has no headers"
