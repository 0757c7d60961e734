"""Reads of a tenant's own rows: its keys, projects, members and limits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from django.db.models import Count, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.utils import timezone

from tenants.key_format import PREFIX
from tenants.models import (
    ApiKey,
    Membership,
    Project,
    QuotaLimit,
    Tenant,
    Tier,
)
from tenants.principal import LimitScope, LimitSpec, Principal, Scope
from tenants.principal_selectors import _limit_spec


class ApiKeyNotFound(Exception):
    """There is no such key in this tenant: absent and another tenant's are the same."""


class ProjectNotFound(Exception):
    """There is no such project in this tenant."""


def projects_of_keys(public_ids: Collection[UUID]) -> dict[tuple[int, UUID], UUID]:
    """By tenant and key, the public id of the key's project, where it has one."""
    rows = ApiKey.unscoped.filter(public_id__in=public_ids, project__isnull=False)
    return {
        (tenant_id, public_id): project
        for tenant_id, public_id, project in rows.values_list("tenant_id", "public_id", "project__public_id")
    }


def default_tier() -> Tier | None:
    """Of a tenant for which nobody chose another: `standard`, or the first by rank where none has that name."""
    tiers = list(Tier.objects.order_by("rank"))
    return next((tier for tier in tiers if tier.name == "standard"), tiers[0] if tiers else None)


def live_keys_made_before(moment: datetime) -> int:
    """How many keys that may still be used, whosever they are, were made before it."""
    return ApiKey.unscoped.filter(revoked_at=None, created_at__lt=moment).count()


def get_project(principal: Principal, public_id: str) -> Project:
    """Raises ProjectNotFound for an absent one as for another tenant's: one query, one answer."""
    try:
        return Project.objects.for_tenant(principal.tenant_id).get(public_id=UUID(public_id))
    except (ValueError, Project.DoesNotExist):
        raise ProjectNotFound(public_id) from None


def list_projects(principal: Principal) -> list[Project]:
    return list(Project.objects.for_tenant(principal.tenant_id))


def list_members(principal: Principal) -> list[Membership]:
    return list(Membership.objects.for_tenant(principal.tenant_id).select_related("user").order_by("id"))


def list_limits(principal: Principal) -> list[QuotaLimit]:
    """Every limit that binds the tenant or one of its keys, widest first."""
    tenant = Tenant.objects.get(pk=principal.tenant_id)
    applies = Q(scope=LimitScope.TIER.value, tier=tenant.tier_id) | Q(tenant=tenant)
    rows = QuotaLimit.unscoped.filter(applies).select_related("api_key")
    order = list(LimitScope)
    return sorted(rows, key=lambda row: (order.index(LimitScope(row.scope)), row.pk))


def get_api_key(principal: Principal, public_id: str) -> ApiKey:
    """Raises ApiKeyNotFound for an absent key as for another tenant's: one query, one answer."""
    try:
        keys = ApiKey.objects.for_tenant(principal.tenant_id)
        return keys.select_related("tenant__tier", "use", "project", "max_tier").get(
            public_id=UUID(public_id)
        )
    except (ValueError, ApiKey.DoesNotExist):
        raise ApiKeyNotFound(public_id) from None


def list_api_keys(principal: Principal) -> list[ApiKey]:
    """The tenant's keys, newest first, each with its `use` row where there is one."""
    return list(
        ApiKey.objects.for_tenant(principal.tenant_id).select_related(
            "use", "created_by", "project", "max_tier"
        )
    )


_KEYS_PER_PAGE: Final = 50


@dataclass(frozen=True, slots=True)
class KeyPage:
    """Some of a tenant's keys, newest first, as they were asked for."""

    keys: list[ApiKey]
    ended: bool
    search: str
    before: str
    older: str
    """The `before` of the next page; "" where none follows."""


def key_page(tenant: Tenant, *, ended: bool = False, search: str = "", before: str = "") -> KeyPage:
    """The keys that work or, `ended`, those that don't any more; found by the last key of the page before."""
    is_ended = Q(revoked_at__isnull=False) | Q(expires_at__lte=timezone.now())
    rows = ApiKey.objects.for_tenant(tenant).filter(is_ended if ended else ~is_ended)
    if search:
        rows = rows.filter(Q(name__icontains=search) | Q(lookup_id=search.removeprefix(PREFIX)))
    last = _key_id(tenant, before)
    if last is not None:
        rows = rows.filter(id__lt=last)
    found = list(rows.select_related("use", "project", "max_tier").order_by("-id")[: _KEYS_PER_PAGE + 1])
    keys = found[:_KEYS_PER_PAGE]
    older = str(keys[-1].public_id) if len(found) > len(keys) else ""
    return KeyPage(keys, ended, search, before if last is not None else "", older)


def _key_id(tenant: Tenant, public_id: str) -> int | None:
    try:
        asked = UUID(public_id)
    except ValueError:
        return None
    return ApiKey.objects.for_tenant(tenant).filter(public_id=asked).values_list("id", flat=True).first()


def keys_for_batches(tenant: Tenant) -> list[ApiKey]:
    """Keys that work now and may run models, by name; at most a hundred."""
    is_live = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
    may_run = Q(scopes__overlap=[Scope.INFERENCE.value, Scope.ADMIN.value])
    return list(
        ApiKey.objects.for_tenant(tenant)
        .filter(is_live, may_run, revoked_at=None)
        .order_by("name", "id")[:100]
    )


def limits_of_keys(tenant: Tenant) -> list[tuple[ApiKey, list[LimitSpec]]]:
    """Live keys that have limits of their own, by name; at most two hundred limits. One query."""
    rows = (
        QuotaLimit.objects.filter(tenant=tenant, scope=LimitScope.KEY.value, api_key__revoked_at=None)
        .select_related("api_key")
        .order_by("api_key__name", "api_key_id", "id")[:200]
    )
    found: dict[ApiKey, list[LimitSpec]] = {}
    for row in rows:
        assert row.api_key is not None
        found.setdefault(row.api_key, []).append(_limit_spec(row, str(row.api_key.public_id)))
    return list(found.items())


def with_people_and_keys(rows: QuerySet[Tenant]) -> QuerySet[Tenant]:
    """Each with `people` and `live_keys`. Counted apart: over one join, hundreds of each would be multiplied first."""

    def number(of: QuerySet[Any]) -> Coalesce:
        counted = of.filter(tenant=OuterRef("pk")).order_by().values("tenant").annotate(n=Count("pk"))
        return Coalesce(Subquery(counted.values("n")), 0)

    return rows.annotate(
        people=number(Membership.unscoped.all()),
        live_keys=number(ApiKey.unscoped.filter(revoked_at=None)),
    )


def projects_with_keys(tenant: Tenant) -> list[Project]:
    """By name, each with its number of `live_keys`."""
    live = Count("api_keys", filter=Q(api_keys__revoked_at=None))
    return list(Project.objects.for_tenant(tenant).annotate(live_keys=live))


def api_key_names(tenant: Tenant, public_ids: Collection[UUID]) -> dict[UUID, str]:
    """Names of a tenant's keys, for lists that hold only their public ids."""
    if not public_ids:
        return {}
    rows = ApiKey.objects.for_tenant(tenant).filter(public_id__in=public_ids)
    return dict(rows.values_list("public_id", "name"))


def project_names(tenant: Tenant, public_ids: Collection[UUID]) -> dict[UUID, str]:
    """As `api_key_names`, of projects."""
    if not public_ids:
        return {}
    rows = Project.objects.for_tenant(tenant).filter(public_id__in=public_ids)
    return dict(rows.values_list("public_id", "name"))
