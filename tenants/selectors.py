"""Reads across the tenants app: principals, and a tenant's own rows by public id."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final
from uuid import UUID

from django.db.models import Count, Q
from django.utils import timezone

from tenants.key_format import PREFIX
from tenants.models import (
    ApiKey,
    AuthEpoch,
    Membership,
    ModelPrice,
    Project,
    QuotaLimit,
    Role,
    Tenant,
    TenantSignOn,
    Tier,
    User,
)
from tenants.pricing import Price, price_at
from tenants.principal import Calendar, LimitMetric, LimitScope, LimitSpec, Principal, Scope, TierSpec
from tenants.rights import SCOPES_BY_ROLE

_EVERYTHING: Final = frozenset(Scope)


class ApiKeyNotFound(Exception):
    """There is no such key in this tenant: absent and another tenant's are the same."""


class ProjectNotFound(Exception):
    """There is no such project in this tenant."""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """What authentication needs of a key, its secret aside."""

    principal: Principal
    digest: bytes
    expires_at: datetime | None
    revoked_at: datetime | None
    tenant_suspended_at: datetime | None
    previous_digest: bytes | None = None
    previous_until: datetime | None = None
    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """That it may be used from; empty allows all."""

    def is_allowed_from(self, address: str | None) -> bool:
        if not self.networks:
            return True
        try:
            ip = ip_address(address or "")
        except ValueError:
            return False
        mapped = getattr(ip, "ipv4_mapped", None)
        return any((mapped or ip) in network for network in self.networks)

    def __repr__(self) -> str:
        return f"StoredKey({self.principal.key_public_id})"


def read_auth_epoch() -> UUID | None:
    """None until the first change after installation."""
    return AuthEpoch.objects.values_list("value", flat=True).first()


def find_sign_on(domain: str) -> TenantSignOn | None:
    """The provider that vouches for a domain."""
    rows = TenantSignOn.unscoped.select_related("tenant", "app")
    return rows.filter(domain=domain, tenant__purged_at=None).first()


def sign_on_of_app(provider_id: str) -> TenantSignOn | None:
    """Whose provider it is, by the id that django-allauth knows it by."""
    return TenantSignOn.unscoped.select_related("tenant").filter(app__provider_id=provider_id).first()


def suspended_among(public_ids: Iterable[UUID]) -> set[str]:
    """Public ids of those of these tenants that are suspended, or gone."""
    asked = set(public_ids)
    active = Tenant.objects.filter(public_id__in=asked, suspended_at=None).values_list("public_id", flat=True)
    return {str(public_id) for public_id in asked - set(active)}


def find_stored_key(lookup_id: str) -> StoredKey | None:
    """Two queries: the key with its tenant and tier; the limits of all three. One more where money is limited."""
    api_key = (
        ApiKey.unscoped.select_related("tenant__tier", "max_tier", "project")
        .filter(lookup_id=lookup_id)
        .first()
    )
    if api_key is None:
        return None
    tenant = api_key.tenant
    scopes = frozenset(Scope(scope) for scope in api_key.scopes)
    limits = limits_of(tenant, api_key)
    return StoredKey(
        principal=Principal(
            tenant_id=tenant.pk,
            tenant_public_id=str(tenant.public_id),
            tenant_name=tenant.name,
            tier=tier_spec(_lesser(tenant.tier, api_key.max_tier)),
            limits=limits,
            zone=tenant.timezone,
            allowed_models=frozenset(api_key.allowed_models),
            waits_for_rate=api_key.waits_for_rate,
            is_restricted=bool(api_key.allowed_models or api_key.allowed_networks or api_key.max_tier),
            prices=_prices_for(limits),
            scopes=_EVERYTHING if Scope.ADMIN in scopes else scopes,
            key_id=api_key.pk,
            key_public_id=str(api_key.public_id),
            weight=tenant.weight or tenant.tier.weight,
        ),
        digest=bytes(api_key.digest),
        expires_at=api_key.expires_at,
        revoked_at=api_key.revoked_at,
        tenant_suspended_at=tenant.suspended_at,
        previous_digest=None if api_key.previous_digest is None else bytes(api_key.previous_digest),
        previous_until=api_key.previous_until,
        networks=tuple(ip_network(network) for network in api_key.allowed_networks),
    )


def find_batch_principal(tenant_id: int, key_public_id: UUID | None, tier_name: str) -> Principal | None:
    """Whose batch it is, in the batch tier unless its own is no better; None when the key is not good any more."""
    keys = ApiKey.objects.filter(tenant_id=tenant_id)
    api_key = keys.filter(public_id=key_public_id).first() if key_public_id else None
    stored = find_stored_key(api_key.lookup_id) if api_key else None
    now = timezone.now()
    if stored is None or stored.revoked_at or stored.tenant_suspended_at:
        return None
    if stored.expires_at is not None and stored.expires_at <= now:
        return None
    tier = Tier.objects.filter(name=tier_name, rank__gt=stored.principal.tier.rank).first()
    return replace(stored.principal, tier=tier_spec(tier)) if tier else stored.principal


def find_membership(user: User, tenant_public_id: str | None) -> Membership | None:
    """The person's membership of that tenant; of their first one when none is named."""
    rows = Membership.unscoped.select_related("tenant__tier").filter(user=user).order_by("id")
    if tenant_public_id is not None:
        try:
            rows = rows.filter(tenant__public_id=UUID(tenant_public_id))
        except ValueError:
            return None
    return rows.first()


