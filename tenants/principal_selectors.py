"""Whom a key or a person stands for: principals, with the tier, limits and prices that bind them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final
from uuid import UUID

from django.db.models import Q
from django.utils import timezone

from tenants.models import (
    ApiKey,
    AuthEpoch,
    Membership,
    ModelPrice,
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
            is_restricted=bool(
                api_key.allowed_models
                or api_key.allowed_networks
                or api_key.max_tier
                or any(limit.scope is LimitScope.KEY for limit in limits)
            ),
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
