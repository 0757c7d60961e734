"""Issue, rotate and revoke API keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from ipaddress import ip_network
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from tenants.key_format import digest_key, digest_rotation_id, new_key_secret, rotated_key_secret
from tenants.models import ApiKey, Project, ServiceAccount, Tenant, Tier
from tenants.principal import Scope
from tenants.services.audit import Actor, record_audit
from tenants.services.names import clean_name

ROTATION_ID_CHARS: Final = 22
"""Of 64: as many as 128 bits take."""
OVERLAP_MAX: Final = timedelta(days=30)


class RotationUnderway(Exception):
    """The secret before the last rotation still works."""

    def __init__(self, until: datetime) -> None:
        super().__init__(
            f"the key was rotated before, and its earlier secret works until {until:%Y-%m-%d %H:%M} UTC"
        )
        self.until = until


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
    project: Project | None = None,
    allowed_models: Iterable[str] = (),
    allowed_networks: Iterable[str] = (),
    max_tier: Tier | None = None,
    service_account: ServiceAccount | None = None,
    waits_for_rate: bool = False,
) -> IssuedKey:
    """Raises django.core.exceptions.ValidationError when a value won't do."""
    if project is not None and project.tenant_id != tenant.pk:
        raise ValueError("a key can't be of another tenant's project")
    _hold_project(project)
    if expires_at is not None and expires_at <= timezone.now():
        raise ValidationError({"expires_at": "This moment has passed: give one to come."})
    secret = new_key_secret()
    api_key = ApiKey(
        tenant=tenant,
        name=clean_name(name),
        lookup_id=secret.lookup_id,
        digest=digest_key(secret, pepper=settings.API_KEY_PEPPER),
        scopes=sorted({Scope(scope).value for scope in scopes}),
        expires_at=expires_at,
        created_by=actor.user,
        project=project,
        allowed_models=_models(allowed_models),
        allowed_networks=_networks(allowed_networks),
        max_tier=max_tier,
        service_account=service_account,
        waits_for_rate=waits_for_rate,
    )
    api_key.full_clean(validate_constraints=False)  # expires_at is checked against created_at, not yet known
    api_key.save()
    record_audit(
        actor=actor,
        action="key.issued",
        tenant=tenant,
        target=api_key,
        after={
            "prefix": api_key.prefix,
            "scopes": api_key.scopes,
            "expires_at": expires_at,
            "service_account": None if service_account is None else service_account.name,
            **_bounds(api_key),
        },
    )
    return IssuedKey(api_key=api_key, secret=secret.reveal)


def _hold_project(project: Project | None) -> None:
    """Until the transaction ends nobody deletes it; who has just done so was first. Raises ValidationError."""
    if project is None:
        return
    rows = Project.objects.for_tenant(project.tenant_id).select_for_update(no_key=True)
    if not rows.filter(pk=project.pk).exists():
        raise ValidationError({"project": "This project was deleted just now: choose another."})


@transaction.atomic
def change_api_key(
    *,
    actor: Actor,
    api_key: ApiKey,
    name: str,
    project: Project | None,
    allowed_models: Iterable[str],
    allowed_networks: Iterable[str],
    max_tier: Tier | None,
    waits_for_rate: bool | None = None,
) -> bool:
    """Renames a key, moves it to a project, binds it anew; it holds within a second. False when nothing differs.
    `waits_for_rate` stays as it is unless given.

    Raises django.core.exceptions.ValidationError when a value won't do.
    """
    if project is not None and project.tenant_id != api_key.tenant_id:
        raise ValueError("a key can't be of another tenant's project")
    _hold_project(project)
    keys = ApiKey.objects.for_tenant(api_key.tenant_id).select_for_update(of=("self",))
    locked = keys.select_related("tenant", "project", "max_tier").get(pk=api_key.pk)
    before = _bounds(locked)
    locked.name, locked.project, locked.max_tier = clean_name(name), project, max_tier
    locked.allowed_models = _models(allowed_models)
    locked.allowed_networks = _networks(allowed_networks)
    if waits_for_rate is not None:
        locked.waits_for_rate = waits_for_rate
    locked.full_clean()
    after = _bounds(locked)
    if after == before:
        return False
    locked.save(
        update_fields=[
            "name", "project", "max_tier", "allowed_models", "allowed_networks", "waits_for_rate",
        ]
    )  # fmt: skip
    changed = [field for field in after if after[field] != before[field]]
    record_audit(
        actor=actor,
        action="key.changed",
        tenant=locked.tenant,
        target=locked,
        before={field: before[field] for field in changed},
        after={field: after[field] for field in changed},
    )
    return True


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


@transaction.atomic
def rotate_api_key(
    *, actor: Actor, api_key: ApiKey, rotation_id: str, overlap: timedelta = timedelta(days=1)
) -> IssuedKey:
    """A new secret for the key; the old one goes on working for the overlap, and no longer.

    `rotation_id` is made by the caller, hard to guess, one for each rotation: called again with the same one (the
    answer was lost, say), it changes nothing and gives the same secret. With an overlap of nothing the old secret
    stops at once.

    Raises RotationUnderway while the overlap of an earlier rotation lasts, since a third secret would cut it
    short; ValidationError when a value won't do.
    """
    if len(rotation_id) < ROTATION_ID_CHARS:
        raise ValidationError({"rotation_id": f"Give at least {ROTATION_ID_CHARS} random characters."})
    if not timedelta(0) <= overlap <= OVERLAP_MAX:
        raise ValidationError({"overlap": f"An overlap lasts at most {OVERLAP_MAX.days} days."})
    pepper, now = settings.API_KEY_PEPPER, timezone.now()
    locked = ApiKey.objects.for_tenant(api_key.tenant_id).select_for_update(of=("self",)).get(pk=api_key.pk)
    if locked.revoked_at is not None:
        raise ValidationError("A revoked key can't be rotated: make another.")
    secret = rotated_key_secret(locked.lookup_id, rotation_id=rotation_id, pepper=pepper)
    rotation = digest_rotation_id(rotation_id, pepper=pepper)
    if locked.rotation_digest is None or bytes(locked.rotation_digest) != rotation:
        if locked.previous_until is not None and locked.previous_until > now:
            raise RotationUnderway(locked.previous_until)
        locked.previous_digest, locked.previous_until = bytes(locked.digest), now + overlap
        locked.digest, locked.rotation_digest = digest_key(secret, pepper=pepper), rotation
        locked.save(update_fields=["digest", "previous_digest", "previous_until", "rotation_digest"])
        record_audit(
            actor=actor,
            action="key.rotated",
            tenant=locked.tenant,
            target=locked,
            after={"previous_until": locked.previous_until},
        )
    return IssuedKey(api_key=locked, secret=secret.reveal)


def _bounds(api_key: ApiKey) -> dict[str, Any]:
    """What can be changed of a key, as the audit log writes it."""
    return {
        "name": api_key.name,
        "project": None if api_key.project is None else api_key.project.name,
        "allowed_models": api_key.allowed_models,
        "allowed_networks": api_key.allowed_networks,
        "max_tier": None if api_key.max_tier is None else api_key.max_tier.name,
        "waits_for_rate": api_key.waits_for_rate,
    }


def _models(given: Iterable[str]) -> list[str]:
    return sorted({clean_name(model, field="allowed_models") for model in given})


def _networks(given: Iterable[str]) -> list[str]:
    try:
        return sorted({str(ip_network(network.strip())) for network in given})
    except ValueError as error:
        raise ValidationError({"allowed_networks": f"Not a network such as 192.0.2.0/24: {error}."}) from None
