"""The audit log as the API tells it."""

from __future__ import annotations

from typing import Any

import msgspec

from tenants.models import AuditEntry


class AuditObject(msgspec.Struct, kw_only=True):
    id: str
    at: str
    """ISO 8601, UTC."""
    actor_kind: str
    """`user`, `key` or `system`."""
    actor: str
    """The e-mail, the key's prefix, or the program."""
    address: str | None
    action: str
    target_type: str
    target_id: str | None
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    object: str = "audit.entry"


class AuditPage(msgspec.Struct):
    data: list[AuditObject]
    has_more: bool
    next_page: str | None
    object: str = "list"


def audit_object(entry: AuditEntry) -> AuditObject:
    return AuditObject(
        id=str(entry.public_id),
        at=entry.created_at.isoformat(),
        actor_kind=entry.actor_kind,
        actor=entry.actor_label,
        address=entry.ip_address,
        action=entry.action,
        target_type=entry.target_type,
        target_id=None if entry.target_public_id is None else str(entry.target_public_id),
        target=entry.target_label,
        before=entry.before,
        after=entry.after,
    )
