"""Nothing changes without a line in the audit log: every service that has an actor, and every page of the admin."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group
from django.test import Client
from django.urls import reverse

from tenants.admin.base import AuditedAdmin, ReadOnlyAdmin
from tenants.models import AuditEntry, QuotaLimit, Tenant
from tests.factories import make_operator, make_tenant, make_tier, make_user

ROOT = Path(__file__).resolve().parents[2]

THROUGH_A_SERVICE = {"ModelPriceAdmin", "UsageAdjustmentAdmin"}
"""Admin pages whose saving calls a service, which writes the line."""
NO_CHANGE: set[str] = set()
"""Services that have an actor and change nothing: each needs a reason."""


def services() -> list[tuple[str, ast.FunctionDef]]:
    """Every function with a parameter `actor` in a `services` package, by where it is."""
    return [
        (f"{path.relative_to(ROOT)}:{node.name}", node)
        for package in ("tenants", "inference")
        for path in sorted((ROOT / package / "services").glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and "actor" in {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        and node.name != "record_audit"
    ]


def calls(node: ast.AST) -> set[str]:
    return {
        getattr(call.func, "id", getattr(call.func, "attr", ""))
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
    }


def test_every_service_with_an_actor_is_audited():
    """Itself, or by another that it calls and that, in the end, writes the line."""
    found = services()
    called = {where.partition(":")[2]: calls(node) for where, node in found}
    assert {"issue_api_key", "set_quota_limit", "adjust_usage", "create_webhook"} <= set(called)
    audited = {"record_audit"}
    while more := {name for name, calls_ in called.items() if calls_ & audited} - audited:
        audited |= more
    # A private helper is a part of the service that calls it: that one has to write the line.
    public = {where for where, _ in found if not where.partition(":")[2].startswith("_")}
    assert {where for where in public if where.partition(":")[2] not in audited} == NO_CHANGE


def test_every_admin_page_that_changes_something_is_audited():
    ours = [
        page
        for page in admin.site._registry.values()
        if type(page).__module__.startswith(("tenants", "inference"))
    ]
    assert len(ours) > 10
    silent = {type(page).__name__ for page in ours if not isinstance(page, AuditedAdmin | ReadOnlyAdmin)}
    assert silent == THROUGH_A_SERVICE


@pytest.mark.django_db
def test_the_admins_lines_say_what_was_before_and_after():
    operator = make_operator()
    browser = Client(REMOTE_ADDR="192.0.2.4")
    browser.force_login(operator)
    group = {"name": "Support"}
    assert browser.post(reverse("admin:auth_group_add"), group).status_code == 302
    group_row = Group.objects.get()
    assert (
        browser.post(reverse("admin:auth_group_change", args=[group_row.pk]), {"name": "Care"}).status_code
        == 302
    )
    assert (
        browser.post(reverse("admin:auth_group_delete", args=[group_row.pk]), {"post": "yes"}).status_code
        == 302
    )
    told = list(
        AuditEntry.unscoped.filter(action__startswith="group.")
        .order_by("id")
        .values_list("action", "before", "after")
    )
    assert [action for action, _, _ in told] == ["group.created", "group.changed", "group.deleted"]
    assert (told[1][1]["name"], told[1][2]["name"]) == ("Support", "Care")
    assert told[2][1]["name"] == "Care"

    tier = make_tier()
    page = reverse("admin:tenants_tier_change", args=[tier.pk])
    names = ["name", "rank", "weight", "max_queued", "max_queued_per_tenant", "max_wait_s", "deadline_s"]
    names += ["max_output_tokens"]
    fields = {name: getattr(tier, name) or "" for name in names} | {"rank": tier.rank}
    row = {"metric": "requests", "amount": 5, "period_s": 60, "burst": "", "calendar": "", "is_hard": "on"}

    def save(rows: list[dict[str, object]]) -> None:
        inline = {f"limits-{n}-{name}": value for n, each in enumerate(rows) for name, value in each.items()}
        managed = {
            "limits-TOTAL_FORMS": len(rows),
            "limits-INITIAL_FORMS": sum("id" in each for each in rows),
        }
        answer = browser.post(page, fields | managed | inline)
        assert answer.status_code == 302, answer.context["errors"]

    save([row])
    limit = QuotaLimit.unscoped.get(tier=tier)
    kept = row | {"id": limit.pk, "tier": tier.pk}
    save([kept | {"amount": 9, "burst": 9}])
    save([kept | {"amount": 9, "burst": 9, "DELETE": "on"}])
    told = list(
        AuditEntry.unscoped.filter(action__startswith="limit.")
        .order_by("id")
        .values_list("action", "before", "after")
    )
    assert [action for action, _, _ in told] == ["limit.created", "limit.changed", "limit.deleted"]
    assert told[0][2]["amount"] == 5
    assert (told[1][1]["amount"], told[1][2]["amount"]) == (5, 9)
    assert told[2][1]["amount"] == 9
    entry = AuditEntry.unscoped.filter(action="limit.deleted").get()
    assert (entry.actor_user, entry.ip_address, entry.target_public_id) == (
        operator,
        "192.0.2.4",
        limit.public_id,
    )


@pytest.mark.django_db
def test_what_the_admin_deletes_is_told_without_its_secrets():
    operator, tenant = make_operator(), make_tenant(owner=make_user())
    browser = Client()
    browser.force_login(operator)
    membership = Tenant.objects.get(pk=tenant.pk).memberships.get()
    path = reverse("admin:tenants_membership_delete", args=[membership.pk])
    assert browser.post(path, {"post": "yes"}).status_code == 302
    entry = AuditEntry.objects.filter(tenant=tenant, action="member.deleted").get()
    assert entry.before["role"] == "owner"
    assert entry.before["user_id"] == membership.user_id
