"""Issue and revoke API keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from tenants.key_format import digest_key, new_key_secret
from tenants.models import ApiKey, Tenant
from tenants.principal import Scope
from tenants.services.audit import Actor, record_audit


@dataclass(frozen=True, slots=True)
class IssuedKey:
    api_key: ApiKey
    secret: str = field(repr=False)
    """The whole key. Shown to its owner now; nobody can show it again."""


@transaction.atomic
def issue_api_key(
    *,
    actor: Actor,
    tenant: Tenant,
    name: str,
    scopes: Iterable[Scope] = (Scope.INFERENCE,),
    expires_at: datetime | None = None,
) -> IssuedKey:
    """Raises django.core.exceptions.ValidationError when a value won't do."""
    if expires_at is not None and expires_at <= timezone.now():
        raise ValidationError({"expires_at": "This moment has passed."})
    secret = new_key_secret()
    api_key = ApiKey(
        tenant=tenant,
        name=name.strip(),
        lookup_id=secret.lookup_id,
        digest=digest_key(secret, pepper=settings.API_KEY_PEPPER),
        scopes=sorted({Scope(scope).value for scope in scopes}),
        expires_at=expires_at,
        created_by=actor.user,
    )
    api_key.full_clean(validate_constraints=False)  # expires_at is checked against created_at, not yet known
    api_key.save()
    record_audit(
        actor=actor,
        action="key.issued",
        tenant=tenant,
        target=api_key,
        after={
            "name": api_key.name,
            "prefix": api_key.prefix,
            "scopes": api_key.scopes,
            "expires_at": expires_at,
        },
    )
    return IssuedKey(api_key=api_key, secret=secret.reveal)


@transaction.atomic
def revoke_api_key(*, actor: Actor, api_key: ApiKey) -> bool:
    """Within a second no gateway accepts it any more. False when it was revoked before.

    The caches empty by the auth epoch (see models/auth_epoch.py), written in this transaction.
    """
    now = timezone.now()
    changed = ApiKey.objects.filter(tenant_id=api_key.tenant_id, pk=api_key.pk, revoked_at=None).update(
        revoked_at=now
    )
    if changed:
        record_audit(
            actor=actor,
            action="key.revoked",
            tenant=api_key.tenant,
            target=api_key,
            after={"revoked_at": now},
        )
    api_key.refresh_from_db()
    return bool(changed)
