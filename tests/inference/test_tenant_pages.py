"""The console's pages about settings, the audit log, alerts and webhooks: what they show, who may change what."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from inference.models import Alert, AlertKind, WebhookDelivery, WebhookEndpoint
from inference.services.webhook_delivery import send_deliveries
from tenants.models import AuditEntry, Role
from tenants.services import add_member
from tests.factories import TEST, make_key, make_user, signed_in

pytestmark = pytest.mark.django_db


def test_a_tenant_is_renamed_and_moved_to_another_zone(cast):
    url = reverse("settings", args=[cast.tenant.public_id])
    owner = signed_in(cast.owner)
    saved = owner.post(url, {"name": "<b>Ministry</b>", "timezone": "Europe/Berlin"}, follow=True)
    page = saved.content.decode()
    assert "Saved." in page
    assert "&lt;b&gt;Ministry" in page
    assert "<b>Ministry" not in page
    cast.tenant.refresh_from_db()
    assert (cast.tenant.name, cast.tenant.timezone) == ("<b>Ministry</b>", "Europe/Berlin")
    entry = AuditEntry.objects.get(tenant=cast.tenant, action="tenant.changed")
    assert entry.after == {"name": "<b>Ministry</b>", "timezone": "Europe/Berlin"}
    wrong = owner.post(url, {"name": "x", "timezone": "Mars/Crater"}).content.decode()
    assert "No time zone" in wrong
    assert 'name="name" value="x"' in wrong, "what was typed is still there"
    cast.tenant.refresh_from_db()
    assert cast.tenant.timezone == "Europe/Berlin"


@pytest.mark.parametrize("role", [Role.DEVELOPER, Role.VIEWER, Role.BILLING])
def test_others_see_settings_and_alerts_and_no_audit_log(cast, role):
    person = make_user()
    add_member(actor=TEST, tenant=cast.tenant, user=person, role=role)
    client = signed_in(person)
    settings = reverse("settings", args=[cast.tenant.public_id])
    alerts = reverse("alerts", args=[cast.tenant.public_id])
    assert b"Save</button>" not in client.get(settings).content
    assert b"Add webhook" not in client.get(alerts).content
    assert client.post(settings, {"name": "mine", "timezone": "UTC"}).status_code == 403
    assert client.post(alerts, {"url": "https://example.com/"}).status_code == 403
    assert client.get(reverse("audit", args=[cast.tenant.public_id])).status_code == 403


def test_the_audit_log_is_searched_paged_and_saved(cast):
    for number in range(55):
        make_key(cast.tenant, name=f"key {number:02}")
    make_key(cast.other_tenant, name="not theirs")
    owner = signed_in(cast.owner)
    url = reverse("audit", args=[cast.tenant.public_id])
    first = owner.get(url).content.decode()
    assert "key 54" in first
    assert "key 04" not in first
    assert "not theirs" not in first
    assert 'rel="next"' in first
    found = owner.get(url, {"q": "key 04", "action": "key.issued", "since": "2020-01-01"}).content.decode()
    assert "key 04" in found
    assert "key 05" not in found
    assert "Nothing of that kind" in owner.get(url, {"until": "2020-01-01"}).content.decode()
    assert owner.get(url, {"since": "yesterday", "q": "\0", "before": "x"}).status_code == 200
    file = owner.get(url, {"q": "key 04", "form": "csv"})
    assert file.headers["Content-Disposition"] == 'attachment; filename="audit.csv"'
    assert b"key 04" in file.content
    assert b"key 05" not in file.content


def test_alerts_are_listed_and_webhooks_kept(cast):
    Alert.objects.create(
        tenant=cast.tenant, kind=AlertKind.BUDGET, subject="s", period="2026-11", threshold=80,
        title="80 % of <i>a budget</i> is used", text="Look at it.",
    )  # fmt: skip
    owner = signed_in(cast.owner)
    url = reverse("alerts", args=[cast.tenant.public_id])
    page = owner.get(url).content.decode()
    assert "80 % of &lt;i&gt;a budget" in page
    refused = owner.post(url, {"url": "https://10.0.0.1/weir", "kinds": ["budget"]}).content.decode()
    assert "not in the public internet" in refused
    assert 'value="https://10.0.0.1/weir"' in refused, "what was typed is still there"
    assert 'value="budget" checked' in refused
    made = owner.post(url, {"url": "https://hooks.example.com/weir", "kinds": ["budget", "nonsense"]})
    endpoint = WebhookEndpoint.objects.get(tenant=cast.tenant)
    one = reverse("webhook", args=[cast.tenant.public_id, endpoint.public_id])
    assert made.headers["Location"] == one
    assert endpoint.kinds == ["budget"]
    secret = owner.get(one).content.decode().partition("whsec_")[2][:20]
    assert "Nothing was sent yet" in owner.get(one).content.decode()
    owner.post(one, {"verb": "try"})
    page = owner.get(one).content.decode()
    assert "waiting" in page
    assert "data-polls" in page, "what becomes of it is shown without being asked for"
    owner.post(one, {"verb": "rotate"})
    assert secret not in owner.get(one).content.decode()
    owner.post(one, {"verb": "disable"})
    assert "switched off" in owner.get(one).content.decode()
    assert owner.post(one, {"verb": "steal"}).status_code == 404
    theirs = reverse("webhook", args=[cast.other_tenant.public_id, endpoint.public_id])
    assert signed_in(cast.outsider).post(theirs, {"verb": "delete"}).status_code == 404
    owner.post(one, {"verb": "delete"})
    assert not WebhookEndpoint.objects.filter(tenant=cast.tenant).exists()


def test_a_webhook_that_nothing_reaches_is_told_when_it_is_made_and_where_it_is_listed(cast, settings):
    settings.WEBHOOK_NETWORKS = []
    owner = signed_in(cast.owner)
    alerts = reverse("alerts", args=[cast.tenant.public_id])
    page = owner.post(alerts, {"url": "https://nobody.invalid/weir"}, follow=True).content.decode()
    assert "nothing would arrive there now: nobody.invalid is not found" in page
    endpoint = WebhookEndpoint.objects.get(tenant=cast.tenant)
    one = reverse("webhook", args=[cast.tenant.public_id, endpoint.public_id])
    assert "not arriving" not in owner.get(alerts).content.decode()
    owner.post(one, {"verb": "try"})
    now = timezone.now()
    send_deliveries(now)
    assert "not arriving" in (listed := owner.get(alerts).content.decode())
    assert "the name is not found" in listed
    assert "1 of 8" in (page := owner.get(one).content.decode())
    assert "not delivered" in page
    for day in range(1, 10):
        send_deliveries(now + timedelta(days=day))
    assert "given up" in owner.get(one).content.decode()
    delivery = WebhookDelivery.objects.get(tenant=cast.tenant)
    again = {"verb": "redeliver", "delivery": str(delivery.public_id)}
    theirs = reverse("webhook", args=[cast.other_tenant.public_id, endpoint.public_id])
    assert signed_in(cast.outsider).post(theirs, again).status_code == 404
    assert "It is sent again" in owner.post(one, again, follow=True).content.decode()
    delivery.refresh_from_db()
    assert delivery.state == "waiting"
    assert owner.post(one, again | {"delivery": "nonsense"}).status_code == 404
