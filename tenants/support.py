"""Support: an operator looks at a tenant's console, in their own name, for a while, changing nothing.

Kept in the operator's session; the tenant reads in its audit log who looked, why and until when. See ADR 22.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from tenants.models import Tenant, User
from tenants.services import Actor, record_audit

LASTS: Final = timedelta(minutes=30)
_KEY: Final = "support"
_REASON_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Visit:
    tenant_public_id: UUID
    until: datetime


def visit_of(user: User, session: Any, now: datetime | None = None) -> Visit | None:
    """The one that this operator is on, unless its time is over."""
    kept = session.get(_KEY)
    if not kept or not (user.is_active and user.is_superuser):
        return None
    visit = Visit(UUID(kept["tenant"]), datetime.fromisoformat(kept["until"]))
    return visit if (now or timezone.now()) < visit.until else None


@transaction.atomic
def begin_visit(*, actor: Actor, session: Any, tenant: Tenant, reason: str) -> Visit:
    """Raises django.core.exceptions.ValidationError without a reason: the tenant is told it."""
    reason = reason.strip()
    if not reason or len(reason) > _REASON_MAX:
        raise ValidationError(f"Say why, in at most {_REASON_MAX} characters: the tenant can read it.")
    visit = Visit(tenant.public_id, timezone.now() + LASTS)
    record_audit(
        actor=actor,
        action="support.began",
        tenant=tenant,
        target=tenant,
        after={"reason": reason, "until": visit.until},
    )
    session[_KEY] = {"tenant": str(visit.tenant_public_id), "until": visit.until.isoformat()}
    return visit


@transaction.atomic
def end_visit(*, actor: Actor, session: Any, tenant: Tenant) -> None:
    if session.pop(_KEY, None) is not None:
        record_audit(actor=actor, action="support.ended", tenant=tenant, target=tenant)
