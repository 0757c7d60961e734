"""How the tests ask the admin for its pages, and what they find on record."""

from __future__ import annotations

import pytest
from django.urls import reverse

from tenants.models import AuditEntry

committed = pytest.mark.django_db(transaction=True)
"""For what authentication must see: it reads on connections of its own."""


def url(model, page: str, *args) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}", args=args)


def inline_blanks() -> dict[str, str]:
    return {
        f"{prefix}-{name}": "0"
        for prefix in ("memberships", "limits")
        for name in ("TOTAL_FORMS", "INITIAL_FORMS")
    }


def last_audit(action: str) -> AuditEntry:
    entry = AuditEntry.unscoped.filter(action=action).first()
    assert entry is not None, list(AuditEntry.unscoped.values_list("action", flat=True))
    return entry
