"""The audit log, to read and search."""

from __future__ import annotations

import json
from typing import Any

from django.contrib import admin
from django.utils.html import format_html
from unfold.decorators import display

from tenants.admin.base import ReadOnlyAdmin
from tenants.models import AuditEntry


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnlyAdmin):
    list_display = ("created_at", "action", "actor_label", "tenant", "target_label", "ip_address")
    list_filter = ("action", "actor_kind", ("created_at", admin.DateFieldListFilter))
    list_select_related = ("tenant",)
    search_fields = ("actor_label", "action", "target_label", "tenant__name", "target_public_id")
    search_help_text = "Actor, action, what was changed, or its public id"
    fieldsets = (
        (
            None,
            {"fields": ("created_at", "action", "tenant", "target_type", "target_label", "target_public_id")},
        ),
        ("Who", {"fields": ("actor_kind", "actor_label", "actor_user", "ip_address")}),
        ("What", {"fields": ("before_values", "after_values")}),
    )

    @display(description="before")
    def before_values(self, entry: AuditEntry) -> str:
        return _as_lines(entry.before)

    @display(description="after")
    def after_values(self, entry: AuditEntry) -> str:
        return _as_lines(entry.after)


def _as_lines(values: Any) -> str:
    if values is None:
        return "-"
    text = json.dumps(values, indent=2, ensure_ascii=False)
    return format_html('<pre class="whitespace-pre-wrap font-mono text-xs">{}</pre>', text)
