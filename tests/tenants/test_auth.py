"""A key to a principal, a member to a principal: the ways in and the ways out."""

from __future__ import annotations

from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.utils import timezone

from tenants.auth import (
    AuthenticationFailed,
    ExpiredKey,
    InvalidKey,
    MissingKey,
    NotAMember,
    RevokedKey,
    TenantSuspended,
    authenticate_bearer,
    principal_for_member,
)
from tenants.models import ApiKey, ApiKeyUse, Membership, Tenant
from tenants.principal import LimitMetric, LimitScope, Scope
from tenants.services import resume_tenant, revoke_api_key, suspend_tenant
from tests.factories import TEST, make_cast, make_key, make_tenant, make_tier, make_user, set_limit

pytestmark = pytest.mark.django_db(transaction=True)

authenticate = async_to_sync(authenticate_bearer)
member_principal = async_to_sync(principal_for_member)


@pytest.mark.parametrize(("own", "weight"), [(None, 5), (3, 3)])
def test_a_tenants_weight_is_its_own_or_its_tiers(own, weight):
    tenant = make_tenant(tier=make_tier(weight=5, max_wait_s=90), owner=make_user("weighty@example.org"))
    Tenant.objects.filter(pk=tenant.pk).update(weight=own)
    by_key = authenticate(make_key(tenant).secret)
    by_session = member_principal(tenant.members.get(), str(tenant.public_id))
    assert (by_key.weight, by_session.weight) == (weight, weight)
    assert by_key.tier.max_wait_s == by_session.tier.max_wait_s == 90


def test_a_key_gives_its_principal():
    tenant = make_tenant("Acme")
    issued = make_key(tenant, scopes=(Scope.INFERENCE, Scope.USAGE_READ))
    set_limit(tenant.tier, LimitMetric.REQUESTS, 100)
    set_limit(tenant, LimitMetric.TOKENS, 1000)
    set_limit(issued.api_key, LimitMetric.CONCURRENCY, 3)
    set_limit(make_tenant(), LimitMetric.TOKENS, 7)
    set_limit(make_key(tenant).api_key, LimitMetric.TOKENS, 8)

    principal = authenticate(issued.secret)

    assert principal.tenant_public_id == str(tenant.public_id)
    assert principal.key_public_id == str(issued.api_key.public_id)
    assert principal.scopes == {Scope.INFERENCE, Scope.USAGE_READ}
    assert [(x.scope, x.metric, x.owner_id) for x in principal.limits] == [
        (LimitScope.TIER, LimitMetric.REQUESTS, str(tenant.public_id)),
        (LimitScope.TENANT, LimitMetric.TOKENS, str(tenant.public_id)),
        (LimitScope.KEY, LimitMetric.CONCURRENCY, str(issued.api_key.public_id)),
    ]


@pytest.mark.parametrize("token", [None, "", "  "])
def test_no_key(token):
    with pytest.raises(MissingKey):
        authenticate(token)


def test_what_is_no_key_of_ours():
    secret = make_key().secret
    last = "a" if secret[-1] != "a" else "b"
    for token in [
        "sk-123",
        secret[:-1],
        secret + "x",
        secret[:-1] + last,
        "wr_live_",
        secret.upper(),
        "\u00e9" * 70,
    ]:
        with pytest.raises(InvalidKey):
            authenticate(token)


def test_a_key_that_was_never_issued():
    from tenants.key_format import new_key_secret

    with pytest.raises(InvalidKey):
        authenticate(new_key_secret().reveal)


def test_the_right_lookup_id_with_a_wrong_secret():
    from tenants.key_format import PREFIX, _checksum, parse_key

    issued = make_key()
    body = f"{PREFIX}{issued.api_key.lookup_id}_{'0' * 43}"
    forged = body + _checksum(body)
    assert parse_key(forged) is not None
    revoke_api_key(actor=TEST, api_key=issued.api_key)
    # Not "revoked": who does not hold the secret learns nothing of the key.
    with pytest.raises(InvalidKey):
        authenticate(forged)


def test_revoked_expired_suspended():
    issued = make_key()
    key = issued.api_key
    revoked = make_key()
    revoke_api_key(actor=TEST, api_key=revoked.api_key)
    with pytest.raises(RevokedKey) as refusal:
        authenticate(revoked.secret)
    assert (refusal.value.code, refusal.value.status) == ("api_key_revoked", 401)

    suspend_tenant(actor=TEST, tenant=key.tenant)
    with pytest.raises(TenantSuspended):
        authenticate(issued.secret)
    resume_tenant(actor=TEST, tenant=key.tenant)
    assert authenticate(issued.secret)

    past = timezone.now() - timedelta(seconds=1)
    ApiKey.objects.filter(tenant=key.tenant, pk=key.pk).update(
        expires_at=past, created_at=past - timedelta(days=1)
    )
    with pytest.raises(ExpiredKey):
        authenticate(issued.secret)


def test_first_use_is_noted():
    issued = make_key()
    authenticate(issued.secret)
    assert ApiKeyUse.objects.get(api_key=issued.api_key).last_used_at <= timezone.now()


def test_members_and_outsiders():
    cast = make_cast()
    principal = member_principal(cast.member, str(cast.tenant.public_id))
    assert (principal.user_id, principal.tenant_id, principal.key_id) == (
        cast.member.pk,
        cast.tenant.pk,
        None,
    )
    assert Scope.INFERENCE in principal.scopes
    assert Scope.KEYS_WRITE not in principal.scopes
    assert member_principal(cast.outsider).tenant_id == cast.other_tenant.pk
    for user in (cast.outsider, cast.operator):
        with pytest.raises(NotAMember):
            member_principal(user, str(cast.tenant.public_id))
    for tenant_id in ("", "not-a-uuid", "0197e5a0-0000-7000-8000-000000000000"):
        with pytest.raises(NotAMember):
            member_principal(cast.owner, tenant_id)
    with pytest.raises(NotAMember):
        member_principal(make_user())


def test_a_member_loses_access_at_once():
    cast = make_cast()
    assert member_principal(cast.member)
    suspend_tenant(actor=TEST, tenant=cast.tenant)
    with pytest.raises(AuthenticationFailed):
        member_principal(cast.member)
    Membership.objects.filter(tenant=cast.tenant, user=cast.member).delete()
    with pytest.raises(NotAMember):
        member_principal(cast.member)
    cast.owner.is_active = False
    with pytest.raises(NotAMember):
        member_principal(cast.owner)
