"""Service accounts: made, given keys, retired with all of them."""

from __future__ import annotations

from collections.abc import Iterable

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from tenants.models import ApiKey, ServiceAccount, Tenant
from tenants.principal import Scope
from tenants.services.api_keys import IssuedKey, issue_api_key, revoke_api_key
from tenants.services.audit import Actor, record_audit
from tenants.services.names import clean_name


@transaction.atomic
def create_service_account(*, actor: Actor, tenant: Tenant, name: str) -> ServiceAccount:
    """Raises django.core.exceptions.ValidationError when the name won't do or is taken."""
    Tenant.objects.select_for_update(no_key=True).get(pk=tenant.pk)  # of two with one name, one is told so
    account = ServiceAccount(tenant=tenant, name=clean_name(name), created_by=actor.user)
    if ServiceAccount.objects.for_tenant(tenant).filter(name=account.name, retired_at=None).exists():
        raise ValidationError({"name": "A service account of this name already exists."})
    account.full_clean()
    account.save()
    record_audit(
        actor=actor,
        action="service_account.created",
        tenant=tenant,
        target=account,
        after={"name": account.name},
    )
    return account


@transaction.atomic
def issue_service_key(
    *, actor: Actor, account: ServiceAccount, name: str, scopes: Iterable[Scope] = (Scope.INFERENCE,)
) -> IssuedKey:
    """A key that belongs to the service account. Raises ValidationError for a retired one."""
    # Shared with others who issue, not with who retires it: no key slips in behind that.
    rows = ServiceAccount.objects.for_tenant(account.tenant_id).select_for_update(no_key=True, of=("self",))
    current = rows.select_related("tenant").get(pk=account.pk)
    if current.retired_at is not None:
        raise ValidationError("This service account is retired.")
    return issue_api_key(
        actor=actor, tenant=current.tenant, name=name, scopes=scopes, service_account=current
    )


@transaction.atomic
def retire_service_account(*, actor: Actor, account: ServiceAccount) -> bool:
    """Revokes all its keys, on every gateway within a second. False when it was retired before."""
    rows = ServiceAccount.objects.for_tenant(account.tenant_id).select_for_update(no_key=True)
    current = rows.get(pk=account.pk)
    if current.retired_at is not None:
        return False
    for api_key in ApiKey.objects.for_tenant(account.tenant_id).filter(
        service_account=current, revoked_at=None
    ):
        revoke_api_key(actor=actor, api_key=api_key)
    current.retired_at = timezone.now()
    current.save(update_fields=["retired_at"])
    record_audit(
        actor=actor,
        action="service_account.retired",
        tenant=account.tenant,
        target=current,
        after={"retired_at": current.retired_at},
    )
    return True
