"""The operator's admin: every page opens, every change is on record, and no secret is ever shown twice."""

from __future__ import annotations

import re

import pytest
from asgiref.sync import async_to_sync
from django.contrib import admin
from django.urls import reverse

from inference.models import Alert, Maintenance, ParkedUsageEvent, UsageAdjustment, UsageRecord
from inference.services.ledger import record_usage
from tenants.auth import RevokedKey, authenticate_bearer
from tenants.models import ApiKey, AuditEntry, Membership, ModelPrice, QuotaLimit, Role, Tenant, Tier, User
from tenants.principal import LimitMetric, LimitScope
from tests.factories import make_cast, make_key, make_operator, make_tenant, make_tier, make_user, set_limit
from tests.inference.ledger_driving import an_event

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)
"""For what authentication must see: it reads on connections of its own."""

OUR_MODELS = [
    model for model in admin.site._registry if model._meta.app_label in {"tenants", "inference", "auth"}
]
READ_ONLY = [AuditEntry, UsageRecord, ParkedUsageEvent, Alert]
ONE_ROW = [Maintenance]
"""Their list leads to the row, and no other is added."""


@pytest.fixture
def operator():
    return make_operator()


@pytest.fixture
def browser(client, operator):
    client.force_login(operator)
    return client


@pytest.fixture
def world():
    """At least one row behind every page."""
    cast = make_cast()
    issued = make_key(cast.tenant)
    set_limit(cast.tenant, LimitMetric.TOKENS, 1000)
    set_limit(issued.api_key, LimitMetric.REQUESTS, 10)
    set_limit(cast.tenant.tier, LimitMetric.CONCURRENCY, 10)
    record_usage([an_event(str(cast.tenant.public_id), "r1"), an_event("nobody", "r2")])
    Alert.objects.create(
        tenant=cast.tenant, kind="budget", subject="b", period="2026-11", threshold=50, title="t", text="t"
    )
    return cast, issued


def url(model, page: str, *args) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}", args=args)


def inline_blanks() -> dict[str, str]:
    return {
        f"{prefix}-{name}": "0"
        for prefix in ("memberships", "limits")
        for name in ("TOTAL_FORMS", "INITIAL_FORMS")
    }


def last_audit(action: str) -> AuditEntry:
    entry = AuditEntry.unscoped.filter(action=action).first()
    assert entry is not None, list(AuditEntry.unscoped.values_list("action", flat=True))
    return entry


@pytest.mark.parametrize("model", OUR_MODELS, ids=lambda model: model.__name__)
def test_every_page_opens_and_shows_no_secret(browser, world, model):
    _, issued = world
    leads_on = model in ONE_ROW
    pages = [browser.get(url(model, "changelist"), query, follow=leads_on) for query in (None, {"q": "a"})]
    row = admin.site._registry[model].get_queryset(None).first()
    if row is not None:
        pages.append(browser.get(url(model, "change", row.pk)))
    add = browser.get(url(model, "add"))
    assert add.status_code == (403 if model in READ_ONLY + ONE_ROW else 200)
    digest = bytes(issued.api_key.digest)
    for page in pages:
        assert page.status_code == 200
        body = page.content
        assert issued.secret.encode() not in body
        assert issued.secret.split("_")[-1].encode() not in body
        assert digest not in body
        assert digest.hex().encode() not in body


@pytest.mark.parametrize("model", OUR_MODELS, ids=lambda model: model.__name__)
def test_nobody_else_gets_in(client, world, model):
    cast, _ = world
    for user in (cast.owner, cast.member, cast.outsider):
        client.force_login(user)
        assert client.get(url(model, "changelist")).status_code == 302


@pytest.mark.parametrize("model", READ_ONLY, ids=lambda model: model.__name__)
def test_ledger_and_audit_can_not_be_changed_even_by_a_superuser(browser, world, model):
    row = admin.site._registry[model].get_queryset(None).first()
    assert browser.post(url(model, "add"), {}).status_code == 403
    assert browser.post(url(model, "change", row.pk), {"request_id": "x"}).status_code == 403
    assert browser.post(url(model, "delete", row.pk), {"post": "yes"}).status_code == 403
    assert "delete_selected" not in browser.get(url(model, "changelist")).content.decode()


