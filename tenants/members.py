"""Reads about who belongs to a tenant, people and programs, and who is invited."""

from __future__ import annotations

from uuid import UUID

from django.db.models import Count, Max, Q

from tenants.models import Invitation, Membership, ServiceAccount, Tenant


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


def list_service_accounts(tenant: Tenant) -> list[ServiceAccount]:
    """Those that are not retired, each with `live_keys` and `last_used_at`."""
    rows = ServiceAccount.objects.for_tenant(tenant).filter(retired_at=None).select_related("created_by")
    return list(
        rows.annotate(
            live_keys=Count("api_keys", filter=Q(api_keys__revoked_at=None), distinct=True),
            last_used_at=Max("api_keys__use__last_used_at"),
        )
    )


def get_service_account(tenant: Tenant, public_id: UUID) -> ServiceAccount | None:
    """None for an absent one as for another tenant's."""
    rows = ServiceAccount.objects.for_tenant(tenant).select_related("tenant")
    return rows.filter(public_id=public_id).first()
