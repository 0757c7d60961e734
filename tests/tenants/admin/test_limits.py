"""Limits in the operator's admin: what can't hold is a form's error."""

from __future__ import annotations

import re

import pytest

from tenants.models import QuotaLimit
from tenants.principal import LimitMetric, LimitScope
from tests.factories import make_key, make_tenant, make_tier, set_limit
from tests.tenants.admin.forms import url

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    "given",
    [
        {"scope": "tier", "tier": ""},
        {"scope": "tenant"},
        {"amount": "0"},
        {"amount": "-5"},
        {"period_s": "0"},
        {"period_s": str(32 * 86_400)},
        {"amount": str(10**13)},
        {"amount": str(10**11), "period_s": "86400"},
        {"metric": "kittens"},
    ],
    ids=str,
)
def test_an_impossible_limit_is_a_form_error_not_a_crash(browser, given):
    form = {
        "scope": "tier",
        "tier": make_tier().pk,
        "tenant": "",
        "api_key": "",
        "metric": "requests",
        "amount": "10",
        "period_s": "60",
        "burst": "",
    }
    page = browser.post(url(QuotaLimit, "add"), form | given)
    assert page.status_code == 200
    assert page.context["adminform"].form.errors
    assert not QuotaLimit.unscoped.exists()


def test_lists_group_whole_numbers_and_still_sort_by_them(browser):
    tenant = make_tenant()
    for amount in (9, 1_234_567, 800):
        set_limit(make_key(tenant).api_key, LimitMetric.TOKENS, amount)
    for order, shown in (("4", ["9", "800", "1,234,567"]), ("-4", ["1,234,567", "800", "9"])):
        page = browser.get(url(QuotaLimit, "changelist"), {"o": order, "q": tenant.slug}).content.decode()
        assert re.findall(r"<td[^>]*field-amount[^>]*>\s*([\d,]+)", page) == shown


def test_a_limit_can_not_name_another_tenants_key(browser):
    key = make_key().api_key
    other = make_tenant()
    form = {
        "scope": LimitScope.KEY.value,
        "tier": "",
        "tenant": other.pk,
        "api_key": key.pk,
        "metric": "requests",
        "amount": "10",
        "period_s": "60",
        "burst": "",
    }
    page = browser.post(url(QuotaLimit, "add"), form)
    assert page.status_code == 200
    assert "api_key" in page.context["adminform"].form.errors
    assert browser.post(url(QuotaLimit, "add"), form | {"tenant": ""}).status_code == 302
    assert QuotaLimit.objects.get(tenant=key.tenant).api_key == key
