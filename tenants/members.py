"""Reads about who belongs to a tenant, people and programs, and who is invited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from django.db.models import Count, Max, Q

from tenants.models import Invitation, Membership, ServiceAccount, Tenant

_PER_PAGE: Final = 50


@dataclass(frozen=True, slots=True)
class MemberPage:
    """Some of a tenant's people, longest first, as they were asked for."""

    members: list[Membership]
    search: str
    after: str
    newer: str
    """The `after` of the next page; "" where none follows."""


def member_page(tenant: Tenant, *, search: str = "", after: str = "") -> MemberPage:
    """Found by the last one of the page before; a search looks in addresses."""
    rows = Membership.objects.for_tenant(tenant).select_related("user").order_by("id")
    if search:
        rows = rows.filter(user__email__icontains=search)
    last = _member_id(tenant, after)
    if last is not None:
        rows = rows.filter(id__gt=last)
    found = list(rows[: _PER_PAGE + 1])
    members = found[:_PER_PAGE]
    newer = str(members[-1].public_id) if len(found) > len(members) else ""
    return MemberPage(members, search, after if last is not None else "", newer)


def _member_id(tenant: Tenant, public_id: str) -> int | None:
    try:
        asked = UUID(public_id)
    except ValueError:
        return None
    return Membership.objects.for_tenant(tenant).filter(public_id=asked).values_list("id", flat=True).first()


def get_membership(tenant: Tenant, public_id: UUID) -> Membership | None:
    """None for an absent one as for another tenant's."""
    rows = Membership.objects.for_tenant(tenant).select_related("user", "tenant")
    return rows.filter(public_id=public_id).first()


def list_invitations(tenant: Tenant) -> list[Invitation]:
    """Those that are neither accepted nor revoked, newest first; expired ones too, since they can be sent again.
    The newest hundred: a page shows no more."""
    return list(Invitation.objects.for_tenant(tenant).filter(accepted_at=None, revoked_at=None)[:100])


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
