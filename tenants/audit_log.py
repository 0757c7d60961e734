"""A tenant's audit log, searched: who changed what, from where, before and after. Newest first, page by page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from django.db.models import Q, QuerySet

from tenants.csv_text import Cell
from tenants.models import AuditEntry

COLUMNS: Final = (
    "at", "actor_kind", "actor", "address", "action", "target_type", "target_id", "target", "before", "after", "id",
)  # fmt: skip
_EXPORT_MAX: Final = 200_000
_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class AuditWanted:
    """What is looked for; empty fields narrow nothing."""

    text: str = ""
    """Anywhere in the actor, the action, the target or the address."""
    action: str = ""
    """`key.revoked`, or `key.` for all that begins so."""
    actor: str = ""
    target_id: UUID | None = None
    since: datetime | None = None
    until: datetime | None = None
    """Not included."""


def audit_page(
    tenant_id: int, wanted: AuditWanted, *, limit: int = 50, before: str = ""
) -> tuple[list[AuditEntry], str]:
    """The next `limit` entries, and where the page after them begins ("" at the end). One query.

    `before` is such a place; one that is not is taken for the beginning.
    """
    rows = _matching(tenant_id, wanted)
    if is_place(before):
        rows = rows.filter(pk__lt=int(before))
    found = list(rows[: limit + 1])
    return found[:limit], str(found[limit - 1].pk) if len(found) > limit else ""


def is_place(text: str) -> bool:
    """Whether it is one that `audit_page` gives."""
    return text.isascii() and text.isdecimal() and len(text) < 19


def audit_actions(tenant_id: int) -> list[str]:
    """Every action that this tenant's log has, for a list to choose from."""
    return sorted(
        AuditEntry.objects.for_tenant(tenant_id).order_by().values_list("action", flat=True).distinct()
    )


def audit_rows(tenant_id: int, wanted: AuditWanted) -> Iterator[list[Cell]]:
    """Rows of COLUMNS for a file, newest first, at most 200,000; read a page at a time."""
    before, left = "", _EXPORT_MAX
    while left > 0:
        page, before = audit_page(tenant_id, wanted, limit=min(_PAGE, left), before=before)
        for entry in page:
            yield [
                entry.created_at.isoformat(),
                entry.actor_kind,
                entry.actor_label,
                entry.ip_address or "",
                entry.action,
                entry.target_type,
                str(entry.target_public_id or ""),
                entry.target_label,
                _json(entry.before),
                _json(entry.after),
                str(entry.public_id),
            ]
        left -= len(page)
        if not before:
            return


def _matching(tenant_id: int, wanted: AuditWanted) -> QuerySet[AuditEntry]:
    rows = AuditEntry.objects.for_tenant(tenant_id)
    if text := wanted.text.replace("\0", ""):
        rows = rows.filter(
            Q(actor_label__icontains=text)
            | Q(action__icontains=text)
            | Q(target_label__icontains=text)
            | Q(ip_address__startswith=text)
        )
    if action := wanted.action.replace("\0", ""):
        rows = rows.filter(action__startswith=action) if action.endswith(".") else rows.filter(action=action)
    if actor := wanted.actor.replace("\0", ""):
        rows = rows.filter(actor_label__iexact=actor)
    if wanted.target_id is not None:
        rows = rows.filter(target_public_id=wanted.target_id)
    if wanted.since is not None:
        rows = rows.filter(created_at__gte=wanted.since)
    if wanted.until is not None:
        rows = rows.filter(created_at__lt=wanted.until)
    return rows


def _json(values: object) -> str:
    return "" if values is None else json.dumps(values, ensure_ascii=False, sort_keys=True)
