"""Every change: what it does, what it refuses, and the audit row beside it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.db import DatabaseError, IntegrityError, connection, connections, transaction
from django.utils import timezone

from tenants.key_format import digest_key, new_key_secret, parse_key
from tenants.models import ApiKey, AuditEntry, Membership, QuotaLimit, Role, Tenant, Tier, User
from tenants.principal import LimitMetric, Scope
from tenants.services import (
    Actor,
    add_member,
    create_tenant,
    ensure_demo,
    issue_api_key,
    record_audit,
    remove_quota_limit,
    resume_tenant,
    revoke_api_key,
    set_quota_limit,
    suspend_tenant,
)
from tests.factories import TEST, make_key, make_tenant, make_tier, make_user

pytestmark = pytest.mark.django_db
committed = pytest.mark.django_db(transaction=True)


def actions(tenant: Tenant | None = None) -> list[str]:
    return list(AuditEntry.unscoped.filter(tenant=tenant).order_by("id").values_list("action", flat=True))


@pytest.fixture
def ada():
    return Actor.person(make_user("ada@example.org"), ip_address="192.0.2.7")


def test_a_tenant_with_its_owner(ada):
    tenant = create_tenant(actor=ada, name=" Acme Research ", tier=make_tier(), owner=ada.user)
    assert (tenant.name, tenant.slug) == ("Acme Research", "acme-research")
    assert Membership.objects.get(tenant=tenant).role == Role.OWNER
    assert actions(tenant) == ["tenant.created", "member.added"]
    entry = AuditEntry.objects.filter(tenant=tenant, action="tenant.created").get()
    assert (entry.actor_kind, entry.actor_label, entry.actor_user) == ("user", "ada@example.org", ada.user)
    assert (entry.ip_address, entry.target_public_id) == ("192.0.2.7", tenant.public_id)


@pytest.mark.parametrize(
    "given", [{"name": ""}, {"name": "  "}, {"name": "!!!"}, {"name": "x", "slug": "a b"}]
)
def test_a_tenant_that_will_not_do_leaves_nothing(ada, given):
    with pytest.raises(ValidationError):
        create_tenant(actor=ada, tier=make_tier(), **given)
    assert not Tenant.objects.exists()
    assert not AuditEntry.unscoped.exists()


def test_a_taken_slug_is_refused(ada):
    make_tenant("Acme")
    with pytest.raises(ValidationError) as refusal:
        create_tenant(actor=ada, name="ACME!", tier=make_tier())
    assert "slug" in refusal.value.message_dict


def test_a_member_gets_one_role_and_another_later(ada):
    tenant, user = make_tenant(), make_user()
    add_member(actor=ada, tenant=tenant, user=user, role=Role.VIEWER)
    add_member(actor=ada, tenant=tenant, user=user, role=Role.VIEWER)
    add_member(actor=ada, tenant=tenant, user=user, role=Role.ADMIN)
    assert Membership.objects.get(tenant=tenant, user=user).role == Role.ADMIN
    assert actions(tenant) == ["tenant.created", "member.added", "member.role_changed"]
    change = AuditEntry.objects.filter(tenant=tenant).first()
    assert change is not None
    assert (change.before, change.after) == (
        {"role": "viewer"},
        {"user": user.email, "role": "admin"},
    )


def test_a_key_is_stored_as_a_digest_only(ada, settings):
    tenant = make_tenant()
    issued = issue_api_key(actor=ada, tenant=tenant, name="web", scopes=(Scope.INFERENCE, Scope.INFERENCE))
    row = ApiKey.objects.get(tenant=tenant)
    key = parse_key(issued.secret)
    assert key is not None
    assert bytes(row.digest) == digest_key(key, pepper=settings.API_KEY_PEPPER)
    assert bytes(row.digest) != digest_key(key, pepper="another pepper")
    assert (row.scopes, row.created_by) == (["inference"], ada.user)
    assert issued.secret.startswith(row.prefix + "_")
    with connection.cursor() as cursor:
        for query in ("SELECT t::text FROM tenants_apikey t", "SELECT t::text FROM tenants_auditentry t"):
            cursor.execute(query)
            assert issued.secret.split("_")[-1] not in str(cursor.fetchall())


def test_what_a_key_refuses(ada):
    tenant = make_tenant()
    with pytest.raises(ValidationError):
        issue_api_key(actor=ada, tenant=tenant, name="x", scopes=())
    with pytest.raises(ValueError, match="root"):
        issue_api_key(actor=ada, tenant=tenant, name="x", scopes=("root",))
    with pytest.raises(ValidationError):
        issue_api_key(actor=ada, tenant=tenant, name="  ")
    with pytest.raises(ValidationError):
        issue_api_key(actor=ada, tenant=tenant, name="x", expires_at=timezone.now() - timedelta(seconds=1))
    assert not ApiKey.objects.filter(tenant=tenant).exists()


def test_no_two_keys_are_alike_and_each_reads_back():
    keys = {new_key_secret().reveal for _ in range(500)}
    assert len(keys) == 500
    for text in keys:
        key = parse_key(text)
        assert key is not None
        assert key.reveal == text
        # Any one wrong character is noticed without the database.
        assert parse_key(text[:30] + ("a" if text[30] != "a" else "b") + text[31:]) is None


def test_revoking_and_suspending_twice_is_once(ada):
    key = make_key().api_key
    assert [revoke_api_key(actor=ada, api_key=key) for _ in range(2)] == [True, False]
    assert key.revoked_at is not None
    tenant = key.tenant
    assert [suspend_tenant(actor=ada, tenant=tenant, reason="unpaid") for _ in range(2)] == [True, False]
    assert tenant.suspended_reason == "unpaid"
    assert [resume_tenant(actor=ada, tenant=tenant) for _ in range(2)] == [True, False]
    assert actions(tenant)[2:] == ["key.revoked", "tenant.suspended", "tenant.resumed"]


@committed
def test_revoking_at_once_is_recorded_once():
    key = make_key().api_key
    barrier = threading.Barrier(6)

    def revoke() -> bool:
        try:
            mine = ApiKey.objects.get(tenant=key.tenant_id, pk=key.pk)
            barrier.wait(timeout=20)
            return revoke_api_key(actor=TEST, api_key=mine)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(6) as pool:
        results = [done.result(timeout=60) for done in [pool.submit(revoke) for _ in range(6)]]
    assert sorted(results) == [False] * 5 + [True]
    assert actions(key.tenant).count("key.revoked") == 1


@committed
def test_control_a_revocation_that_reads_first_is_recorded_by_all():
    """What the conditional UPDATE guards against."""
    key = make_key().api_key
    barrier = threading.Barrier(4)

    def revoke() -> bool:
        try:
            mine = ApiKey.objects.get(tenant=key.tenant_id, pk=key.pk)
            barrier.wait(timeout=20)
            if mine.revoked_at is not None:
                return False
            mine.revoked_at = timezone.now()
            mine.save()
            return True
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        assert sum(done.result(timeout=60) for done in [pool.submit(revoke) for _ in range(4)]) == 4


def test_limits_are_set_changed_and_removed(ada):
    tenant = make_tenant()
    first = set_quota_limit(actor=ada, owner=tenant, metric=LimitMetric.TOKENS, amount=1000)
    assert (first.burst, first.period_s) == (1000, 60)
    second = set_quota_limit(actor=ada, owner=tenant, metric=LimitMetric.TOKENS, amount=500, burst=900)
    assert second.pk == first.pk
    per_day = set_quota_limit(actor=ada, owner=tenant, metric=LimitMetric.TOKENS, amount=9, period_s=86_400)
    assert per_day.pk != first.pk
    slots = set_quota_limit(actor=ada, owner=tenant, metric=LimitMetric.CONCURRENCY, amount=4, period_s=60)
    assert (slots.period_s, slots.burst) == (0, 4)
    remove_quota_limit(actor=ada, limit=per_day)
    assert QuotaLimit.objects.filter(tenant=tenant).count() == 2
    assert actions(tenant)[1:] == ["limit.set"] * 4 + ["limit.removed"]
    changed = AuditEntry.objects.filter(tenant=tenant, action="limit.set").order_by("id")[1]
    assert (changed.before["amount"], changed.after["amount"], changed.after["burst"]) == (1000, 500, 900)


@pytest.mark.parametrize(
    "given",
    [
        {"amount": 0},
        {"amount": -1},
        {"amount": 10**13},
        {"amount": 10**9, "period_s": 86_400},
        {"period_s": 10**8},
    ],
    ids=str,
)
def test_a_limit_out_of_range_is_refused(ada, given):
    tenant = make_tenant()
    with pytest.raises(ValidationError):
        set_quota_limit(actor=ada, owner=tenant, metric=LimitMetric.TOKENS, **{"amount": 5, **given})
    assert not QuotaLimit.objects.filter(tenant=tenant).exists()


def test_an_audit_row_outside_a_transaction_is_a_mistake(transactional_db):
    tenant = make_tenant()
    with pytest.raises(RuntimeError):
        record_audit(actor=TEST, action="x", tenant=tenant, target=tenant)


def test_a_change_that_fails_leaves_no_audit_row(ada, monkeypatch):
    tenant = make_tenant()

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(Membership, "save", fail)
    with pytest.raises(RuntimeError):
        add_member(actor=ada, tenant=tenant, user=make_user(), role=Role.VIEWER)
    assert actions(tenant) == ["tenant.created"]


def test_the_audit_log_can_not_be_rewritten():
    tenant = make_tenant()
    rows = AuditEntry.objects.filter(tenant=tenant)
    for change in (lambda: rows.update(action="nothing"), lambda: rows.delete()):
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            change()
    assert actions(tenant) == ["tenant.created"]


def test_the_demo_is_made_once_and_its_secrets_shown_once():
    make_tier("standard")
    first = ensure_demo(actor=TEST)
    assert first.api_key is not None
    assert first.operator_password is not None
    operator = User.objects.get(email=first.operator_email)
    assert operator.is_superuser
    assert operator.check_password(first.operator_password)
    again = ensure_demo(actor=TEST)
    assert (again.api_key, again.operator_password) == (None, None)
    assert again.tenant_public_id == first.tenant_public_id
    tenant = Tenant.objects.get(public_id=first.tenant_public_id)
    assert ApiKey.objects.filter(tenant=tenant).count() == 1
    assert {row.metric for row in QuotaLimit.objects.filter(tenant=tenant)} == {
        LimitMetric.REQUESTS,
        LimitMetric.TOKENS,
        LimitMetric.CONCURRENCY,
    }
    lost = ensure_demo(actor=TEST, new_key=True, new_password=True)
    assert lost.api_key not in (None, first.api_key)
    assert lost.operator_password not in (None, first.operator_password)
    for secret in (first.api_key, first.operator_password):
        assert secret not in repr(first)


@committed
def test_two_demos_at_once_are_one():
    make_tier("standard")
    barrier = threading.Barrier(3)

    def demo() -> object:
        try:
            barrier.wait(timeout=20)
            return ensure_demo(actor=TEST)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(3) as pool:
        demos = [done.result(timeout=60) for done in [pool.submit(demo) for _ in range(3)]]
    assert len([demo for demo in demos if demo.api_key]) == 1
    assert len([demo for demo in demos if demo.operator_password]) == 1


@pytest.mark.parametrize(
    ("constraint", "change"),
    [
        ("user_email_is_lower_case", "UPDATE tenants_user SET email = 'ADA@example.org'"),
        ("tier_weight_is_positive", "UPDATE tenants_tier SET weight = 0"),
        (
            "tier_tenant_queue_fits_tier_queue",
            "UPDATE tenants_tier SET max_queued_per_tenant = max_queued + 1",
        ),
        ("tenant_has_a_name", "UPDATE tenants_tenant SET name = ''"),
        ("tenant_reason_only_while_suspended", "UPDATE tenants_tenant SET suspended_reason = 'x'"),
        ("membership_role_is_known", "UPDATE tenants_membership SET role = 'king'"),
        ("api_key_scopes_are_known", "UPDATE tenants_apikey SET scopes = '{root}'"),
        ("api_key_scopes_are_known", "UPDATE tenants_apikey SET scopes = '{}'"),
        ("api_key_digest_is_sha256", "UPDATE tenants_apikey SET digest = 'short'"),
        ("api_key_expires_after_creation", "UPDATE tenants_apikey SET expires_at = created_at"),
        (
            "quota_limit_has_one_owner",
            "UPDATE tenants_quotalimit SET tier_id = (SELECT id FROM tenants_tier LIMIT 1)",
        ),
        ("quota_limit_period_fits_metric", "UPDATE tenants_quotalimit SET period_s = 0"),
        ("quota_limit_amount_in_range", "UPDATE tenants_quotalimit SET amount = 0"),
        ("quota_limit_counts_exactly", "UPDATE tenants_quotalimit SET burst = 1000000000000, period_s = 60"),
        ("auth_epoch_is_one_row", "INSERT INTO tenants_authepoch VALUES (2, gen_random_uuid())"),
    ],
)
def test_the_database_is_the_last_guard(ada, constraint, change):
    tenant = make_tenant(owner=make_user())
    make_key(tenant)
    set_quota_limit(actor=ada, owner=tenant, metric=LimitMetric.TOKENS, amount=5)
    with pytest.raises(IntegrityError, match=constraint), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(change)


def test_one_address_is_one_person_whatever_its_case():
    ada = make_user("Ada@Example.ORG")
    assert ada.email == "ada@example.org"
    assert User.objects.get(email="ADA@example.org") == ada
    assert User.objects.get_by_natural_key("ADA@EXAMPLE.ORG") == ada
    with pytest.raises(IntegrityError), transaction.atomic():
        make_user("ADA@example.org")


def test_a_fresh_installation_has_three_tiers(django_db_blocker):
    # As the migration made them, unless another test emptied the tables: then its source is what counts.
    from importlib import import_module

    tiers = import_module("tenants.migrations.0002_default_tiers").TIERS
    assert [tier["name"] for tier in sorted(tiers, key=lambda tier: tier["rank"])] == [
        "realtime",
        "standard",
        "batch",
    ]
    Tier.objects.all().delete()
    for values in tiers:
        Tier(**values).full_clean()
        Tier.objects.create(**values)


def test_a_revoked_keys_limits_can_be_taken_away_and_not_set():
    key = make_key().api_key
    limit = set_quota_limit(actor=TEST, owner=key, metric=LimitMetric.REQUESTS, amount=5)
    revoke_api_key(actor=TEST, api_key=key)
    with pytest.raises(ValidationError, match="set it on another key"):
        set_quota_limit(actor=TEST, owner=key, metric=LimitMetric.REQUESTS, amount=6)
    remove_quota_limit(actor=TEST, limit=limit)


@pytest.mark.parametrize("character", ["\0", "\x1b", "\u2028", "\u202e", "\u2066"])
def test_a_name_shows_as_it_is_written(character):
    for make in (make_tenant, lambda name: make_key(name=name)):
        with pytest.raises(ValidationError, match=rf"U\+{ord(character):04X}\): leave that out"):
            make(f"ab{character}c")
    assert make_tenant(" ab \u05d0\u05d1\u200e ").name == "ab \u05d0\u05d1\u200e"
