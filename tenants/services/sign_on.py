"""Set and remove a tenant's own sign-in. The operator's affair: it decides whose word counts for a domain."""

from __future__ import annotations

from urllib.parse import urlsplit
from uuid import uuid4

from allauth.socialaccount.models import SocialApp
from django.core.exceptions import ValidationError
from django.db import transaction

from tenants.models import Role, Tenant, TenantSignOn
from tenants.services.audit import Actor, record_audit


@transaction.atomic
def set_sign_on(
    *,
    actor: Actor,
    tenant: Tenant,
    domain: str,
    issuer: str,
    client_id: str,
    secret: str,
    default_role: Role = Role.DEVELOPER,
) -> TenantSignOn:
    """Creates or changes what holds for this tenant and domain; an empty secret keeps the one that is there.

    Raises django.core.exceptions.ValidationError when a value won't do or the domain is another tenant's.
    """
    domain = domain.strip().lower()
    address = urlsplit(issuer)
    if address.scheme not in {"https", "http"} or not address.hostname:
        raise ValidationError({"issuer": "The provider's address, such as https://login.example.com."})
    if default_role is Role.OWNER:
        raise ValidationError({"default_role": "Owners are made by owners."})
    sign_on = TenantSignOn.objects.for_tenant(tenant).select_related("app").filter(domain=domain).first()
    if sign_on is None:
        app = SocialApp(provider="openid_connect", provider_id=uuid4().hex)
        sign_on = TenantSignOn(tenant=tenant, domain=domain)
    else:
        app = sign_on.app
    app.name = domain[:40]
    app.client_id = client_id
    app.secret = secret or app.secret
    app.settings = {"server_url": issuer, "oauth_pkce_enabled": True}
    sign_on.default_role = default_role.value
    sign_on.full_clean(exclude=["app"])
    app.full_clean()
    app.save()
    sign_on.app = app
    sign_on.save()
    record_audit(
        actor=actor,
        action="sign_on.set",
        tenant=tenant,
        target=sign_on,
        after={
            "domain": domain,
            "issuer": issuer,
            "client_id": client_id,
            "default_role": default_role.value,
        },
    )
    return sign_on


@transaction.atomic
def remove_sign_on(*, actor: Actor, sign_on: TenantSignOn) -> None:
    """Nobody comes in by it any more; accounts and memberships stay."""
    record_audit(
        actor=actor,
        action="sign_on.removed",
        tenant=sign_on.tenant,
        target=sign_on,
        before={"domain": sign_on.domain, "default_role": sign_on.default_role},
    )
    sign_on.app.delete()  # and with it the row
