"""Tenants and their members."""

from __future__ import annotations

from django.db import transaction
from django.utils import timezone
from django.utils.text import slugify

from tenants.models import Membership, Role, Tenant, Tier, User
from tenants.services.audit import Actor, record_audit
from tenants.services.names import clean_name


@transaction.atomic
def create_tenant(
    *, actor: Actor, name: str, tier: Tier, slug: str | None = None, owner: User | None = None
) -> Tenant:
    """A new tenant, with its first member when `owner` is given.

    Raises django.core.exceptions.ValidationError when a value won't do or the slug is taken.
    """
    tenant = Tenant(name=clean_name(name), slug=slug or slugify(name), tier=tier)
    tenant.full_clean()
    tenant.save()
    record_audit(
        actor=actor,
        action="tenant.created",
        tenant=tenant,
        target=tenant,
        after={"name": tenant.name, "slug": tenant.slug, "tier": tier.name},
    )
    if owner is not None:
        add_member(actor=actor, tenant=tenant, user=owner, role=Role.OWNER)
    return tenant


@transaction.atomic
def add_member(*, actor: Actor, tenant: Tenant, user: User, role: Role) -> Membership:
    """Adds the person, or gives a member another role."""
    membership, is_new = Membership.objects.get_or_create(tenant=tenant, user=user, defaults={"role": role})
    before = None if is_new else {"role": membership.role}
    if not is_new:
        if membership.role == role:
            return membership
        membership.role = role
        membership.save(update_fields=["role"])
    record_audit(
        actor=actor,
        action="member.added" if is_new else "member.role_changed",
        tenant=tenant,
        target=membership,
        before=before,
        after={"user": user.email, "role": role},
    )
    return membership


@transaction.atomic
def suspend_tenant(*, actor: Actor, tenant: Tenant, reason: str = "") -> bool:
    """Refuses the tenant's keys and members from now on. False when it was suspended before."""
    now = timezone.now()
    changed = Tenant.objects.filter(pk=tenant.pk, suspended_at=None).update(
        suspended_at=now, suspended_reason=reason[:200]
    )
    if changed:
        record_audit(
            actor=actor,
            action="tenant.suspended",
            tenant=tenant,
            target=tenant,
            after={"suspended_at": now, "reason": reason[:200]},
        )
    tenant.refresh_from_db()
    return bool(changed)


@transaction.atomic
def resume_tenant(*, actor: Actor, tenant: Tenant) -> bool:
    """Ends a suspension. False when there was none, or when the tenant is to be deleted: see `restore_tenant`."""
    changed = Tenant.objects.filter(pk=tenant.pk, suspended_at__isnull=False, delete_at=None).update(
        suspended_at=None, suspended_reason=""
    )
    if changed:
        record_audit(actor=actor, action="tenant.resumed", tenant=tenant, target=tenant)
    tenant.refresh_from_db()
    return bool(changed)


@transaction.atomic
def change_tenant(*, actor: Actor, tenant: Tenant, name: str, timezone: str) -> bool:
    """What a tenant's own people may change of it. False when nothing differs.

    Raises django.core.exceptions.ValidationError when a value won't do.
    """
    locked = Tenant.objects.select_for_update(of=("self",)).get(pk=tenant.pk)
    before = {"name": locked.name, "timezone": locked.timezone}
    locked.name, locked.timezone = clean_name(name), timezone
    locked.full_clean()
    after = {"name": locked.name, "timezone": locked.timezone}
    if after == before:
        return False
    locked.save(update_fields=["name", "timezone", "updated_at"])
    record_audit(
        actor=actor, action="tenant.changed", tenant=locked, target=locked, before=before, after=after
    )
    return True
