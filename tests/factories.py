"""Rows for tests: plain functions with valid defaults, and the standing cast."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore
from django.test import Client

from tenants.models import Role, Tenant, Tier, User
from tenants.principal import Calendar, LimitMetric, LimitScope, LimitSpec, Principal, Scope, TierSpec
from tenants.services import Actor, IssuedKey, add_member, create_tenant, issue_api_key, set_quota_limit

_numbers = count(1)
PASSWORD = "correct horse battery"
TEST = Actor.system("tests")


def make_user(email: str | None = None, **values: Any) -> User:
    return User.objects.create_user(email or f"person{next(_numbers)}@example.org", PASSWORD, **values)


def make_operator(email: str | None = None) -> User:
    return User.objects.create_superuser(email or f"operator{next(_numbers)}@example.org", PASSWORD)


def make_tier(name: str = "standard", **values: Any) -> Tier:
    """The tier of that name; a fresh database has realtime, standard and batch."""
    defaults = {"rank": {"realtime": 0, "standard": 1, "batch": 2}.get(name, 100 + next(_numbers)), **values}
    tier, _ = Tier.objects.update_or_create(name=name, defaults=values, create_defaults=defaults)
    return tier


def make_tenant(name: str | None = None, *, tier: Tier | None = None, owner: User | None = None) -> Tenant:
    name = name or f"Tenant {next(_numbers)}"
    return create_tenant(actor=TEST, name=name, tier=tier or make_tier(), owner=owner)


def make_key(tenant: Tenant | None = None, *, name: str = "test key", **values: Any) -> IssuedKey:
    return issue_api_key(actor=TEST, tenant=tenant or make_tenant(), name=name, **values)


def set_limit(owner: Any, metric: LimitMetric, amount: int, **values: Any) -> None:
    set_quota_limit(actor=TEST, owner=owner, metric=metric, amount=amount, **values)


@dataclass(frozen=True, slots=True)
class Cast:
    """Who appears in most tests: two tenants, their people, and the operator who belongs to neither."""

    tenant: Tenant
    owner: User
    member: User
    """A developer of `tenant`."""
    other_tenant: Tenant
    outsider: User
    """Owner of `other_tenant`, nobody in `tenant`."""
    operator: User


def make_cast() -> Cast:
    owner, member, outsider, operator = make_user(), make_user(), make_user(), make_operator()
    tenant, other_tenant = make_tenant(owner=owner), make_tenant(owner=outsider)
    add_member(actor=TEST, tenant=tenant, user=member, role=Role.DEVELOPER)
    return Cast(
        tenant=tenant,
        owner=owner,
        member=member,
        other_tenant=other_tenant,
        outsider=outsider,
        operator=operator,
    )


def signed_in(user: User) -> Client:
    """A browser in which that person is signed in."""
    client = Client()
    client.force_login(user)
    return client


def browser_of(url: str, user: User) -> httpx.Client:
    """The same at a server: with a session as the login page makes one."""
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = settings.AUTHENTICATION_BACKENDS[0]
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.save()
    return httpx.Client(
        base_url=url, cookies={settings.SESSION_COOKIE_NAME: session.session_key or ""}, timeout=60
    )


def a_limit(
    metric: LimitMetric,
    amount: int,
    *,
    period_s: int = 60,
    burst: int | None = None,
    scope: LimitScope = LimitScope.TENANT,
    owner_id: str = "t1",
) -> LimitSpec:
    """A limit as the quota store sees it: no database row."""
    if metric is LimitMetric.CONCURRENCY:
        period_s = 0
    return LimitSpec(
        scope=scope,
        owner_id=owner_id,
        metric=metric,
        amount=amount,
        period_s=period_s,
        burst=amount if burst is None else burst,
    )


def a_budget(
    metric: LimitMetric,
    amount: int,
    *,
    calendar: Calendar = Calendar.DAY,
    is_hard: bool = True,
    scope: LimitScope = LimitScope.TENANT,
    owner_id: str = "t1",
) -> LimitSpec:
    return LimitSpec(
        scope=scope,
        owner_id=owner_id,
        metric=metric,
        amount=amount,
        period_s=0,
        burst=amount,
        calendar=calendar,
        is_hard=is_hard,
    )


def a_principal(
    *limits: LimitSpec, tenant_public_id: str = "t1", scopes: frozenset[Scope] = frozenset(Scope)
) -> Principal:
    """A principal without database rows, for what only needs its values."""
    return Principal(
        tenant_id=1,
        tenant_public_id=tenant_public_id,
        tenant_name="Tenant",
        tier=TierSpec(
            name="standard",
            rank=1,
            weight=1,
            max_queued=1000,
            max_queued_per_tenant=200,
            deadline_s=300,
            max_output_tokens=4096,
        ),
        limits=limits,
        scopes=scopes,
    )
