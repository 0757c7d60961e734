"""What the operator's admin does to the ledger: prices, adjustments, parked events."""

from __future__ import annotations

import pytest

from inference.models import ParkedUsageEvent, UsageAdjustment, UsageRecord
from tenants.models import AuditEntry, ModelPrice
from tests.factories import make_tenant
from tests.tenants.admin.forms import url

pytestmark = pytest.mark.django_db


def test_a_parked_event_is_filed_by_an_action(browser, world):
    cast, _ = world
    parked = ParkedUsageEvent.objects.get()
    act = {"action": "file_again", "_selected_action": [parked.pk]}
    page = browser.post(url(ParkedUsageEvent, "changelist"), act, follow=True)
    assert "no tenant has the public id" in page.content.decode()
    parked.event["tenant_id"] = str(cast.tenant.public_id)
    parked.save()
    browser.post(url(ParkedUsageEvent, "changelist"), act)
    assert UsageRecord.objects.get(tenant=cast.tenant, request_id="r2")


def test_prices_are_set_and_only_shown_once_in_force(browser):
    amounts = dict.fromkeys(("input_microusd_per_mtok", "cached_input_microusd_per_mtok"), "7")
    form = {"model": "m", "output_microusd_per_mtok": "9", **amounts}
    past = browser.post(
        url(ModelPrice, "add"), form | {"valid_from_0": "2026-01-01", "valid_from_1": "00:00"}
    )
    assert past.status_code == 200
    assert b"This moment has passed" in past.content
    page = browser.post(
        url(ModelPrice, "add"), form | {"valid_from_0": "2099-01-01", "valid_from_1": "00:00"}
    )
    assert page.status_code == 302
    price = ModelPrice.objects.get()
    assert (price.input_microusd_per_mtok, price.output_microusd_per_mtok) == (7, 9)
    assert browser.post(url(ModelPrice, "change", price.pk), form).status_code == 403


def test_an_adjustment_takes_a_reason(browser):
    tenant = make_tenant()
    form = {"tenant": tenant.pk, "cost_microusd": "-500", "reason": ""}
    assert browser.post(url(UsageAdjustment, "add"), form).status_code == 200
    assert browser.post(url(UsageAdjustment, "add"), form | {"reason": "Goodwill"}).status_code == 302
    made = UsageAdjustment.objects.for_tenant(tenant).get()
    assert (made.cost_microusd, made.reason) == (-500, "Goodwill")
    assert AuditEntry.objects.filter(tenant=tenant, action="usage.adjusted").exists()