def member_principal(membership: Membership, user: User, tier: Tier | None = None) -> Principal:
    """In the tenant's own tier, or in the one given."""
    tenant = membership.tenant
    tier = tier or tenant.tier
    limits = limits_of(tenant, None)
    return Principal(
        tenant_id=tenant.pk,
        tenant_public_id=str(tenant.public_id),
        tenant_name=tenant.name,
        tier=tier_spec(tier),
        limits=limits,
        zone=tenant.timezone,
        prices=_prices_for(limits),
        scopes=SCOPES_BY_ROLE[Role(membership.role)],
        user_id=user.pk,
        user_public_id=str(user.public_id),
        weight=tenant.weight or tier.weight,
    )


def _lesser(tier: Tier, other: Tier | None) -> Tier:
    return tier if other is None or other.rank <= tier.rank else other


def tier_spec(tier: Tier) -> TierSpec:
    return TierSpec(
        name=tier.name,
        rank=tier.rank,
        weight=tier.weight,
        max_queued=tier.max_queued,
        max_queued_per_tenant=tier.max_queued_per_tenant,
        deadline_s=tier.deadline_s,
        max_output_tokens=tier.max_output_tokens,
        max_wait_s=tier.max_wait_s,
    )


def tiers_from(rank: int) -> list[TierSpec]:
    """All tiers from that rank on, the first to go first."""
    return [tier_spec(tier) for tier in Tier.objects.filter(rank__gte=rank).order_by("rank")]


def tiers_open_to(tenant: Tenant) -> list[Tier]:
    """The tenant's own, and those after it: a member may choose to wait longer, never less. Best first."""
    return list(Tier.objects.filter(rank__gte=tenant.tier.rank).order_by("rank"))


def limits_of(tenant: Tenant, api_key: ApiKey | None) -> tuple[LimitSpec, ...]:
    """Every limit that binds the tenant (and the key), widest first. A tier's is counted per tenant."""
    applies = Q(scope=LimitScope.TIER.value, tier=tenant.tier_id) | Q(
        scope__in=[LimitScope.TENANT.value, LimitScope.MODEL.value], tenant=tenant
    )
    if api_key is not None:
        applies |= Q(scope=LimitScope.KEY.value, tenant=tenant, api_key=api_key)
    widest_first = list(LimitScope)
    rows = sorted(
        QuotaLimit.unscoped.filter(applies),
        key=lambda row: (widest_first.index(LimitScope(row.scope)), row.pk),
    )
    owners = {
        LimitScope.TIER: str(tenant.public_id),
        LimitScope.TENANT: str(tenant.public_id),
        LimitScope.KEY: "" if api_key is None else str(api_key.public_id),
    }
    return tuple(_limit_spec(row, row.model or owners[LimitScope(row.scope)]) for row in rows)


def _limit_spec(row: QuotaLimit, owner_id: str) -> LimitSpec:
    return LimitSpec(
        scope=LimitScope(row.scope),
        owner_id=owner_id,
        metric=LimitMetric(row.metric),
        amount=row.amount,
        period_s=row.period_s,
        burst=row.burst,
        calendar=Calendar(row.calendar) if row.calendar else None,
        is_hard=row.is_hard,
        serial=row.pk if row.calendar else 0,
    )


def tenant_principal(tenant: Tenant, api_key: ApiKey | None = None) -> Principal:
    """Whom its limits bind, and one of its keys'; to read them by, for it may do nothing."""
    return Principal(
        tenant_id=tenant.pk,
        tenant_public_id=str(tenant.public_id),
        tenant_name=tenant.name,
        tier=tier_spec(tenant.tier),
        limits=limits_of(tenant, api_key),
        scopes=frozenset(),
        zone=tenant.timezone,
    )


def budgets_of(tenant: Tenant) -> list[tuple[Principal, LimitSpec]]:
    """Every budget that binds the tenant or one of its keys, with a principal that it binds."""
    found: dict[LimitSpec, Principal] = {}
    keys = ApiKey.objects.for_tenant(tenant).filter(revoked_at=None, limits__calendar__gt="").distinct()
    for api_key in [None, *keys]:
        principal = tenant_principal(tenant, api_key)
        for limit in principal.limits:
            if limit.is_budget:
                found.setdefault(limit, principal)
    return [(principal, limit) for limit, principal in found.items()]


def _prices_for(limits: Iterable[LimitSpec]) -> dict[str, tuple[Price, ...]]:
    """The prices in force and those to come, where a limit counts money; a query only then."""
    if not any(limit.metric is LimitMetric.COST for limit in limits):
        return {}
    now = timezone.now()
    prices = {}
    for model, every in model_prices().items():
        current = price_at(every, now)
        prices[model] = tuple(price for price in every if price is current or price.valid_from > now)
    return prices


def model_prices(models: Collection[str] | None = None) -> dict[str, list[Price]]:
    """Every price, past and to come, of these models or of all."""
    found: dict[str, list[Price]] = {}
    rows = ModelPrice.objects.all() if models is None else ModelPrice.objects.filter(model__in=models)
    for row in rows:
        found.setdefault(row.model, []).append(
            Price(
                public_id=str(row.public_id),
                valid_from=row.valid_from,
                input_microusd_per_mtok=row.input_microusd_per_mtok,
                cached_input_microusd_per_mtok=row.cached_input_microusd_per_mtok,
                output_microusd_per_mtok=row.output_microusd_per_mtok,
            )
        )
    return found


def projects_of_keys(public_ids: Collection[UUID]) -> dict[tuple[int, UUID], UUID]:
    """By tenant and key, the public id of the key's project, where it has one."""
    rows = ApiKey.unscoped.filter(public_id__in=public_ids, project__isnull=False)
    return {
        (tenant_id, public_id): project
        for tenant_id, public_id, project in rows.values_list("tenant_id", "public_id", "project__public_id")
    }


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
