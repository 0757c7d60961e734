"""Reads about who belongs to a tenant and who is invited."""

from __future__ import annotations

from uuid import UUID

from tenants.models import Invitation, Membership, Tenant


def list_members(tenant: Tenant) -> list[Membership]:
    """Longest first."""
    return list(Membership.objects.for_tenant(tenant).select_related("user").order_by("id"))


def get_membership(tenant: Tenant, public_id: UUID) -> Membership | None:
    """None for an absent one as for another tenant's."""
    rows = Membership.objects.for_tenant(tenant).select_related("user", "tenant")
    return rows.filter(public_id=public_id).first()


def list_invitations(tenant: Tenant) -> list[Invitation]:
    """Those that are neither accepted nor revoked, newest first; expired ones too, since they can be sent again."""
    return list(Invitation.objects.for_tenant(tenant).filter(accepted_at=None, revoked_at=None))


def get_invitation(tenant: Tenant, public_id: UUID) -> Invitation | None:
    """None for an absent one as for another tenant's."""
    rows = Invitation.objects.for_tenant(tenant).select_related("tenant")
    return rows.filter(public_id=public_id).first()
