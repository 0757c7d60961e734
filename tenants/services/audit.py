"""Who acts, and the record of it. Every service writes its audit row inside its own transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.db.models import Model

from tenants.models import ActorKind, ApiKey, AuditEntry, Tenant, User


@dataclass(frozen=True, slots=True)
class Actor:
    """Who makes a change: a person, an API key, or the program itself."""

    kind: ActorKind
    label: str
    user: User | None = None
    ip_address: str | None = None

    @classmethod
    def person(cls, user: User, *, ip_address: str | None = None) -> Actor:
        return cls(kind=ActorKind.USER, label=user.email, user=user, ip_address=ip_address)

    @classmethod
    def key(cls, api_key: ApiKey, *, ip_address: str | None = None) -> Actor:
        return cls(kind=ActorKind.KEY, label=api_key.prefix, ip_address=ip_address)

    @classmethod
    def system(cls, program: str) -> Actor:
        """A command or a task, by its name."""
        return cls(kind=ActorKind.SYSTEM, label=program)


def record_audit(
    *,
    actor: Actor,
    action: str,
    tenant: Tenant | None,
    target: Model,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> AuditEntry:
    """One append-only row. Only inside the transaction of the change itself: both happen, or neither."""
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("an audit row belongs inside the transaction of the change that it records")
    values = {
        "actor_kind": actor.kind,
        "actor_user": actor.user,
        "actor_label": actor.label,
        "ip_address": actor.ip_address,
        "action": action,
        "target_type": type(target).__name__,
        "target_public_id": getattr(target, "public_id", None),
        "target_label": str(target)[:254],
        "before": before,
        "after": after,
    }
    if tenant is None:
        return AuditEntry.unscoped.create(tenant=None, **values)
    return AuditEntry.objects.create(tenant=tenant, **values)
