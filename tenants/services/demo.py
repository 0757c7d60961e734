"""The demo that `make run` sets up: an operator, a tenant, a key. Idempotent."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from django.db import transaction

from tenants.models import ApiKey, Role, Tenant, Tier, User
from tenants.principal import LimitMetric, Scope
from tenants.selectors import default_tier
from tenants.services.api_keys import issue_api_key
from tenants.services.audit import Actor, record_audit
from tenants.services.limits import set_quota_limit
from tenants.services.tenants import add_member, create_tenant

DEMO_EMAIL = "admin@weir.local"
DEMO_SLUG = "demo"
DEMO_SCOPES = (Scope.INFERENCE, Scope.USAGE_READ)
_LIMITS = (
    # Generous for one machine, but real: the rate-limit headers show how they are used up.
    (LimitMetric.REQUESTS, 600, 600),
    (LimitMetric.TOKENS, 400_000, 400_000),
    (LimitMetric.CONCURRENCY, 64, 64),
)


@dataclass(frozen=True, slots=True)
class Demo:
    operator_email: str
    tenant_public_id: str
    operator_password: str | None = field(repr=False)
    """None: the operator was there before, and only the one who noted the password knows it."""
    api_key: str | None = field(repr=False)
    """None: the demo key was there before."""


@transaction.atomic
def ensure_demo(*, actor: Actor, new_key: bool = False, new_password: bool = False) -> Demo:
    """Creates what is missing of the demo. Secrets are in the answer only when newly made; `new_key`
    and `new_password` make them anew, for one who has lost them."""
    tier = default_tier()
    if tier is None:
        raise RuntimeError("there is no tier: create one before the demo")
    # One at a time: two supervisors started together would else make two demo keys.
    tier = Tier.objects.select_for_update().get(pk=tier.pk)

    password = None
    operator = User.objects.filter(email=DEMO_EMAIL).first()
    if operator is None:
        password = secrets.token_urlsafe(12)
        operator = User.objects.create_superuser(DEMO_EMAIL, password)
        record_audit(actor=actor, action="user.created", tenant=None, target=operator)
    elif new_password:
        password = secrets.token_urlsafe(12)
        operator.set_password(password)
        operator.save(update_fields=["password"])
        record_audit(actor=actor, action="user.password_set", tenant=None, target=operator)

    tenant = Tenant.objects.filter(slug=DEMO_SLUG).first()
    if tenant is None:
        tenant = create_tenant(actor=actor, name="Demo", slug=DEMO_SLUG, tier=tier)
        for metric, amount, burst in _LIMITS:
            set_quota_limit(actor=actor, owner=tenant, metric=metric, amount=amount, burst=burst)
    add_member(actor=actor, tenant=tenant, user=operator, role=Role.OWNER)

    secret = None
    if new_key or not ApiKey.objects.filter(tenant=tenant, revoked_at=None).exists():
        issued = issue_api_key(actor=actor, tenant=tenant, name="demo", scopes=DEMO_SCOPES)
        secret = issued.secret
    return Demo(
        operator_email=operator.email,
        tenant_public_id=str(tenant.public_id),
        operator_password=password,
        api_key=secret,
    )


__all__ = ["DEMO_EMAIL", "DEMO_SCOPES", "DEMO_SLUG", "Demo", "ensure_demo"]