@committed
def test_a_key_is_issued_and_its_secret_shown_once(browser, operator):
    tenant = make_tenant()
    form = {"tenant": tenant.pk, "name": "from the admin", "scopes": ["inference"], "expires_at_0": ""}
    page = browser.post(url(ApiKey, "add"), form | {"expires_at_1": ""})
    assert page.status_code == 200
    assert "no-store" in page["Cache-Control"]
    (secret,) = set(re.findall(r"wr_live_\w{12}_\w{49}", page.content.decode()))
    principal = async_to_sync(authenticate_bearer)(secret)
    assert principal.tenant_id == tenant.pk
    # Not in a cookie, not in a message, not on any page afterwards.
    assert secret not in str(page.cookies) + str(dict(browser.session))
    api_key = ApiKey.objects.get(tenant=tenant)
    assert api_key.created_by == operator
    for path in (url(ApiKey, "changelist"), url(ApiKey, "change", api_key.pk), url(AuditEntry, "changelist")):
        assert secret.split("_")[-1] not in browser.get(path).content.decode()
    entry = last_audit("key.issued")
    assert (entry.actor_user, entry.tenant, entry.target_public_id) == (operator, tenant, api_key.public_id)
    assert entry.ip_address == "127.0.0.1"


@pytest.mark.parametrize(
    ("field", "value"), [("scopes", []), ("scopes", ["root"]), ("name", ""), ("expires_at_0", "2020-01-01")]
)
def test_a_wrong_key_form_says_so(browser, field, value):
    form = {
        "tenant": make_tenant().pk,
        "name": "x",
        "scopes": ["inference"],
        "expires_at_0": "",
        "expires_at_1": "",
    }
    if field == "expires_at_0":
        form["expires_at_1"] = "00:00:00"
    page = browser.post(url(ApiKey, "add"), form | {field: value})
    assert page.status_code == 200
    assert page.context["adminform"].form.errors
    assert not ApiKey.unscoped.exists()


def test_the_menu_leads_to_every_list_and_shows_nobody_what_is_not_theirs(client, browser):
    page = browser.get("/admin/live/").content.decode()
    for model in admin.site._registry:
        assert f'href="{url(model, "changelist")}"' in page, model
    assert 'href="/admin/live/"' in page
    client.force_login(make_user(is_staff=True))
    page = client.get("/admin/live/").content.decode()
    assert 'href="/admin/live/"' in page
    assert url(Tenant, "changelist") not in page


@committed
def test_keys_are_revoked_by_an_action_and_never_deleted(browser, operator, world):
    _, issued = world
    act = {"action": "revoke", "_selected_action": [issued.api_key.pk]}
    asked = browser.post(url(ApiKey, "changelist"), act)
    assert (asked.status_code, issued.api_key.name in asked.content.decode()) == (200, True)
    async_to_sync(authenticate_bearer)(issued.secret)
    act["confirmed"] = "1"
    assert browser.post(url(ApiKey, "changelist"), act).status_code == 302
    with pytest.raises(RevokedKey):
        async_to_sync(authenticate_bearer)(issued.secret)
    assert last_audit("key.revoked").actor_user == operator
    browser.post(url(ApiKey, "changelist"), act)
    assert AuditEntry.unscoped.filter(action="key.revoked").count() == 1
    assert browser.post(url(ApiKey, "delete", issued.api_key.pk), {"post": "yes"}).status_code == 403


def test_renaming_a_key_is_on_record_and_leaves_its_scopes(browser, world):
    _, issued = world
    form = {"name": "renamed", "expires_at_0": "", "expires_at_1": "", "scopes": ["admin"]}
    assert browser.post(url(ApiKey, "change", issued.api_key.pk), form).status_code == 302
    api_key = ApiKey.objects.get(tenant=issued.api_key.tenant, pk=issued.api_key.pk)
    assert (api_key.name, api_key.scopes) == ("renamed", ["inference"])
    entry = last_audit("key.changed")
    assert (entry.before, entry.after) == ({"name": "test key"}, {"name": "renamed"})


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


@pytest.mark.parametrize("model", [ApiKey, Tenant, UsageRecord, AuditEntry, QuotaLimit, Membership])
def test_a_longer_list_asks_no_more_queries(browser, django_assert_max_num_queries, model):
    def grow() -> None:
        for _ in range(4):
            tenant = make_tenant(owner=make_user())
            set_limit(make_key(tenant).api_key, LimitMetric.TOKENS, 5)
            record_usage([an_event(str(tenant.public_id))])

    grow()
    path = url(model, "changelist")
    browser.get(path)
    with django_assert_max_num_queries(100) as few:
        browser.get(path)
    grow()
    with django_assert_max_num_queries(len(few)):
        browser.get(path)


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
