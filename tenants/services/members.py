"""Members: their roles, and their going. A tenant always has an owner."""

from __future__ import annotations

from django.db import transaction

from tenants.models import Membership, Role, Tenant
from tenants.rights import may_give
from tenants.services.audit import Actor, record_audit


class LastOwner(Exception):
    """The tenant would be left without an owner."""

    def __init__(self) -> None:
        super().__init__("A tenant needs an owner: make someone else one first.")


class NotAllowedToManage(Exception):
    """The role of who asks does not reach so far."""

    def __init__(self) -> None:
        super().__init__("Only an owner may make owners, change them or remove them.")


def change_role(*, actor: Actor, by: Role, membership: Membership, role: Role) -> bool:
    """Gives a member another role, on the word of someone whose role is `by`. False when they have it already, or are
    no member any more.

    Raises NotAllowedToManage or LastOwner.
    """
    with transaction.atomic():
        current = _locked(membership)
        if current is None:
            return False
        before, by = Role(current.role), _role_now(actor, by, current)
        if not (may_give(by, before) and may_give(by, role)):
            raise NotAllowedToManage
        if before is role:
            return False
        if before is Role.OWNER:
            _require_another_owner(current)
        current.role = role
        current.save(update_fields=["role"])
        record_audit(
            actor=actor,
            action="member.role_changed",
            tenant=current.tenant,
            target=current,
            before={"role": before},
            after={"user": current.user.email, "role": role},
        )
    return True


def remove_member(*, actor: Actor, by: Role, membership: Membership) -> None:
    """Ends a membership, if it has not ended yet; what the person made stays the tenant's. Anyone may leave.

    Raises NotAllowedToManage or LastOwner.
    """
    with transaction.atomic():
        current = _locked(membership)
        if current is None:
            return
        role, by = Role(current.role), _role_now(actor, by, current)
        leaves = actor.user is not None and actor.user.pk == current.user_id
        if not leaves and not may_give(by, role):
            raise NotAllowedToManage
        if role is Role.OWNER:
            _require_another_owner(current)
        record_audit(
            actor=actor,
            action="member.left" if leaves else "member.removed",
            tenant=current.tenant,
            target=current,
            before={"user": current.user.email, "role": role},
        )
        current.delete()


def _role_now(actor: Actor, by: Role, membership: Membership) -> Role:
    """Of who asks, who may have lost it since `by` was read. Raises NotAllowedToManage: they are no member any more."""
    if actor.user is None:
        return by
    own = Membership.objects.for_tenant(membership.tenant_id).filter(user=actor.user).first()
    if own is None:
        raise NotAllowedToManage
    return Role(own.role)


def _locked(membership: Membership) -> Membership | None:
    """The row as it is now. The tenant is locked first: of two owners who leave at once, one is the last."""
    Tenant.objects.select_for_update(no_key=True).get(pk=membership.tenant_id)
    rows = Membership.objects.for_tenant(membership.tenant_id).select_related("user", "tenant")
    return rows.filter(pk=membership.pk).first()


def _require_another_owner(membership: Membership) -> None:
    owners = Membership.objects.for_tenant(membership.tenant_id).filter(role=Role.OWNER, user__is_active=True)
    if not owners.exclude(pk=membership.pk).exists():
        raise LastOwner
