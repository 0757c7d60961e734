"""`/v1/organization` and a key's limits: requests and answers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tenants.models import Membership, Project, QuotaLimit, Tenant
from tenants.services import KeyLimit

_Name = Annotated[str, Meta(min_length=1, max_length=120)]
_Amount = Annotated[int, Meta(ge=1, le=2**53)]


class Organization(msgspec.Struct, kw_only=True):
    id: str
    name: str
    tier: str
    timezone: str
    """Where its days and months begin."""
    created_at: int
    object: Literal["organization"] = "organization"


class NewProject(msgspec.Struct, forbid_unknown_fields=True):
    name: _Name


class ProjectObject(msgspec.Struct, kw_only=True):
    id: str
    name: str
    created_at: int
    object: Literal["organization.project"] = "organization.project"


class ProjectList(msgspec.Struct):
    data: list[ProjectObject]
    has_more: bool = False
    object: Literal["list"] = "list"


class ProjectDeleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: Literal["organization.project.deleted"] = "organization.project.deleted"


class MemberObject(msgspec.Struct, kw_only=True):
    id: str
    email: str
    role: str
    added_at: int
    object: Literal["organization.user"] = "organization.user"


class MemberList(msgspec.Struct):
    data: list[MemberObject]
    has_more: bool = False
    object: Literal["list"] = "list"


class LimitObject(msgspec.Struct, kw_only=True):
    scope: str
    """`tier`, `tenant`, `model` or `key`."""
    key: str | None
    """Of a key's limit, whose."""
    model: str | None
    metric: str
    amount: int
    """Per period: tokens, requests, slots, or millionths of a dollar."""
    period_s: int | None
    calendar: str | None
    burst: int
    is_hard: bool
    object: Literal["organization.limit"] = "organization.limit"


class LimitList(msgspec.Struct):
    data: list[LimitObject]
    has_more: bool = False
    object: Literal["list"] = "list"


class KeyLimits(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is left out stays; null takes a limit away."""

    requests_per_minute: _Amount | msgspec.UnsetType | None = msgspec.UNSET
    tokens_per_minute: _Amount | msgspec.UnsetType | None = msgspec.UNSET
    requests_at_once: _Amount | msgspec.UnsetType | None = msgspec.UNSET
    cost_per_month: _Amount | msgspec.UnsetType | None = msgspec.UNSET
    """Millionths of a dollar; a hard budget."""

    def named(self) -> dict[KeyLimit, int | None]:
        asked = {kind: getattr(self, kind) for kind in KeyLimit}
        return {kind: amount for kind, amount in asked.items() if amount is not msgspec.UNSET}


def organization(tenant: Tenant) -> Organization:
    return Organization(
        id=str(tenant.public_id),
        name=tenant.name,
        tier=tenant.tier.name,
        timezone=tenant.timezone,
        created_at=int(tenant.created_at.timestamp()),
    )


def project_object(project: Project) -> ProjectObject:
    return ProjectObject(
        id=str(project.public_id), name=project.name, created_at=int(project.created_at.timestamp())
    )


def member_object(member: Membership) -> MemberObject:
    return MemberObject(
        id=str(member.public_id),
        email=member.user.email,
        role=member.role,
        added_at=int(member.created_at.timestamp()),
    )


def limit_object(limit: QuotaLimit) -> LimitObject:
    return LimitObject(
        scope=limit.scope,
        key=None if limit.api_key is None else str(limit.api_key.public_id),
        model=limit.model or None,
        metric=limit.metric,
        amount=limit.amount,
        period_s=limit.period_s or None,
        calendar=limit.calendar or None,
        burst=limit.burst,
        is_hard=limit.is_hard,
    )
