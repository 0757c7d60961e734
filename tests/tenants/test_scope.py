"""The door to tenant-owned rows: no query without a tenant."""

from __future__ import annotations

import pytest

from tenants.models import ApiKey, Membership, Role, Tenant
from tenants.principal import Principal
from tenants.principal_selectors import member_principal
from tenants.scope import UnscopedQuery
from tenants.selectors import ApiKeyNotFound, get_api_key, list_api_keys
from tests.factories import make_cast, make_key, make_tenant

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    "query",
    [
        lambda: ApiKey.objects.all(),
        lambda: ApiKey.objects.count(),
        lambda: ApiKey.objects.exists(),
        lambda: ApiKey.objects.first(),
        lambda: ApiKey.objects.filter(name="x"),
        lambda: ApiKey.objects.filter(tenant=None),
        lambda: ApiKey.objects.filter(tenant_id=None),
        lambda: ApiKey.objects.get(pk=1),
        lambda: ApiKey.objects.exclude(tenant=1),
        lambda: ApiKey.objects.values("name"),
        lambda: ApiKey.objects.update(name="x"),
        lambda: ApiKey.objects.in_bulk([1]),
        lambda: ApiKey.objects.select_related("tenant"),
        lambda: ApiKey.objects.create(name="x"),
        lambda: ApiKey.objects.bulk_create([ApiKey(name="x")]),
        lambda: Membership.objects.get_or_create(role="owner"),
        lambda: ApiKey.objects.for_tenant(Tenant(name="not saved")),
    ],
)
def test_a_query_that_names_no_tenant_is_refused(query):
    make_key()
    with pytest.raises(UnscopedQuery):
        query()


def test_a_named_tenant_sees_its_rows_and_no_others():
    mine, theirs = make_key(), make_key()
    tenant = mine.api_key.tenant
    for rows in (
        ApiKey.objects.for_tenant(tenant),
        ApiKey.objects.for_tenant(tenant.pk),
        ApiKey.objects.filter(tenant=tenant),
        ApiKey.objects.filter(tenant_id=tenant.pk),
        tenant.api_keys.all(),
    ):
        assert list(rows) == [mine.api_key]
    with pytest.raises(ApiKey.DoesNotExist):
        ApiKey.objects.get(tenant=tenant, pk=theirs.api_key.pk)


def test_get_or_create_keeps_to_its_tenant():
    cast = make_cast()
    row, is_new = Membership.objects.get_or_create(
        tenant=cast.other_tenant, user=cast.member, defaults={"role": Role.VIEWER}
    )
    assert is_new
    assert (row.tenant, row.role) == (cast.other_tenant, Role.VIEWER)
    assert not Membership.objects.get_or_create(tenant=cast.other_tenant, user=cast.member)[1]


def principal_of(tenant: Tenant, cast) -> Principal:
    return member_principal(Membership.objects.get(tenant=tenant, user=cast.owner), cast.owner)


def test_absent_malformed_and_another_tenants_key_are_the_same():
    cast = make_cast()
    mine, theirs = make_key(cast.tenant), make_key(cast.other_tenant)
    principal = principal_of(cast.tenant, cast)
    assert get_api_key(principal, str(mine.api_key.public_id)) == mine.api_key
    assert list_api_keys(principal) == [mine.api_key]
    for public_id in (
        str(theirs.api_key.public_id),
        "0197e5a0-0000-7000-8000-000000000000",
        "",
        "1",
        "'; --",
    ):
        with pytest.raises(ApiKeyNotFound):
            get_api_key(principal, public_id)


def test_a_row_can_be_followed_across_tenants_only_by_reference():
    # Django's own machinery (foreign keys, cascades, the admin) goes through the default manager.
    key = make_key(make_tenant()).api_key
    assert ApiKey.objects.get(tenant=key.tenant, pk=key.pk).tenant == key.tenant
