"""Tenants, tiers and people in the operator's admin: every change is on record."""

from __future__ import annotations

import re

import pytest
from django.db.models import F

from tenants.models import AuditEntry, Membership, QuotaLimit, Role, Tenant, Tier, User
from tenants.principal import LimitMetric
from tests.factories import make_tenant, make_tier, make_user, set_limit
from tests.tenants.admin.forms import inline_blanks, last_audit, url

pytestmark = pytest.mark.django_db


def test_tenants_are_suspended_and_resumed_by_actions(browser, operator):
    tenant = make_tenant()
    act = {"action": "suspend", "_selected_action": [tenant.pk]}
    asked = browser.post(url(Tenant, "changelist"), act).content.decode()
    assert tenant.name in asked
    tenant.refresh_from_db()
    assert not tenant.is_suspended, "it was only asked"
    browser.post(
        url(Tenant, "changelist"), {**act, "confirmed": "1", "reason": "The invoice of March is open"}
    )
    tenant.refresh_from_db()
    assert (tenant.is_suspended, tenant.suspended_reason) == (True, "The invoice of March is open")
    browser.post(url(Tenant, "changelist"), {**act, "action": "resume"})
    tenant.refresh_from_db()
    assert not tenant.is_suspended
    assert last_audit("tenant.resumed").actor_user == operator
    assert browser.post(url(Tenant, "delete", tenant.pk), {"post": "yes"}).status_code == 403


def test_a_tenant_with_a_member_and_a_limit_in_one_form(browser, operator):
    user = make_user()
    form = inline_blanks() | {
        "name": "Acme",
        "slug": "acme",
        "tier": make_tier().pk,
        "timezone": "Europe/Berlin",
        "memberships-TOTAL_FORMS": "1",
        "memberships-0-user": user.pk,
        "memberships-0-role": "owner",
        "limits-TOTAL_FORMS": "2",
        "limits-0-metric": "tokens",
        "limits-0-amount": "5000",
        "limits-0-period_s": "60",
        "limits-0-burst": "",
        "limits-1-metric": "concurrency",
        "limits-1-amount": "3",
        "limits-1-period_s": "60",
        "limits-1-burst": "",
    }
    twice = browser.post(url(Tenant, "add"), form | {"limits-1-metric": "tokens", "limits-1-period_s": "60"})
    assert twice.status_code == 200
    assert "Another row limits this over the same period." in twice.content.decode()
    page = browser.post(url(Tenant, "add"), form)
    assert page.status_code == 302, page.context["errors"]
    tenant = Tenant.objects.get(slug="acme")
    assert Membership.objects.get(tenant=tenant).role == Role.OWNER
    limits = QuotaLimit.objects.filter(tenant=tenant).order_by("id")
    assert [(x.scope, x.metric, x.amount, x.period_s, x.burst) for x in limits] == [
        ("tenant", "tokens", 5000, 60, 5000),
        ("tenant", "concurrency", 3, 0, 3),
    ]
    actions = AuditEntry.objects.filter(tenant=tenant, actor_user=operator).values_list("action", flat=True)
    assert sorted(actions) == ["limit.created", "limit.created", "member.created", "tenant.created"]


def test_a_new_tenant_is_told_whether_anything_limits_it(browser):
    bare, limited = make_tier("bare", rank=71), make_tier("limited", rank=72)
    set_limit(limited, LimitMetric.TOKENS, 1000)
    own = {
        "limits-TOTAL_FORMS": "1", "limits-0-metric": "tokens", "limits-0-amount": "5000",
        "limits-0-period_s": "60", "limits-0-burst": "",
    }  # fmt: skip
    for tier, limits, told in (
        (bare, {}, "Nothing limits what"),
        (limited, {}, "those of its tier, limited, hold"),
        (bare, own, None),
    ):
        slug = f"t{Tenant.objects.count()}"
        form = inline_blanks() | {"name": slug, "slug": slug, "tier": tier.pk, "timezone": "UTC"} | limits
        page = browser.post(url(Tenant, "add"), form, follow=True)
        messages = [str(message) for message in page.context["messages"]]
        assert [message for message in messages if "limit" in message] == [
            message for message in messages if told and told in message
        ]
        assert len(messages) == (2 if told else 1), messages


@pytest.mark.parametrize("has_standard", [True, False])
def test_a_new_tenant_is_in_the_default_tier_unless_another_is_chosen(browser, has_standard):
    Tier.objects.all().update(rank=F("rank") + 100)
    Tier.objects.filter(name="standard").update(name="of-another-name")
    tier = make_tier("standard" if has_standard else "usual", rank=40)
    make_tier("realtime-too", rank=30 if has_standard else 50)
    page = browser.get(url(Tenant, "add"))
    assert page.context["adminform"].form["tier"].value() == tier.pk
    assert re.search(rf'<option value="{tier.pk}" selected', page.content.decode())


def test_what_is_not_saved_yet_has_no_id_to_show(browser):
    assert b"Public id" not in browser.get(url(Tenant, "add")).content
    tenant = make_tenant()
    page = browser.get(url(Tenant, "change", tenant.pk)).content.decode()
    assert str(tenant.public_id) in page
    way = [re.search(rf">\s*{name}\s*</a\s*>", page) for name in ("Tenancy", "Tenants")]
    assert all(way), "not the same word twice"


def test_a_tier_change_is_on_record(browser, operator):
    tier = make_tier("odd", rank=77)
    form = inline_blanks() | {
        "name": "odd",
        "rank": "77",
        "weight": "9",
        "max_queued": "10",
        "max_queued_per_tenant": "5",
        "deadline_s": "60",
        "max_output_tokens": "100",
    }
    assert browser.post(url(Tier, "change", tier.pk), form).status_code == 302
    entry = last_audit("tier.changed")
    assert (entry.before["weight"], entry.after["weight"], entry.tenant) == (1, 9, None)
    page = browser.post(url(Tier, "change", tier.pk), form | {"max_queued_per_tenant": "11"})
    assert page.status_code == 200
    assert page.context["adminform"].form.errors


def test_a_person_is_added_by_mail_and_passwords_are_never_recorded(browser):
    form = {"email": "Ada@Example.org", "usable_password": "true"}
    secret = "a long and fine password"
    page = browser.post(url(User, "add"), form | {"password1": secret, "password2": secret})
    assert page.status_code == 302, page.context["errors"]
    user = User.objects.get(email="ada@example.org")
    assert user.check_password(secret)
    again = browser.post(url(User, "add"), form | {"password1": secret, "password2": secret})
    assert again.status_code == 200
    other = "another fine password"
    change = f"/admin/tenants/user/{user.pk}/password/"
    assert (
        browser.post(change, {"password1": other, "password2": other, "usable_password": "true"}).status_code
        == 302
    )
    recorded = str(list(AuditEntry.unscoped.values("action", "before", "after")))
    assert "user.created" in recorded
    assert "user.password_set" in recorded
    assert secret not in recorded
    assert other not in recorded
    assert "md5" not in recorded


def test_a_time_zone_that_is_none_is_refused(browser):
    form = inline_blanks() | {
        "name": "Acme",
        "slug": "acme",
        "tier": make_tier().pk,
        "timezone": "Mars/Olympus",
    }
    page = browser.post(url(Tenant, "add"), form)
    assert page.status_code == 200
    assert b"No time zone of the IANA database" in page.content
